"""A first run of a kernel in Gluon in a process of its own: one that hangs costs a minute there, and nothing else.

What such a kernel waits for is written by hand, so a mistake shows as a GPU that never answers. Tuning asks here before
it runs one; ``python -m ringlab.kernels.triton_trial`` is what it starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict

import torch
from torch import Tensor

from ...patterns import Dilated
from .. import PROBE_ERROR
from ..triton import TritonLists, compute_of, row_sums
from ..triton_config import Sizes, Use

SECONDS = 120  # for a process that imports torch, compiles two kernels and runs them in milliseconds
REPEATS = 20  # with the same bits each time: what a race would change
FOLDED = Dilated([1024, 2048], [1, 2])
LENGTH = 5000  # a last segment that ends early, tiles that are not full, more programs than a GPU runs at once
HEADS = 8  # so many tiles that programs which stay serve three: every barrier's phase comes back


def trial(use: Use, size: Sizes, device: torch.device) -> str | None:
    """Why the first run of a candidate failed, or None: what it printed last, or that it did not end in time."""
    asked = {
        "name": use.name, "head_dim": use.head_dim, "dtype": str(use.dtype).removeprefix("torch."),
        "causal": use.causal, "group": use.group, "size": asdict(size), "device": str(device),
    }  # fmt: skip
    command = [sys.executable, "-m", __name__, json.dumps(asked)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"hangs: a first run did not end within {SECONDS} s"
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["nothing was printed"]
        return f"a first run ended with status {done.returncode}: {lines[-1][:200]}"
    return None


def prove(name: str, head_dim: int, dtype: str, causal: bool, group: int, size: dict, device: str) -> str | None:
    """What is wrong with a pass by these sizes on a GPU, beside the defaults, or None."""
    kind, made = getattr(torch, dtype), Sizes(**size)
    generator = torch.Generator().manual_seed(0)
    heads = HEADS * group

    def draw(h: int) -> Tensor:
        return torch.randn(1, LENGTH, h, head_dim, generator=generator).to(device, kind)

    q, k, v, dout = draw(heads), draw(HEADS), draw(HEADS), draw(heads)
    own = Use.of(name, head_dim, kind, causal, False, group)
    default = own.candidates(compute_of(q))[0]
    plain, tried = (TritonLists(lambda *_, size=x: size) for x in (default, made))
    shared = FOLDED, causal, head_dim**-0.5
    out, lse = plain.attend(q, k, v, *shared)

    def call(kernel: TritonLists) -> tuple[Tensor, ...]:
        if name == "forward":
            return kernel.attend(q, k, v, *shared)
        return kernel.gradient(name, dout, row_sums(dout, out, None), q, k, v, lse, *shared)

    launches = tried.launches(name, q, k, v, *shared[:2], dout=None if name == "forward" else dout)
    if why := next((one.why for one in launches if one.why), None):
        return why
    want, first = call(plain), call(tried)
    if why := differs(first, want, PROBE_ERROR.get(kind, 0.05)):
        return why
    for _ in range(REPEATS):
        if not all(map(torch.equal, call(tried), first)):
            return "other bits the next time"
    return None


def differs(found: tuple[Tensor, ...], want: tuple[Tensor, ...], most: float) -> str | None:
    """Why results are not those of the defaults, or None; a row that sees nothing has lse -inf in both."""
    for x, y in zip(found, want):
        off = torch.where(x == y, 0, x - y).float().norm() / y.float().nan_to_num(0, 0, 0).norm()
        if not off <= most:
            return f"wrong result: off by {off:.1e}"
    return None


if __name__ == "__main__":
    if wrong := prove(**json.loads(sys.argv[1])):
        sys.exit(wrong)
