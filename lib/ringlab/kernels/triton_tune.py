"""Time the candidates for the list kernels' tile sizes on the GPU at hand, and keep the fastest right one.

Nothing is tuned unless asked for: a call of attention never times anything, it takes what was kept, or the defaults.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..patterns import Pattern
from . import PROBE_ERROR, probe, triton_config
from .experimental.sandbox import differs, trial
from .triton import Launch, TritonLists, compute_of, dense_rows, row_sums, too_long
from .triton_config import BY_HAND, TILE_PASSES, Sizes, Use

Timer = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class Timed:
    """What came of a use: seconds of a call for each candidate that was right, the reason for each that was not timed.

    ``default`` is what runs untuned.
    """

    use: Use
    default: Sizes
    seconds: dict[Sizes, float]
    refused: dict[Sizes, str]

    @property
    def best(self) -> Sizes:
        """The fastest; the default where it is as fast, or nothing was timed."""
        return min(self.seconds, key=lambda x: (self.seconds[x], x != self.default), default=self.default)


def tune(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    causal: bool = False,
    passes: tuple[str, ...] = TILE_PASSES,
    timer: Timer | None = None,
    keep: bool = True,
) -> list[Timed]:
    """Time every candidate of each pass on tensors as the caller has them, q (b, n, h, d), k and v (b, n, h_kv, d).

    A candidate's results must be those of the defaults, to rounding, which a tiny call has proved against float64
    before; one that differs, does not compile or cannot serve these tensors is refused with the reason. The fastest is
    kept for its use (``Use``) in the file of this GPU. ``timer(call)`` gives the seconds of a call, by default the
    median of Triton's ``do_bench``. A pattern of several launches tunes the first, then those that go on from it.

    Raises NotImplementedError, with the reason, where the kernels cannot run, ValueError for an unknown pass and
    OSError where the choices cannot be kept.
    """
    if unknown := set(passes) - set(TILE_PASSES):
        raise ValueError(f"unknown pass {sorted(unknown)[0]!r}; known: {', '.join(TILE_PASSES)}")
    if why := probe("triton", q.device, q.dtype, q.shape[3], causal, True):
        raise NotImplementedError(f"backend 'triton' cannot run on {q.device.type} in {q.dtype}: {why}")
    tried = _Calls(q, k, v, pattern, causal)
    timer = timer or _median
    found = [one for name in passes for one in _tuned(tried, name, timer)]
    if keep:
        triton_config.keep({one.use: one.best for one in found}, q.device)
    return found


def _tuned(calls: _Calls, name: str, timer: Timer) -> Iterator[Timed]:
    taken: dict[Use, Sizes] = {}
    for joins in (False, True):
        if len(calls.launches(name, taken)) <= joins:
            break
        found = _timed(calls, calls.use(name, joins), taken, timer)
        taken[found.use] = found.best
        yield found


def _timed(calls: _Calls, use: Use, taken: dict[Use, Sizes], timer: Timer) -> Timed:
    broken = importlib.import_module("triton.errors").TritonError
    default, *_ = tried = calls.candidates(use)
    want = calls.call(use.name, taken | {use: default})()
    found = Timed(use, default, {}, {})
    for size in tried:
        now = taken | {use: size}
        launch = calls.launches(use.name, now)[use.joins]
        # A tile that is cut to the pieces of this pattern would be timed as another than it is.
        why = launch.why or (None if size == default else too_long(size, launch.lists))
        if why is None and size.reads in BY_HAND:
            why = trial(use, size, calls.tensors[0].device)
        try:
            call = calls.call(use.name, now)
            why = why or differs(call(), want, PROBE_ERROR.get(use.dtype, 0.05))
            if why is None:
                found.seconds[size] = timer(call)
        except (RuntimeError, broken) as failure:
            why = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
        if why is not None:
            found.refused[size] = why
    return found


def _median(call: Callable[[], object]) -> float:
    return importlib.import_module("triton.testing").do_bench(call, return_mode="median") * 1e-3


class _Calls:
    """The passes of one attention call with given sizes."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, causal: bool) -> None:
        self.tensors = tuple(map(dense_rows, (q, k, v)))
        self.shared = (pattern, causal, q.shape[3] ** -0.5)
        out, self.lse = self.call("forward", {})()
        self.dout = torch.randn(q.shape, device=q.device).to(q.dtype)
        self.less = row_sums(self.dout, out, None)

    def use(self, name: str, joins: bool) -> Use:
        q, k, _ = self.tensors
        return Use.of(name, q.shape[3], q.dtype, self.shared[1], joins, q.shape[2] // k.shape[2])

    def candidates(self, use: Use) -> tuple[Sizes, ...]:
        return use.candidates(compute_of(self.tensors[0]))

    def kernel(self, taken: dict[Use, Sizes]) -> TritonLists:
        """The kernels with these sizes, and the defaults for every other use."""

        def pick(name, q, k, causal, joins) -> Sizes:
            use = self.use(name, joins)
            return taken.get(use) or self.candidates(use)[0]

        return TritonLists(pick)

    def launches(self, name: str, taken: dict[Use, Sizes]) -> list[Launch]:
        dout = None if name == "forward" else self.dout
        return self.kernel(taken).launches(name, *self.tensors, *self.shared[:2], dout=dout)

    def call(self, name: str, taken: dict[Use, Sizes]) -> Callable[[], tuple[Tensor, ...]]:
        """One pass, ready to run; its plans are kept for as long as the call itself."""
        plans: dict = {}

        def cached(key, build):
            return plans[key] if key in plans else plans.setdefault(key, build())

        kernel = self.kernel(taken)
        if name == "forward":
            return lambda: kernel.attend(*self.tensors, *self.shared, cached)
        return lambda: kernel.gradient(name, self.dout, self.less, *self.tensors, self.lse, *self.shared, cached)
