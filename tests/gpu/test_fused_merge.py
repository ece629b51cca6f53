"""The fused merge: its values by Triton's interpreter, the bytes it moves and holds,
refusals, its device code.
"""

import re
import sys

import pytest
import torch
from compiled import used
from interpreted import JOINED, join_bytes, printed, within_bounds
from ringlab import Dilated, Execution, block_patterns, estimate
from ringlab.engine.dilated import make_plan
from ringlab.kernels import fused_merge, triton_config

pytest.importorskip("triton")

TARGET = Dilated([2048, 4096, 8192], [1, 2, 4])
IN_TURN, CPU = Execution(pool=True), torch.device("cpu")


def test_bytes_of_the_target_are_those_that_were_planned():
    """bf16, 65,536 rows of 16 heads of 128: 1.25 and 0.5 times as many rows are read
    and written as out has.
    """
    read, written = join_bytes(
        make_plan(TARGET, 65536, 16, 16), 1, 65536, 16, 128, torch.bfloat16
    )
    rows = 65536 * 16
    assert (read, written) == (rows * 5 // 4 * 260, rows // 2 * 260)
    assert (round(read / 260 * 256 / 1e6), round(written / 260 * 256 / 1e6)) == (
        336,
        134,
    )


def test_what_is_held_until_the_join_is_estimated():
    """H100, bf16: out and lse of the branches after the first; in the backward their
    dq, dk and dv.
    """
    shape = {
        "seq_len": 16384,
        "heads": 16,
        "head_dim": 128,
        "dtype": torch.bfloat16,
        "profile": "h100",
    }
    out, lse = 16384 * 16 * 128 * 2, 16384 * 16 * 4
    e = estimate(TARGET, backend="sdpa", **shape)
    assert e.parts["workspace"] - (out + lse) * 3 // 4 in range(
        1 << 16
    )  # and the rows' table
    assert e.peak_bytes == 4 * out + lse + e.parts["workspace"]
    both = estimate(TARGET, backend="sdpa", passes="fwd+bwd", **shape)
    assert (
        both.parts["workspace"] >= 3 * out * 3 // 4
        and both.parts["gradients"] == 4 * out
    )
    eager = estimate(TARGET, execution=IN_TURN, backend="sdpa", **shape)
    assert 0 < eager.parts["workspace"] < e.parts["workspace"]
    # By rule the list kernels run this call, which hold nothing else; on an A100 it is
    # one merge.
    assert estimate(TARGET, **shape).parts["workspace"] == 0
    assert estimate(TARGET, **shape | {"profile": "a100"}).parts == e.parts


@pytest.mark.parametrize(
    "call",
    [
        {"profile": "gtx1080"},
        {"profile": "a100", "dtype": torch.float64},
        {"profile": "a100", "ranks": 2},
        {"profile": "a100", "pattern": block_patterns.sliding_window(1)},
    ],
    ids=str,
)
def test_where_there_is_no_merging_kernel_calls_are_merged_in_turn(call):
    call = {"pattern": TARGET, "seq_len": 16384, "backend": "sdpa"} | call
    assert estimate(**call).parts == estimate(**call, execution=IN_TURN).parts


def test_what_a_gpu_needs_for_it_is_said(monkeypatch):
    monkeypatch.setattr("ringlab.kernels.base.capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "triton", None)
    gpu = torch.device("cuda", 0)
    assert "not installed" in fused_merge.refuses(gpu, torch.bfloat16)
    monkeypatch.setitem(sys.modules, "triton", sys)
    assert fused_merge.refuses(gpu, torch.bfloat16) is None
    assert "needs a CUDA device" in fused_merge.refuses(CPU, torch.bfloat16)


# --------------------------------------------------------------------------------------
# what it computes


def test_values_equal_the_oracle_and_wrong_joins_are_found():
    found = printed("joined")
    half = [name for name in JOINED if "bfloat16" in name]
    within_bounds({name: found[name] for name in JOINED if name not in half})
    within_bounds({name: found[name] for name in half}, 2e-2)
    for wrong in ("all parts weigh alike", "a head forgotten"):
        assert min(found[wrong]["error"].values()) > 0.01


def test_it_moves_and_holds_the_bytes_that_are_computed():
    for name in ("in place", "short segments, grouped"):
        found = printed("joined")[f"bytes, {name}"]
        assert found["moved"] == found["told"] and min(found["told"]) > 0
    found = printed("joined")["held"]
    assert found["peak"] == found["told"] and found["grads"] == 3


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
def test_joins_fit_every_architecture_and_read_16_bytes_at_a_time(
    case, tmp_path, monkeypatch
):
    """(compute capability, head_dim, calls, WEIGH, OVER, heads that are summed, dtype)."""
    capability, head_dim, parts, weigh, over, group, dtype = case
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pad, lse = triton_config.padded(head_dim), "*fp32" if weigh else f"*{dtype}"
    fixed = {
        "WEIGH": weigh,
        "OVER": over,
        "GROUP": group,
        "ROWS": fused_merge.ELEMENTS // pad,
        "DIM": head_dim,
        "PAD": pad,
        "ALIGNED": 8 if head_dim % 16 else 16,
    }
    kinds = {
        "parts": (f"*{dtype}",) * parts,
        "lses": (lse,) * parts,
        "out": f"*{dtype}",
        "lse": lse,
        "table": "*i64",
        "firsts": "*i64",
    }
    found, ptx = used(fused_merge.join, kinds, fixed, capability, num_warps=4)
    assert (found["stack"], found["local"]) == (0, 0) and 0 < found["registers"] <= 255
    assert re.search(r"ld\.global\S*v4\.b32", ptx) and not re.search(
        r"ld\.global\S*b16", ptx
    )
    if over:  # in place: what stands there is read by all before one writes
        assert ptx.rindex("ld.global") < ptx.rindex("bar.sync") < ptx.index("st.global")
