"""Tuning: times the candidates for the Triton kernels' tile sizes on this GPU, and
stores the fastest correct one.

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
from .triton import Launch, TritonKernel, dense_rows, kind_of_launch, row_sums
from .triton_config import TILE_PASSES, LaunchKind, Sizes, shortened

Timer = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class Timed:
    """The result for one kind of launch: seconds per call of each correct candidate,
    and the reason why others were not timed.

    ``default`` runs if nothing is tuned.

    >>> first, second = Sizes(128, 64, 8, 2), Sizes(64, 64, 4, 2)
    >>> kind = LaunchKind("forward", 64, torch.float16, (8, 6))
    >>> print(Timed(kind, first, {first: 0.002, second: 0.0015}, {}))
    forward, head_dim 64, float16, groups of 1: 64 x 64, 4 warps, 2 stages, pointers
        1.500 ms  64 x 64, 4 warps, 2 stages, pointers
        2.000 ms  128 x 64, 8 warps, 2 stages, pointers
    """

    kind: LaunchKind
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
        return "\n".join([f"{self.kind}: {self.best}", *lines])


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
    tensors is refused with the reason. The fastest is stored for its ``LaunchKind`` in
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
    calls, best = Calls(q, k, v, pattern, causal), {}
    results = []
    for name in passes:
        for joins in (False, True):  # the first launch, and those that add to it
            if len(calls.launches(name, best)) > joins:
                kind = kind_of_launch(name, *calls.tensors[:2], causal, joins)
                results.append(_timed(calls, kind, best, timer))
                best[kind] = results[-1].best
    triton_config.keep(best, q.device)
    return results


def _timed(
    calls: Calls, kind: LaunchKind, best: dict[LaunchKind, Sizes], timer: Timer
) -> Timed:
    """Time the candidates of a kind of launch; earlier launches have their ``best``."""
    from triton.errors import TritonError

    default, *_ = sizes = triton_config.candidates(kind)
    expected = calls.call(kind.name, best | {kind: default})()
    result = Timed(kind, default, {}, {})
    for size in sizes:
        launch = calls.launches(kind.name, best | {kind: size})[kind.joins]
        # Tiles that this pattern makes smaller would be timed under the name of larger
        # ones.
        why = None if size == default else shortened(size, launch.schedule)
        try:
            call = calls.call(kind.name, best | {kind: size})
            why = why or differs(call(), expected, PROBE_ERROR.get(kind.dtype, 0.05))
            if why is None:
                result.seconds[size] = timer(call)
        except (RuntimeError, TritonError) as failure:
            why = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
        if why is not None:
            result.refused[size] = why
    return result


def differs(
    results: tuple[Tensor, ...], expected: tuple[Tensor, ...], most: float
) -> str | None:
    """Why results are not those of the defaults, or None. Rows that see nothing have
    lse -inf in both.
    """
    for x, y in zip(results, expected):
        difference = torch.where(x == y, 0, x - y).float().norm()
        error = difference / y.float().nan_to_num(0, 0, 0).norm()
        if not error <= most:
            return f"wrong result: off by {error:.1e}"
    return None


class Calls:
    """The passes of one attention call, to be run with given sizes."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, causal: bool
    ) -> None:
        self.tensors = tuple(map(dense_rows, (q, k, v)))
        self.options = pattern, causal, q.shape[3] ** -0.5
        out, lse = self.call("forward", {})()
        self.dout = torch.randn(q.shape, device=q.device).to(q.dtype)
        self.rows = row_sums(self.dout, out, lse, None, PatternCache().get)

    def kernel(self, sizes: dict[LaunchKind, Sizes]) -> TritonKernel:
        """The kernel with these sizes, and the defaults for every other launch."""
        return TritonKernel(
            lambda kind, _: sizes.get(kind) or triton_config.sizes(kind)
        )

    def launches(self, name: str, sizes: dict[LaunchKind, Sizes]) -> list[Launch]:
        read = self.tensors if name == "forward" else (self.dout, *self.tensors)
        return self.kernel(sizes).launches(name, read, *self.options[:2])

    def call(
        self, name: str, sizes: dict[LaunchKind, Sizes]
    ) -> Callable[[], tuple[Tensor, ...]]:
        """One pass, ready to run. It keeps its own plans."""
        kernel, cached = self.kernel(sizes), PatternCache(1 << 30).get
        call = *self.tensors, *self.options, cached
        if name == "forward":
            return lambda: kernel.attend(*call)
        return lambda: kernel.gradient(name, self.dout, self.rows, *call)
