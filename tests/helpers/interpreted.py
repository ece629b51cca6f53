"""Run by test_triton.py where TRITON_INTERPRET=1: the Triton kernels on small CPU tensors, against the oracle.

Prints one JSON object a line: a case, the error and the bound of each result.
"""

import json
import os
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, replace
from unittest import mock

import torch
from gluon_machine import CODE, SOURCES, Machine
from helpers import NAMES, errors, results
from ringlab import Dense, Dilated, Execution, attention, block_patterns, estimate, kernels, reference
from ringlab import cache as caches
from ringlab.engine import fused
from ringlab.engine.autograd import IN_GRAPHS
from ringlab.engine.dilated import make_plan
from ringlab.kernels import KERNELS, tile_schedule, triton, triton_config, triton_tune
from ringlab.kernels.experimental import fused_merge, sandbox
from ringlab.kernels.torch_kernels import Eager
from ringlab.kernels.triton_config import Sizes
from ringlab.tracking import LiveStorageTracker

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LAUNCH, CHOSEN = triton._launch, triton_config.chosen
# pattern, n, heads, K/V heads, head_dim, causal, dtype, scale, tile and how it is read if not by pointers
CASES = {
    "folded, causal, grouped": (Dilated([32, 64], [1, 2]), 41, 2, 1, 16, True, F32, None, (16, 16)),
    "folded thrice, half": (Dilated([32, 32, 32], [1, 1, 2]), 35, 1, 1, 16, False, F16, None, (16, 32)),
    "several launches, rows uncovered": (Dilated([8, 16], [3, 2], offsets="branch"), 20, 2, 1, 16, True, F16, 0.5,
                                         (16, 16)),
    "several launches, batch": (Dilated([6, 20], [1, 4], offsets="block"), 9, 1, 1, 16, False, F32, None, (16, 16)),
    "head groups of unlike rates": (Dilated([16, 8], [3, 2], "head_groups"), 19, 3, 1, 16, True, F32, None, (16, 16)),
    "block-sparse": (block_patterns.local_global(0, 1, block_size=16), 39, 2, 1, 16, True, F32, None, (16, 16)),
    "block-sparse, queries that see nothing": (
        block_patterns.from_mask(torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 0]]) > 0, block_size=16), 45, 1, 1, 16, True, F16,
        None, (16, 16),
    ),
    "dense, padded head_dim, negative scale": (Dense(), 33, 1, 1, 24, True, F16, -0.3, (32, 16)),
    "dense, odd head_dim, scale 0": (Dense(), 18, 1, 1, 5, False, F32, 0.0, (32, 16)),
    "descriptors, folded, batch": (Dilated([32, 64], [1, 2]), 38, 2, 1, 16, True, F32, None, (16, 16, "descriptors")),
    "descriptors, odd length": (Dilated([32, 64], [1, 2]), 37, 1, 1, 16, False, F16, None, (16, 16, "descriptors")),
    "specialized, folded, grouped": (Dilated([32, 64], [1, 2]), 36, 2, 1, 16, True, F16, None, (16, 16, "specialized")),
    "specialized, nothing masked": (Dilated([32, 64], [1, 2]), 64, 1, 1, 16, False, F32, None,
                                    (16, 16, "specialized")),
}  # fmt: skip
# the same without a tile: calls of a dense kernel that are joined
JOINED = {
    "in place": (Dilated([16, 32], [1, 2]), 64, 2, 2, 16, True, F16, None),
    "in place, bfloat16": (Dilated([16, 32], [1, 2]), 32, 2, 2, 16, False, BF16, None),
    "in place, batch folds": (Dilated([4, 8, 16], [1, 2, 4]), 16, 2, 2, 8, False, F32, None),
    "short segments, grouped": (Dilated([4, 8], [1, 2], offsets="kv_head"), 14, 4, 2, 16, True, F16, None),
    "rows uncovered, negative scale": (Dilated([8, 16], [3, 2], offsets="branch"), 16, 2, 1, 12, True, F32, -0.3),
    "rates that do not divide, batch": (Dilated([6, 10], [1, 4], offsets="block"), 18, 2, 2, 5, False, F32, None),
    "head groups": (Dilated([8, 4], [3, 2], "head_groups"), 13, 3, 1, 16, True, F16, None),
}


class Padded(Eager):
    """Results in the inputs' dtype, laid out as GPU kernels do: by head before rows, log-sum-exps in rows of 32."""

    def forward(self, q, k, v, causal, scale):
        out, lse = super().forward(q, k, v, causal, scale)
        rows = lse.new_full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), torch.nan)
        rows[..., : lse.shape[2]] = lse
        return by_head(out.to(q.dtype)), rows[..., : lse.shape[2]]

    def backward(self, dout, q, *rest):
        return tuple(by_head(g.to(q.dtype)) for g in super().backward(dout, q, *rest))


def by_head(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def inside_inf(*shape, dtype) -> torch.Tensor:
    """Random numbers as a view into a buffer of inf: whoever reads past it shows it."""
    b, n, heads, d = shape
    return torch.full((b, n + 40, heads, d + 32), torch.inf, dtype=dtype)[:, :n, :, :d].copy_(torch.randn(shape))


def record(tile) -> set[str]:
    """Make a tile the one that is used, as if tuned; returns how launches read, as they happen."""
    reads = set()

    def launch(name, one, *args):
        reads.add(one.size.reads)
        return LAUNCH(name, one, *args)

    triton_config.sizes = lambda *_: Sizes(*tile[:2], 4, 1)
    same = tile[2:] != ("specialized",)
    triton_config.chosen = lambda use, *_: Sizes(*tile[:2], 4, 1, *tile[2:]) if same or use.name == "forward" else None
    triton._launch = launch
    return reads


def run(*case, batch=1):
    reads = record(case[-1])
    return {**checked(*case[:-1], batch, inside_inf, backend="triton"), "reads": sorted(reads)}


def run_joined(*case, batch=1, draw=inside_inf):
    with kernels.override_kernel(Padded(), "cuda"):
        return checked(*case, batch, draw, execution=Execution(merge="fused"))


def plain(*shape, dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def checked(pattern, n, heads, kv_heads, d, causal, dtype, scale, batch, draw, **how):
    torch.manual_seed(0)
    q, k, v = (draw(batch, n, h, d, dtype=dtype).requires_grad_() for h in (heads, kv_heads, kv_heads))
    dout, dlse = draw(batch, n, heads, d, dtype=dtype), torch.randn(batch, heads, n, dtype=torch.float64)
    options = {"causal": causal, "scale": scale}
    out, lse = attention(q, k, v, pattern, return_lse=True, **how, **options)
    got = results(out, lse, q, k, v, dout, dlse)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want = results(*reference.attention(*exact, pattern, **options), *exact, dout, dlse)
    # A dense kernel that masks before it scales makes no bound for a negative scale; -q with -scale is the same.
    flip = -1 if scale is not None and scale < 0 else 1
    options["scale"] = None if scale is None else flip * scale
    bound = reference.tolerance(flip * q, k, v, dout, pattern=pattern, **options)
    return {"error": errors(got, want, q, k, dout, scale), "bound": bound}


def show(name: str, **found) -> None:
    print(json.dumps({"case": name, **found}), flush=True)


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # new tensors hold NaN, so that a row which nobody wrote shows
    tile_schedule.LONG = 1  # fold short branches too
    kernels.PROBE_ROWS = 20  # interpreted, a program takes milliseconds
    for name, case in CASES.items():
        show(name, **run(*case, batch=2 if "batch" in name else 1))
    folded = CASES["folded, causal, grouped"]
    counted = tile_schedule.make_schedule
    tile_schedule.make_schedule = lambda *args, **more: once(counted(*args, **more))
    caches.GLOBAL.clear()
    show("each pair once", **run(*folded))
    tile_schedule.make_schedule = lambda *args, **more: replace(counted(*args, **more), stride=1)
    caches.GLOBAL.clear()
    show("neighbours in place of a class", **run(*CASES["descriptors, folded, batch"]))
    tile_schedule.make_schedule = counted
    caches.GLOBAL.clear()
    tuning()
    first_runs()
    compiled(Dilated([8, 16], [1, 2]), 18, 1, 1, 16)
    joined()
    show("bfloat16", refusal=KERNELS["triton"].refuses(torch.device("cpu"), torch.bfloat16, 64))


def once(lists):
    """The lists with M = 1 throughout: an answer that must be found wrong."""
    lists.entries[:, 1] -= (lists.entries[:, 1] >> 9 & 255).sub(1).clamp(min=0) << 9
    return lists


def tuning():
    """Two passes on the sizes of a GPU of 9.0, by a timer that likes one way of reading; attention then takes it."""
    triton.compute_of = triton_tune.compute_of = lambda q: (9, 0)
    triton_config.sizes, triton_config.chosen = triton_config.sizes, CHOSEN
    pattern, (q, k, v) = Dilated([128], [1]), (torch.randn(1, 128, 1, 64).half() for _ in range(3))
    before = triton.tuned("forward", q, k, False, False)
    times = iter(range(100, 0, -1))
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, RINGLAB_CACHE=folder):
        with by_hand(), mock.patch.object(triton_tune, "trial", lambda *_: None):
            found = triton_tune.tune(q, k, v, pattern, passes=("forward",), timer=lambda call: call() and next(times))
        after = triton.tuned("forward", q, k, False, False)
    show("tuned", uses=[str(one.use) for one in found], timed=[str(x) for x in found[0].seconds],
         refused=list(map(str, found[0].refused.items())), before=str(before), after=str(after))  # fmt: skip


def by_hand(old="", new=""):
    """The kernels in Gluon on a small machine, with ``old`` in their text changed to ``new``."""
    found = {name: source.replace(old, new) if old else source for name, source in SOURCES.items()}
    machines = {name: Machine({part: found[part] for part in (CODE, name)}) for name in found if name != CODE}
    return mock.patch.dict(sys.modules, machines)


def first_runs():
    """What the first run of a candidate in Gluon says of the right kernels, and of wrong ones."""
    triton.compute_of, sandbox.LENGTH, sandbox.HEADS = (lambda q: (9, 0)), 600, 1
    sandbox.FOLDED, sandbox.REPEATS = Dilated([256, 512], [1, 2]), 1
    asked = {"head_dim": 16, "dtype": "float16", "causal": True, "group": 2, "device": "cpu"}
    size = asdict(Sizes(128, 64, 4, 2, "gluon"))
    with by_hand():
        right = [sandbox.prove(name, size=size, **asked) for name in triton_config.TILE_PASSES]
        unfit = sandbox.prove("forward", size=size | {"rows": 256}, **asked)
    with by_hand("shift - bonus", "shift"):
        wrong = sandbox.prove("forward", size=size, **asked)
    show("first run", right=right, unfit=unfit, wrong=wrong)


def joined():
    """Calls that are joined: values, what is read and written, what is held, and wrong joins that must be found."""
    fused.ELEMENTS = 256  # several programs a head
    for name, case in JOINED.items():
        draw = plain if "folds" in name else inside_inf
        show(f"joined, {name}", **run_joined(*case, batch=2 if "batch" in name else 1, draw=draw))
    for name in ("in place", "short segments, grouped"):
        show(f"joined, bytes, {name}", **traffic(*JOINED[name][:5]))
    show("joined, held", **held(Dilated([16, 32], [1, 2]), 41))
    case, build, join = JOINED["in place"], fused.make_rows, fused._join
    fused._join = lambda into, lse, calls, parts, lses, *rest: join(
        into, lse, calls, parts, tuple(map(torch.zeros_like, lses)), *rest)  # fmt: skip
    show("joined, all parts weigh alike", **run_joined(*case))
    fused._join, fused.make_rows = join, lambda calls, *rest: without_a_head(build(calls, *rest))
    caches.GLOBAL.clear()
    show("joined, a head forgotten", **run_joined(*case))
    fused.make_rows = build
    caches.GLOBAL.clear()


def without_a_head(rows):
    rows.table[1, 0, 2] = 0
    return rows


def traffic(pattern, n, heads, kv_heads, d):
    """Bytes that the join moved, tables apart, and rows that the first call alone holds: equal in every bit?"""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    load, store, moved = Builder.create_masked_load, Builder.create_masked_store, [0, 0]

    def counted_load(self, ptrs, mask, *rest):
        element = ptrs.get_element_ty()
        moved[0] += int(mask.data.sum()) * element.primitive_bitwidth // 8 if element.is_floating() else 0
        return load(self, ptrs, mask, *rest)

    def counted_store(self, ptrs, value, mask, *rest):
        moved[1] += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return store(self, ptrs, value, mask, *rest)

    Builder.create_masked_load, Builder.create_masked_store = counted_load, counted_store
    q, k, v = (torch.randn(1, n, h, d).half() for h in (heads, kv_heads, kv_heads))
    execution = Execution(merge="fused")
    with kernels.override_kernel(Padded(), "cuda"):
        out = attention(q, k, v, pattern, execution=execution)
        found = tuple(moved)
        first = attention(q, k, v, Dilated(pattern.segment_lengths[:1], [1]), execution=execution)
    Builder.create_masked_load, Builder.create_masked_store = load, store
    plan = make_plan(pattern, n, heads, kv_heads)
    alone = torch.ones(1, n, heads, 1, dtype=torch.bool)
    for call in plan.blocks[0][1]:
        if call.rate > 1:
            call.view(alone, range(call.segments)).fill_(False)
    same = (out == first).all(-1, keepdim=True)
    untouched = bool(same[alone].all()) and not bool(same[~alone].any())
    return {"moved": found, "told": fused.join_bytes(plan, 1, n, heads, d, F16), "untouched": untouched}


def held(pattern, n):
    """The peak of a first call, forward and backward, and what ``estimate`` says; the interpreter holds more."""
    execution = Execution(merge="fused", cache=False)
    told = estimate(pattern, seq_len=n, heads=4, kv_heads=2, head_dim=16, passes="fwd+bwd", execution=execution)
    q, k, v, dout = (torch.randn(1, n, h, 16) for h in (4, 2, 2, 4))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    kernels.choose("cpu", F32, 16, backward=True)
    join, fused_merge.join = fused_merge.join, defaultdict(lambda: lambda *_, **options: None)
    with LiveStorageTracker() as tracker:
        tracker.register(q, k, v, dout)
        out = attention(q, k, v, pattern, execution=execution)
        grads = torch.autograd.grad(out, (q, k, v), dout)
    fused_merge.join = join
    return {"peak": tracker.peak_bytes, "told": told.peak_bytes, "grads": len(grads)}


def compiled(pattern, n, heads, kv_heads, d):
    """One graph, without a break, equal in every bit to the call outside of graphs; and torch's own checks."""
    q, k, v = (torch.randn(1, n, h, d, requires_grad=True) for h in (heads, kv_heads, kv_heads))

    def step(q, k, v):
        return attention(q, k, v, pattern, causal=True, scale=-0.3, backend="triton", return_lse=True)

    graph = torch.compile(step, fullgraph=IN_GRAPHS, backend="aot_eager")
    a, b = (results(*f(q, k, v), q, k, v, torch.ones(()), torch.ones(1, heads, n)) for f in (step, graph))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    text = triton._text(pattern)
    checks = torch.library.opcheck(triton.lists_forward, (q, k, v, text, True, 0.25), test_utils=tests)
    show("compiled", same={name: torch.equal(a[name], b[name]) for name in NAMES}, checks=checks)


if __name__ == "__main__":
    main()
