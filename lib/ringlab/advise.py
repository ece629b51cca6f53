"""Advice: which attention for which length on which hardware, and how to run it.

Dense attention while its time and the memory allow; beyond that by what a model needs:
every key exactly, something from far away, or its neighbours. Each option comes with
its cost and with the evidence for it: measured, trained, computed or unknown.
``ringlab.report.evidence`` makes evidence from stored rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from textwrap import wrap

import torch

from . import hardware, kernels
from .block_patterns import BlockSparse, sliding_window
from .call import CallSpec
from .checks import (
    LARGEST,
    check_bool,
    check_choice,
    check_int,
    is_real,
    parse_bytes,
    short_repr,
)
from .cost import far_queries, format_bytes, format_seconds
from .estimate import Estimate, estimate_call, longest_call, rates_of
from .meta_run import check_size
from .patterns import Dense, Pattern, as_pattern
from .ring import bytes_by_scheme
from .ring.volume import unevenness

WINDOW = 2048  # positions around a query that a window shows; whole blocks show more
BLOCK = 128  # positions of a block; more where blocks would be more than MOST_BLOCKS
MOST_BLOCKS = 4096
DENSE_LAYER = 4  # of so many layers with windows one is dense, the first
SECONDS = 1.0  # what a call of one layer may take
EVEN = 1.1  # shards stay contiguous while the busiest rank computes at most this many times the average
SAVED = ("q", "k", "v", "out", "lse")  # of a layer, from its forward to its backward
START, STEPS = 65536, 4  # of the search for a length that takes so long
ROOM = 0.5  # of the memory: checkpointing leaves more where layers would take it
NEEDS = ("exact", "far", "local")
MEASURED = "measured"
ABOUT = "about"
AT_LEAST = "at least"
# The sign of a time and what it rests on, the surest first.
TIMES = {
    MEASURED: ("", "measured"),
    ABOUT: ("about ", "measured rate"),
    AT_LEAST: ("≥ ", "computed"),
}


@dataclass(frozen=True)
class Evidence:
    """A measured call on the hardware that is asked about, and its time. A call of the
    same kind of pattern, dtype and passes takes about as many times its own roofline.

    Of a ``method`` that chooses its keys by content its name, and its time as a part of
    dense attention's, measured beside it.
    """

    call: CallSpec
    seconds: float
    method: str = ""
    of_dense: float = 1.0


@dataclass(frozen=True)
class Decision:
    """One setting: its ``value`` and ``why`` it was chosen."""

    name: str
    value: object
    why: str

    def __str__(self) -> str:
        shown = {True: "yes", False: "no"}.get(self.value, self.value)
        return f"{self.name} {dtype_name(shown)}"


@dataclass(frozen=True)
class Option:
    """A way to attend over the length, for one need: "exact", "far", "local", or
    "asked" for a pattern that was given.

    With ``dense_every``, one layer of so many is dense and the others have ``pattern``;
    figures are then the average layer's, ``peak_bytes`` the larger one. ``share``: of
    the pairs of dense attention. ``reach``: the share of queries that see a key at
    least half the sequence away (causal: half of all at most). ``seconds`` of a layer: a
    call, with checkpointing one more forward. ``time`` says whether "measured", "about"
    (from measured calls of the kind) or "at least" (the roofline); 0 where no rate is
    known. ``trained``: what is known of small models that learned with it.
    """

    need: str
    name: str
    pattern: Pattern
    share: float
    reach: float
    seconds: float
    time: str
    peak_bytes: int | None  # of the rank that needs most; None: not estimated
    sent_bytes: int  # all ranks together
    dense_every: int = 0
    trained: str = ""

    @property
    def takes(self) -> str:
        """Its time in words."""
        return self.in_words(self.seconds)

    def in_words(self, seconds: float) -> str:
        """A time that is as sure as its own."""
        sign, _ = TIMES[self.time]
        return sign + format_seconds(seconds) if seconds else "not known"

    @property
    def evidence(self) -> str:
        """What the time rests on, and what is known of learning."""
        return "; ".join(filter(None, [TIMES[self.time][1], self.trained]))


def least_sure(*times: str) -> str:
    """Return the one of ``TIMES`` that says least."""
    return max(times, key=list(TIMES).index)


def of_layers(layers: int, dense_every: int, dense, other):
    """Return the sum over layers, of which one in ``dense_every`` (0: none) is dense."""
    count = -(-layers // dense_every) if dense_every else 0
    return count * dense + (layers - count) * other


def dtype_name(dtype: torch.dtype) -> str:
    """As rows and the command line name it, float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")


TORCHRUN = (
    '# Under torchrun: group=mesh["sequence"], and q, k, v are this rank\'s shards.\n'
)
WHOLE = f"A window of {WINDOW:,} is of whole blocks: a token sees up to"
HEADER = (
    "need",
    "use",
    "pairs",
    "reach n/2",
    "a layer takes",
    "peak",
    "a layer sends",
    "evidence",
)


@dataclass(frozen=True)
class Advice:
    """What to use for a length on a profile: the ``options`` by need, the one
    ``advised``, ``why``, and the settings it runs with.

    ``advice["scheme"]`` is a setting's value. ``dense_until``: up to about this length
    dense attention keeps within the time and the memory, and ``ends`` says which of
    them ends it ("time", "memory"; None: neither is known). ``need_bytes`` is what the
    rank that needs most needs, ``budget_bytes`` what it has (None: not known); where
    that is less, ``longest`` is the longest sequence of this pattern that fits.
    ``cache_bytes``: what the caches of all layers take for generating up to this
    length, on the rank with most (None: not causal, or not estimated). ``choosing``:
    methods that choose their keys by content and were measured to take less time than
    dense attention, a line each; their memory is not estimated.
    """

    call: CallSpec  # its shape, passes, ranks and profile
    layers: int
    options: tuple[Option, ...]
    advised: Option
    why: str
    choices: dict[str, Decision]
    dense_until: int | None = None
    ends: str | None = None
    budget_bytes: int | None = None
    need_bytes: int | None = None
    longest: int | None = None
    cache_bytes: int | None = None
    choosing: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> object:
        return self.choices[name].value

    @property
    def seq_len(self) -> int:
        return self.call.seq_len

    @property
    def fits(self) -> bool | None:
        if None in (self.budget_bytes, self.need_bytes):
            return None
        return self.need_bytes <= self.budget_bytes

    @property
    def title(self) -> str:
        c = self.call
        fewer = "" if c.kv_heads == c.heads else f" over {c.kv_heads} of K/V"
        parts = [
            c.profile.title,
            "one rank" if c.ranks == 1 else f"{c.ranks} ranks",
            f"{self.seq_len:,} tokens",
            f"{c.heads} heads{fewer} of {c.head_dim}",
            "causal" if c.causal else "not causal",
            "forward and backward" if c.backward else "forward",
            f"batch {c.batch}" if c.batch > 1 else "",
            f"{self.layers} layers" if self.layers > 1 else "",
        ]
        return ", ".join(filter(None, parts))

    @property
    def memory(self) -> str:
        """One line on whether it fits."""
        if self.need_bytes is None:
            return "not estimated"
        what = "of attention alone"
        if self.layers > 1 and self.call.backward:
            what = f"of attention in {self.layers:,} layers"
        elif self.layers > 1:
            what += f", one of {self.layers:,} layers at a time"
        need = f"{format_bytes(self.need_bytes)} {what}, on the rank that needs most"
        if self.budget_bytes is None:
            return f"{need}; how much there is, is not known: give a budget"
        have = f"{need}, of {format_bytes(self.budget_bytes)}"
        if self.fits:
            rest = format_bytes(self.budget_bytes - self.need_bytes)
            kept = (
                "weights, gradients and optimizer" if self.call.backward else "weights"
            )
            return f"fits: {have}: {rest} are left for {kept}"
        longest = (
            f"{self.longest:,} tokens fit"
            if self.longest
            else "no shorter length was found that fits"
        )
        held = [
            f"; {x.name} fit"
            for x in self.options
            if x.peak_bytes and x.peak_bytes <= self.budget_bytes
        ]
        return f"does not fit: {have}; {longest}{''.join(held)}"

    @property
    def takes(self) -> str:
        """One line on its time: of a layer, and of all."""
        x = self.advised
        if self.layers == 1 or not x.seconds:
            return x.takes
        each = {x.need: x.seconds for x in self.options}
        other = each["local"] if x.dense_every else x.seconds
        total = of_layers(self.layers, x.dense_every, each["exact"], other)
        return f"{x.takes} a layer, {x.in_words(total)} in all {self.layers:,} layers"

    def __str__(self) -> str:
        return f"{self.text()}\n\n{self.code()}"

    def text(self) -> str:
        """For a terminal: what to use, whether it fits and how it runs, a line each, then
        the options by need.
        """
        memory = self.memory
        if self.cache_bytes is not None:
            caches = "a cache" if self.layers == 1 else f"{self.layers} layers' caches"
            memory += f"; {caches} for generation: {format_bytes(self.cache_bytes)}"
        settings = ", ".join(map(str, self.choices.values()))
        lines = [
            self.title,
            "",
            f"use      {self.advised.name}",
            f"why      {self.why}",
            f"takes    {self.takes}",
            f"memory   {memory}",
            f"runs by  {settings}",
            "",
            *columns([HEADER, *map(self._figures, self.options)]),
        ]
        if self.options[-1].need == "local":
            lines += ["", f"{WHOLE} {keys_of(self.seq_len):,} keys."]
        if self.choosing:
            lines += ["", "keys chosen by content:", *self.choosing]
        return "\n".join(lines)

    def _figures(self, x: Option) -> tuple[str, ...]:
        peak = "not estimated" if x.peak_bytes is None else format_bytes(x.peak_bytes)
        if x.peak_bytes and self.budget_bytes and x.peak_bytes > self.budget_bytes:
            peak += ", does not fit"
        return (
            f"{x.need} *" if x is self.advised else x.need,
            x.name,
            f"{100 * x.share:.3g} %",
            f"{100 * x.reach:.3g} %",
            x.takes,
            peak,
            format_bytes(x.sent_bytes),
            x.evidence,
        )

    def code(self) -> str:
        """Python that runs as it stands, on the profile's device or else on a CPU.

        Ranks are simulated in the one process; a comment says what changes under
        torchrun.
        """
        c = self.call
        pattern = self.advised.pattern
        dense_every = self.advised.dense_every
        comments = [self.title, f"{self.advised.name}: {self.why}"]
        comments += [f"{x}: {x.why}" for x in self.choices.values()]
        comments += [f"memory: {self.memory}"]
        about = "\n".join(
            f"# {x}"
            for text in comments
            for x in wrap(text, 88, subsequent_indent="  ")
        )
        options = f"causal={c.causal}"
        if c.ranks > 1:
            scheme = "auto" if dense_every else self["scheme"]
            options += f", group=ringlab.Simulated({c.ranks}), scheme={scheme!r}"
            options += f", layout={str(self['layout'])!r}"
        names = set(re.findall(r"\b([A-Z]\w*)\(", repr(pattern)))
        module = "blocks" if isinstance(pattern, BlockSparse) else "patterns"
        imports = f"from ringlab.{module} import {', '.join(sorted(names))}\n"
        layers = "[pattern]"
        if dense_every:
            layers = f"[ringlab.Dense()] + {layers} * {dense_every - 1}"
        attend = "attend(out, pattern)"
        if self["checkpointing"]:
            attend = "checkpoint(attend, out, pattern, use_reentrant=False)"
            imports += "from torch.utils.checkpoint import checkpoint\n"
        ends = "out.sum().backward()\n" if c.backward else ""
        device = '"cpu"'
        if c.profile.kind == "cuda":
            device = '"cuda" if torch.cuda.is_available() else "cpu"'
        return f"""\
{about}
import torch
import ringlab
{imports}
seq_len = {self.seq_len}
device = {device}
pattern = {pattern!r}
# Layer i attends with layers[i % len(layers)].
layers = {layers}
{TORCHRUN if c.ranks > 1 else ""}

def attend(x, pattern):
    # In place of a layer's projections of x.
    q, k, v = (x[:, :, :heads].clone() for heads in {(c.heads, c.kv_heads, c.kv_heads)})
    return ringlab.attention(q, k, v, pattern, {options})


print("{self.seq_len:,} tokens", flush=True)
made = {{'dtype': {self["dtype"]}, 'device': device, 'requires_grad': {c.backward}}}
x = out = torch.randn({c.batch}, seq_len, {c.heads}, {c.head_dim}, **made)
for i in range({max(self.layers, dense_every)}):
    pattern = layers[i % len(layers)]
    out = {attend}
{ends}print(tuple(out.shape))
"""


def columns(rows: Sequence[Sequence[str]], sides: Sequence[str] = "") -> list[str]:
    """Rows as lines with aligned columns; ``sides``: of each column, "<" (all by
    default) or ">".
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    sides = sides or "<" * len(widths)
    return [
        "  ".join(f"{t:{s}{w}}" for t, s, w in zip(row, sides, widths)).rstrip()
        for row in rows
    ]


def local(seq_len: int, causal: bool = False, width: int = WINDOW) -> BlockSparse:
    """A sliding window in which a query sees at least ``width`` positions beside itself:
    half of them on either side, or all before it if ``causal``. Blocks are whole, so
    that it may see more (``keys_of``).

    >>> str(local(10000)), str(local(10000, causal=True)), str(local(2**20))
    ('blocks of 128: window 8', 'blocks of 128: window 16', 'blocks of 512: window 2')
    """
    most = max(BLOCK, 1 << (seq_len // MOST_BLOCKS).bit_length())
    block = min(most, seq_len, width // 2)
    return sliding_window(
        max(1, width // (block if causal else 2 * block)), block_size=block
    )


def keys_of(seq_len: int) -> int:
    """The keys that a query of ``local`` sees at most.

    >>> keys_of(131072), keys_of(2**20)
    (2176, 2560)
    """
    return WINDOW + local(seq_len).block_size


def advise(
    profile: hardware.Profile | str,
    seq_len: int | str,
    *,
    need: str = "far",
    seconds: float = SECONDS,
    ranks: int = 1,
    batch: int = 1,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 64,
    causal: bool = False,
    passes: str = "fwd",
    layers: int = 1,
    pattern: str | Pattern = "auto",
    dtype: torch.dtype | None = None,
    memory_bytes: int | str | None = None,
    estimates: bool = True,
    rows: Iterable[Evidence] = (),
    trained: Mapping[str, str] | None = None,
) -> Advice:
    """Advise an attention for ``seq_len`` tokens on ``ranks`` of a profile, and the
    dtype, backend, scheme, layout and checkpointing to run it with.

    Dense attention is advised while a call of one layer takes at most ``seconds``; it
    needs about as much memory as the others, and whether that is there is said beside
    it. Beyond that ``need`` decides. "exact": dense all the same. "far": a
    query has to find keys from anywhere; windows, and one layer in four dense. "local":
    its neighbours are enough; windows alone, at any length. ``pattern``: one to keep
    instead of a choice by need, or its name, as "ladder" for who has a LongNet. Sizes
    may be texts of the command line, as "128K" and "8GiB".

    ``layers``: how many hold their tensors from forward to backward, or with
    checkpointing their inputs, and then make each forward twice. ``memory_bytes``:
    of a rank (None: the profile's). ``rows``: measured calls on this hardware, which
    make times of rooflines, on one rank; on several, times stay lower bounds. Methods
    among them that choose their keys by content, and were faster than dense attention
    in this shape, are named beside the advice.
    ``trained``: what small models learned with "dense", "far", "local" and with such
    methods by name, in words. A
    ``dtype`` that is given is kept. ``estimates=False``: memory, which takes seconds to
    find, stays unknown.

    Raises ValueError, in one line, for an unknown profile, numbers that are not
    positive, memory that cannot hold the inputs of a rank, and what takes minutes to
    estimate.

    >>> advice = advise("gtx1080", 8192, passes="fwd")
    >>> advice.advised.name, advice["dtype"], advice.fits
    ('dense attention', torch.float32, True)
    >>> advise("gtx1080", 131072, passes="fwd", estimates=False).advised.name
    'windows of 2,048, one layer in 4 dense'
    """
    if not isinstance(profile, str | hardware.Profile):
        raise TypeError(
            f"profile must be a hardware profile or its name, got {short_repr(profile)}"
        )
    if isinstance(profile, str):
        machine = hardware.detect()
        profile = hardware.resolve(profile, machine).on(machine)
    check_choice("need", need, NEEDS)
    layers = check_int("layers", layers, most=LARGEST)
    chosen = Decision("dtype", dtype, "a dtype that is given is kept")
    if dtype is None:
        name, why = profile.dtype_reason().split(": ", 1)
        chosen = Decision("dtype", getattr(torch, name), why)
    call = CallSpec(
        Dense(),
        seq_len,
        batch,
        heads,
        kv_heads,
        head_dim,
        chosen.value,
        causal,
        passes,
        ranks,
        profile=profile,
    )
    if call.ranks > call.seq_len:
        raise ValueError(
            f"{short_repr(call.ranks)} ranks are more than {seq_len} tokens"
        )
    if str(pattern) != "auto":
        pattern = as_pattern(pattern, Pattern, call.seq_len, call.heads)
    if isinstance(memory_bytes, str):
        memory_bytes = parse_bytes(memory_bytes)
    memory = 1 if memory_bytes is None else memory_bytes
    for name, value in (("seconds", seconds), ("memory_bytes", memory)):
        if not (is_real(value) and 0 < value < math.inf):
            raise ValueError(
                f"{name} must be a positive number, got {short_repr(value)}"
            )
    check_bool("estimates", estimates)
    rows = tuple(rows)
    if not all(isinstance(row, Evidence) for row in rows):
        raise TypeError(f"rows must be Evidence objects, got {short_repr(rows)}")
    budget = profile.memory_bytes if memory_bytes is None else int(memory_bytes)
    return _Advisor(
        call,
        layers,
        budget,
        rows,
        trained or {},
        chosen,
        estimates,
        seconds,
    ).advice(need, pattern)


@dataclass
class Candidate:
    """A pattern with the settings it runs with."""

    call: CallSpec
    across: tuple[Decision, ...] = ()  # scheme and layout

    @cached_property
    def bounded(self) -> Estimate:
        """The work and its lower bounds alone: nothing is run, and memory is not known."""
        c = self.call
        work = c.cost()
        rates = rates_of(c, work)
        return Estimate(work, c.ranks, None, {}, 0, c.sent()).bounded(rates)

    @cached_property
    def estimate(self) -> Estimate:
        return estimate_call(self.call)


@dataclass
class _Advisor:
    """What is asked for, and the decisions: the kernel first, then the options and how
    the advised one runs.
    """

    call: CallSpec  # with the kernel that was decided; each pattern replaces the rest
    layers: int
    budget: int | None
    rows: tuple[Evidence, ...]
    trained: Mapping[str, str]
    dtype: Decision
    estimates: bool
    seconds: float

    def __post_init__(self):
        kernel = self._kernel(Dense()).value
        # On a GPU "auto" depends on the pattern, too.
        by_rule = self.call.device.type == "cuda" and kernel in kernels.SDPA
        self.call = replace(self.call, backend="auto" if by_rule else kernel)
        self.place = cache(self._place)

    def advice(self, need: str, pattern: str | Pattern) -> Advice:
        c = self.call
        rows = c.batch * -(-c.seq_len // c.ranks)  # of a rank
        least = rows * (c.heads + 2 * c.kv_heads) * c.head_dim * c.dtype.itemsize
        if self.budget is not None and least > self.budget:
            need = f"q, k and v of a rank are {format_bytes(least)}"
            raise ValueError(
                f"{format_bytes(self.budget)} cannot hold the inputs: {need}"
            )
        if self.estimates:
            check_size(c)
        options = self._options(pattern)
        end, ends = self._dense_until(options["exact"])
        name, why = self._chosen(need, options, end, ends)
        advised = options[name]
        placed = self.place(advised.pattern)
        if advised.dense_every and advised.peak_bytes != options["local"].peak_bytes:
            placed = self.place(Dense())  # its dense layers need most
        kept = self._checkpointing(placed)
        choices = (self.dtype, self._kernel(advised.pattern), *placed.across, kept)
        memory = {}
        if self.estimates:
            memory["need_bytes"] = need = self._need(placed.estimate, kept.value)
            if c.causal:
                cached = (
                    self.place(each).estimate.cache_bytes
                    for each in (Dense(), advised.pattern)
                )
                memory["cache_bytes"] = of_layers(
                    self.layers, advised.dense_every, *cached
                )
            if self.budget is not None and need > self.budget:
                memory["longest"] = self._longest(placed)
        return Advice(
            c,
            self.layers,
            tuple(options.values()),
            advised,
            why,
            {c.name: c for c in choices},
            end,
            ends,
            self.budget,
            **memory,
            choosing=self._choosing(),
        )

    def _kernel(self, pattern: Pattern) -> Decision:
        """The kernel that ``backend="auto"`` should take for a pattern."""
        call = replace(self.call, pattern=pattern)
        try:
            choice = call.kernel_choice()
        except NotImplementedError as error:
            return Decision("kernel", "auto", str(error))
        why = ["this library's own kernel"]
        if choice.name in kernels.SDPA:
            why = ["of torch's own kernels"]
        if choice.rule is not None:
            why[0] += f": {choice.rule}"
            back = call.kernel_choice(for_gradients=True)
            if call.backward and back.rule != choice.rule:
                why.append(f"backward {back.name}: {back.rule}")
        if call.profile.kind != "cpu":  # a CPU refuses all that is for GPUs
            refused = choice.refusals.items()
            why += [f"{name} {x}" for name, x in refused if name not in kernels.CPU]
        return Decision("kernel", choice.name, "; ".join(why))

    # ----------------------------------------------------------------------------------
    # the options

    def _options(self, pattern: str | Pattern) -> dict[str, Option]:
        """The options by need; with a pattern that was asked for, that one first."""
        window = local(self.call.seq_len, self.call.causal)
        dense = self._option("exact", "dense attention", Dense())
        near = self._option("local", f"windows of {WINDOW:,}", window)
        options = [dense]
        if isinstance(pattern, Pattern):
            options = [self._option("asked", str(pattern), pattern), dense]
        if near.share < 1:
            options += [self._far(dense, near), near]
        return {x.need: x for x in options}

    def _option(self, need: str, name: str, pattern: Pattern) -> Option:
        c = self.call
        n = c.seq_len
        placed = self.place(pattern)
        dense = self.place(Dense())
        far = far_queries(pattern, n, c.heads, c.kv_heads, c.causal)
        seconds, time = self._time(placed)
        kept = self._checkpointing(placed).value
        if kept:
            forward = Candidate(replace(placed.call, passes="fwd"))
            again, other = self._time(forward)
            seconds += again
            time = least_sure(time, other)
        return Option(
            need,
            name,
            pattern,
            placed.bounded.cost.distinct_pairs / dense.bounded.cost.distinct_pairs,
            far / n,
            seconds,
            time,
            self._need(placed.estimate, kept) if self.estimates else None,
            sum(placed.bounded.sent.values()),
            trained=self.trained.get("dense" if placed is dense else need, ""),
        )

    def _far(self, dense: Option, near: Option) -> Option:
        """Windows with a dense layer of so many: the average of a layer."""

        def mean(name: str) -> float:
            each = getattr(dense, name), getattr(near, name)
            return of_layers(DENSE_LAYER, DENSE_LAYER, *each) / DENSE_LAYER

        return replace(
            near,
            need="far",
            name=f"{near.name}, one layer in {DENSE_LAYER} dense",
            share=mean("share"),
            reach=dense.reach,
            seconds=mean("seconds"),
            time=least_sure(dense.time, near.time),
            peak_bytes=near.peak_bytes and max(near.peak_bytes, dense.peak_bytes),
            sent_bytes=int(mean("sent_bytes")),
            dense_every=DENSE_LAYER,
            trained=self.trained.get("far", ""),
        )

    def _time(self, placed: Candidate) -> tuple[float, str]:
        """Seconds of a call, and what they are: as measured; else those of the measured
        call that is most like it (in its pattern, then its shape, then the next longer
        one), times the quotient of the two rooflines; or the roofline alone. Never less
        than a shorter call of its kind took: short calls on a GPU wait for the host.
        """
        c = placed.call
        n = c.seq_len
        bound = placed.bounded.bound_s

        def kind(x: CallSpec) -> tuple:
            return type(x.pattern), x.dtype, x.passes, x.ranks

        similar = [e for e in self.rows if not e.method and kind(e.call) == kind(c)]
        if not similar or not bound:
            return bound, AT_LEAST
        window = c.pattern == local(n, c.causal)

        def unlike(e: Evidence) -> tuple:
            x = e.call
            # Longer sequences have the same window in larger blocks.
            same = c.pattern, local(x.seq_len, x.causal) if window else c.pattern
            other = x.pattern not in same, x.causal != c.causal, x.shape != c.shape
            return *other, x.seq_len < n, abs(x.seq_len - n)

        nearest = min(similar, key=unlike)
        if not any(unlike(nearest)):
            return nearest.seconds, MEASURED
        # Both rooflines are by the profile's rates: a GPU may have been measured at a
        # higher clock.
        its = Candidate(replace(nearest.call, profile=c.profile)).bounded.bound_s
        shorter = [
            e.seconds for e in similar if e.call.seq_len < n and not any(unlike(e)[:3])
        ]
        return max([nearest.seconds * bound / its, *shorter]), ABOUT

    def _choosing(self) -> tuple[str, ...]:
        """Methods that choose keys by content and are faster than dense attention in
        calls of this shape, at the longest measured length up to this one.
        """
        c = self.call

        def kind(x: CallSpec) -> tuple:
            return x.shape, x.dtype, x.passes, x.ranks

        alike = [
            e
            for e in self.rows
            if e.method and kind(e.call) == kind(c) and e.call.seq_len <= c.seq_len
        ]
        longest = max((x.call.seq_len for x in alike), default=0)
        faster = [x for x in alike if x.call.seq_len == longest and x.of_dense < 1]
        unknown = "whether models learn with it is unknown"
        return tuple(
            f"{x.method}: {x.of_dense:.2g} of the time of dense attention at {longest:,}"
            f" tokens, measured; {self.trained.get(x.method, unknown)}"
            for x in sorted(faster, key=lambda x: x.of_dense)
        )

    def _dense_until(self, dense: Option) -> tuple[int | None, str | None]:
        """The length up to which dense attention keeps within the time and the memory,
        and which of them ends it; the same for any length that is asked about.
        """
        ends = {}
        if dense.seconds:
            ends["time"] = self._within(self.seconds)
        if dense.peak_bytes and self.budget:
            about = self.call.seq_len * self.budget / dense.peak_bytes
            # To know it exactly takes long, and pays only where it may be the end.
            if about < 1.2 * ends.get("time", math.inf):
                ends["memory"] = self._longest(self.place(Dense())) or 0
        return min(zip(ends.values(), ends), default=(None, None))

    def _within(self, seconds: float) -> int:
        """The length at which dense attention takes so many seconds. Times grow about
        as the square of it.
        """
        n = START
        for _ in range(STEPS):
            ranks = min(self.call.ranks, n)
            takes, _ = self._time(self.place(Dense(), seq_len=n, ranks=ranks))
            n = min(max(int(n * math.sqrt(seconds / takes)), 1), LARGEST)
        return n

    def _chosen(
        self,
        need: str,
        options: Mapping[str, Option],
        end: int | None,
        ends: str | None,
    ) -> tuple[str, str]:
        """The need of the option to use, and why."""
        dense = options["exact"]
        until = "neither its time nor its memory is known"
        if ends:
            limit = "in memory"
            about = "about"
            if ends == "time":
                limit = f"within {format_seconds(self.seconds)} a call"
                about = "at most" if dense.time == AT_LEAST else about
            until = (
                f"dense attention stays {limit} up to {about} {rounded(end):,} tokens"
            )
        if "asked" in options:
            return "asked", f"a pattern that is given is kept; {until}"
        if "far" not in options:
            return "exact", f"a window of {WINDOW:,} would show every key, too"
        if need == "exact":
            return "exact", f"every key, as asked; {until}"
        if need == "local":
            seen = f"{100 * options['local'].share:.2g} % of the pairs"
            return "local", f"neighbours alone, as asked: {seen}; {until}"
        if self._time(self.place(Dense()))[0] <= self.seconds:
            takes = (
                f"a layer takes {dense.takes}"
                if dense.seconds
                else "its time is not known"
            )
            return "exact", f"{takes}; {until}"
        learned = options["far"].trained or "whether models learn with it is unknown"
        return "far", f"{until}, here a layer takes {dense.takes}; {learned}"

    # ----------------------------------------------------------------------------------
    # by estimate

    def _need(self, estimated: Estimate, checkpointing: bool = False) -> int:
        """Bytes of the rank that needs most: one layer at its peak, the others with
        what they save.
        """
        others = self.layers - 1 if self.call.backward else 0
        saved = ("q",) if checkpointing else SAVED
        return estimated.peak_bytes + others * sum(map(estimated.parts.get, saved))

    def _place(self, pattern: Pattern, **shape: int) -> Candidate:
        """The pattern, in this call or one of another ``shape``, with a layout and the
        scheme that sends the fewest bytes of those that fit, as ``ring.bytes_by_scheme``
        orders them.
        """
        c = replace(self.call, pattern=pattern, **shape)
        if c.ranks == 1:
            return Candidate(c)
        for name in ("contiguous", "zigzag"):
            call = replace(c, layout=name)
            problem, _ = call.problem()
            total = bytes_by_scheme(problem, **c.options("head_dim", "dtype", "passes"))
            least = best = next(iter(total))
            if unevenness(problem, least) <= EVEN:
                break
        placed = {scheme: Candidate(replace(call, scheme=scheme)) for scheme in total}
        # An estimate takes long.
        if self.estimates and self.budget is not None:
            fitting = (
                scheme
                for scheme in total
                if self._need(placed[scheme].estimate) <= self.budget
            )
            best = next(fitting, least)
        why = "what each rank's queries see is on it, so nothing moves"
        if total[least]:
            listed = ", ".join(
                f"{scheme} {format_bytes(c.batch * size)}"
                for scheme, size in total.items()
            )
            why = f"all ranks together send in a call: {listed}"
        if best != least:
            why += f"; {least} needs {format_bytes(self._need(placed[least].estimate))} on a rank, more than there is"
        why = "; ".join([why, *problem.refusals().values()])
        chosen = placed[best]
        busiest = unevenness(problem, best)
        chosen.across = (
            Decision("scheme", best, why),
            Decision(
                "layout",
                name,
                f"the busiest rank computes {busiest:.3g} times the average",
            ),
        )
        return chosen

    # ----------------------------------------------------------------------------------
    # memory

    def _checkpointing(self, placed: Candidate) -> Decision:
        no = partial(Decision, "checkpointing", False)
        if not self.call.backward:
            return no("nothing is kept for a backward")
        if self.layers == 1:
            return no("of one layer it saves nothing: its backward holds it all")
        if not self.estimates:
            return no("memory was not estimated")
        without = self._need(placed.estimate)
        with_ = self._need(placed.estimate, checkpointing=True)
        why = f"{self.layers} layers need {format_bytes(without)} without, {format_bytes(with_)} with"
        why += ", which runs each forward twice; weights and optimizer need room, too"
        most = math.inf if self.budget is None else ROOM * self.budget
        return Decision("checkpointing", most < without > with_, why)

    def _longest(self, placed: Candidate) -> int | None:
        """The longest sequence that fits with this pattern, scheme and layout, and
        checkpointing; None for none.
        """

        def least(call: CallSpec) -> int:
            estimated = estimate_call(call)
            return min(self._need(estimated, kept) for kept in (False, True))

        try:
            return longest_call(placed.call, self.budget, least)
        except ValueError:
            return None


def rounded(n: int) -> int:
    """A length to two digits.

    >>> rounded(33_917), rounded(921)
    (34000, 920)
    """
    return round(n, -max(0, len(str(n)) - 2))
