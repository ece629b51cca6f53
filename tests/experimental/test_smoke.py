"""The part of the experimental tests that always runs: everything imports, the smallest
case is right, refusals.
"""

import pytest
import torch
from gluon_machine import running
from ringlab import Dense, Dilated, Execution, attention, reference
from ringlab.kernels import experimental
from ringlab.kernels.triton import TritonKernel
from ringlab.kernels.triton_config import Sizes

pytest.importorskip("triton.experimental.gluon")


def test_a_kernel_in_gluon_equals_the_oracle():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 150, 1, 16).half() for _ in range(3))
    with running():
        out, _ = TritonKernel(lambda *_: Sizes(128, 64, 4, 2, "gluon")).attend(
            q, k, v, Dense(), True, 0.25
        )
    want, _ = reference.attention(
        *(t.double() for t in (q, k, v)), Dense(), causal=True
    )
    assert (
        reference.error(out, want, 1.0)
        <= reference.tolerance(q, k, v, causal=True)["out"]
    )


def test_candidates_for_hopper_read_in_every_way():
    assert {
        x.reads for x in experimental.candidates("forward", 64, (9, 0), False)
    } == set(experimental.READS)
    assert experimental.candidates("forward", 64, (8, 0), False) == ()


def test_the_fused_merge_needs_a_gpu():
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(
        NotImplementedError,
        match=r"^merge='fused' cannot run on cpu in torch.float32: needs",
    ):
        attention(q, q, q, Dilated([4, 8], [1, 2]), execution=Execution(merge="fused"))
