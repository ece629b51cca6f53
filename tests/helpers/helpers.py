"""Shared by the tests: results with gradients to compare, and memory that shows whoever reads it too early."""

import torch
from ringlab import reference
from ringlab.memory import MemoryPool

NAMES = ("out", "lse", "dq", "dk", "dv")


class Stained(MemoryPool):
    """Results of any size in memory that holds NaN, as memory that was used before may."""

    def __init__(self):
        super().__init__(threshold_bytes=0)

    def __repr__(self) -> str:
        return "STAINED"

    def lend(self, *args, **kwargs):
        return super().lend(*args, **kwargs).fill_(torch.nan)


STAINED = Stained()


def results(out, lse, q, k, v, dout, dlse=None):
    """out, lse, dq, dk, dv by name; a cotangent on lse counts only where some key is seen."""
    loss = (out.double() * dout.double()).sum()
    if dlse is not None:
        seen = lse != -torch.inf
        loss = loss + (lse.double()[seen] * dlse[seen]).sum()
    return dict(zip(NAMES, (out, lse, *torch.autograd.grad(loss, (q, k, v)))))


def errors(got: dict, want: dict, q, k, dout, scale=None) -> dict[str, float]:
    """The error of each result that is there, as the design defines it."""
    floor = reference.gradient_floor(q, k, dout, scale)
    return {n: reference.error(got[n], want[n], 1.0 if n in ("out", "lse") else floor) for n in want}
