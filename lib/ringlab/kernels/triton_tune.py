"""Time the candidates for the Triton kernels' tile sizes on this GPU and store the
fastest correct one.

Tuning runs only when asked for. A call of attention times nothing: it uses the stored
sizes, or the defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache import PatternCache
from ..patterns import Pattern
from . import PROBE_ERROR, probe, triton_config
from .triton import Launch, TritonKernel, compute_of, dense_rows, row_sums
from .triton_config import TILE_PASSES, Sizes, Use, shortened

Timer = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class Timed:
    """The result for one use: seconds per call of each correct candidate, and the
    reason why others were not timed.

    ``default`` runs if nothing is tuned.

    >>> first, second = Sizes(128, 64, 8, 2), Sizes(64, 64, 4, 2)
    >>> use = Use.of("forward", 64, torch.float16, False, False, 1)
    >>> print(Timed(use, first, {first: 0.002, second: 0.0015}, {}))
    forward, head_dim 64, float16, groups of 1: 64 x 64, 4 warps, 2 stages, pointers
        1.500 ms  64 x 64, 4 warps, 2 stages, pointers
        2.000 ms  128 x 64, 8 warps, 2 stages, pointers
    """

    use: Use
    default: Sizes
    seconds: dict[Sizes, float]
    refused: dict[Sizes, str]

    @property
    def best(self) -> Sizes:
        """The fastest. The default if it is as fast, or was not timed: it may only not
        suit these tensors.
        """
        if self.default not in self.seconds:
            return self.default
        return min(self.seconds, key=lambda x: (self.seconds[x], x != self.default))

    def __str__(self) -> str:
        timed = sorted(self.seconds.items(), key=lambda x: x[1])
        lines = [f"{seconds * 1e3:9.3f} ms  {size}" for size, seconds in timed]
        lines += [
            f"{'refused':>12}  {size}: {why}" for size, why in self.refused.items()
        ]
        return "\n".join([f"{self.use}: {self.best}", *lines])


def median(call: Callable[[], object]) -> float:
    """The median seconds of a call on a GPU."""
    from triton.testing import do_bench

    return do_bench(call, return_mode="median") * 1e-3


def tune(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    causal: bool = False,
    passes: tuple[str, ...] = TILE_PASSES,
    timer: Timer = median,
) -> list[Timed]:
    """Time every candidate of each pass on the given tensors, q (b, n, h, d), k and v
    (b, n, h_kv, d).

    A candidate must give the results of the defaults, up to rounding; the probe
    compares those with float64. One that differs, does not compile or cannot read these
    tensors is refused with the reason. The fastest is stored for its use (``Use``) in
    the file of this GPU. If a pattern needs several launches, the first is tuned, then
    the later ones. ``timer(call)`` returns the seconds of a call.

    Raises NotImplementedError, with the reason, where the kernels cannot run,
    ValueError for an unknown pass and OSError if the file cannot be written.
    """
    if unknown := set(passes) - set(TILE_PASSES):
        raise ValueError(
            f"unknown pass {sorted(unknown)[0]!r}; known: {', '.join(TILE_PASSES)}"
        )
    if why := probe("triton", q.device, q.dtype, q.shape[3], causal, True):
        raise NotImplementedError(
            f"backend 'triton' cannot run on {q.device.type} in {q.dtype}: {why}"
        )
    calls, found = Calls(q, k, v, pattern, causal), []
    for name in passes:
        taken: dict[Use, Sizes] = {}
        for joins in (False, True):  # the first launch, and those that add to it
            if len(calls.launches(name, taken)) > joins:
                found.append(_timed(calls, calls.use(name, joins), taken, timer))
                taken[found[-1].use] = found[-1].best
    triton_config.keep({one.use: one.best for one in found}, q.device)
    return found


def _timed(calls: Calls, use: Use, taken: dict[Use, Sizes], timer: Timer) -> Timed:
    from triton.errors import TritonError

    default, *_ = tried = calls.candidates(use)
    want = calls.call(use.name, taken | {use: default})()
    found = Timed(use, default, {}, {})
    for size in tried:
        now = taken | {use: size}
        launch = calls.launches(use.name, now)[use.joins]
        # Tiles that this pattern makes smaller would be timed under the name of larger
        # ones.
        why = launch.why or (
            None if size == default else shortened(size, launch.schedule)
        )
        try:
            call = calls.call(use.name, now)
            why = why or differs(call(), want, PROBE_ERROR.get(use.dtype, 0.05))
            if why is None:
                found.seconds[size] = timer(call)
        except (RuntimeError, TritonError) as failure:
            why = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
        if why is not None:
            found.refused[size] = why
    return found


def differs(
    found: tuple[Tensor, ...], want: tuple[Tensor, ...], most: float
) -> str | None:
    """Why results are not those of the defaults, or None. Rows that see nothing have
    lse -inf in both.
    """
    for x, y in zip(found, want):
        off = (
            torch.where(x == y, 0, x - y).float().norm()
            / y.float().nan_to_num(0, 0, 0).norm()
        )
        if not off <= most:
            return f"wrong result: off by {off:.1e}"
    return None


class Calls:
    """The passes of one attention call, to be run with given sizes."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, causal: bool
    ) -> None:
        self.tensors = tuple(map(dense_rows, (q, k, v)))
        self.shared = (pattern, causal, q.shape[3] ** -0.5)
        out, lse = self.call("forward", {})()
        self.dout = torch.randn(q.shape, device=q.device).to(q.dtype)
        self.rows = row_sums(self.dout, out, lse, None, PatternCache().get)

    def use(self, name: str, joins: bool) -> Use:
        q, k, _ = self.tensors
        return Use.of(
            name, q.shape[3], q.dtype, self.shared[1], joins, q.shape[2] // k.shape[2]
        )

    def candidates(self, use: Use) -> tuple[Sizes, ...]:
        compute = compute_of(self.tensors[0])
        return triton_config.candidates(
            use.name, use.head_dim, use.dtype, compute, use.joins
        )

    def kernel(self, taken: dict[Use, Sizes]) -> TritonKernel:
        """The kernel with these sizes, and the defaults for every other use."""

        def pick(name, q, k, causal, joins) -> Sizes:
            return taken.get(use := self.use(name, joins)) or self.candidates(use)[0]

        return TritonKernel(pick)

    def launches(self, name: str, taken: dict[Use, Sizes]) -> list[Launch]:
        read = self.tensors if name == "forward" else (self.dout, *self.tensors)
        return self.kernel(taken).launches(name, read, *self.shared[:2])

    def call(
        self, name: str, taken: dict[Use, Sizes]
    ) -> Callable[[], tuple[Tensor, ...]]:
        """One pass, ready to run. It keeps its own plans."""
        kernel, cached = self.kernel(taken), PatternCache(1 << 30).get
        if name == "forward":
            return lambda: kernel.attend(*self.tensors, *self.shared, cached)
        return lambda: kernel.gradient(
            name, self.dout, self.rows, *self.tensors, *self.shared, cached
        )
