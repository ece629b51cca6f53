"""Tiles form few scores at a time; where memory runs out, smaller ones are taken and no
message changes.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matrix import F32, LADDER, Case, drawn, wrong
from ring_cases import short_of_memory
from ringlab import Dense, Dilated, Execution, OOMBackoff, attention, kernels, reference
from ringlab.engine.autograd import LSE_COLUMNS
from ringlab.ring import SCHEMES, contiguous, counting
from ringlab.ring.launch import launch
from ringlab.tracking import LiveStorageTracker, is_out_of_memory

EAGER = type(kernels.KERNELS["eager"])
DENSE = Case(Dense(), 16, causal=True, heads=2, kv_heads=1, d=8, backend="eager")


@pytest.fixture(autouse=True)
def probed():
    """The probes of the eager kernel, so that no test counts its calls or makes it fail:
    a gradient of lse widens the heads.
    """
    how = {"causal": True, "backward": True, "backend": "eager"}
    for head_dim in (DENSE.d, DENSE.d + LSE_COLUMNS):
        kernels.choose("cpu", torch.float64, head_dim, **how)


class Fails:
    """Replace both passes of the eager kernel: ``when(number of the call, rows, keys)``
    raises instead of computing.
    """

    def __init__(self, monkeypatch, when, error=torch.OutOfMemoryError):
        self.calls, self.when, self.error = 0, when, error
        for name, first in (("forward", 0), ("backward", 1)):
            monkeypatch.setattr(EAGER, name, self.wrapped(getattr(EAGER, name), first))

    def wrapped(self, right, first):
        def kernel(eager, *args):
            self.calls += 1
            if self.when(self.calls, args[first].shape[1], args[first + 1].shape[1]):
                raise self.error("out of memory, as told")
            return right(eager, *args)

        return kernel


@pytest.mark.parametrize("scheme", SCHEMES)
def test_whichever_call_runs_out_of_memory_the_step_is_the_same(monkeypatch, scheme):
    """Each call of each rank and pass fails once, of most schemes every third: values
    and messages stay the same.
    """
    case = replace(
        DENSE,
        pattern=LADDER,
        n=48,
        heads=3,
        kv_heads=3,
        layout=contiguous(48, 3),
        scheme=scheme,
    )
    with monkeypatch.context() as patch, counting() as right:
        calls = Fails(patch, lambda *_: False)
        assert not wrong(case) and calls.calls > 10
    for failing in range(1, calls.calls + 1, 1 if scheme == "ring" else 3):
        backoff = OOMBackoff((8, 4))
        with monkeypatch.context() as patch, counting() as traffic:
            Fails(patch, lambda i, *_, failing=failing: i == failing)
            assert (
                not wrong(replace(case, execution=Execution(tile=backoff)))
                and backoff.level == 1
            ), failing
        assert (traffic.sent, traffic.messages) == (right.sent, right.messages)


@pytest.mark.parametrize("most, level", [(16, 0), (11, 1), (4, 2), (2, 3)])
@pytest.mark.parametrize("way", [None, "gather"])
def test_the_backoff_goes_down_to_the_tile_that_fits(monkeypatch, most, level, way):
    backoff = OOMBackoff((8, 4, 2))
    Fails(monkeypatch, lambda _, rows, keys: max(rows, keys) > most)
    assert (
        not wrong(replace(DENSE, way=way, execution=Execution(tile=backoff)))
        and backoff.level == level
    )


def test_below_the_smallest_tile_the_error_says_what_was_tried(monkeypatch):
    attempts = Fails(monkeypatch, lambda *_: True)
    with pytest.raises(torch.OutOfMemoryError, match="as told") as caught:
        wrong(replace(DENSE, execution=Execution(tile=OOMBackoff((8, 4)))))
    assert (
        caught.value.__notes__ == ["out of memory without tiles and with tiles of 8, 4"]
        and attempts.calls == 3
    )


def test_another_error_is_not_tried_again(monkeypatch):
    backoff, attempts = (
        OOMBackoff((8, 4)),
        Fails(monkeypatch, lambda *_: True, lambda said: RuntimeError("a bad day")),
    )
    with pytest.raises(RuntimeError, match="a bad day"):
        wrong(replace(DENSE, execution=Execution(tile=backoff)))
    assert attempts.calls == 1 and backoff.level == 0


def test_what_counts_as_out_of_memory():
    for error in (
        MemoryError(),
        torch.OutOfMemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ):
        assert is_out_of_memory(error)
    assert not is_out_of_memory(
        RuntimeError("shapes disagree")
    ) and not is_out_of_memory(KeyboardInterrupt())


def test_tiles_that_grow_are_refused():
    with pytest.raises(
        ValueError, match="each tile must be smaller than the one before"
    ):
        OOMBackoff((64, 128))


REAL = """
import os, resource
os.environ["MALLOC_ARENA_MAX"] = "1"
import torch
from ringlab import Dense, Execution, OOMBackoff, attention
torch.set_num_threads(1)
torch.manual_seed(0)
q, k, v, dout = torch.randn(4, 1, 2048, 2, 16, dtype=torch.float64).unbind()

def step(execution):
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = attention(*leaves, Dense(), causal=True, backend="eager", execution=execution)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

want = step(Execution())
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (46 << 20),) * 2)  # scores: 32 MiB, in tiles 29, then 4; two at once
try:
    step(Execution())
except RuntimeError as error:
    print("refused:", error)
backoff = OOMBackoff((1950, 700, 180))
found = step(Execution(tile=backoff))
print("level", backoff.level, "apart", max(float((a - b).norm() / b.norm()) for a, b in zip(found, want)))
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="limits the address space by Linux's means",
)
def test_memory_that_really_runs_out():
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "lib")}
    done = subprocess.run(
        [sys.executable, "-c", REAL], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    refused, level, number, _, worst = done.stdout.replace("\n", " ").rsplit(None, 4)
    assert "refused:" in refused and "allocate memory" in refused
    assert (level, number) == ("level", "2") and float(worst) <= 1e-12


def test_one_rank_out_of_memory_and_then_agreed():
    """Rank 1 alone goes down; the other does not wait in vain, no message is sent
    again, and then both agree.
    """
    pattern = Dilated([12, 36], [1, 2], "head_groups", "branch")
    case = Case(
        pattern,
        48,
        causal=True,
        kv_heads=4,
        d=8,
        lse_cotangent=False,
        layout=contiguous(48, 2),
    )
    want = replace(case, layout=None).run(*drawn(case))
    a, b = launch(short_of_memory, 2, case)
    for name, found in case.joined([a["values"], b["values"]]).items():
        assert reference.error(found, want[name], 1.0) <= 1e-12
    assert [x["levels"] for x in (a, b)] == [(0, 1), (1, 1)], (
        "before and after agreeing"
    )
    assert all(x["failures"] == rank for rank, x in enumerate((a, b)))
    assert all(x["sent"] == x["sent without failure"] for x in (a, b))
    assert all(x["cached"] > 0 for x in (a, b)), (
        "an execution's objects reach the operator"
    )


@pytest.mark.parametrize("causal", [False, True])
def test_scores_take_tile_by_tile(causal):
    """Beyond results and rows of the sequence, forward and backward hold a few tile x
    tile, not n x n.
    """
    n, heads, d, tile = 384, 2, 8, 48
    rows, scores, peaks = 4 * n * heads * d, 4 * tile * tile, {}
    kernels.choose(
        "cpu", F32, d, causal=causal, backward=True, backend="eager"
    )  # its probe is not of a call
    for used in (tile, None):
        q, k, v = (torch.randn(1, n, heads, d, requires_grad=True) for _ in range(3))
        with LiveStorageTracker() as forward:
            out = attention(
                q,
                k,
                v,
                Dense(),
                causal=causal,
                backend="eager",
                execution=Execution(tile=used),
            )
        with LiveStorageTracker() as backward:
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        peaks[used] = (
            forward.peak_bytes - rows,
            backward.peak_bytes - 4 * rows,
        )  # out; dout, dq, dk, dv
    for pass_, (peak, whole) in enumerate(zip(peaks[tile], peaks[None])):
        assert peak <= 4 * scores + 2 * rows, (pass_, peak / scores)
        assert whole >= 2 * 4 * heads * n * n, (pass_, whole)
