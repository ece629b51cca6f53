"""The fused merge: its values by Triton's interpreter, the rows it reads, the bytes it moves and holds, refusals."""

import importlib
import random
import re
import sys

import pytest
import torch
from compiled import used
from interpreted import JOINED, printed, within_bounds
from ringlab import Dense, Dilated, Execution, Simulated, attention, block_patterns, estimate
from ringlab.engine.dilated import make_plan
from ringlab.engine.execute import views_of
from ringlab.kernels import triton_config
from ringlab.kernels.base import DeviceSpec
from ringlab.kernels.experimental import fused_merge
from ringlab.patterns import MIXINGS, OFFSETS

pytest.importorskip("triton")

TARGET = Dilated([2048, 4096, 8192], [1, 2, 4])
FUSED = Execution(merge="fused")


def random_plan(rng: random.Random):
    kv_heads, n = rng.randint(1, 4), rng.choice([rng.randint(1, 60), 64, 96])
    heads = kv_heads * rng.choice([1, 2, 3])
    lengths = [rng.randint(1, 70) if rng.random() < 0.5 else rng.choice([8, 16, 32]) for _ in range(rng.randint(1, 3))]
    rates = [rng.choice([1, min(2, w), min(4, w), rng.randint(1, w)]) for w in lengths]
    pattern = Dilated(lengths, rates, rng.choice(MIXINGS), rng.choice(OFFSETS))
    return pattern, n, heads, kv_heads, make_plan(pattern, n, heads, kv_heads)


def selected(pattern, n: int, heads: int, kv_heads: int) -> list[torch.Tensor]:
    """By branch: which positions each of its heads keeps (heads, n), from the pattern's own definition."""
    found = []
    for branch in pattern.branches(n, heads, kv_heads):
        kept = torch.zeros(heads, n, dtype=torch.bool)
        for head, offset in zip(branch.heads, branch.offsets):
            kept[head] = torch.arange(n) % branch.length % branch.rate == offset
        found.append(kept)
    return found


def test_rows_of_a_call_are_those_that_its_views_read_and_are_joined_once():
    rng = random.Random(0)
    for _ in range(60):
        pattern, n, heads, kv_heads, plan = random_plan(rng)
        first = plan.whole(n, heads) if heads == kv_heads else None
        calls = [c for c in plan.calls if c is not first]
        shapes = [(c.nodes, c.q.rows, c.heads) for c in calls]
        strides = tuple(((m * h, h, 1), (h * m, m, 1)) for _, m, h in shapes)  # results of head_dim 1
        group = rng.choice([1, heads // kv_heads]) if first is None else 1
        rows = fused_merge.make_rows(calls, heads, n, group, strides, first is not None)
        positions = torch.arange(n)[None, :, None, None].expand(1, n, heads, 1)
        held = torch.zeros(heads, n, dtype=torch.bool)
        for i, (call, shape) in enumerate(zip(calls, shapes)):
            ((result,),) = views_of([(positions, (0, 0), call.q)], range(call.nodes), call.heads)
            result = result[..., 0]  # (segments, rows, heads)
            for head in range(heads):
                start, length, segments, rate, kept, at, s_b, s_n, lse_at, l_b, l_n = rows.table[head, i].tolist()
                for segment in range(segments):
                    for row in range(kept):
                        element, x = at + segment * s_b + row * s_n, start + segment * length + row * rate
                        assert result.contiguous().flatten()[element] == x
                        lse = lse_at + segment * l_b + row * l_n
                        assert result.transpose(1, 2).contiguous().flatten()[lse] == x
                        held[head, x] = True
            assert int((rows.table[:, i, 2] > 0).sum()) == shape[2]
        grid = torch.zeros(heads // group, n, dtype=torch.bool)
        for owner, one in enumerate(rows.firsts.tolist()):
            grid[owner, one :: rows.step] = True
        owned = held.unflatten(0, (-1, group)).any(1)
        assert bool(grid[owned].all()) and (first is not None or bool(grid.all()))


def test_rows_of_one_class_are_walked_without_gaps():
    plan = make_plan(TARGET, 65536, 16, 16)
    calls = plan.calls[1:]
    rows = fused_merge.make_rows(calls, 16, 65536, 1, (((1, 1, 1), (1, 1, 1)),) * len(calls), True)
    assert (len(calls), rows.step, rows.firsts.tolist()) == (6, 2, [0, 1] * 8)


def test_bytes_of_the_target_are_those_that_were_planned():
    """bf16, 65,536 rows of 16 heads of 128: 1.25 and 0.5 times as many rows are read and written as out has."""
    read, written = fused_merge.join_bytes(make_plan(TARGET, 65536, 16, 16), 1, 65536, 16, 128, torch.bfloat16)
    rows = 65536 * 16
    assert (read, written) == (rows * 5 // 4 * 260, rows // 2 * 260)
    assert (round(read / 260 * 256 / 1e6), round(written / 260 * 256 / 1e6)) == (336, 134)


def test_bytes_follow_from_the_rows_that_branches_keep():
    rng = random.Random(1)
    in_place = 0
    for _ in range(200):
        pattern, n, heads, kv_heads, plan = random_plan(rng)
        read, written = fused_merge.join_bytes(plan, 3, n, heads, 8, torch.float32)
        kept = selected(pattern, n, heads, kv_heads)
        parts, union = sum(int(x.sum()) for x in kept), heads * n
        first = next((i for i, b in enumerate(pattern.branches(n, heads, kv_heads)) if b.rate == 1), None)
        if plan.whole(n, heads) is not None:
            others = kept[:first] + kept[first + 1 :]
            union = int(torch.stack([torch.zeros(heads, n, dtype=torch.bool), *others]).any(0).sum())
            parts += union - heads * n
            in_place += bool(others)
        assert (read, written) == (3 * parts * 36, 3 * union * 36)
    assert in_place > 10


def test_what_is_held_until_the_join_is_estimated():
    """H100, bf16: out and lse of the branches after the first; in the backward their dq, dk and dv."""
    shape = {"seq_len": 16384, "heads": 16, "head_dim": 128, "dtype": torch.bfloat16, "profile": "h100"}
    out, lse = 16384 * 16 * 128 * 2, 16384 * 16 * 4
    e = estimate(TARGET, execution=FUSED, **shape)
    assert e.parts["workspace"] - (out + lse) * 3 // 4 in range(1 << 16)  # and the rows' table
    assert e.peak_bytes == 4 * out + lse + e.parts["workspace"]
    both = estimate(TARGET, execution=FUSED, passes="fwd+bwd", **shape)
    assert both.parts["workspace"] >= 3 * out * 3 // 4 and both.parts["gradients"] == 4 * out
    eager = estimate(TARGET, execution=Execution(merge="eager"), **shape)
    assert eager.parts == estimate(TARGET, **shape).parts and eager.parts["workspace"] < e.parts["workspace"]


@pytest.mark.parametrize(
    "call, said",
    [
        ({"pattern": TARGET, "profile": "gtx1080"}, "needs compute capability 8.0 or newer, this is 6.1"),
        ({"pattern": TARGET}, "needs a CUDA device, this is cpu"),
        ({"pattern": TARGET, "profile": "h100", "dtype": torch.float64}, "bfloat16, not float64"),
        ({"pattern": block_patterns.sliding_window(1), "profile": "h100"}, "not block-sparse ones"),
        ({"pattern": TARGET, "profile": "h100", "ranks": 2}, "joins the results of one device, not what 2 ranks"),
    ],
)
def test_an_estimate_refuses_what_a_call_would(call, said):
    with pytest.raises(NotImplementedError, match=re.escape(said)):
        estimate(seq_len=8192, execution=FUSED, **call)


def test_without_a_gpu_it_is_refused_in_one_line():
    q = torch.randn(1, 8, 2, 16)
    for pattern in (Dilated([4, 8], [1, 2]), Dense()):
        with pytest.raises(NotImplementedError, match=r"^merge='fused' cannot run on cpu in torch.float32: needs"):
            attention(q, q, q, pattern, execution=FUSED)
        with pytest.raises(NotImplementedError, match="joins the results of one device, not what 2 ranks exchange"):
            attention(q, q, q, pattern, execution=FUSED, group=Simulated(2))
    with pytest.raises(NotImplementedError, match="joins the branches of dilated patterns, not block-sparse ones"):
        attention(q, q, q, block_patterns.sliding_window(1, block_size=4), execution=FUSED)
    assert torch.equal(*(attention(q, q, q, TARGET, execution=Execution(merge=m)) for m in ("auto", "eager")))


def test_what_a_gpu_needs_for_it_is_said(monkeypatch):
    monkeypatch.setattr("ringlab.kernels.base.capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "triton", None)
    gpu = torch.device("cuda", 0)
    with pytest.raises(NotImplementedError, match="triton is not installed"):
        fused_merge.check(gpu, torch.bfloat16, TARGET)
    monkeypatch.setitem(sys.modules, "triton", sys)
    fused_merge.check(gpu, torch.bfloat16, TARGET)
    monkeypatch.setattr("ringlab.kernels.base.capability", lambda device: (7, 5))
    with pytest.raises(NotImplementedError, match="needs compute capability 8.0 or newer, this is 7.5"):
        fused_merge.check(DeviceSpec("cuda", (7, 5)), torch.float16, TARGET)


def test_the_switch_is_checked():
    with pytest.raises(ValueError, match="unknown merge 'atomic'; known: auto, eager, fused"):
        Execution(merge="atomic")
    with pytest.raises(ValueError, match="merge='fused' joins strided views, and gather=True makes copies"):
        Execution(merge="fused", gather=True)


# ---------------------------------------------------------------------------------------------------------------------
# what it computes


def test_values_equal_the_oracle_and_wrong_joins_are_found():
    found = printed("variants")
    half = [name for name in JOINED if "bfloat16" in name]
    within_bounds({name: found[f"joined, {name}"] for name in JOINED if name not in half})
    within_bounds({name: found[f"joined, {name}"] for name in half}, 2e-2)
    for wrong in ("joined, all parts weigh alike", "joined, a head forgotten"):
        assert min(found[wrong]["error"].values()) > 0.01


@pytest.mark.parametrize("name", ["in place", "short segments, grouped"])
def test_it_moves_the_bytes_that_are_computed_and_leaves_rows_of_one_call_alone(name):
    found = printed("variants")[f"joined, bytes, {name}"]
    assert found["moved"] == found["told"] and min(found["told"]) > 0 and found["untouched"]


def test_the_bytes_that_it_holds_are_estimated():
    found = printed("variants")["joined, held"]
    assert found["peak"] == found["told"] and found["grads"] == 3


def join_resources(capability: int, head_dim: int, parts: int, weigh: bool, over: bool, group: int, dtype: str):
    """What a program of the join of so many calls takes, and its PTX."""
    code = importlib.import_module("ringlab.kernels.experimental.fused_merge_code")
    pad = triton_config.padded(head_dim)
    fixed = {"WEIGH": weigh, "OVER": over, "GROUP": group, "ROWS": fused_merge.tile_rows(head_dim), "DIM": head_dim,
             "PAD": pad, "ALIGNED": 8 if head_dim % 16 else 16}  # fmt: skip
    kinds = {"parts": (f"*{dtype}",) * parts, "lses": ("*fp32" if weigh else f"*{dtype}",) * parts, "out": f"*{dtype}",
             "lse": "*fp32" if weigh else f"*{dtype}", "table": "*i64", "firsts": "*i64"}  # fmt: skip
    return used(code.join, kinds, fixed, capability, num_warps=4)


@pytest.mark.parametrize(
    "case",
    [
        (80, 64, 3, True, True, 1, "bf16"),
        (86, 128, 3, True, False, 1, "bf16"),
        (89, 64, 2, False, True, 1, "fp32"),
        (90, 128, 3, True, True, 1, "bf16"),
        (100, 64, 2, False, False, 4, "bf16"),
        (120, 136, 2, False, False, 1, "bf16"),
    ],
    ids=lambda case: f"{case[0]}-{case[1]}",
)
def test_joins_fit_every_architecture_and_read_16_bytes_at_a_time(case, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found, ptx = join_resources(*case)
    assert (found["stack"], found["local"]) == (0, 0) and 0 < found["registers"] <= 255
    assert re.search(r"ld\.global\S*v4\.b32", ptx) and not re.search(r"ld\.global\S*b16", ptx)
    if case[4]:  # in place: what stands there is read by all before one writes
        assert ptx.rindex("ld.global") < ptx.rindex("bar.sync") < ptx.index("st.global")
