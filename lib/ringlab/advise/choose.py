"""Patterns to propose for a length.

How each setting is chosen: by measured comparisons that bear on it, else by the hardware's policy or by estimate.

What to run for a length on given hardware: by measured rows where they bear on it, else by policy and estimate.

Rows come as ``Evidence``; ``ringlab.report.evidence`` makes it from stored ones. Only the pattern is a matter of taste:
it is proposed, and nothing here changes one that is given.

``config="auto"`` of a module: advice for each shape that comes, applied as far as it keeps the function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from .. import cost, hardware, kernels
from ..block_patterns import BlockSparse, local_global, sliding_window
from ..checks import check_bool, check_choice, check_float_dtype, check_int, is_real, short_repr
from ..cost import PASSES
from ..engine import Execution
from ..engine.chunked import Ladder
from ..estimate import Estimate, estimate, rates_of
from ..patterns import Dense, Dilated, Pattern
from ..ring import SCHEMES, Layout, Problem, Simulated, group_size
from ..ring.layout import layout_named
from ..ring.volume import sent_bytes, unevenness
from .render import ASKED, ESTIMATE, POLICY, Advice, Choice, Evidence, Proposal, duration, evidence, size

PAPER = 2048  # LongNet's first segment (Ding et al. 2023, arXiv 2307.02486)
BLOCK, MOST_BLOCKS = 128, 4096  # positions of a block, and larger ones where there would be more of them


def ladder(seq_len: int, first: int = PAPER) -> Pattern:
    """LongNet's ladder up to the sequence: segments first, 2 first, ... at rates 1, 2, ...; dense where one holds all.

    >>> str(ladder(10000)), str(ladder(2048))
    ('dilated [2048, 4096, 8192, 16384] / [1, 2, 4, 8]', 'dense')
    """
    steps = max(0, (-(-seq_len // first) - 1).bit_length())
    return Dilated([first << i for i in range(steps + 1)], [1 << i for i in range(steps + 1)]) if steps else Dense()


def local(seq_len: int, ranks: int = 1, width: int = PAPER) -> BlockSparse:
    """A sliding window of about ``width`` positions; on one rank a global block too, which needs rows of everyone's.

    >>> str(local(10000)), str(local(10000, ranks=2))
    ('blocks of 128: window 8, 1 global', 'blocks of 128: window 8')
    """
    block = min(max(BLOCK, 1 << (seq_len // MOST_BLOCKS).bit_length()), seq_len, width // 2)
    before = max(1, width // (2 * block))
    return local_global(before, 1, block_size=block) if ranks == 1 else sliding_window(before, block_size=block)


EVEN = 1.1  # work of the busiest rank over the average, up to which shards stay side by side
TILE = 512
SWITCHES = {"gather": "gathered copies", "cache": "the pattern cache", "pool": "the pool", "blocks": "ways for blocks"}
HELD = ("q", "k", "v", "out", "lse")  # of a layer, from its forward to its backward


@dataclass(frozen=True)
class Placed:
    """A pattern as it is run: its settings, the bytes that each rank sends, and ``run``, which estimates the call."""

    pattern: Pattern
    execution: Choice
    run: Callable[[], Estimate]
    across: tuple[Choice, ...] = ()  # scheme and layout
    sent: tuple[int, ...] = (0,)

    @cached_property
    def estimate(self) -> Estimate:
        return self.run()


@dataclass(frozen=True)
class Asked:
    """What advice is asked for, and the choices that follow from it."""

    profile: hardware.Profile
    seq_len: int
    ranks: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    passes: str
    layers: int
    budget: int | None
    rows: tuple[Evidence, ...]
    layout: str | Layout | None
    given_dtype: torch.dtype | None
    estimates: bool

    def __post_init__(self):
        check_bool("causal", self.causal)
        check_bool("estimates", self.estimates)
        if self.layout is not None:
            layout_named(self.layout, self.seq_len, self.ranks)  # raises what is wrong with it

    # -----------------------------------------------------------------------------------------------------------------
    # from rows

    def measured(self, about: str, default: str, **fields) -> tuple[Evidence, ...]:
        """Comparisons with ``default``, turned to it: of each other setting the one nearest to what is asked for."""
        found = [e.turned() if e.setting == default else e for e in self.rows
                 if e.about == about and default in (e.setting, e.against)]  # fmt: skip
        found = [e for e in found if all(getattr(e, name) == value for name, value in fields.items())]
        found.sort(key=lambda e: (not e.counts, e.distance(self.seq_len, self.passes, self.causal)))
        nearest: dict[str, Evidence] = {}
        for e in found:
            nearest.setdefault(e.setting, e)
        return tuple(nearest.values())

    def picked(self, name: str, default, why: str, found: tuple[Evidence, ...], how: str = POLICY) -> Choice:
        """The fastest that was measured faster than the default, else the default."""
        counting = sorted((e for e in found if e.counts), key=lambda e: -e.ratio)
        if quicker := [e for e in counting if e.faster]:
            best = quicker[0]
            return Choice(name, best.setting, best.how, f"faster than {best.against}, {best.label}", found)
        if counting and all(e.slower for e in counting):
            best = counting[0].turned()
            return Choice(name, default, best.how, f"faster than {best.against}, {best.label}; {why}", found)
        return Choice(name, default, how, why, found)

    def dtype(self) -> Choice:
        if self.given_dtype is not None:
            return Choice("dtype", self.given_dtype, ASKED, "a dtype that is given is kept")
        policy, why = self.profile.default_dtype(), self.profile.dtype_reason().partition(": ")[2]
        name = str(policy).removeprefix("torch.")
        choice = self.picked("dtype", name, why, self.measured("dtype", name))
        return replace(choice, value=getattr(torch, choice.value))

    def backend(self, dtype: torch.dtype) -> tuple[Choice, str]:
        """The choice, and the kernel that should run."""
        try:
            found = kernels.expected(self.profile.kind, self.profile.capability, dtype, self.head_dim)
            for_cpu = self.profile.kind == "cpu"  # where all that is for GPUs is refused, and it goes without saying
            refused = [f"{name} {why}" for name, why in found.refusals.items() if not for_cpu and name != "cpu_flash"]
            kernel, why = found.name, "; ".join([f"{found.name} of torch's own kernels", *refused])
        except NotImplementedError as error:
            kernel, why = "auto", str(error)
        sides = ("setting", "against")
        as_auto = [
            replace(e, **{s: "auto" if getattr(e, s) == kernel else getattr(e, s) for s in sides})
            for e in self.rows
            if e.about == "backend" and {e.setting, e.against} != {"auto", kernel}
        ]
        found = replace(self, rows=tuple(as_auto)).measured("backend", "auto", dtype=str(dtype).removeprefix("torch."))
        choice = self.picked("backend", "auto", why, found)
        if choice.value == "auto":
            return choice, kernel
        return replace(choice, value=(choice.value, "auto")), choice.value

    def execution(self, pattern: Pattern) -> Choice:
        plain, found, taken = Execution(), (), {}
        how, why = POLICY, "strided views, the pattern cache, no pool and no tiles"
        kind = "blocks" if isinstance(pattern, BlockSparse) else "dilated"
        for name, words in SWITCHES.items():
            if (name == "gather" and self.ranks > 1) or (name != "blocks") == (kind == "blocks") and name != "cache":
                continue
            default = str(getattr(plain, name))
            choice = self.picked(name, default, "", self.measured(name, default, kind=kind))
            found += choice.evidence
            if choice.value != default:
                taken[name] = {"True": True, "False": False}.get(choice.value, choice.value)
                how, why = choice.how, f"{words}: {choice.why}"
        return Choice("execution", replace(plain, **taken), how, why, found)

    # -----------------------------------------------------------------------------------------------------------------
    # by estimate

    def estimate(self, pattern: Pattern, dtype, kernel: str, execution: Execution, **across) -> Estimate:
        shape = {name: getattr(self, name) for name in ("seq_len", "heads", "head_dim", "batch", "kv_heads", "causal",
                                                        "passes", "ranks", "profile")}  # fmt: skip
        return estimate(pattern, dtype=dtype, backend=kernel, execution=execution, **shape, **across)

    def bounded(self, placed: Placed, dtype: torch.dtype) -> Estimate:
        """The work of a call and its lower bounds alone: nothing is run, and memory is not known."""
        shape = {name: getattr(self, name) for name in ("batch", "seq_len", "heads", "kv_heads", "head_dim", "causal",
                                                        "passes")}  # fmt: skip
        counted = cost.count(placed.pattern, dtype=dtype, **shape)
        sent = {(rank, -1): size for rank, size in enumerate(placed.sent)}
        found = Estimate(counted, self.ranks, None, {}, 0, sent)
        return found.bounded(rates_of(self.profile, dtype, counted.floor_bytes // self.ranks))

    def need(self, found: Estimate, checkpointing: bool = False) -> int:
        """Bytes of the rank that needs most: one layer at its peak, the others with what they keep."""
        kept = found.parts["q"] if checkpointing else sum(found.parts[name] for name in HELD)
        return found.peak_bytes + (kept * (self.layers - 1) if self.passes == "fwd+bwd" else 0)

    def fits(self, found: Estimate, checkpointing: bool = False) -> bool:
        return self.budget is None or self.need(found, checkpointing) <= self.budget

    def place(self, pattern: Pattern, dtype: torch.dtype, kernel: str) -> Placed:
        """The pattern with the execution, scheme and layout that suit it; eager scores, which alone fill memory, in
        tiles where they do not fit."""
        execution = self.execution(pattern)
        if kernel == "eager" and not self.estimates and self.profile.kind == "cuda":
            tiled = replace(execution.value, tile=Ladder())
            execution = replace(execution, value=tiled, why=f"smaller tiles where memory runs out; {execution.why}")
        placed = self._shared_out(pattern, dtype, kernel, execution)
        if kernel == "eager" and self.estimates and not self.fits(placed.estimate):
            tiled = replace(execution.value, tile=TILE)
            why = f"{size(self.need(placed.estimate))} without tiles; {execution.why}"
            tried = self._shared_out(pattern, dtype, kernel, replace(execution, value=tiled, how=ESTIMATE, why=why))
            if tried.estimate.peak_bytes < placed.estimate.peak_bytes:
                return tried
        return placed

    def _shared_out(self, pattern: Pattern, dtype, kernel: str, execution: Choice) -> Placed:
        if self.ranks == 1:
            return Placed(pattern, execution, lambda: self.estimate(pattern, dtype, kernel, execution.value))
        for name in (self.layout,) if self.layout is not None else ("contiguous", "zigzag"):
            problem = Problem(
                pattern, layout_named(name, self.seq_len, self.ranks), self.causal, self.heads, self.kv_heads
            )
            sent, refused = self.sent(problem, dtype)
            uneven = unevenness(problem, min(sent, key=lambda scheme: sum(sent[scheme])))
            if uneven <= EVEN:
                break

        def placed(scheme: str) -> Placed:
            across = {"scheme": scheme, "layout": problem.layout}
            run = lambda: self.estimate(pattern, dtype, kernel, execution.value, **across)  # noqa: E731
            return Placed(pattern, execution, run, sent=sent[scheme])

        choice, found = self._scheme(problem, sent, refused, placed)
        how = ESTIMATE if self.layout is None else ASKED
        busiest = f"the busiest rank computes {unevenness(problem, choice.value):.3g} times the average"
        return replace(found, across=(choice, Choice("layout", name, how, busiest)))

    def sent(self, problem: Problem, dtype: torch.dtype) -> tuple[dict[str, tuple[int, ...]], list[str]]:
        """Bytes of one call by scheme and rank; and why the other schemes cannot serve."""
        sent, refused = {}, []
        for scheme in SCHEMES:
            try:
                problem.check(scheme)
            except ValueError as error:
                refused.append(str(error))
                continue
            how = {"batch": self.batch, "head_dim": self.head_dim, "dtype": dtype, "passes": self.passes}
            sent[scheme] = tuple(sent_bytes(problem, rank, scheme, **how) for rank in range(self.ranks))
        return sent, refused

    def _scheme(self, problem: Problem, sent: dict, refused: list, placed: Callable) -> tuple[Choice, Placed]:
        """The scheme that sends the fewest bytes of those that fit; where equal the ring, which holds the least."""
        total = {scheme: sum(each) for scheme, each in sent.items()}
        order = sorted(total, key=lambda scheme: (total[scheme], scheme != ("ring" if total[scheme] else "plan")))
        found = {scheme: placed(scheme) for scheme in order}
        least = order[0]
        if self.estimates and self.budget is not None:
            least = next((scheme for scheme in order if self.fits(found[scheme].estimate)), least)
        listed = ", ".join(f"{scheme} {size(total[scheme])}" for scheme in order)
        why = [f"all ranks together send in a call: {listed}"]
        if not total[order[0]]:
            why = ["what each rank's queries see is on it, so nothing moves"]
        if least != order[0]:
            why.append(f"{order[0]} needs {size(self.need(found[order[0]].estimate))} on a rank, more than there is")
        rows = self.measured("scheme", least, ranks=self.ranks, pattern=str(problem.pattern))
        rows = tuple(e for e in rows if e.setting in sent)
        choice = self.picked("scheme", least, "; ".join([*why, *refused]), rows, ESTIMATE)
        return choice, found[choice.value]


SHORTEST = 256  # first segment of a ladder
MOST_RANKS = 32  # looked at for a sequence that does not fit
STEP, TRIES = 128, 6  # positions a rank of a length that is tried to fit, and how many are
NEAR = 1.5  # a row of so many times the share of dense's products, or one part in so many, is of like work
KINDS = ("auto", "dense", "ladder", "local")


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
    ``seconds``: what a call may take at its lower bound; the ladder then starts as long as that allows. ``layers``: as
    many hold their tensors from forward to backward. ``memory_bytes``: of a rank (None: the profile's). ``rows``: what
    was measured. A ``dtype`` or ``layout`` given is kept. ``estimates=False`` goes by policy, rows
    and bytes sent alone: memory and lower bounds, which take seconds to find, stay unknown.

    Raises ValueError, in one line, for an unknown profile, numbers that are not positive, and memory that cannot hold
    the inputs of a rank.

    >>> advice = advise("gtx1080", 131072, ranks=2)
    >>> advice["dtype"], advice["scheme"], advice["pattern"].segment_lengths[:3], advice.fits
    (torch.float32, 'plan', (2048, 4096, 8192), True)
    """
    if not isinstance(profile, str | hardware.Profile):
        raise TypeError(f"profile must be a hardware profile or its name, got {short_repr(profile)}")
    if isinstance(profile, str):
        machine = hardware.detect()
        profile = hardware.resolve(profile, machine).on(machine)
    kv_heads = heads if kv_heads is None else kv_heads
    numbers = {"seq_len": seq_len, "ranks": ranks, "batch": batch, "heads": heads, "kv_heads": kv_heads,
               "head_dim": head_dim, "layers": layers}  # fmt: skip
    numbers = {name: check_int(name, value) for name, value in numbers.items()}
    if heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads: {heads} and {kv_heads}")
    if ranks > seq_len:
        raise ValueError(f"{ranks} ranks are more than {seq_len} tokens")
    check_choice("passes", passes, PASSES)
    if dtype is not None:
        check_float_dtype(dtype)
    for name, value in (("memory_bytes", memory_bytes), ("seconds", seconds)):
        if value is not None and not (is_real(value) and 0 < value < math.inf):
            raise ValueError(f"{name} must be a positive number, got {short_repr(value)}")
    if not isinstance(pattern, Pattern) and not (isinstance(pattern, str) and pattern in KINDS):
        raise ValueError(f"pattern must be a ringlab pattern or one of {', '.join(KINDS)}, got {short_repr(pattern)}")
    budget = profile.memory_bytes if memory_bytes is None else int(memory_bytes)
    asked = Asked(profile, causal=causal, passes=passes, budget=budget, rows=evidence(rows), layout=layout,
                  given_dtype=dtype, estimates=estimates, **numbers)  # fmt: skip
    return _Advising(asked, seconds).advice(pattern)


class _Advising:
    """The choices that hang together: the dtype and the kernel first, then the pattern as it is placed."""

    def __init__(self, asked: Asked, seconds: float | None):
        self.asked, self.seconds = asked, seconds
        self.dtype = asked.dtype()
        self._check_inputs()
        self.backend, self.kernel = asked.backend(self.dtype.value)
        self.placed: dict[Pattern, Placed] = {}

    def _check_inputs(self) -> None:
        a, each = self.asked, self.dtype.value.itemsize
        rows = -(-a.seq_len // a.ranks)
        least = a.batch * rows * (a.heads + 2 * a.kv_heads) * a.head_dim * each
        if a.budget is not None and least > a.budget:
            raise ValueError(f"{size(a.budget)} cannot hold the inputs: q, k and v of a rank are {size(least)}")

    def place(self, pattern: Pattern) -> Placed:
        if pattern not in self.placed:
            self.placed[pattern] = self.asked.place(pattern, self.dtype.value, self.kernel)
        return self.placed[pattern]

    def advice(self, wanted: str | Pattern) -> Advice:
        a = self.asked
        choice = self._pattern(wanted)
        placed = self.place(choice.value)
        checkpointing = self._checkpointing(placed)
        need = a.need(placed.estimate, checkpointing.value) if a.estimates else None
        short = need is not None and a.budget is not None and need > a.budget
        choices = (choice, self.dtype, self.backend, *placed.across, placed.execution, checkpointing)
        shape = {name: getattr(a, name) for name in ("profile", "seq_len", "ranks", "batch", "heads", "kv_heads",
                                                     "head_dim", "causal", "passes", "layers")}  # fmt: skip
        compared = self._proposals(choice, wanted, checkpointing.value) if a.estimates else ()
        return Advice(
            **shape, choices=choices, proposals=compared,
            need_bytes=need, budget_bytes=a.budget,
            longest=self._longest(placed, checkpointing.value) if short else None,
            enough_ranks=self._enough_ranks(choice.value, checkpointing.value) if short else None,
        )  # fmt: skip

    # -----------------------------------------------------------------------------------------------------------------

    def _pattern(self, wanted: str | Pattern) -> Choice:
        n = self.asked.seq_len
        if isinstance(wanted, Pattern):
            return Choice("pattern", wanted, ASKED, "a pattern that is given is kept")
        if wanted in ("dense", "local"):
            return Choice("pattern", Dense() if wanted == "dense" else local(n, self.asked.ranks), ASKED, "as proposed")
        if self.seconds is not None:
            return self._in_time()
        found = ladder(n)
        share = self._share(found)
        why = f"LongNet's first segment of {PAPER:,}; {100 * share:.3g} % of the products of dense attention"
        if wanted == "ladder":
            return Choice("pattern", found, ASKED, why)
        if isinstance(found, Dense):
            return Choice("pattern", found, ESTIMATE, f"a segment of {PAPER:,}, LongNet's first, holds all")
        if share >= 1:
            return Choice("pattern", Dense(), ESTIMATE, f"it needs no more than {found}: {why}")
        return self._against_dense(found, share, why)

    def _share(self, pattern: Pattern) -> float:
        """Of the products of dense attention, those that a pattern computes, branch by branch."""
        return self._bounded(pattern).cost.pairs / self._bounded(Dense()).cost.pairs

    def _against_dense(self, found: Dilated, share: float, why: str) -> Choice:
        """The ladder, unless rows of such work (pass, causal or not, dtype, density) show that it does not pay."""
        a = self.asked
        rows = [e if e.against == "dense" else e.turned() for e in a.rows if e.about == "pattern" and "dense" in (
                e.setting, e.against)]  # fmt: skip
        work = a.passes, a.causal, 1, str(self.dtype.value).removeprefix("torch.")
        rows = [e for e in rows if (e.passes, e.causal, e.ranks, e.dtype) == work and e.setting.startswith("dilated")]
        rows = tuple(sorted((e for e in rows if 1 / NEAR <= e.share / share <= NEAR), key=lambda e: e.seq_len))
        counting = [e for e in rows if e.counts]
        if not counting:
            return Choice("pattern", found, POLICY, why, rows)
        e = min(counting, key=lambda e: abs(e.seq_len - a.seq_len))
        at = f"{e.setting}, {100 * e.share:.3g} %, at {e.seq_len:,} tokens"
        if not e.faster:
            return Choice("pattern", Dense(), e.how, f"{at} is no faster than dense; {why}", rows)
        return Choice("pattern", found, e.how, f"{at}; {why}", rows)

    def _in_time(self) -> Choice:
        """The ladder whose first segment is the longest that the time allows; dense if one holds all."""
        n, allowed = self.asked.seq_len, duration(self.seconds)
        first = 1 << (n - 1).bit_length()
        while True:
            pattern = ladder(n, first)
            bound = self._bounded(pattern).bound_s
            if not bound:
                raise ValueError(f"profile {self.asked.profile.name!r} has no rates, so no bound to hold to {allowed}")
            if bound <= self.seconds:
                why = f"the longest first segment within {allowed}: {duration(bound)} at the lower bound"
                return Choice("pattern", pattern, ESTIMATE, why)
            if first <= SHORTEST:
                why = f"no ladder keeps to {allowed}: this one takes {duration(bound)} at the lower bound"
                return Choice("pattern", pattern, ESTIMATE, why)
            first //= 2

    def _bounded(self, pattern: Pattern):
        return self.asked.bounded(self.place(pattern), self.dtype.value)

    def _proposals(self, choice: Choice, wanted: str | Pattern, checkpointing: bool) -> tuple[Proposal, ...]:
        """What is advised, dense attention, and the two sparse kinds where no pattern was given.

        Only the first two with their memory: it takes seconds to find.
        """
        a, n = self.asked, self.asked.seq_len
        kinds = {"advised": choice.value, "dense": Dense()}
        if not isinstance(wanted, Pattern):
            kinds |= {"ladder": ladder(n), "local": local(n, a.ranks)}
        full = self._bounded(Dense()).cost.distinct_pairs
        found: dict[Pattern, Proposal] = {}
        for name, pattern in kinds.items():
            placed, bounded = self.place(pattern), self._bounded(pattern)
            peak = a.need(placed.estimate, checkpointing) if name in ("advised", "dense") else None
            found.setdefault(pattern, Proposal(name, pattern, bounded.cost.distinct_pairs / full, bounded.bound_s,
                                               bounded.binds, peak, sum(placed.sent)))  # fmt: skip
        return tuple(found.values())

    # -----------------------------------------------------------------------------------------------------------------

    def _checkpointing(self, placed: Placed) -> Choice:
        a = self.asked
        if a.passes == "fwd":
            return Choice("checkpointing", False, POLICY, "nothing is kept for a backward")
        if a.layers == 1:
            return Choice("checkpointing", False, ESTIMATE, "of one layer it saves nothing: its backward holds it all")
        if not a.estimates:
            return Choice("checkpointing", False, POLICY, "memory was not estimated")
        found = placed.estimate
        without, with_ = a.need(found), a.need(found, checkpointing=True)
        said = f"{a.layers} layers need {size(without)} without, {size(with_)} with"
        return Choice("checkpointing", not a.fits(found) and with_ < without, ESTIMATE, said)

    def _longest(self, placed: Placed, checkpointing: bool) -> int | None:
        """A length of this pattern, shared out this way, that fits: what is needed is nearly linear in it."""
        a, across = self.asked, {c.name: c.value for c in placed.across}
        if isinstance(a.layout, Layout):
            return None  # it is of one length
        unit, n, need = STEP * a.ranks, a.seq_len, a.need(placed.estimate, checkpointing)
        for _ in range(TRIES):
            n = int(n * a.budget / need) // unit * unit
            if n < unit:
                return None
            shorter = replace(a, seq_len=n)
            found = shorter.estimate(placed.pattern, self.dtype.value, self.kernel, placed.execution.value, **across)
            need = a.need(found, checkpointing)
            if need <= a.budget:
                return n
        return None

    def _enough_ranks(self, pattern: Pattern, checkpointing: bool) -> int | None:
        """Ranks, doubled from those asked for, that hold the sequence; none is tried that can hold it by no means."""
        ranks, need = 2 * self.asked.ranks, self.asked.need(self.place(pattern).estimate, checkpointing)
        while ranks <= min(MOST_RANKS, self.asked.seq_len):
            if need * self.asked.ranks / ranks <= 1.1 * self.asked.budget:
                more = replace(self.asked, ranks=ranks, layout=None)
                if more.fits(more.place(pattern, self.dtype.value, self.kernel).estimate, checkpointing):
                    return ranks
            ranks *= 2
        return None


class Auto:
    """Backend, scheme and execution by advice, where a module was told none; ``advice`` is the last that was taken.

    ``config``: "auto", which asks for each shape once, or an ``Advice``, as one that rests on measured rows: it is then
    taken for every shape. The pattern, the layout and the dtype of tensors stay as they are. A compiler's graph ends
    where it is asked, over a group too.
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
        self.asks, self.advice, self.found = not given, config if given else None, {}

    def __repr__(self) -> str:
        taken = ("backend", "scheme", "execution")
        said = [f"{c.name}: {c.shown}" for c in self.advice.choices if c.name in taken] if self.advice else []
        return f"config=auto ({'; '.join(said) or 'nothing chosen yet'})"

    def fill(self, options: dict, pattern: Pattern, q: Tensor, k: Tensor) -> dict:
        """``options`` of ``attention`` with what was left open; q and k (b, n, h, d) are whole, or shards."""
        group, layout = options.get("group"), options.get("layout", "contiguous")
        ranks = 1 if group is None else group_size(group)
        whole = group is None or isinstance(group, Simulated)
        n = layout.n if isinstance(layout, Layout) else q.shape[1] * (1 if whole else ranks)
        left = tuple(name for name in ("backend", "scheme") if options.get(name) == "auto")
        shape = n, ranks, q.shape[0], q.shape[2], k.shape[2], q.shape[3]
        call = _outside_graphs() if torch.compiler.is_compiling() else _filled
        return options | call(
            self, left, options["execution"], pattern, layout, shape, options["causal"], q.dtype, q.device,
            torch.is_grad_enabled(),
        )  # fmt: skip

    def take(self, pattern, layout, shape, causal: bool, dtype, device, backward: bool) -> Advice:
        """The advice given, or that for a shape."""
        key = pattern, layout, shape, causal, dtype, device, backward
        if self.asks and key not in self.found:
            n, ranks, batch, heads, kv_heads, head_dim = shape
            self.found[key] = advise(
                profile_of(device), n, ranks=ranks, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                causal=causal, passes="fwd+bwd" if backward else "fwd", pattern=pattern, dtype=dtype, layout=layout,
                estimates=False,
            )  # fmt: skip
        self.advice = self.found[key] if self.asks else self.advice
        return self.advice


def _filled(auto: Auto, left: tuple[str, ...], mine: Execution, *asked) -> dict:
    """What advice puts in the place of the names ``left`` open and of the switches that are as they stand."""
    advice, plain = auto.take(*asked), Execution()
    same = [f.name for f in fields(mine) if getattr(mine, f.name) == getattr(plain, f.name)]
    execution = replace(mine, **{name: getattr(advice["execution"], name) for name in same})
    return {"execution": execution} | {name: advice[name] for name in left if name in advice.names}


_opaque = None


def _outside_graphs():
    """``_filled`` as torch.compile calls it but may not trace it; made late, as it loads the compiler."""
    global _opaque
    if _opaque is None:
        _opaque = torch.compiler.disable(_filled)
    return _opaque


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
