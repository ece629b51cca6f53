"""Advice: which settings for which length on which hardware.

Each setting is chosen by measured rows (``Evidence``) where they bear on it, else by
the hardware's policy or by estimate. ``ringlab.report.evidence`` makes evidence from
stored rows. Only the pattern changes results: it is proposed, and one that is given
stays.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from textwrap import wrap

import torch

from . import hardware, kernels
from .block_patterns import BlockSparse, local_global, sliding_window
from .checks import LARGEST, check_bool, check_int, is_real, short_repr
from .cost import far_queries, format_bytes, format_seconds
from .engine import Execution
from .engine.chunked import OOMBackoff
from .estimate import NETWORK_REMOVED, Estimate, cost_of, estimate_of, rates_of
from .meta_run import MetaCall
from .patterns import Dense, Dilated, Pattern
from .ring import SCHEMES, Layout
from .ring.layout import layout_named
from .ring.volume import unevenness

PAPER = 2048  # LongNet's first segment (Ding et al. 2023, arXiv 2307.02486)
SHORTEST = 256  # first segment of a ladder
BLOCK, MOST_BLOCKS = (
    128,
    4096,
)  # positions of a block; blocks are larger where there would be more of them
EVEN = 1.1  # shards stay contiguous while the busiest rank computes at most this many times the average
TILE = 512
SWITCHES = {
    "gather": "gathered copies",
    "cache": "the pattern cache",
    "pool": "the pool",
    "blocks": "ways for blocks",
}
SAVED = ("q", "k", "v", "out", "lse")  # of a layer, from its forward to its backward
MOST_RANKS = 32  # tried for a sequence that does not fit
STEP, TRIES = (
    128,
    6,
)  # a shorter length is sought in multiples of so many positions a rank, in so many tries
NEAR = 1.5  # rows count whose share of dense's products differs by at most this factor
KINDS = ("auto", "dense", "ladder", "local")
POLICY, ESTIMATE, ASKED = "by policy", "by estimate", "as asked"


@dataclass(frozen=True)
class Evidence:
    """A measured comparison of two rows that differ in one thing: ``against`` takes
    ``ratio`` times as long as ``setting``, from ``low`` to ``high`` at 95 %.

    ``about``: what they differ in, "dtype", "backend", "scheme", "pattern" or a switch
    of ``Execution``; ``origin`` which rows they are. ``counts`` is false for rows of
    another machine and of a rehearsal: they are shown and decide nothing. No ratio
    below ``least`` is a difference.

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
        low, high = 1 / self.high, 1 / self.low if self.low else math.inf
        return replace(
            self,
            setting=self.against,
            against=self.setting,
            ratio=1 / self.ratio,
            low=low,
            high=high,
        )

    @property
    def text(self) -> str:
        word = (
            "faster than"
            if self.faster
            else "slower than"
            if self.slower
            else "within noise of"
        )
        sides = [
            f"{self.about}={x}" if x in ("True", "False") else x
            for x in (self.setting, self.against)
        ]
        said = (
            f"{sides[0]} {self.figures} {word} {sides[1]}, {self.label}, {self.origin}"
        )
        return said if self.counts else f"{said}: decides nothing"

    @property
    def how(self) -> str:
        return f"measured: {self.figures}, {self.origin}"

    @property
    def figures(self) -> str:
        return f"{self.ratio:.3g}x ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True)
class Decision:
    """One setting: its ``value``, ``how`` it was chosen ("by policy", "by estimate",
    "measured: ...", "as asked"), ``why``, and the measured comparisons that concern it.
    """

    name: str
    value: object
    how: str
    why: str
    evidence: tuple[Evidence, ...] = ()

    @property
    def shown(self) -> str:
        if isinstance(self.value, torch.dtype):
            return dtype_name(self.value)
        if isinstance(self.value, Execution):
            return (
                ", ".join(f"{k}={v}" for k, v in changed(self.value).items())
                or "as it stands"
            )
        if isinstance(self.value, bool):
            return "yes" if self.value else "no"
        return (
            ", ".join(self.value) if isinstance(self.value, tuple) else str(self.value)
        )


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
    plain = vars(Execution())
    return {
        name: value for name, value in vars(execution).items() if value != plain[name]
    }


def dtype_name(dtype: torch.dtype) -> str:
    """As rows and the command line name it, float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")


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
TORCHRUN = (
    '# Under torchrun: group=mesh["sequence"], and q, k, v are this rank\'s shards.\n'
)
PATTERN_COLUMNS = (
    "pairs of dense",
    "lower bound",
    "peak per rank",
    "sent in all",
    "pattern",
)


@dataclass(frozen=True)
class Advice:
    """What to run for a length on a profile: choices with their reasons, and the
    patterns that were compared.

    ``advice["scheme"]`` is a choice's value. ``need_bytes`` is what the rank that needs
    most needs, ``budget_bytes`` what it has (None: not known); where that is less,
    ``longest`` is a length of this pattern that fits, near the longest, and
    ``enough_ranks`` a number of ranks that hold the sequence. ``cache_bytes``: what the
    caches of all layers take for generating up to this length, on the rank with most
    (None: not causal, or not estimated).
    """

    call: MetaCall  # its shape, passes, ranks and profile
    seq_len: int
    layers: int
    choices: dict[str, Decision]
    budget_bytes: int | None = None
    need_bytes: int | None = None
    proposals: tuple[Proposal, ...] = ()
    longest: int | None = None
    enough_ranks: int | None = None
    cache_bytes: int | None = None

    def __getitem__(self, name: str):
        return self.choices[name].value

    @property
    def fits(self) -> bool | None:
        return (
            None
            if None in (self.budget_bytes, self.need_bytes)
            else self.need_bytes <= self.budget_bytes
        )

    @property
    def title(self) -> str:
        c = self.call
        heads = f"{c.heads} heads" + (
            "" if c.kv_heads == c.heads else f" over {c.kv_heads} of K/V"
        )
        parts = [
            c.profile.title,
            "one rank" if c.ranks == 1 else f"{c.ranks} ranks",
            f"{self.seq_len:,} tokens",
            f"{heads} of {c.head_dim}",
            "causal" if c.causal else "not causal",
            "forward" if c.passes == "fwd" else "forward and backward",
            f"batch {c.batch}" if c.batch > 1 else "",
            f"{self.layers} layers" if self.layers > 1 else "",
        ]
        return ", ".join(filter(None, parts))

    @property
    def memory(self) -> str:
        """One line on whether it fits."""
        if self.need_bytes is None:
            return "not estimated"
        need = f"{format_bytes(self.need_bytes)} of attention alone, on the rank that needs most"
        if self.budget_bytes is None:
            return f"{need}; how much there is, is not known: give a budget"
        have = f"{need}, of {format_bytes(self.budget_bytes)}"
        if self.fits:
            return f"fits: {have}"
        longest = (
            f"{self.longest:,} tokens fit"
            if self.longest
            else "no shorter length was found that fits"
        )
        ranks = f"; {self.enough_ranks} ranks hold it" if self.enough_ranks else ""
        return f"does not fit: {have}; {longest}{ranks}"

    def _memories(self) -> list[tuple[str, str]]:
        """What is said of memory: of the call, and of the caches for generation."""
        if self.cache_bytes is None:
            return [("memory", self.memory)]
        caches = (
            "a cache" if self.layers == 1 else f"the caches of {self.layers} layers"
        )
        said = f"{caches} for {self.seq_len:,} tokens: {format_bytes(self.cache_bytes)}"
        return [("memory", self.memory), ("generation", said)]

    def text(self) -> str:
        """For a terminal: the choices, the measured comparisons, and the patterns that
        were compared.
        """
        lines = [self.title, ""]
        for c in self.choices.values():
            lines += [f"{c.name:15}{c.shown}", f"{'':15}{c.how}: {c.why}"]
        lines += [f"{name:15}{ESTIMATE}: {said}" for name, said in self._memories()]
        lines += [""]
        measured = [f"  {e.text}" for c in self.choices.values() for e in c.evidence]
        lines += (
            ["measured:", *measured]
            if measured
            else ["measured: nothing that bears on it"]
        )
        return "\n".join(
            [
                *lines,
                "",
                *columns([PATTERN_COLUMNS, *map(self._figures, self.proposals)]),
            ]
        )

    def code(self) -> str:
        """Python that runs as it stands, on the profile's device or else on a CPU.

        Ranks are simulated in the one process; a comment says what changes under
        torchrun.
        """
        c, pattern, kept, backward = (
            self.call,
            self["pattern"],
            self["checkpointing"],
            self.call.passes != "fwd",
        )
        about = [
            f"{x.name}: {x.shown}; {x.how}: {x.why}" for x in self.choices.values()
        ]
        about = [
            wrap(x, 114, subsequent_indent="  ")
            for x in (self.title, *about, f"memory: {self.memory}")
        ]
        options = [f"causal={c.causal}", f"backend={self['backend']!r}"]
        if c.ranks > 1:
            options += [
                f"group=ringlab.Simulated({c.ranks})",
                f"scheme={self['scheme']!r}",
            ]
            options += [f"layout={str(self['layout'])!r}"]
        if execution := changed(self["execution"]):
            options += [
                f"execution=ringlab.Execution({', '.join(f'{k}={v!r}' for k, v in execution.items())})"
            ]
        return CODE.format(
            about="\n".join(f"# {line}" for lines in about for line in lines),
            module="blocks" if isinstance(pattern, BlockSparse) else "patterns",
            names=", ".join(sorted(set(re.findall(r"\b([A-Z]\w*)\(", repr(pattern))))),
            checkpoint="from torch.utils.checkpoint import checkpoint\n"
            if kept
            else "",
            seq_len=self.seq_len,
            pattern=repr(pattern),
            options=", ".join(options),
            dtype=self["dtype"],
            device='"cuda" if torch.cuda.is_available() else "cpu"'
            if c.profile.kind == "cuda"
            else '"cpu"',
            torchrun=TORCHRUN if c.ranks > 1 else "",
            grad=backward,
            batch=c.batch,
            head_dim=c.head_dim,
            heads=[c.heads, c.kv_heads, c.kv_heads],
            out="checkpoint(attend, q, k, v, use_reentrant=False)"
            if kept
            else "attend(q, k, v)",
            backward="out.sum().backward()\n" if backward else "",
        )

    def _figures(self, p: Proposal) -> tuple[str, ...]:
        bound = f"{format_seconds(p.bound_s)} ({p.binds})" if p.bound_s else "not known"
        over = (
            p.peak_bytes
            and self.budget_bytes is not None
            and p.peak_bytes > self.budget_bytes
        )
        peak = (
            format_bytes(p.peak_bytes) + (", does not fit" if over else "")
            if p.peak_bytes
            else "not estimated"
        )
        return (
            f"{100 * p.share:.3g} %",
            bound,
            peak,
            format_bytes(p.sent_bytes),
            f"{p.name}: {p.pattern}",
        )


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


def ladder(seq_len: int, first: int = PAPER) -> Pattern:
    """LongNet's ladder up to the sequence: segments first, 2 first, ... at rates 1, 2,
    ...; dense where one holds all.

    >>> str(ladder(10000)), str(ladder(2048))
    ('dilated [2048, 4096, 8192, 16384] / [1, 2, 4, 8]', 'dense')
    """
    steps = max(0, (-(-seq_len // first) - 1).bit_length())
    return (
        Dilated(
            [first << i for i in range(steps + 1)], [1 << i for i in range(steps + 1)]
        )
        if steps
        else Dense()
    )


def local(seq_len: int, ranks: int = 1, width: int = PAPER) -> BlockSparse:
    """A sliding window of about ``width`` positions; on one rank a global block too,
    for which ranks would send all.

    >>> str(local(10000)), str(local(10000, ranks=2))
    ('blocks of 128: window 8, 1 global', 'blocks of 128: window 8')
    """
    block = min(
        max(BLOCK, 1 << (seq_len // MOST_BLOCKS).bit_length()), seq_len, width // 2
    )
    before = max(1, width // (2 * block))
    return (
        local_global(before, 1, block_size=block)
        if ranks == 1
        else sliding_window(before, block_size=block)
    )


def advise(
    profile: hardware.Profile | str,
    seq_len: int,
    *,
    ranks: int = 1,
    batch: int = 1,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 64,
    causal: bool = False,
    passes: str = "fwd+bwd",
    layers: int = 1,
    pattern: str | Pattern = "auto",
    dtype: torch.dtype | None = None,
    layout: str | Layout | None = None,
    memory_bytes: int | None = None,
    seconds: float | None = None,
    estimates: bool = True,
    rows: Iterable[Evidence] = (),
    network: None = None,
) -> Advice:
    """Advise dtype, backend, scheme, layout, pattern, execution and checkpointing for
    ``seq_len`` tokens on ``ranks``.

    ``pattern``: one to keep, or what to propose: "dense", "ladder" (LongNet: segments
    w, 2w, 4w at rates 1, 2, 4 and so on up to the sequence), "local" (sliding window,
    global block), "auto" (the ladder where it pays, else dense). ``seconds``: a limit
    for the lower bound of a call; the ladder's first segment is the longest within it.
    ``layers``: how many hold their tensors from forward to backward. ``memory_bytes``:
    of a rank (None: the profile's). ``rows``: measured comparisons. A ``dtype`` or
    ``layout`` that is given is kept. ``estimates=False``: choose by policy, rows and
    bytes sent alone; memory and lower bounds, which take seconds to find, stay unknown.
    ``network`` is refused: predicted times were removed.

    Raises ValueError, in one line, for an unknown profile, numbers that are not
    positive, memory that cannot hold the inputs of a rank, and what takes minutes to
    estimate.

    >>> advice = advise("gtx1080", 131072, ranks=2)
    >>> advice["dtype"], advice["scheme"], advice["pattern"].segment_lengths[:3], advice.fits
    (torch.float32, 'plan', (2048, 4096, 8192), True)
    """
    if network is not None:
        raise TypeError(NETWORK_REMOVED)
    if not isinstance(profile, str | hardware.Profile):
        raise TypeError(
            f"profile must be a hardware profile or its name, got {short_repr(profile)}"
        )
    if isinstance(profile, str):
        machine = hardware.detect()
        profile = hardware.resolve(profile, machine).on(machine)
    if not isinstance(pattern, Pattern) and not (
        isinstance(pattern, str) and pattern in KINDS
    ):
        raise ValueError(
            f"pattern must be a ringlab pattern or one of {', '.join(KINDS)}, got {short_repr(pattern)}"
        )
    seq_len = check_int("seq_len", seq_len, most=LARGEST)
    layers = check_int("layers", layers, most=LARGEST)
    call = MetaCall(
        Dense(),
        heads,
        head_dim,
        batch,
        kv_heads,
        causal=causal,
        passes=passes,
        ranks=ranks,
        profile=profile,
        **({} if dtype is None else {"dtype": dtype}),
    )
    if call.ranks > seq_len:
        raise ValueError(
            f"{short_repr(call.ranks)} ranks are more than {seq_len} tokens"
        )
    for name, value in (("memory_bytes", memory_bytes), ("seconds", seconds)):
        if value is not None and not (is_real(value) and 0 < value < math.inf):
            raise ValueError(
                f"{name} must be a positive number, got {short_repr(value)}"
            )
    check_bool("estimates", estimates)
    if layout is not None:
        layout_named(layout, seq_len, call.ranks)  # raises what is wrong with it
    rows = tuple(rows) if isinstance(rows, Iterable) else (rows,)
    if not all(isinstance(row, Evidence) for row in rows):
        raise TypeError(f"rows must be ringlab.Evidence, got {short_repr(rows)}")
    budget = profile.memory_bytes if memory_bytes is None else int(memory_bytes)
    return _Advisor(
        call, seq_len, layers, budget, rows, layout, dtype, estimates, seconds
    ).advice(pattern)


@dataclass
class _Placed:
    """A pattern with the settings it runs with; ``sent`` is the bytes of a call by
    (from rank, to rank).
    """

    call: MetaCall
    seq_len: int
    execution: Decision
    across: tuple[Decision, ...] = ()  # scheme and layout
    sent: dict[tuple[int, int], int] = field(default_factory=dict)

    @cached_property
    def estimate(self) -> Estimate:
        return estimate_of(self.call, self.seq_len)


@dataclass
class _Advisor:
    """What is asked for, and the decisions: dtype and backend first, then the pattern
    with its execution and scheme.
    """

    call: MetaCall  # with the dtype and the kernel that were decided; each pattern replaces the rest
    seq_len: int
    layers: int
    budget: int | None
    rows: tuple[Evidence, ...]
    layout: str | Layout | None
    given_dtype: torch.dtype | None
    estimates: bool
    seconds: float | None

    def __post_init__(self):
        self.dtype = self._dtype()
        self.call = replace(self.call, dtype=self.dtype.value)
        _, kernel = self._backend(Dense())
        # On a GPU "auto" depends on the pattern, too.
        by_rule = self.call.device_type == "cuda" and kernel in kernels.SDPA
        self.call = replace(self.call, backend="auto" if by_rule else kernel)
        self.place = cache(self._place)

    def advice(self, wanted: str | Pattern) -> Advice:
        c = self.call
        least = (
            c.batch
            * -(-self.seq_len // c.ranks)
            * (c.heads + 2 * c.kv_heads)
            * c.head_dim
            * c.dtype.itemsize
        )
        if self.budget is not None and least > self.budget:
            few = (
                f"q, k and v of a rank are {format_bytes(least)}"
                if least < 2**60
                else "q, k and v are far larger"
            )
            raise ValueError(
                f"{format_bytes(self.budget)} cannot hold the inputs: {few}"
            )
        if self.estimates:
            c.check(self.seq_len)
        pattern = self._pattern(wanted)
        placed = self.place(pattern.value)
        checkpointing = self._checkpointing(placed)
        choices = (
            pattern,
            self.dtype,
            self._backend(pattern.value)[0],
            *placed.across,
            placed.execution,
            checkpointing,
        )
        found: dict = {}
        if self.estimates:
            kept = checkpointing.value
            found["need_bytes"] = self._need(placed.estimate, kept)
            if c.causal:
                found["cache_bytes"] = self.layers * placed.estimate.cache_bytes
            found["proposals"] = self._proposals(
                pattern.value, isinstance(wanted, Pattern), kept
            )
            if not self._fits(placed.estimate, kept):
                found["longest"] = self._longest(placed, kept)
                found["enough_ranks"] = self._enough_ranks(placed, kept)
        return Advice(
            c,
            self.seq_len,
            self.layers,
            {c.name: c for c in choices},
            self.budget,
            **found,
        )

    # ----------------------------------------------------------------------------------
    # from rows

    def _measured(
        self, about: str, default: str, suits: Callable
    ) -> tuple[Evidence, ...]:
        """For each other setting, the comparison with ``default`` whose shape is
        nearest to the one asked for.
        """

        def distance(e: Evidence) -> tuple:
            other = e.passes != self.call.passes, e.causal != self.call.causal
            return not e.counts, *other, abs(math.log(e.seq_len / self.seq_len))

        nearest: dict[str, Evidence] = {}
        for e in sorted(
            (e for e in self.rows if e.about == about and suits(e)), key=distance
        ):
            e = e.turned() if e.setting == default else e
            if e.against == default != e.setting:
                nearest.setdefault(e.setting, e)
        return tuple(nearest.values())

    def _fastest(
        self,
        about: str,
        default: str,
        why="",
        how=POLICY,
        suits: Callable = lambda e: True,
    ) -> Decision:
        """The fastest setting that was measured faster than the default, else the
        default.
        """
        found = self._measured(about, default, suits)
        counting = [e for e in found if e.counts]
        best = max(counting, key=lambda e: (e.faster, e.ratio), default=None)
        if best and best.faster:
            return Decision(
                about,
                best.setting,
                best.how,
                f"faster than {best.against}, {best.label}",
                found,
            )
        if best and all(e.slower for e in counting):
            best = best.turned()
            how, why = best.how, f"faster than {best.against}, {best.label}; {why}"
        return Decision(about, default, how, why, found)

    def _dtype(self) -> Decision:
        if self.given_dtype is not None:
            return Decision(
                "dtype", self.given_dtype, ASKED, "a dtype that is given is kept"
            )
        name, why = self.call.profile.dtype_reason().split(": ", 1)
        decided = self._fastest("dtype", name, why)
        return replace(decided, value=getattr(torch, decided.value))

    def _backend(self, pattern: Pattern) -> tuple[Decision, str]:
        """The backend, and the kernel that should run a pattern."""
        profile, dtype = self.call.profile, self.call.dtype
        try:
            call = replace(self.call, pattern=pattern)
            found = call.choice(self.seq_len)
            said = (
                found.refusals if profile.kind != "cpu" else {}
            )  # a CPU refuses all that is for GPUs
            refused = [
                f"{name} {why}" for name, why in said.items() if name not in kernels.CPU
            ]
            own = (
                "of torch's own kernels"
                if found.name in kernels.SDPA
                else "this library's own kernel"
            )
            why = [f"{found.name}, {own}"]
            if found.rule is not None:
                why = [f"{found.name}, {own}: {found.rule}"]
                back = call.choice(self.seq_len, for_gradients=True)
                if call.passes != "fwd" and back.rule != found.rule:
                    why.append(f"backward {back.name}: {back.rule}")
            kernel, why = found.name, "; ".join([*why, *refused])
        except NotImplementedError as error:
            kernel, why = "auto", str(error)
        as_auto = {
            kernel: "auto"
        }  # a row of the kernel that "auto" comes to is a row of "auto"
        self.rows = tuple(
            replace(
                e,
                **{
                    side: as_auto.get(getattr(e, side), getattr(e, side))
                    for side in ("setting", "against")
                },
            )
            if e.about == "backend"
            else e
            for e in self.rows
        )
        decided = self._fastest(
            "backend", "auto", why, suits=lambda e: e.dtype == dtype_name(dtype)
        )
        if decided.value == "auto":
            return decided, kernel
        return replace(decided, value=(decided.value, "auto")), decided.value

    def _execution(self, pattern: Pattern) -> Decision:
        plain, found, taken = Execution(), (), {}
        how, why = POLICY, "strided views, the pattern cache, no pool and no tiles"
        kind = "blocks" if isinstance(pattern, BlockSparse) else "dilated"
        for name, title in SWITCHES.items():
            if name == "gather" and self.call.ranks > 1:
                continue
            default = str(getattr(plain, name))
            decided = self._fastest(
                name, default, suits=lambda e: e.pattern.startswith(kind)
            )
            found += decided.evidence
            if decided.value != default:
                taken[name] = {"True": True, "False": False}.get(
                    decided.value, decided.value
                )
                how, why = decided.how, f"{title}: {decided.why}"
        return Decision("execution", replace(plain, **taken), how, why, found)

    # ----------------------------------------------------------------------------------
    # by estimate

    def _bounded(self, pattern: Pattern) -> Estimate:
        """The work of a call and its lower bounds alone: nothing is run, and memory is
        not known.
        """
        placed = self.place(pattern)
        counted = cost_of(placed.call, self.seq_len)
        return Estimate(counted, self.call.ranks, None, {}, 0, placed.sent).bounded(
            rates_of(placed.call, counted)
        )

    def _need(self, found: Estimate, checkpointing: bool = False) -> int:
        """Bytes of the rank that needs most: one layer at its peak, the others with
        what they save.
        """
        saved = (
            found.parts["q"]
            if checkpointing
            else sum(found.parts[name] for name in SAVED)
        )
        return found.peak_bytes + (
            saved * (self.layers - 1) if self.call.passes == "fwd+bwd" else 0
        )

    def _fits(self, found: Estimate, checkpointing: bool = False) -> bool:
        return self.budget is None or self._need(found, checkpointing) <= self.budget

    def _place(self, pattern: Pattern) -> _Placed:
        """The pattern with the execution, scheme and layout that suit it.

        Eager scores, which alone fill memory, are computed in tiles where they do not
        fit.
        """
        execution, eager = self._execution(pattern), self.call.backend == "eager"
        if eager and not self.estimates and self.call.profile.kind == "cuda":
            why = f"smaller tiles where memory runs out; {execution.why}"
            execution = replace(
                execution, value=replace(execution.value, tile=OOMBackoff()), why=why
            )
        placed = self._on_ranks(pattern, execution)
        if eager and self.estimates and not self._fits(placed.estimate):
            tiled, need = (
                replace(execution.value, tile=TILE),
                format_bytes(self._need(placed.estimate)),
            )
            tried = replace(
                execution,
                value=tiled,
                how=ESTIMATE,
                why=f"{need} without tiles; {execution.why}",
            )
            placed = min(
                placed,
                self._on_ranks(pattern, tried),
                key=lambda each: each.estimate.peak_bytes,
            )
        return placed

    def _on_ranks(self, pattern: Pattern, execution: Decision) -> _Placed:
        """The pattern with a layout and the scheme that sends the fewest bytes of those
        that fit.

        Where schemes send equally much it is the ring, which holds the least.
        """
        c, n = (
            replace(self.call, pattern=pattern, execution=execution.value),
            self.seq_len,
        )
        if c.ranks == 1:
            return _Placed(c, n, execution)
        for name in ("contiguous", "zigzag") if self.layout is None else (self.layout,):
            found, total, refused = {}, {}, []
            for scheme in SCHEMES:
                call = replace(c, scheme=scheme, layout=name)
                try:
                    problem, _ = call.problem(n)
                except ValueError as error:
                    refused.append(str(error))
                    continue
                found[scheme] = _Placed(
                    call, n, execution, sent=call.sent(problem, scheme)
                )
                total[scheme] = sum(found[scheme].sent.values())
            order = sorted(
                total,
                key=lambda scheme: (
                    total[scheme],
                    scheme != ("ring" if total[scheme] else "plan"),
                ),
            )
            if unevenness(problem, order[0]) <= EVEN:
                break
        least, best = order[0], order[0]
        if (
            self.estimates and self.budget is not None and len(order) > 1
        ):  # an estimate takes long
            best = next(
                (scheme for scheme in order if self._fits(found[scheme].estimate)),
                least,
            )
        why = "what each rank's queries see is on it, so nothing moves"
        if total[least]:
            listed = ", ".join(
                f"{scheme} {format_bytes(total[scheme])}" for scheme in order
            )
            why = f"all ranks together send in a call: {listed}"
        if best != least:
            why += f"; {least} needs {format_bytes(self._need(found[least].estimate))} on a rank, more than there is"

        def suits(e: Evidence) -> bool:
            return (e.ranks, e.pattern) == (c.ranks, str(pattern)) and {
                e.setting,
                e.against,
            } <= total.keys()

        scheme = self._fastest(
            "scheme", best, "; ".join([why, *refused]), ESTIMATE, suits
        )
        busiest = f"the busiest rank computes {unevenness(problem, scheme.value):.3g} times the average"
        layout = Decision(
            "layout", name, ESTIMATE if self.layout is None else ASKED, busiest
        )
        placed = found[scheme.value]
        placed.across = scheme, layout
        return placed

    # ----------------------------------------------------------------------------------
    # the pattern

    def _pattern(self, wanted: str | Pattern) -> Decision:
        c, n = self.call, self.seq_len
        if wanted in ("dense", "local"):
            wanted = Dense() if wanted == "dense" else local(n, c.ranks)
        if isinstance(wanted, Pattern):
            return Decision("pattern", wanted, ASKED, "a pattern that is given is kept")
        if self.seconds is not None:
            return self._in_time()
        found = ladder(n)
        cost, dense = (cost_of(replace(c, pattern=p), n) for p in (found, Dense()))
        share, seen = (
            cost.pairs / dense.pairs,
            cost.distinct_pairs / dense.distinct_pairs,
        )
        why = f"LongNet's first segment of {PAPER:,}; {100 * share:.3g} % of the products of dense attention"
        if share > seen:
            why += f", for {100 * seen:.3g} % of its pairs: branches share some"
        far = 100 * far_queries(found, n, c.heads, c.kv_heads, c.causal) / n
        why += f"; {far:.3g} % of queries see a key at least half the sequence away{' (causal: 50 at most)' * c.causal}"
        if wanted == "ladder":
            return Decision("pattern", found, ASKED, why)
        if isinstance(found, Dense):
            return Decision(
                "pattern",
                found,
                ESTIMATE,
                f"a segment of {PAPER:,}, LongNet's first, holds all",
            )
        if share >= 1:
            return Decision(
                "pattern", Dense(), ESTIMATE, f"it needs no more than {found}: {why}"
            )
        # The ladder, unless rows of the same work and about its density show that it
        # does not pay.

        def suits(e: Evidence) -> bool:
            same = (e.passes, e.causal, e.ranks, e.dtype) == (
                c.passes,
                c.causal,
                1,
                dtype_name(c.dtype),
            )
            return (
                same
                and 1 / NEAR <= e.share / share <= NEAR
                and "dilated" in e.setting + e.against
            )

        rows = self._measured("pattern", "dense", suits)
        if not rows or not rows[0].counts:
            return Decision("pattern", found, POLICY, why, rows)
        e = rows[0]
        at = f"{e.setting}, {100 * e.share:.3g} %, at {e.seq_len:,} tokens"
        if not e.faster:
            return Decision(
                "pattern", Dense(), e.how, f"{at} is no faster than dense; {why}", rows
            )
        return Decision("pattern", found, e.how, f"{at}; {why}", rows)

    def _in_time(self) -> Decision:
        """The ladder whose first segment is the longest that the time allows; dense if
        one holds all.
        """
        allowed, first = (
            format_seconds(self.seconds),
            1 << (self.seq_len - 1).bit_length(),
        )
        while (
            bound := self._bounded(ladder(self.seq_len, first)).bound_s
        ) > self.seconds and first > SHORTEST:
            first //= 2
        if not bound:
            raise ValueError(
                f"profile {self.call.profile.name!r} has no rates, so no bound to hold to {allowed}"
            )
        why = (
            "the longest first segment within"
            if bound <= self.seconds
            else "no ladder keeps to"
        )
        why = f"{why} {allowed}: {format_seconds(bound)} at the lower bound"
        return Decision("pattern", ladder(self.seq_len, first), ESTIMATE, why)

    def _proposals(
        self, advised: Pattern, given: bool, checkpointing: bool
    ) -> tuple[Proposal, ...]:
        """What is advised, dense attention, and the local window where no pattern was
        given.

        Only the first two with their memory: it takes seconds to find.
        """
        kinds = {"advised": advised, "dense": Dense()}
        if not given:
            kinds["local"] = local(self.seq_len, self.call.ranks)
        full = self._bounded(Dense()).cost.distinct_pairs
        found: dict[Pattern, Proposal] = {}
        for name, pattern in kinds.items():
            placed, e = self.place(pattern), self._bounded(pattern)
            peak = (
                self._need(placed.estimate, checkpointing)
                if name in ("advised", "dense")
                else None
            )
            share, sent = e.cost.distinct_pairs / full, sum(placed.sent.values())
            found.setdefault(
                pattern, Proposal(name, pattern, share, e.bound_s, e.binds, peak, sent)
            )
        return tuple(found.values())

    # ----------------------------------------------------------------------------------
    # memory

    def _checkpointing(self, placed: _Placed) -> Decision:
        no = partial(Decision, "checkpointing", False, POLICY)
        if self.call.passes == "fwd":
            return no("nothing is kept for a backward")
        if self.layers == 1:
            return no("of one layer it saves nothing: its backward holds it all")
        if not self.estimates:
            return no("memory was not estimated")
        without, with_ = (
            self._need(placed.estimate),
            self._need(placed.estimate, checkpointing=True),
        )
        why = f"{self.layers} layers need {format_bytes(without)} without, {format_bytes(with_)} with"
        return Decision(
            "checkpointing",
            not self._fits(placed.estimate) and with_ < without,
            ESTIMATE,
            why,
        )

    def _longest(self, placed: _Placed, checkpointing: bool) -> int | None:
        """A length that fits with this pattern, scheme and layout; the memory is nearly
        linear in the length.
        """
        if isinstance(self.layout, Layout):
            return None  # it is of one length
        unit, n, need = (
            STEP * self.call.ranks,
            self.seq_len,
            self._need(placed.estimate, checkpointing),
        )
        for _ in range(TRIES):
            n = int(n * self.budget / need) // unit * unit
            if not n:
                break
            need = self._need(estimate_of(placed.call, n), checkpointing)
            if need <= self.budget:
                return n
        return None

    def _enough_ranks(self, placed: _Placed, checkpointing: bool) -> int | None:
        """The first doubling of the ranks that holds the sequence; what cannot suffice
        is not tried.
        """
        ranks, total = (
            self.call.ranks,
            self.call.ranks * self._need(placed.estimate, checkpointing),
        )
        while (ranks := 2 * ranks) <= min(MOST_RANKS, self.seq_len):
            if total / ranks <= 1.1 * self.budget:
                more = replace(
                    self,
                    call=replace(self.call, ranks=ranks),
                    layout=None,
                )
                if more._fits(more.place(placed.call.pattern).estimate, checkpointing):
                    return ranks
        return None
