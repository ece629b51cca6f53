"""How each setting is chosen: by measured comparisons that bear on it, else by the hardware's policy or by estimate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from .. import cost, hardware, kernels
from ..checks import flag
from ..estimate import Estimate, estimate, rates_of
from ..local import Execution
from ..patterns import BlockSparse, Pattern
from ..ring import SCHEMES, Layout, Problem
from ..ring.layout import named
from ..ring.volume import sent_bytes
from ..tiles import Ladder
from .balance import unevenness
from .records import ASKED, ESTIMATE, POLICY, Choice, Evidence, size

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
        flag("causal", self.causal)
        flag("estimates", self.estimates)
        if self.layout is not None:
            named(self.layout, self.seq_len, self.ranks)  # raises what is wrong with it

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
        as_auto = [replace(e, **{s: "auto" if getattr(e, s) == kernel else getattr(e, s) for s in sides})
                   for e in self.rows if e.about == "backend" and {e.setting, e.against} != {"auto", kernel}]
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
            problem = Problem(pattern, named(name, self.seq_len, self.ranks), self.causal, self.heads, self.kv_heads)
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
