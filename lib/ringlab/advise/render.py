"""Advice as text, as a table and as code that runs; and its parts: evidence, decisions and proposed patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from textwrap import wrap

import torch

from ..block_patterns import BlockSparse
from ..cost import format_bytes, format_seconds
from ..engine import Execution
from ..meta_run import MetaCall
from ..patterns import Pattern

POLICY, ESTIMATE, ASKED = "by policy", "by estimate", "as asked"


@dataclass(frozen=True)
class Evidence:
    """A measured comparison of two rows that differ in one thing: ``against`` takes ``ratio`` times as long as
    ``setting``, from ``low`` to ``high`` at 95 %.

    ``about``: what they differ in, "dtype", "backend", "scheme", "pattern" or a switch of ``Execution``; ``origin``
    which rows they are. ``counts`` is false for rows of another machine and of a rehearsal: they are shown and decide
    nothing. No ratio below ``least`` is a difference.

    >>> e = Evidence("backend", "eager", "auto", 0.5, 0.4, 0.6, "8K", "rows of today")
    >>> e.faster, e.slower, e.turned().setting, e.turned().ratio
    (False, True, 'auto', 2.0)
    """

    about: str
    setting: str
    against: str
    ratio: float
    low: float
    high: float
    label: str
    origin: str
    pattern: str = ""
    dtype: str = ""
    seq_len: int = 1
    passes: str = "fwd"
    causal: bool = False
    ranks: int = 1
    counts: bool = True
    least: float = 1.0
    share: float = 0.0  # of the pairs of dense attention that its pattern has, branch by branch; 0: not known

    @property
    def faster(self) -> bool:
        return self.low > self.least

    @property
    def slower(self) -> bool:
        return self.high < 1 / self.least

    def turned(self) -> Evidence:
        """The same comparison from the other side."""
        sides = {"setting": self.against, "against": self.setting}
        return replace(self, **sides, ratio=1 / self.ratio, low=1 / self.high, high=1 / self.low)

    @property
    def text(self) -> str:
        word = "faster than" if self.faster else "slower than" if self.slower else "not told apart from"
        sides = [f"{self.about}={x}" if x in ("True", "False") else x for x in (self.setting, self.against)]
        said = f"{sides[0]} {self.figures} {word} {sides[1]}, {self.label}, {self.origin}"
        return said if self.counts else f"{said}: decides nothing"

    @property
    def kind(self) -> str:
        """The first word of its pattern: "dense", "dilated" or "blocks"."""
        return self.pattern.partition(" ")[0]

    @property
    def how(self) -> str:
        return f"measured: {self.figures}, {self.origin}"

    @property
    def figures(self) -> str:
        return f"{self.ratio:.3g}x ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True)
class Decision:
    """One setting: its ``value``, ``how`` it was chosen ("by policy", "by estimate", "measured: ...", "as asked"),
    ``why``, and the measured comparisons that concern it."""

    name: str
    value: object
    how: str
    why: str
    evidence: tuple[Evidence, ...] = ()

    @property
    def shown(self) -> str:
        if isinstance(self.value, torch.dtype):
            return str(self.value).removeprefix("torch.")
        if isinstance(self.value, Execution):
            return ", ".join(f"{k}={v}" for k, v in changed(self.value).items()) or "as it stands"
        if isinstance(self.value, bool):
            return "yes" if self.value else "no"
        return ", ".join(self.value) if isinstance(self.value, tuple) else str(self.value)


@dataclass(frozen=True)
class Proposal:
    """A pattern for the length, with what it comes to where it is run as advised."""

    name: str
    pattern: Pattern
    share: float  # of the pairs of dense attention, each once
    bound_s: float  # 0: not known
    binds: str | None
    peak_bytes: int | None  # of the rank that needs most; None: not estimated
    sent_bytes: int  # all ranks together


def changed(execution: Execution) -> dict:
    """The switches of an execution that are not as it stands by itself."""
    plain = Execution()
    values = {f.name: getattr(execution, f.name) for f in fields(execution)}
    return {name: value for name, value in values.items() if value != getattr(plain, name)}


CODE = """\
{about}
import torch
import ringlab
from ringlab.{module} import {names}
{checkpoint}
seq_len = {seq_len}
device = {device}
pattern = {pattern}
{torchrun}

def attend(q, k, v):
    return ringlab.attention(q, k, v, pattern, {options})


made = {{'dtype': {dtype}, 'device': device, 'requires_grad': {grad}}}
q, k, v = (torch.randn({batch}, seq_len, heads, {head_dim}, **made) for heads in {heads})
out = {out}
{backward}"""
TORCHRUN = '# Under torchrun: group=mesh["sequence"], and q, k, v are this rank\'s shards.\n'
PATTERN_COLUMNS = ("pairs of dense", "lower bound", "peak per rank", "sent in all", "pattern")


@dataclass(frozen=True)
class Advice:
    """What to run for a length on a profile: choices with their reasons, and the patterns that were compared.

    ``advice["scheme"]`` is a choice's value. ``need_bytes`` is what the rank that needs most needs, ``budget_bytes``
    what it has (None: not known); where that is less, ``longest`` is a length of this pattern that fits, near the
    longest, and ``enough_ranks`` a number of ranks that hold the sequence.
    """

    call: MetaCall  # as it was asked for: its shape, passes, ranks and profile
    seq_len: int
    layers: int
    choices: dict[str, Decision]
    budget_bytes: int | None = None
    need_bytes: int | None = None
    proposals: tuple[Proposal, ...] = ()
    longest: int | None = None
    enough_ranks: int | None = None

    def __getitem__(self, name: str):
        return self.choice(name).value

    def choice(self, name: str) -> Decision:
        """A choice by its name; KeyError for one that was not made."""
        return self.choices[name]

    @property
    def fits(self) -> bool | None:
        return None if None in (self.budget_bytes, self.need_bytes) else self.need_bytes <= self.budget_bytes

    @property
    def title(self) -> str:
        c = self.call
        heads = f"{c.heads} heads" + ("" if c.kv_heads == c.heads else f" over {c.kv_heads} of K/V")
        parts = [
            c.profile.title, "one rank" if c.ranks == 1 else f"{c.ranks} ranks", f"{self.seq_len:,} tokens",
            f"{heads} of {c.head_dim}", "causal" if c.causal else "not causal",
            "forward" if c.passes == "fwd" else "forward and backward",
            f"batch {c.batch}" if c.batch > 1 else "", f"{self.layers} layers" if self.layers > 1 else "",
        ]  # fmt: skip
        return ", ".join(filter(None, parts))

    @property
    def memory(self) -> str:
        """One line on whether it fits."""
        if self.need_bytes is None:
            return "not estimated"
        need = f"{format_bytes(self.need_bytes)} on the rank that needs most"
        if self.budget_bytes is None:
            return f"{need}; how much there is, is not known: give a budget"
        have = f"{need}, of {format_bytes(self.budget_bytes)}"
        if self.fits:
            return f"fits: {have}"
        longest = f"{self.longest:,} tokens fit" if self.longest else "no shorter length was found that fits"
        ranks = f"; {self.enough_ranks} ranks hold it" if self.enough_ranks else ""
        return f"does not fit: {have}; {longest}{ranks}"

    def text(self) -> str:
        """For a terminal: the choices, the measured comparisons, and the patterns that were compared."""
        lines = [self.title, ""]
        for c in self.choices.values():
            lines += [f"{c.name:15}{c.shown}", f"{'':15}{c.how}: {c.why}"]
        lines += [f"{'memory':15}{ESTIMATE}: {self.memory}", ""]
        measured = [f"  {e.text}" for c in self.choices.values() for e in c.evidence]
        lines += ["measured:", *measured] if measured else ["measured: nothing that bears on it"]
        return "\n".join([*lines, "", *columns([PATTERN_COLUMNS, *map(self._figures, self.proposals)])])

    def table(self) -> str:
        """Two tables in Markdown: the choices with their evidence, and the patterns that were compared."""
        rows = [("What", "Choice", "How", "Why", "Measured")]
        rows += [(c.name, c.shown, c.how, c.why, "; ".join(e.text for e in c.evidence)) for c in self.choices.values()]
        rows += [("memory", "", ESTIMATE, self.memory, "")]
        return f"{_markdown(rows)}\n\n{_markdown([PATTERN_COLUMNS, *map(self._figures, self.proposals)])}"

    def code(self) -> str:
        """Python that runs as it stands, on the profile's device or else on a CPU.

        Ranks are simulated in the one process; a comment says what changes under torchrun.
        """
        c, pattern, kept, backward = self.call, self["pattern"], self["checkpointing"], self.call.passes != "fwd"
        about = [f"{x.name}: {x.shown}; {x.how}: {x.why}" for x in self.choices.values()]
        about = [wrap(x, 114, subsequent_indent="  ") for x in (self.title, *about, f"memory: {self.memory}")]
        options = [f"causal={c.causal}", f"backend={self['backend']!r}"]
        if c.ranks > 1:
            options += [f"group=ringlab.Simulated({c.ranks})", f"scheme={self['scheme']!r}"]
            options += [f"layout={str(self['layout'])!r}"]
        if execution := changed(self["execution"]):
            options += [f"execution=ringlab.Execution({', '.join(f'{k}={v!r}' for k, v in execution.items())})"]
        return CODE.format(
            about="\n".join(f"# {line}" for lines in about for line in lines),
            module="blocks" if isinstance(pattern, BlockSparse) else "patterns",
            names=", ".join(sorted(set(re.findall(r"\b([A-Z]\w*)\(", repr(pattern))))),
            checkpoint="from torch.utils.checkpoint import checkpoint\n" if kept else "",
            seq_len=self.seq_len, pattern=repr(pattern), options=", ".join(options), dtype=self["dtype"],
            device='"cuda" if torch.cuda.is_available() else "cpu"' if c.profile.kind == "cuda" else '"cpu"',
            torchrun=TORCHRUN if c.ranks > 1 else "", grad=backward, batch=c.batch, head_dim=c.head_dim,
            heads=[c.heads, c.kv_heads, c.kv_heads],
            out="checkpoint(attend, q, k, v, use_reentrant=False)" if kept else "attend(q, k, v)",
            backward="out.sum().backward()\n" if backward else "",
        )  # fmt: skip

    def _figures(self, p: Proposal) -> tuple[str, ...]:
        bound = f"{format_seconds(p.bound_s)} ({p.binds})" if p.bound_s else "not known"
        over = p.peak_bytes and self.budget_bytes is not None and p.peak_bytes > self.budget_bytes
        peak = format_bytes(p.peak_bytes) + (", does not fit" if over else "") if p.peak_bytes else "not estimated"
        return f"{100 * p.share:.3g} %", bound, peak, format_bytes(p.sent_bytes), f"{p.name}: {p.pattern}"

    def _repr_markdown_(self) -> str:
        return f"**{self.title}**\n\n{self.table()}\n\n```python\n{self.code()}```\n"


def columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Rows as lines with aligned columns, the last as long as it is."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return ["  ".join([*(text.ljust(w) for text, w in zip(row, widths)), row[-1]]).rstrip() for row in rows]


def _markdown(rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + ":--|" * len(rows[0]), *lines[1:]])
