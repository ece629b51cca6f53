"""Advice: which settings for which length on which hardware, and ``config="auto"`` of the modules.

Each setting is chosen by measured rows (``Evidence``) where they bear on it, else by the hardware's policy or by
estimate. ``ringlab.report.evidence`` makes evidence from stored rows. Only the pattern changes results: it is proposed,
and one that is given stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor

from .. import hardware, kernels
from ..block_patterns import BlockSparse, local_global, sliding_window
from ..checks import LARGEST, check_bool, check_float_dtype, check_int, is_real, short_repr
from ..cost import format_bytes, format_seconds
from ..engine import Execution
from ..engine.chunked import Ladder
from ..estimate import Estimate, cost_of, estimate_of, rates_of
from ..meta_run import MetaCall
from ..patterns import Dense, Dilated, Pattern
from ..ring import SCHEMES, Layout, Problem, Simulated, group_size
from ..ring.layout import layout_named
from ..ring.volume import sent_bytes, unevenness
from .render import ASKED, ESTIMATE, POLICY, Advice, Decision, Evidence, Proposal, changed

__all__ = ["Advice", "Auto", "Decision", "Evidence", "Proposal", "advise", "ladder", "local"]

PAPER = 2048  # LongNet's first segment (Ding et al. 2023, arXiv 2307.02486)
BLOCK, MOST_BLOCKS = 128, 4096  # positions of a block; blocks are larger where there would be more of them
KINDS = ("auto", "dense", "ladder", "local")
EVEN = 1.1  # shards stay contiguous while the busiest rank computes at most this many times the average
TILE = 512
SWITCHES = {"gather": "gathered copies", "cache": "the pattern cache", "pool": "the pool", "blocks": "ways for blocks"}
SWITCHES_OF = {"dilated": ("gather", "cache", "pool"), "blocks": ("cache", "blocks")}  # by the kind of a pattern
SAVED = ("q", "k", "v", "out", "lse")  # of a layer, from its forward to its backward
SHORTEST = 256  # first segment of a ladder
MOST_RANKS = 32  # tried for a sequence that does not fit
STEP, TRIES = 128, 6  # a shorter length is sought in multiples of so many positions a rank, in so many tries
NEAR = 1.5  # rows count whose share of dense's products differs by at most this factor


def ladder(seq_len: int, first: int = PAPER) -> Pattern:
    """LongNet's ladder up to the sequence: segments first, 2 first, ... at rates 1, 2, ...; dense where one holds all.

    >>> str(ladder(10000)), str(ladder(2048))
    ('dilated [2048, 4096, 8192, 16384] / [1, 2, 4, 8]', 'dense')
    """
    steps = max(0, (-(-seq_len // first) - 1).bit_length())
    return Dilated([first << i for i in range(steps + 1)], [1 << i for i in range(steps + 1)]) if steps else Dense()


def local(seq_len: int, ranks: int = 1, width: int = PAPER) -> BlockSparse:
    """A sliding window of about ``width`` positions; on one rank a global block too, for which ranks would send all.

    >>> str(local(10000)), str(local(10000, ranks=2))
    ('blocks of 128: window 8, 1 global', 'blocks of 128: window 8')
    """
    block = min(max(BLOCK, 1 << (seq_len // MOST_BLOCKS).bit_length()), seq_len, width // 2)
    before = max(1, width // (2 * block))
    return local_global(before, 1, block_size=block) if ranks == 1 else sliding_window(before, block_size=block)


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
) -> Advice:
    """Advise dtype, backend, scheme, layout, pattern, execution and checkpointing for ``seq_len`` tokens on ``ranks``.

    ``pattern``: one to keep, or what to propose: "dense", "ladder" (LongNet: segments w, 2w, 4w at rates 1, 2, 4 and so
    on up to the sequence), "local" (sliding window, global block), "auto" (the ladder where it pays, else dense).
    ``seconds``: a limit for the lower bound of a call; the ladder's first segment is the longest within it.
    ``layers``: how many hold their tensors from forward to backward. ``memory_bytes``: of a rank (None: the profile's).
    ``rows``: measured comparisons. A ``dtype`` or ``layout`` that is given is kept. ``estimates=False``: choose by
    policy, rows and bytes sent alone; memory and lower bounds, which take seconds to find, stay unknown.

    Raises ValueError, in one line, for an unknown profile, numbers that are not positive, memory that cannot hold
    the inputs of a rank, and what takes minutes to estimate.

    >>> advice = advise("gtx1080", 131072, ranks=2)
    >>> advice["dtype"], advice["scheme"], advice["pattern"].segment_lengths[:3], advice.fits
    (torch.float32, 'plan', (2048, 4096, 8192), True)
    """
    if not isinstance(profile, str | hardware.Profile):
        raise TypeError(f"profile must be a hardware profile or its name, got {short_repr(profile)}")
    if isinstance(profile, str):
        machine = hardware.detect()
        profile = hardware.resolve(profile, machine).on(machine)
    if not isinstance(pattern, Pattern) and not (isinstance(pattern, str) and pattern in KINDS):
        raise ValueError(f"pattern must be a ringlab pattern or one of {', '.join(KINDS)}, got {short_repr(pattern)}")
    seq_len = check_int("seq_len", seq_len, most=LARGEST)
    layers = check_int("layers", layers, most=LARGEST)
    call = MetaCall(Dense(), heads, head_dim, batch, kv_heads, causal=causal, passes=passes, ranks=ranks,
                    profile=profile)  # fmt: skip
    if call.ranks > seq_len:
        raise ValueError(f"{short_repr(call.ranks)} ranks are more than {seq_len} tokens")
    if dtype is not None:
        check_float_dtype(dtype)
    for name, value in (("memory_bytes", memory_bytes), ("seconds", seconds)):
        if value is not None and not (is_real(value) and 0 < value < math.inf):
            raise ValueError(f"{name} must be a positive number, got {short_repr(value)}")
    check_bool("estimates", estimates)
    if layout is not None:
        layout_named(layout, seq_len, call.ranks)  # raises what is wrong with it
    rows = tuple(rows) if isinstance(rows, Iterable) else (rows,)
    if not all(isinstance(row, Evidence) for row in rows):
        raise TypeError(f"rows must be ringlab.Evidence, got {short_repr(rows)}")
    budget = profile.memory_bytes if memory_bytes is None else int(memory_bytes)
    return _Advising(call, seq_len, layers, budget, rows, layout, dtype, estimates, seconds).advice(pattern)


@dataclass
class _Placed:
    """A pattern as it is run: its settings, the bytes that each rank sends, and ``run(seq_len)``, its estimate."""

    execution: Decision
    run: Callable[..., Estimate]
    across: tuple[Decision, ...] = ()  # scheme and layout
    sent: tuple[int, ...] = (0,)

    @cached_property
    def estimate(self) -> Estimate:
        return self.run()


@dataclass(frozen=True)
class _Advising:
    """What is asked for, and the decisions: dtype and kernel first, then the pattern with its execution and scheme."""

    call: MetaCall  # of its pattern, dtype, backend, execution, scheme and layout the decisions take the place
    seq_len: int
    layers: int
    budget: int | None
    rows: tuple[Evidence, ...]
    layout: str | Layout | None
    given_dtype: torch.dtype | None
    estimates: bool
    seconds: float | None
    placed: dict[Pattern, _Placed] = field(default_factory=dict, init=False)

    def advice(self, wanted: str | Pattern) -> Advice:
        self._check_inputs()
        decided = self._pattern(wanted)
        placed = self._place(decided.value)
        checkpointing = self._checkpointing(placed)
        choices = decided, self.dtype, self.backend[0], *placed.across, placed.execution, checkpointing
        advice = Advice(self.call, self.seq_len, self.layers, {c.name: c for c in choices}, self.budget)
        if not self.estimates:
            return advice
        kept = checkpointing.value
        need, proposals = self._need(placed.estimate, kept), self._proposals(decided, wanted, kept)
        advice = replace(advice, need_bytes=need, proposals=proposals)
        if advice.fits is False:
            more = {"longest": self._longest(placed, kept), "enough_ranks": self._enough_ranks(decided.value, kept)}
            advice = replace(advice, **more)
        return advice

    def _check_inputs(self) -> None:
        c = self.call
        rows = -(-self.seq_len // c.ranks)
        least = c.batch * rows * (c.heads + 2 * c.kv_heads) * c.head_dim * self.dtype.value.itemsize
        if self.budget is not None and least > self.budget:
            few = f"q, k and v of a rank are {format_bytes(least)}" if least < 2**60 else "q, k and v are far larger"
            raise ValueError(f"{format_bytes(self.budget)} cannot hold the inputs: {few}")
        if self.estimates:
            c.check(self.seq_len)

    # -----------------------------------------------------------------------------------------------------------------
    # from rows

    def _compared(self, about: str, default: str, rows=None, **match) -> list[Evidence]:
        """The comparisons with ``default`` in one thing, turned so that they are against it."""
        rows = self.rows if rows is None else rows
        found = [e.turned() if e.setting == default else e for e in rows if e.about == about]
        match |= {"against": default}
        return [e for e in found if all(getattr(e, name) == value for name, value in match.items())]

    def _measured(self, *asked, **match) -> tuple[Evidence, ...]:
        """Of ``_compared``, for each other setting, the comparison whose shape is the nearest to what is asked for."""

        def distance(e: Evidence) -> tuple:
            other = e.passes != self.call.passes, e.causal != self.call.causal
            return not e.counts, *other, abs(math.log(e.seq_len / self.seq_len))

        nearest: dict[str, Evidence] = {}
        for e in sorted(self._compared(*asked, **match), key=distance):
            nearest.setdefault(e.setting, e)
        return tuple(nearest.values())

    @staticmethod
    def _fastest(name: str, default, why: str, found: tuple[Evidence, ...], how: str = POLICY) -> Decision:
        """The fastest that was measured faster than the default, else the default."""
        counting = sorted((e for e in found if e.counts), key=lambda e: -e.ratio)
        if quicker := [e for e in counting if e.faster]:
            best = quicker[0]
            return Decision(name, best.setting, best.how, f"faster than {best.against}, {best.label}", found)
        if counting and all(e.slower for e in counting):
            best = counting[0].turned()
            return Decision(name, default, best.how, f"faster than {best.against}, {best.label}; {why}", found)
        return Decision(name, default, how, why, found)

    @cached_property
    def dtype(self) -> Decision:
        if self.given_dtype is not None:
            return Decision("dtype", self.given_dtype, ASKED, "a dtype that is given is kept")
        name, why = self.call.profile.dtype_reason().split(": ", 1)
        decided = self._fastest("dtype", name, why, self._measured("dtype", name))
        return replace(decided, value=getattr(torch, decided.value))

    @property
    def _dtype_name(self) -> str:
        return str(self.dtype.value).removeprefix("torch.")

    @cached_property
    def backend(self) -> tuple[Decision, str]:
        """The backend, and the kernel that should run."""
        profile, dtype = self.call.profile, self.dtype.value
        try:
            found = kernels.expected(profile.kind, profile.capability, dtype, self.call.head_dim)
            for_cpu = profile.kind == "cpu"  # where all that is for GPUs is refused, and it goes without saying
            refused = [f"{name} {why}" for name, why in found.refusals.items() if not for_cpu and name != "cpu_flash"]
            kernel, why = found.name, "; ".join([f"{found.name} of torch's own kernels", *refused])
        except NotImplementedError as error:
            kernel, why = "auto", str(error)
        # A row of the kernel that "auto" comes to is a row of "auto".
        as_auto = [
            replace(e, **{s: "auto" if getattr(e, s) == kernel else getattr(e, s) for s in ("setting", "against")})
            for e in self.rows
            if e.about == "backend" and {e.setting, e.against} != {"auto", kernel}
        ]
        found = self._measured("backend", "auto", as_auto, dtype=self._dtype_name)
        decided = self._fastest("backend", "auto", why, found)
        if decided.value == "auto":
            return decided, kernel
        return replace(decided, value=(decided.value, "auto")), decided.value

    def _execution(self, pattern: Pattern) -> Decision:
        plain, found, taken = Execution(), (), {}
        how, why = POLICY, "strided views, the pattern cache, no pool and no tiles"
        kind = "blocks" if isinstance(pattern, BlockSparse) else "dilated"
        for name in SWITCHES_OF[kind]:
            if name == "gather" and self.call.ranks > 1:
                continue
            default = str(getattr(plain, name))
            decided = self._fastest(name, default, "", self._measured(name, default, kind=kind))
            found += decided.evidence
            if decided.value != default:
                taken[name] = {"True": True, "False": False}.get(decided.value, decided.value)
                how, why = decided.how, f"{SWITCHES[name]}: {decided.why}"
        return Decision("execution", replace(plain, **taken), how, why, found)

    # -----------------------------------------------------------------------------------------------------------------
    # by estimate

    def _call(self, pattern: Pattern, **decided) -> MetaCall:
        return replace(self.call, pattern=pattern, dtype=self.dtype.value, **decided)

    def _estimate(self, pattern: Pattern, execution: Execution, seq_len: int | None = None, **across) -> Estimate:
        call = self._call(pattern, backend=self.backend[1], execution=execution, **across)
        return estimate_of(call, seq_len or self.seq_len)

    def _bounded(self, pattern: Pattern) -> Estimate:
        """The work of a call and its lower bounds alone: nothing is run, and memory is not known."""
        call = self._call(pattern)
        counted = cost_of(call, self.seq_len)
        sent = {(rank, -1): size for rank, size in enumerate(self._place(pattern).sent)}
        return Estimate(counted, call.ranks, None, {}, 0, sent).bounded(rates_of(call, counted))

    def _need(self, found: Estimate, checkpointing: bool = False) -> int:
        """Bytes of the rank that needs most: one layer at its peak, the others with what they save."""
        saved = found.parts["q"] if checkpointing else sum(found.parts[name] for name in SAVED)
        return found.peak_bytes + (saved * (self.layers - 1) if self.call.passes == "fwd+bwd" else 0)

    def _fits(self, found: Estimate, checkpointing: bool = False) -> bool:
        return self.budget is None or self._need(found, checkpointing) <= self.budget

    def _place(self, pattern: Pattern) -> _Placed:
        """The pattern with the execution, scheme and layout that suit it, decided once.

        Eager scores, which alone fill memory, are computed in tiles where they do not fit.
        """
        if pattern in self.placed:
            return self.placed[pattern]
        execution, eager = self._execution(pattern), self.backend[1] == "eager"
        if eager and not self.estimates and self.call.profile.kind == "cuda":
            tiled = replace(execution.value, tile=Ladder())
            execution = replace(execution, value=tiled, why=f"smaller tiles where memory runs out; {execution.why}")
        placed = self._on_ranks(pattern, execution)
        if eager and self.estimates and not self._fits(placed.estimate):
            tiled = replace(execution.value, tile=TILE)
            why = f"{format_bytes(self._need(placed.estimate))} without tiles; {execution.why}"
            tried = self._on_ranks(pattern, replace(execution, value=tiled, how=ESTIMATE, why=why))
            if tried.estimate.peak_bytes < placed.estimate.peak_bytes:
                placed = tried
        return self.placed.setdefault(pattern, placed)

    def _on_ranks(self, pattern: Pattern, execution: Decision) -> _Placed:
        """The pattern with a layout and the scheme that sends the fewest bytes of those that fit.

        Where schemes send equally much it is the ring, which holds the least.
        """
        c = self.call
        if c.ranks == 1:
            return _Placed(execution, partial(self._estimate, pattern, execution.value))
        for name in (self.layout,) if self.layout is not None else ("contiguous", "zigzag"):
            problem = Problem(pattern, layout_named(name, self.seq_len, c.ranks), c.causal, c.heads, c.kv_heads)
            sent, refused = self._sent(problem)
            total = {scheme: sum(each) for scheme, each in sent.items()}
            if unevenness(problem, min(total, key=total.get)) <= EVEN:
                break
        order = sorted(total, key=lambda scheme: (total[scheme], scheme != ("ring" if total[scheme] else "plan")))
        found = {}
        for scheme in order:
            run = partial(self._estimate, pattern, execution.value, scheme=scheme, layout=name)
            found[scheme] = _Placed(execution, run, sent=sent[scheme])
        least = order[0]
        if self.estimates and self.budget is not None:
            least = next((scheme for scheme in order if self._fits(found[scheme].estimate)), least)
        listed = ", ".join(f"{scheme} {format_bytes(total[scheme])}" for scheme in order)
        why = [f"all ranks together send in a call: {listed}"]
        if not total[order[0]]:
            why = ["what each rank's queries see is on it, so nothing moves"]
        if least != order[0]:
            need = format_bytes(self._need(found[order[0]].estimate))
            why.append(f"{order[0]} needs {need} on a rank, more than there is")
        rows = self._measured("scheme", least, ranks=c.ranks, pattern=str(pattern))
        rows = tuple(e for e in rows if e.setting in sent)
        scheme = self._fastest("scheme", least, "; ".join([*why, *refused]), rows, ESTIMATE)
        busiest = f"the busiest rank computes {unevenness(problem, scheme.value):.3g} times the average"
        layout = Decision("layout", name, ESTIMATE if self.layout is None else ASKED, busiest)
        chosen = found[scheme.value]
        chosen.across = scheme, layout
        return chosen

    def _sent(self, problem: Problem) -> tuple[dict[str, tuple[int, ...]], list[str]]:
        """Bytes of one call by scheme and rank; and why the other schemes cannot serve."""
        sent, refused, c = {}, [], self.call
        how = {"batch": c.batch, "head_dim": c.head_dim, "dtype": self.dtype.value, "passes": c.passes}
        for scheme in SCHEMES:
            try:
                problem.check(scheme)
            except ValueError as error:
                refused.append(str(error))
            else:
                sent[scheme] = tuple(sent_bytes(problem, rank, scheme, **how) for rank in range(c.ranks))
        return sent, refused

    # -----------------------------------------------------------------------------------------------------------------
    # the pattern

    def _pattern(self, wanted: str | Pattern) -> Decision:
        n = self.seq_len
        if isinstance(wanted, Pattern):
            return Decision("pattern", wanted, ASKED, "a pattern that is given is kept")
        if wanted in ("dense", "local"):
            made = Dense() if wanted == "dense" else local(n, self.call.ranks)
            return Decision("pattern", made, ASKED, "as proposed")
        if self.seconds is not None:
            return self._in_time()
        found = ladder(n)
        pairs, dense = (cost_of(self._call(p), n).pairs for p in (found, Dense()))
        share = pairs / dense
        why = f"LongNet's first segment of {PAPER:,}; {100 * share:.3g} % of the products of dense attention"
        if wanted == "ladder":
            return Decision("pattern", found, ASKED, why)
        if isinstance(found, Dense):
            return Decision("pattern", found, ESTIMATE, f"a segment of {PAPER:,}, LongNet's first, holds all")
        if share >= 1:
            return Decision("pattern", Dense(), ESTIMATE, f"it needs no more than {found}: {why}")
        return self._against_dense(found, share, why)

    def _against_dense(self, found: Dilated, share: float, why: str) -> Decision:
        """The ladder, unless rows of the same passes, mask, dtype and about its density show that it does not pay."""
        work = {"passes": self.call.passes, "causal": self.call.causal, "ranks": 1, "dtype": self._dtype_name}
        rows = [e for e in self._compared("pattern", "dense", **work) if e.setting.startswith("dilated")]
        rows = tuple(sorted((e for e in rows if 1 / NEAR <= e.share / share <= NEAR), key=lambda e: e.seq_len))
        counting = [e for e in rows if e.counts]
        if not counting:
            return Decision("pattern", found, POLICY, why, rows)
        e = min(counting, key=lambda e: abs(e.seq_len - self.seq_len))
        at = f"{e.setting}, {100 * e.share:.3g} %, at {e.seq_len:,} tokens"
        if not e.faster:
            return Decision("pattern", Dense(), e.how, f"{at} is no faster than dense; {why}", rows)
        return Decision("pattern", found, e.how, f"{at}; {why}", rows)

    def _in_time(self) -> Decision:
        """The ladder whose first segment is the longest that the time allows; dense if one holds all."""
        allowed, first = format_seconds(self.seconds), 1 << (self.seq_len - 1).bit_length()
        while True:
            pattern = ladder(self.seq_len, first)
            bound = self._bounded(pattern).bound_s
            if not bound:
                name = self.call.profile.name
                raise ValueError(f"profile {name!r} has no rates, so no bound to hold to {allowed}")
            at = f"{format_seconds(bound)} at the lower bound"
            if bound <= self.seconds:
                return Decision("pattern", pattern, ESTIMATE, f"the longest first segment within {allowed}: {at}")
            if first <= SHORTEST:
                return Decision("pattern", pattern, ESTIMATE, f"no ladder keeps to {allowed}: this one takes {at}")
            first //= 2

    def _proposals(self, decided: Decision, wanted: str | Pattern, checkpointing: bool) -> tuple[Proposal, ...]:
        """What is advised, dense attention, and the two sparse kinds where no pattern was given.

        Only the first two with their memory: it takes seconds to find.
        """
        kinds = {"advised": decided.value, "dense": Dense()}
        if not isinstance(wanted, Pattern):
            kinds |= {"ladder": ladder(self.seq_len), "local": local(self.seq_len, self.call.ranks)}
        full = cost_of(self._call(Dense()), self.seq_len).distinct_pairs
        found: dict[Pattern, Proposal] = {}
        for name, pattern in kinds.items():
            placed, bounded = self._place(pattern), self._bounded(pattern)
            peak = self._need(placed.estimate, checkpointing) if name in ("advised", "dense") else None
            found.setdefault(pattern, Proposal(name, pattern, bounded.cost.distinct_pairs / full, bounded.bound_s,
                                               bounded.binds, peak, sum(placed.sent)))  # fmt: skip
        return tuple(found.values())

    # -----------------------------------------------------------------------------------------------------------------
    # memory

    def _checkpointing(self, placed: _Placed) -> Decision:
        if self.call.passes == "fwd":
            return Decision("checkpointing", False, POLICY, "nothing is kept for a backward")
        if self.layers == 1:
            why = "of one layer it saves nothing: its backward holds it all"
            return Decision("checkpointing", False, ESTIMATE, why)
        if not self.estimates:
            return Decision("checkpointing", False, POLICY, "memory was not estimated")
        without, with_ = self._need(placed.estimate), self._need(placed.estimate, checkpointing=True)
        said = f"{self.layers} layers need {format_bytes(without)} without, {format_bytes(with_)} with"
        return Decision("checkpointing", not self._fits(placed.estimate) and with_ < without, ESTIMATE, said)

    def _longest(self, placed: _Placed, checkpointing: bool) -> int | None:
        """A length that fits with this pattern, scheme and layout; the memory is nearly linear in the length."""
        if isinstance(self.layout, Layout):
            return None  # it is of one length
        unit, n, need = STEP * self.call.ranks, self.seq_len, self._need(placed.estimate, checkpointing)
        for _ in range(TRIES):
            n = int(n * self.budget / need) // unit * unit
            if n < unit:
                return None
            need = self._need(placed.run(seq_len=n), checkpointing)
            if need <= self.budget:
                return n
        return None

    def _enough_ranks(self, pattern: Pattern, checkpointing: bool) -> int | None:
        """The first doubling of the ranks that holds the sequence; what cannot suffice is not tried."""
        ranks, need = 2 * self.call.ranks, self._need(self._place(pattern).estimate, checkpointing)
        while ranks <= min(MOST_RANKS, self.seq_len):
            if need * self.call.ranks / ranks <= 1.1 * self.budget:
                more = replace(self, call=replace(self.call, ranks=ranks), layout=None)
                if more._fits(more._place(pattern).estimate, checkpointing):
                    return ranks
            ranks *= 2
        return None


class Auto:
    """Backend, scheme and execution by advice, for a module that was given none; ``advice`` is the last that it took.

    ``config``: "auto", which asks for each shape once, or an ``Advice``, which is taken for every shape. The pattern,
    the layout and the dtype of tensors stay as they are. Under torch.compile the graph breaks here.
    Raises ValueError for anything else.

    >>> Auto("fast")
    Traceback (most recent call last):
    ...
    ValueError: config must be None, "auto" or a ringlab.Advice, got 'fast'
    """

    def __init__(self, config: str | Advice):
        given = isinstance(config, Advice)
        if not given and not (isinstance(config, str) and config == "auto"):
            raise ValueError(f'config must be None, "auto" or a ringlab.Advice, got {short_repr(config)}')
        self.asks, self.advice = not given, config if given else None

    def __repr__(self) -> str:
        taken = ("backend", "scheme", "execution")
        said = [f"{c.name}: {c.shown}" for c in self.advice.choices.values() if c.name in taken] if self.advice else []
        return f"config=auto ({'; '.join(said) or 'nothing chosen yet'})"

    def fill(self, options: dict, pattern: Pattern, q: Tensor, k: Tensor) -> dict:
        """``options`` of ``attention`` with what was left open; q and k (b, n, h, d) are whole, or shards."""
        group, layout = options.get("group"), options.get("layout", "contiguous")
        ranks = 1 if group is None else group_size(group)
        whole = group is None or isinstance(group, Simulated)
        n = layout.n if isinstance(layout, Layout) else q.shape[1] * (1 if whole else ranks)
        shape = n, ranks, q.shape[0], q.shape[2], k.shape[2], q.shape[3]
        passes = "fwd+bwd" if torch.is_grad_enabled() else "fwd"
        left = tuple(name for name in ("backend", "scheme") if options.get(name) == "auto")
        call = torch.compiler.disable(_filled) if torch.compiler.is_compiling() else _filled
        asked = q.device, pattern, layout, shape, options["causal"], passes, q.dtype
        return options | call(self, left, options["execution"], *asked)


def _filled(auto: Auto, left: tuple[str, ...], mine: Execution, *asked) -> dict:
    """What advice gives for the names that were ``left`` open and for the switches that ``mine`` leaves alone."""
    if auto.asks:
        auto.advice = _advised(*asked)
    advice = auto.advice
    execution = replace(advice["execution"], **changed(mine))
    return {"execution": execution} | {name: advice[name] for name in left if name in advice.choices}


@lru_cache(maxsize=256)
def _advised(device, pattern, layout, shape, causal: bool, passes: str, dtype) -> Advice:
    n, ranks, batch, heads, kv_heads, head_dim = shape
    return advise(
        profile_of(device), n, ranks=ranks, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        causal=causal, passes=passes, pattern=pattern, dtype=dtype, layout=layout, estimates=False,
    )  # fmt: skip


@lru_cache(maxsize=16)
def profile_of(device: torch.device) -> hardware.Profile:
    """The profile of a device that is here, with its memory.

    >>> profile_of(torch.device("cpu")).name
    'cpu'
    """
    if device.type == "cpu":
        return hardware.get_profile("cpu")
    found = torch.cuda.get_device_properties(device)
    gpu = hardware.Gpu(found.name, (found.major, found.minor), found.total_memory)
    return hardware.resolve("auto", machine := hardware.Machine(device="cuda", gpus=(gpu,))).on(machine)
