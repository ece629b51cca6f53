"""Other ways of reading than by pointers, without a GPU.

Descriptors: values by Triton's interpreter. Gluon: values and protocol on a small
machine. Device code: compiled.
"""

import re
import subprocess
from dataclasses import replace

import pytest
import torch
from compiled import fed, fits, resources
from gluon_machine import SOURCE, Hazard, running
from interpreted import DESCRIBED, printed, within_bounds
from matrix import NAMES, Case, errors, judged
from ringlab import Dense, Dilated, block_patterns
from ringlab.kernels import experimental, tile_schedule, triton
from ringlab.kernels.triton import TritonKernel
from ringlab.kernels.triton_config import TILE_PASSES, Sizes, Use

pytest.importorskip("triton.experimental.gluon")

BF16, F16 = torch.bfloat16, torch.float16
LADDER = Dilated([256, 512], [1, 2])  # its branches fold, see ``fold``
# the call, columns of a tile, stages, how it runs
CASES = {
    "folded": (Case(LADDER, 1024, F16, heads=2), 64, 2, "gluon"),
    "folded, causal, grouped, a last segment that ends early": (
        Case(LADDER, 922, BF16, True, heads=2, kv_heads=1),
        64,
        3,
        "persistent",
    ),
    "one branch, batch": (
        Case(Dilated([512], [2]), 1000, F16, True, 2, heads=2, d=32),
        32,
        2,
        "persistent",
    ),
    "a last tile that is not full": (
        Case(Dilated([320], [1]), 900, F16, heads=2, kv_heads=1),
        128,
        2,
        "persistent",
    ),
    "head groups": (
        Case(
            Dilated([512, 1024], [2, 2], "head_groups"), 1024, F16, heads=3, kv_heads=1
        ),
        64,
        2,
        "gluon",
    ),
    "dense, causal": (
        Case(Dense(), 300, BF16, True, heads=1, kv_heads=1),
        64,
        2,
        "persistent",
    ),
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
        "gluon",
    ),
}


@pytest.fixture(autouse=True)
def fold(monkeypatch):
    """Fold branches whose pieces hold one tile of queries: short sequences have what
    long ones have.
    """
    monkeypatch.setattr(tile_schedule, "LONG", 1)


def row_sums(dout, out, dlse):
    return ((dout.float() * out).sum(3).transpose(1, 2) - dlse).contiguous()


def run(monkeypatch, case, change=lambda source: source, seed=0):
    """For each result, its error over what is allowed."""
    case, cols, stages, reads = CASES[case]
    monkeypatch.setattr(triton, "row_sums", row_sums)
    (q, k, v), dout, dlse, want, bound = judged(replace(case, seed=seed % 2))
    call = case.pattern, case.causal
    kernel = TritonKernel(lambda *_: Sizes(128, cols, 4, stages, reads))
    for name in TILE_PASSES:
        (launch,) = kernel.launches(
            name, (q, k, v) if name == "forward" else (dout, q, k, v), *call
        )
        assert launch.why is None and launch.size.reads == reads
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
    for seed in range(3):
        found = run(monkeypatch, case, seed=seed)
        assert max(found.values()) <= 1, found


CODE, FORWARD, BACKWARD = re.split(r"(?=@gluon.jit\ndef _(?:forward|dq)_step)", SOURCE)
FOLDED, CAUSAL, SHORT = "folded", "dense, causal", "one branch, batch"
PARTIAL = "folded, causal, grouped, a last segment that ends early"
GROUPED = "block-sparse, grouped, queries that see nothing"
WAIT = "    mbarrier.wait(barriers.index(KIND * STAGES + nth % STAGES), nth // STAGES & 1)\n"
WHOLE = "        whole = gl.minimum(full, last)\n"
VISIBLE = "visible(tile, entry, packed, s, WHICH, STEP, CAUSAL, SCORES)"
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
    "queries are freed before the last scores": (
        FORWARD,
        WHOLE,
        WHOLE + "        free(barriers, turn * STAGES, OWN_FREE)\n",
        SHORT,
    ),
    "a slot of keys is never freed": (
        FORWARD,
        "        free(barriers, nth + 1, A_FREE)\n",
        "",
        SHORT,
    ),
    "each pair counts once": (FORWARD, "(shift - bonus)", "shift", FOLDED),
    "no query is masked": (
        FORWARD,
        f'gl.where({VISIBLE}, s, float("-inf"))',
        "s",
        CAUSAL,
    ),
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


@pytest.mark.parametrize(
    "name, head_dim, reads",
    [
        ("forward", 64, "descriptors"),
        ("forward", 64, "specialized"),
        ("backward_kv", 64, "descriptors"),
        ("forward", 128, "gluon"),
        ("backward_q", 64, "gluon"),
        ("backward_kv", 128, "gluon"),
    ],
)
def test_device_code_fits_and_computes_while_products_run(
    name, head_dim, reads, tmp_path, monkeypatch
):
    """A sample; RINGLAB_SWEEP=1 compiles every candidate, in test_triton."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    size = next(
        x
        for x in experimental.candidates(name, head_dim, (9, 0), False)
        if x.reads == reads
    )
    found = resources(name, 90, head_dim, size)
    assert fits(found, 90) and fed(name, found, size)


def test_what_the_kernels_in_gluon_cannot_serve_is_refused():
    kernel, q = (
        TritonKernel(lambda *_: Sizes(128, 64, 4, 2, "gluon")),
        torch.zeros(1, 256, 2, 16, dtype=F16),
    )

    def why(pattern, t=q):
        return [
            one.why for one in kernel.launches("forward", (t, t, t), pattern, False)
        ]

    assert why(Dense()) == [None]
    assert why(Dilated([128, 256], [1, 2])) == [
        None,
        "the kernels in Gluon start from nothing",
    ]
    many = torch.zeros(1, 1, 1, 1, dtype=F16).expand(1 << 15, 256, 1 << 9, 16)
    assert "count rows" in experimental.unfit(
        Sizes(128, 64, 4, 2, "gluon"), None, (many,)
    )


USE = Use.of("forward", 64, F16, True, False, 1)
SIZE = Sizes(128, 128, 4, 3, "gluon")


def test_a_first_run_happens_elsewhere_and_its_end_is_told(monkeypatch):
    assert "a first run ended with status 1" in experimental.trial(
        USE, SIZE, torch.device("cpu")
    )  # Triton needs a GPU

    def hangs(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(experimental.subprocess, "run", hangs)
    assert experimental.trial(USE, SIZE, torch.device("cpu")).startswith("hangs: ")


def test_the_first_run_of_a_kernel_in_gluon_finds_a_wrong_one():
    found = printed("variants")["first run"]
    assert found["right"] == [None] * 3 and found["wrong"].startswith(
        "wrong result: off by "
    )
    assert found["unfit"] == "the kernels in Gluon start from nothing"


def test_descriptors_give_the_values_of_the_oracle_and_are_used_where_they_can_be():
    found = printed("variants")
    within_bounds({name: found[name] for name in DESCRIBED})
    asked = {
        name: {name.split(",")[0], *["pointers"] * name.startswith("specialized")}
        for name in DESCRIBED
    }
    asked |= {
        "descriptors, odd length": {"pointers"}
    }  # the backward of "specialized" reads by pointers
    assert {name: set(found[name]["reads"]) for name in DESCRIBED} == asked
    wrong = found["neighbours in place of a class"]
    assert min(wrong["error"].values()) > 0.01 and wrong["reads"] == ["descriptors"]


def test_descriptors_are_asked_for_what_they_cannot_read():
    size, q = Sizes(16, 16, 4, 1, "descriptors"), torch.randn(1, 64, 2, 16)
    pattern = Dilated([32, 64], [1, 2])

    def why(q, pattern=pattern, size=size):
        kernel = TritonKernel(lambda *_: size)
        one, *more = kernel.launches("forward", (q, q, q), pattern, False)
        assert not more and (one.size.reads == "pointers") == (one.why is not None)
        return one.why

    assert why(q) is None
    assert "are no block" in why(q[:, :63])
    assert "are no block" in why(q, Dilated([32, 32], [1, 2], "head_groups"))
    assert "shorter than tiles of 32 x 16" in why(
        q, Dilated([16], [1]), Sizes(32, 16, 4, 1, "descriptors")
    )
    assert "head_dim of 2 to some power" in why(torch.randn(1, 64, 2, 24))
    assert "strides of 16 bytes" in why(torch.randn(1, 64, 2, 18)[..., :16])
    assert "strides of 16 bytes" in why(torch.randn(1, 64, 1, 16).expand(1, 64, 2, 16))
    assert "strides of 16 bytes" in why(
        torch.randn(1 + 64 * 2 * 16)[1:].view(1, 64, 2, 16)
    )
