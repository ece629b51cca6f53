"""The Triton kernels on small CPU tensors in Triton's interpreter, compared with the
oracle.

``printed`` runs this file with TRITON_INTERPRET=1 in another process, because Triton
reads it at import. Each line of the output is a JSON object: the case, and the error
and the bound of each result.
"""

import json
import os
import subprocess
import sys
import warnings
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import torch
from matrix import NAMES, Case, differentiated, drawn, errors, judged
from random_cases import seeds
from ringlab import (
    Dense,
    Dilated,
    Execution,
    attention,
    block_patterns,
    estimate,
    kernels,
    reference,
)
from ringlab import cache as caches
from ringlab.engine.autograd import _text, operator
from ringlab.engine.dilated import make_plan
from ringlab.kernels import KERNELS, fused_merge, tile_schedule, triton_config
from ringlab.kernels.torch_kernels import Eager
from ringlab.kernels.triton_config import Sizes
from ringlab.torch_private import IN_GRAPHS
from ringlab.tracking import LiveStorageTracker

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SEEDS = len(seeds(4))  # of generations
FOLDED = Dilated([32, 64], [1, 2])
BLIND = block_patterns.from_mask(
    torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 0]]) > 0, block_size=16
)
ONE = {"heads": 1, "kv_heads": 1}
TWO = {"heads": 2, "kv_heads": 1}
BOTH = {"heads": 2, "kv_heads": 2}
BLOCKS = block_patterns.BlockSparse
SHORT = Dilated([8, 16], [3, 2], offsets="branch")  # some rows are not covered
BY_HEAD = Dilated([32, 64], [1, 2], offsets="kv_head")
# the call, rows and columns of a tile
PLAIN = {
    "folded, causal, grouped": (Case(FOLDED, 41, F32, True, **TWO), 16, 16),
    "folded thrice, half": (
        Case(Dilated([32, 32, 32], [1, 1, 2]), 35, F16, **ONE),
        16,
        32,
    ),
    "several launches, rows uncovered": (
        Case(SHORT, 20, F16, True, scale=0.5, **TWO),
        16,
        16,
    ),
    "several launches, batch": (
        Case(Dilated([6, 20], [1, 4], offsets="block"), 9, F32, batch=2, **ONE),
        16,
        16,
    ),
    "head groups of unlike rates": (
        Case(Dilated([16, 8], [3, 2], "head_groups"), 19, F32, True, 1, 3, 1),
        16,
        16,
    ),
    "block-sparse": (
        Case(block_patterns.local_global(0, 1, block_size=16), 39, F32, True, **TWO),
        16,
        16,
    ),
    "block-sparse, queries that see nothing": (
        Case(BLIND, 45, F16, True, **ONE),
        16,
        16,
    ),
    "window of tokens, causal, grouped": (
        Case(block_patterns.sliding_window(tokens=21), 75, F32, True),
        16,
        16,
    ),
    "first tokens, window and segments, both ways": (
        Case(
            BLOCKS(
                [
                    block_patterns.Window(9, 4),
                    block_patterns.Global(5),
                    block_patterns.Segment(20),
                ],
                1,
            ),
            77,
            F16,
            **TWO,
        ),
        16,
        32,
    ),
    "dense, padded head_dim, negative scale": (
        Case(Dense(), 33, F16, True, d=24, scale=-0.3, **ONE),
        32,
        16,
    ),
    "dense, odd head_dim, scale 0": (
        Case(Dense(), 18, F32, d=5, scale=0.0, **ONE),
        32,
        16,
    ),
}
# calls of a dense kernel that the fused merge joins
JOINED = {
    "in place": Case(Dilated([16, 32], [1, 2]), 64, F16, True, **BOTH),
    "in place, bfloat16": Case(Dilated([16, 32], [1, 2]), 32, BF16, **BOTH),
    "in place, batch folds": Case(
        Dilated([4, 8, 16], [1, 2, 4]), 16, F32, batch=2, d=8, **BOTH
    ),
    "short segments, grouped": Case(
        Dilated([4, 8], [1, 2], offsets="kv_head"), 14, F16, True
    ),
    "offsets of two K/V heads": Case(BY_HEAD, 128, F32, **BOTH),
    "offsets of one, otherwise alike": Case(BY_HEAD, 128, F32, **TWO),
    "rows uncovered, negative scale": Case(
        SHORT, 16, F32, True, d=12, scale=-0.3, **TWO
    ),
    "rates that do not divide, batch": Case(
        Dilated([6, 10], [1, 4], offsets="block"), 18, F32, batch=2, d=5, **BOTH
    ),
    "head groups": Case(Dilated([8, 4], [3, 2], "head_groups"), 13, F16, True, 1, 3, 1),
}


@cache
def printed(part: str) -> dict[str, dict]:
    """The output of ``part``, "plain", "joined" or "generated", by case."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parents[1] / "lib"), str(here), *sys.path])
    env = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", __file__, part]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        found.pop("case"): found for found in map(json.loads, done.stdout.splitlines())
    }


def within_bounds(found: dict[str, dict], most: float = 2e-3) -> None:
    """Assert that every result of every case is the oracle's."""
    for name, case in found.items():
        assert case["error"].keys() == set(NAMES)
        for what, error in case["error"].items():
            assert error <= case["bound"][what] < most, (name, what)


def by_head(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


class Padded(Eager):
    """Results in the inputs' dtype, laid out as GPU kernels do: by head before rows,
    log-sum-exps in rows of 32.
    """

    name = "padded"

    def forward(self, q, k, v, causal, scale):
        out, lse = super().forward(q, k, v, causal, scale)
        rows = lse.new_full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), torch.nan)
        rows[..., : lse.shape[2]] = lse
        return by_head(out.to(q.dtype)), rows[..., : lse.shape[2]]

    def backward(self, dout, q, *rest):
        return tuple(by_head(g.to(q.dtype)) for g in super().backward(dout, q, *rest))


def inside_inf(t: torch.Tensor) -> torch.Tensor:
    """The same as a view into a buffer of inf, so that a read outside of it shows."""
    b, n, heads, d = t.shape
    return torch.full((b, n + 40, heads, d + 32), torch.inf, dtype=t.dtype)[
        :, :n, :, :d
    ].copy_(t)


def run(case: Case, *tile: int):
    """The results' errors of attention with this tile, whatever its size."""
    triton_config.sizes = lambda kind: Sizes(*tile, 4, 1)
    return checked(replace(case, backend="triton"))


def run_joined(case: Case, lay=inside_inf):
    with kernels.pretend(kernels.DeviceSpec("cuda"), Padded()):
        return checked(case, lay)


def checked(case: Case, lay=inside_inf):
    (q, k, v), dout, dlse, want, bound = judged(case)
    got = case.run([lay(t) for t in (q, k, v)], lay(dout), dlse)
    if case.scale is not None and case.scale < 0:
        # A dense kernel that masks before it scales makes no bound for a negative
        # scale; -q with -scale is the same.
        how = {"pattern": case.pattern, "causal": case.causal, "scale": -case.scale}
        bound = reference.tolerance(-q, k, v, dout, **how)
    return {"error": errors(got, want, q, k, dout, case.scale), "bound": bound}


def show(name: str, **found) -> None:
    print(json.dumps({"case": name, **found}), flush=True)


def main(part: str):
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(
        True
    )  # new tensors hold NaN, so that a row that nobody wrote shows
    tile_schedule.MIN_TILES = 1  # fold short branches too
    kernels.PROBE_ROWS = (20,)  # interpreted, a program takes milliseconds
    if part == "plain":
        for name, case in PLAIN.items():
            show(name, **run(*case))
        with schedules(once):
            show("each pair once", **run(*PLAIN["folded, causal, grouped"]))
        compiled(Dilated([8, 16], [1, 2]), 18, 1, 1, 16)
        show(
            "bfloat16",
            refusal=KERNELS["triton"].refuses(torch.device("cpu"), torch.bfloat16, 64),
        )
    elif part == "joined":
        joined()
    else:
        from generated import shown

        shown(lambda case, **found: show(case, **found), SEEDS)


@contextmanager
def schedules(change):
    """Inside, every tile schedule is changed."""
    make = tile_schedule.make_schedule
    caches.GLOBAL.clear()
    with mock.patch.object(
        tile_schedule,
        "make_schedule",
        lambda *args, **more: change(make(*args, **more)),
    ):
        yield
    caches.GLOBAL.clear()


def once(schedule):
    """The schedule with M = 1 everywhere, which is wrong."""
    schedule.entries[:, 1] -= (schedule.entries[:, 1] >> 9 & 255).sub(1).clamp(
        min=0
    ) << 9
    return schedule


def joined():
    """The fused merge: values, bytes moved, bytes held, and wrong merges that must be
    found.
    """
    fused_merge.ELEMENTS = 256  # several programs a head
    for name, case in JOINED.items():
        lay = torch.clone if "folds" in name else inside_inf
        show(name, **run_joined(case, lay))
    for name in ("in place", "short segments, grouped"):
        show(f"bytes, {name}", **traffic(JOINED[name]))
    show("held", **held(Dilated([16, 32], [1, 2]), 41))
    case, build, merge = JOINED["in place"], fused_merge.make_rows, fused_merge._merge

    def unweighted(into, lse, calls, parts, lses, *rest):
        merge(into, lse, calls, parts, tuple(map(torch.zeros_like, lses)), *rest)

    with mock.patch.object(fused_merge, "_merge", unweighted):
        show("all parts weigh alike", **run_joined(case))
    caches.GLOBAL.clear()

    def without_a_head(*args):
        rows = build(*args)
        rows.table[1, 0, 2] = 0
        return rows

    with mock.patch.object(fused_merge, "make_rows", without_a_head):
        show("a head forgotten", **run_joined(case))


def traffic(case: Case):
    """Bytes that the join read and wrote, tables apart, and those that are computed."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    load, store, moved = Builder.create_masked_load, Builder.create_masked_store, [0, 0]

    def counted_load(self, ptrs, mask, *rest):
        element = ptrs.get_element_ty()
        moved[0] += (
            int(mask.data.sum()) * element.primitive_bitwidth // 8
            if element.is_floating()
            else 0
        )
        return load(self, ptrs, mask, *rest)

    def counted_store(self, ptrs, value, mask, *rest):
        moved[1] += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return store(self, ptrs, value, mask, *rest)

    q, k, v = drawn(case)[0]
    patch = mock.patch.object
    with kernels.pretend(kernels.DeviceSpec("cuda"), Padded()):
        with (
            patch(Builder, "create_masked_load", counted_load),
            patch(Builder, "create_masked_store", counted_store),
        ):
            attention(q, k, v, case.pattern)
    plan = make_plan(case.pattern, case.n, case.heads, case.kv_heads)
    told = join_bytes(plan, 1, case.n, case.heads, case.d, F16)
    return {"moved": moved, "told": told}


def join_bytes(
    plan, batch: int, n: int, heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[int, int]:
    """(read, written) bytes of the fused merge in a forward: rows of out in ``dtype``,
    and their lse in fp32.

    Every result of a call is read once. If the first call's result becomes the output,
    its rows are read and written only where other calls have them too.
    """
    first = plan.covering_call(n, heads)
    held = torch.zeros(1, n, heads, 1, dtype=torch.bool)
    rest = [call for call in plan.calls if call is not first]
    for call in rest:
        ((view,),) = call.views((held,), ())
        view.fill_(True)
    read, row = (
        sum(call.repeats * call.q.rows * call.heads for call in rest),
        batch * (head_dim * dtype.itemsize + 4),
    )
    if first is None:
        return read * row, n * heads * row
    written = int(held.sum())
    return (read + written) * row, written * row


@mock.patch.object(kernels.KERNELS["eager"], "name", "as if it stored no scores")
def held(pattern, n):
    """The peak of a first call, forward and backward, and what ``estimate`` says; the
    interpreter holds more.
    """
    execution = Execution(cache=False)
    told = estimate(
        pattern,
        seq_len=n,
        heads=4,
        kv_heads=2,
        head_dim=16,
        passes="fwd+bwd",
        execution=execution,
        backend="eager",
        profile="a100",
    )
    q, k, v, dout = (torch.randn(1, n, h, 16) for h in (4, 2, 2, 4))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    kernels.choose("cpu", F32, 16, backward=True, backend="eager")
    launch = defaultdict(lambda: lambda *_, **options: None)
    with (
        mock.patch.object(fused_merge, "join", launch),
        LiveStorageTracker() as tracker,
    ):
        tracker.register(q, k, v, dout)
        out = attention(q, k, v, pattern, execution=execution, backend="eager")
        grads = torch.autograd.grad(out, (q, k, v), dout)
    return {"peak": tracker.peak_bytes, "told": told.peak_bytes, "grads": len(grads)}


def compiled(pattern, n, heads, kv_heads, d):
    """One graph, without a break, equal in every bit to the call outside of graphs; and
    torch's own checks.
    """
    q, k, v = (
        torch.randn(1, n, h, d, requires_grad=True) for h in (heads, kv_heads, kv_heads)
    )

    def step(q, k, v):
        return attention(
            q, k, v, pattern, causal=True, scale=-0.3, backend="triton", return_lse=True
        )

    graph = torch.compile(step, fullgraph=IN_GRAPHS, backend="aot_eager")
    a, b = (
        differentiated(
            *f(q, k, v), (q, k, v), torch.ones_like(q), torch.ones(1, heads, n)
        )
        for f in (step, graph)
    )
    tests = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_static",
    )
    call = q, k, v, _text(pattern, "triton"), True, 0.25, True
    checks = torch.library.opcheck(operator, call, test_utils=tests)
    show(
        "compiled",
        same={name: torch.equal(a[name], b[name]) for name in NAMES},
        checks=checks,
    )


if __name__ == "__main__":
    # numpy goes on with 0, a GPU with any number.
    undefined = "divide by zero encountered in (floor_divide|fmod|remainder)"
    warnings.filterwarnings("error", message=undefined)
    main(sys.argv[1])
