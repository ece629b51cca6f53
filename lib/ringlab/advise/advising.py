"""What to run for a length on given hardware: by measured rows where they bear on it, else by policy and estimate.

Rows come as ``Evidence``; ``ringlab.report.evidence`` makes it from stored ones. Only the pattern is a matter of taste:
it is proposed, and nothing here changes one that is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch

from .. import hardware
from ..checks import float_dtype, known, positive, real, shown
from ..cost import PASSES
from ..patterns import Dense, Dilated, Pattern
from ..ring import Layout
from .advice import Advice
from .choosing import Asked, Placed
from .proposing import PAPER, ladder, local
from .records import ASKED, ESTIMATE, POLICY, Choice, Evidence, Proposal, duration, evidence, size

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
        raise TypeError(f"profile must be a hardware profile or its name, got {shown(profile)}")
    if isinstance(profile, str):
        machine = hardware.detect()
        profile = hardware.resolve(profile, machine).on(machine)
    kv_heads = heads if kv_heads is None else kv_heads
    numbers = {"seq_len": seq_len, "ranks": ranks, "batch": batch, "heads": heads, "kv_heads": kv_heads,
               "head_dim": head_dim, "layers": layers}  # fmt: skip
    for name, value in numbers.items():
        positive(name, value)
    if heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads: {heads} and {kv_heads}")
    if ranks > seq_len:
        raise ValueError(f"{ranks} ranks are more than {seq_len} tokens")
    known("passes", passes, PASSES)
    if dtype is not None:
        float_dtype(dtype)
    for name, value in (("memory_bytes", memory_bytes), ("seconds", seconds)):
        if value is not None and not (real(value) and 0 < value < math.inf):
            raise ValueError(f"{name} must be a positive number, got {shown(value)}")
    if not isinstance(pattern, Pattern) and not (isinstance(pattern, str) and pattern in KINDS):
        raise ValueError(f"pattern must be a ringlab pattern or one of {', '.join(KINDS)}, got {shown(pattern)}")
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
