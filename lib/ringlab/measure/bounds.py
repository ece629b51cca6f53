"""Lower bounds on times: measured rates on a CPU, a profile's figures on a GPU; None where no figure is known."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import hardware
from ..cost import Cost

MARGIN = 1.1  # rates measured by a probe are raised by this before they bound anything: a probe can be disturbed
PROBES = 3  # of the rates, before a row that is faster than its bound is called suspect


class Bounds:
    """``seconds(cost, dtype)`` that no call can beat on this device.

    ``probe(names)`` measures the rates of dtypes on the CPU: name -> (FLOP/s, bytes/s from memory, from cache). One
    that other processes disturb says too little, and its bound would accuse honest rows: the best of all counts.
    """

    def __init__(self, device: str, profile: str | None, threads: int, probe: Callable[[list[str]], dict]):
        self.machine, self.on_gpu, self.threads, self._probe = hardware.detect(), device == "cuda", threads, probe
        found = hardware.get_profile(profile) if profile and self.on_gpu else None
        self.profile = found.on(self.machine) if found else None
        self.peaks: dict[str, hardware.Peaks] = {}

    def need(self, dtypes, again: bool = False) -> None:
        """Measure the rates of these dtypes, and of fp32, in which half precision may be computed: once each."""
        wanted = {*dtypes, "float32"} if dtypes and not self.on_gpu else set()
        wanted = sorted(wanted if again else wanted - self.peaks.keys())
        for name, rates in (self._probe(wanted) if wanted else {}).items():
            found = hardware.Peaks(*rates, self.machine.cache_bytes, self.threads)
            self.peaks[name] = found.best(self.peaks[name]) if name in self.peaks else found

    def seconds(self, cost: Cost, dtype: str) -> float | None:
        floor = cost.floor_bytes
        if not self.on_gpu:
            peaks = [self.peaks[name] for name in {"float32", dtype} & self.peaks.keys()]
            if not peaks:  # the probe failed
                return None
            flops, bandwidth = max(p.flops_per_s for p in peaks), max(p.bandwidth(floor) for p in peaks)
            return cost.seconds(MARGIN * flops, MARGIN * bandwidth)
        if self.profile is None:
            return None
        rate = self.profile.peak(getattr(torch, dtype), self.machine)
        if dtype == "float32" and rate and self.profile.flops.get("tf32"):
            rate = max(rate, self.profile.flops["tf32"] / 3)  # fp32 out of three tf32 products, as CUTLASS does
        return cost.seconds(rate, self.profile.bandwidth(floor)) or None

    def below(self, cost: Cost, dtype: str, seconds: float) -> tuple[float | None, bool]:
        """(bound, whether ``seconds`` lies below it even after the rates were probed again)."""
        bound = self.seconds(cost, dtype)
        for _ in range(0 if self.on_gpu else PROBES):
            if bound and seconds < bound:
                self.need({dtype}, again=True)
                bound = self.seconds(cost, dtype)
        return bound, bool(bound) and seconds < bound
