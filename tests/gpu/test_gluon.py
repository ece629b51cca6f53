"""The Gluon kernels without a GPU: values and protocol on a small machine, refusals."""

import re
from dataclasses import replace

import pytest
import torch
from gluon_machine import SOURCE, Hazard, running
from matrix import NAMES, Case, errors, judged
from ringlab import Dense, Dilated, block_patterns
from ringlab.kernels import gluon, tile_schedule, triton, triton_config
from ringlab.kernels.triton import TritonKernel
from ringlab.kernels.triton_config import LOG2E, TILE_PASSES, Sizes

pytest.importorskip("triton.experimental.gluon")

BF16, F16 = torch.bfloat16, torch.float16
LADDER = Dilated([256, 512], [1, 2])  # its branches fold, see ``fold``
# the call, columns of a tile, stages
CASES = {
    "folded": (Case(LADDER, 1024, F16, heads=2), 64, 2),
    "folded, causal, grouped, a last segment that ends early": (
        Case(LADDER, 922, BF16, True, heads=2, kv_heads=1),
        64,
        3,
    ),
    "one branch, batch": (
        Case(Dilated([512], [2]), 520, F16, True, 2, heads=2, d=32),
        32,
        2,
    ),
    "a last tile that is not full": (
        Case(Dilated([320], [1]), 900, F16, heads=2, kv_heads=1),
        128,
        2,
    ),
    "head groups": (
        Case(
            Dilated([512, 1024], [2, 2], "head_groups"), 1024, F16, heads=3, kv_heads=1
        ),
        64,
        2,
    ),
    "dense, causal": (Case(Dense(), 300, BF16, True, heads=1, kv_heads=1), 64, 2),
    "block-sparse, grouped, queries that see nothing": (
        Case(
            block_patterns.from_mask(
                torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 1]]) > 0, block_size=128
            ),
            384,
            F16,
            True,
            heads=2,
            kv_heads=1,
        ),
        128,
        2,
    ),
}


@pytest.fixture(autouse=True)
def fold(monkeypatch):
    """Fold branches whose pieces hold one tile of queries: short sequences have what
    long ones have.
    """
    monkeypatch.setattr(tile_schedule, "MIN_TILES", 1)


def row_sums(dout, out, lse, dlse, cached):
    less = ((dout.float() * out).sum(3).transpose(1, 2) - dlse).contiguous()
    return torch.where(lse == -torch.inf, torch.inf, lse * LOG2E), less


def run(monkeypatch, case, change=lambda source: source, seed=0):
    """For each result, its error over what is allowed."""
    case, cols, stages = CASES[case]
    monkeypatch.setattr(triton, "row_sums", row_sums)
    (q, k, v), dout, dlse, want, bound = judged(replace(case, seed=seed % 2))
    call = case.pattern, case.causal
    size = Sizes(128, cols, 4, stages, "gluon")
    monkeypatch.setattr(triton_config, "sizes", lambda kind: size)
    kernel = TritonKernel()
    for name in TILE_PASSES:
        (launch,) = kernel.launches(
            name, (q, k, v) if name == "forward" else (dout, q, k, v), *call
        )
        assert launch.size.reads == "gluon"
    with running(change, seed):
        out, lse = kernel.attend(q, k, v, *call, case.d**-0.5)
        got = (
            out,
            lse,
            *kernel.gradients(dout, dlse, q, k, v, out, lse, *call, case.d**-0.5),
        )
    found = errors(dict(zip(NAMES, got)), want, q, k, dout)
    return {name: found[name] / bound[name] for name in found}


@pytest.mark.parametrize("case", CASES)
def test_values_equal_the_oracle_whatever_the_order_of_events(monkeypatch, case):
    for seed in range(2):
        found = run(monkeypatch, case, seed=seed)
        assert max(found.values()) <= 1, found


CODE, FORWARD, BACKWARD = re.split(r"(?=@gluon.jit\ndef _(?:forward|dq)_step)", SOURCE)
FOLDED, CAUSAL, SHORT = "folded", "dense, causal", "one branch, batch"
PARTIAL = "folded, causal, grouped, a last segment that ends early"
GROUPED = "block-sparse, grouped, queries that see nothing"
WAIT = "    mbarrier.wait(barriers.index(KIND * STAGES + nth % STAGES), nth // STAGES & 1)\n"
SEEN = """        s = gl.where(
            visible(tile, entry, packed, s, WHICH, STEP, CAUSAL, SCORES),
            s,
            float("-inf"),
        )
"""
# part of the source, what is changed in it, to what -> the case that shows it
MUTANTS = {
    "a phase too early": (CODE, WAIT, WAIT.replace("& 1", "& 1 ^ 1"), SHORT),
    "one group frees a slot for both": (CODE, "count=1 + kind % 2", "count=1", SHORT),
    "whole entries are taken for partial ones": (
        CODE,
        "i < full, partial + i,",
        "i < full, i,",
        PARTIAL,
    ),
    "neighbours in place of a class": (
        CODE,
        "[batch, first % STEP, head,",
        "[batch, 0, head,",
        SHORT,
    ),
    "queries of the group's first head": (
        CODE,
        "+ (gl.load(entry + 1) >> MEMBER_AT)",
        "",
        GROUPED,
    ),
    "scores are not waited for": (
        FORWARD,
        "        s, acc = warpgroup_mma_wait(0, [following, acc])\n",
        "        s = following\n",
        SHORT,
    ),
    "a slot of keys is never freed": (
        FORWARD,
        "        free(barriers, nth + 1, A_FREE)\n",
        "",
        SHORT,
    ),
    "each pair counts once": (FORWARD, "(shift - bonus)", "shift", FOLDED),
    "no query is masked": (FORWARD, SEEN, "        s = s\n", CAUSAL),
    "dq: keys are freed before their sum": (
        BACKWARD,
        "    acc = weighted(",
        "    free(barriers, nth, A_FREE)\n    acc = weighted(",
        SHORT,
    ),
    "dk: products with V are not waited for": (
        BACKWARD,
        "mma_wait(1, [dp])",
        "mma_wait(2, [dp])",
        SHORT,
    ),
    "dk: row sums of another head": (
        BACKWARD,
        "rows + (packed >> MEMBER_AT) * n + other",
        "rows + other",
        GROUPED,
    ),
    "dk: each pair counts once": (
        BACKWARD,
        'other=float("inf")) - bonus_of(packed)',
        'other=float("inf"))',
        FOLDED,
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_kernel_is_found(monkeypatch, mutant):
    part, old, new, case = MUTANTS[mutant]
    assert part.count(old) == 1
    for seed in range(5):
        try:
            found = run(
                monkeypatch,
                case,
                lambda source: source.replace(part, part.replace(old, new)),
                seed,
            )
        except Hazard as why:
            print(seed, why)
            return
        print(found)
        if not max(found.values()) <= 10:
            return
    raise AssertionError(f"not found: {mutant}: {found}")


def test_what_the_kernels_cannot_serve_is_refused_and_pointers_are_read(monkeypatch):
    q = torch.randn(1, 512, 2, 16).half()
    size = Sizes(128, 64, 4, 2, "gluon")
    ladder, unfit = Dilated([256, 512], [1, 2]), gluon.unfit

    def why(q=q, pattern=ladder, size=size):
        reasons = []
        monkeypatch.setattr(
            gluon, "unfit", lambda *call: reasons.append(unfit(*call)) or reasons[-1]
        )
        monkeypatch.setattr(triton_config, "sizes", lambda kind: size)
        launches = TritonKernel().launches("forward", (q, q, q), pattern, False)
        reads = ["gluon" if reason is None else "pointers" for reason in reasons]
        assert [launch.size.reads for launch in launches] == reads
        return reasons[-1]

    assert why() is None
    assert (
        why(pattern=Dilated([128, 256], [1, 2]))
        == "the Gluon kernels start from nothing"
    )
    assert "no band" in why(pattern=block_patterns.sliding_window(tokens=300))
    assert "are no block" in why(q[:, :511])
    assert "are no block" in why(pattern=Dilated([256, 256], [1, 2], "head_groups"))
    assert "shorter than tiles of 128 x 64" in why(pattern=Dilated([64], [1]))
    wide = torch.randn(1, 512, 2, 18).half()
    assert "strides of 16 bytes" in why(wide[..., :16])
    assert "strides of 16 bytes" in why(q[:, :, :1].expand(1, 512, 2, 16))
    shifted = torch.randn(1 + q.numel()).half()[1:].view(q.shape)
    assert "strides of 16 bytes" in why(shifted)
    many = torch.zeros(1, 1, 1, 1).half().expand(1 << 15, 256, 1 << 9, 16)
    assert "count rows" in gluon.unfit(size, None, (many,), False)
