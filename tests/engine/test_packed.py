"""Packed sequences and padded batches: each document is the answer that it has alone."""

import random
from dataclasses import replace

import pytest
import torch
from document_cases import drawn_case, spans_of, wrong
from matrix import BLOCK_SPARSE, DILATED, F32, Case, drawn
from random_cases import seeds
from refusals import refused
from ringlab import Dense, Execution, Simulated, attention
from ringlab.engine import documents
from ringlab.engine.autograd import forward
from ringlab.engine.ways import LocalCall
from ringlab.ring import contiguous


@pytest.mark.parametrize("seed", range(6))
def test_every_document_is_attended_as_if_it_stood_alone(seed, monkeypatch):
    """Random patterns, borders, heads, dtypes and ways to run; short documents copied
    or not.
    """
    rng = random.Random(seed)
    monkeypatch.setattr(documents, "COPIED", 1024 if seed % 2 else 0)
    documents._documents.cache_clear()
    for i in seeds(5):
        case = replace(drawn_case(rng), sinks=i % 3 == 0)
        assert not (missed := wrong(case)), (case, missed)
    documents._documents.cache_clear()


BORDERS = {"cu_seqlens": [0, 30, 60, 71, 101, 115]}  # of 120 rows


@pytest.mark.parametrize("pattern", [Dense(), DILATED[0], BLOCK_SPARSE[0]], ids=str)
@pytest.mark.parametrize(
    "documents, layout",
    [
        (BORDERS, None),
        ({"lengths": [120, 50, 0, 50]}, None),
        (BORDERS, contiguous(120, 3)),  # whose borders cut two documents
    ],
    ids=str,
)
def test_nothing_leaks_between_documents_or_out_of_the_padding(
    pattern, documents, layout
):
    """NaN in two documents, in the padding or behind the last document leaves every
    other row bitwise the same, gradients too; rows of no document give nothing.
    """
    packed = "cu_seqlens" in documents
    case = Case(
        pattern,
        120,
        F32,
        batch=1 if packed else 4,
        layout=layout,
        scheme="plan",
        documents=documents,
    )
    inputs, dout, dlse = drawn(case)
    clean = case.run(inputs, dout, dlse)
    dead = torch.ones(inputs[0].shape[:2], dtype=torch.bool)  # rows that hold NaN
    for i, a, b in spans_of(documents):
        dead[i, a:b] = False
    none = dead.clone()
    if packed:
        dead[0, 30:71] = True
    stained = [
        t.masked_fill(dead[:, :, None, None], torch.nan) for t in (*inputs, dout)
    ]
    found = case.run(stained[:3], stained[3], dlse)
    for name, t in clean.items():
        mask = dead[:, None, :] if name == "lse" else dead[:, :, None, None]
        assert torch.equal(found[name].masked_fill(mask, 0), t.masked_fill(mask, 0)), (
            name
        )
    gradients = (found[name][none] for name in ("out", "dq", "dk", "dv"))
    assert none.any() and not torch.cat([*gradients], 1).any()
    assert (found["lse"].transpose(1, 2)[none] == -torch.inf).all()


@pytest.mark.parametrize("pattern", [DILATED[0], BLOCK_SPARSE[12]])
def test_equal_documents_are_the_batch_bit_for_bit(pattern):
    q, k, v = (torch.randn(4, 32, 2, 16) for _ in range(3))
    want = attention(q, k, v, pattern)
    flat = (t.flatten(0, 1)[None] for t in (q, k, v))
    packed = attention(*flat, pattern, cu_seqlens=range(0, 129, 32))
    assert torch.equal(packed.view(want.shape), want)
    assert torch.equal(attention(q, k, v, pattern, lengths=[32] * 4), want)


Q = torch.zeros(1, 16, 2, 8)


@pytest.mark.parametrize(
    "how, error, message",
    [
        (
            {"cu_seqlens": [0, 9, 5, 16]},
            ValueError,
            "must ascend from 0 to at most the sequence length 16, got .0, 9, 5, 16.",
        ),
        ({"cu_seqlens": [1, 16]}, ValueError, "must ascend from 0"),
        ({"cu_seqlens": [0, 17]}, ValueError, "at most the sequence length 16"),
        ({"cu_seqlens": [0]}, ValueError, "must ascend from 0"),
        ({"cu_seqlens": [0, 4.5, 16]}, TypeError, "1-D tensor or a list of integers"),
        ({"cu_seqlens": 16}, TypeError, "1-D tensor or a list of integers"),
        (
            {"cu_seqlens": torch.tensor([0.0, 16.0])},
            ValueError,
            "1-D tensor of int32 or int64, got torch.float32",
        ),
        ({"cu_seqlens": torch.tensor([[0, 16]])}, ValueError, "of shape .1, 2."),
        (
            {"cu_seqlens": torch.tensor([0, 16], device="meta")},
            ValueError,
            "on the CPU or on cpu, got meta",
        ),
        ({"lengths": [17]}, ValueError, "1 numbers of 0 to 16 rows"),
        ({"lengths": [3, 4]}, ValueError, "1 numbers of 0 to 16 rows"),
        ({"lengths": [-1]}, ValueError, "0 to 16 rows"),
        ({"lengths": [3], "cu_seqlens": [0, 16]}, ValueError, "not both"),
        (
            {"q": Q.expand(2, -1, -1, -1), "cu_seqlens": [0, 16]},
            ValueError,
            "needs a batch of 1, got 2",
        ),
        (
            {"cu_seqlens": [0, 16], "group": Simulated(2), "layout": "striped"},
            ValueError,
            "not a striped one",
        ),
    ],
)
def test_wrong_borders_and_lengths_are_refused_in_one_line(how, error, message):
    q = how.pop("q", Q)
    with refused(error, match=message):
        attention(q, q, q, Dense(), **how)


@pytest.mark.parametrize("backend", ["auto", "cpu_flash"])
def test_rows_of_no_document_have_no_sink(backend):
    """As a rank has them, of whose documents others have a part."""
    q, sinks = torch.randn(1, 12, 2, 8), torch.ones(2)
    held = documents.Documents(((0, 2, 5), (0, 5, 9)), 12)
    options = {"backend": backend, "documents": held, "execution": Execution()}
    call = LocalCall(Dense(), True, 0.3, **options)
    _, lse = forward(q, q, q, sinks, call)
    assert lse.isfinite().all((0, 1)).tolist() == [2 <= i < 9 for i in range(12)]


class OnGpu:
    """A tensor of two integers on a GPU, each reading of which is counted."""

    device, is_cuda = torch.device("cuda", 0), False  # no stream that captures

    def __init__(self):
        self.tensor, self.readings = torch.tensor([0, 4]), 0

    def __getattr__(self, name):
        return getattr(self.tensor, name)

    def tolist(self):
        self.readings += 1
        return self.tensor.tolist()


def test_borders_on_a_gpu_are_read_once_and_again_when_they_were_written():
    borders = OnGpu()
    for value in (4, 7):
        borders.tensor[1] = value
        for _ in range(3):
            assert documents.values_of(borders) == [0, value]
    assert borders.readings == 2
    with torch.inference_mode():
        borders = OnGpu()
    for _ in range(3):
        documents.values_of(borders)
    assert borders.readings == 3
