"""Adapters of kernels for GPUs, on doubles with their operators' contracts: called as
the engine calls them, equal to the float64 reference.
"""

import logging
import os
import random
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from document_cases import PATTERNS as OF_DOCUMENTS
from document_cases import wrong as wrong_documents
from doubles import gpu
from matrix import BF16, F16, F32, Case, all_wrong, any_case, wrong
from random_cases import seeds
from ringlab import Dense, Dilated, Execution, attention, blocks, kernels
from ringlab.engine import ways
from ringlab.kernels import KERNELS
from ringlab.ring import contiguous

# (adapter, capability, dtypes that it takes there)
ON = [
    ("efficient", (6, 1), (F32, F16)),
    ("efficient", (7, 5), (F32, F16)),
    ("efficient", (8, 0), (F32, F16, BF16)),
    ("flash", (8, 6), (F16, BF16)),
    ("cudnn", (9, 0), (F16, BF16)),
    ("xformers", (6, 1), (F32, F16)),
    ("xformers", (8, 0), (F32, F16, BF16)),
    ("flash_attn_2", (8, 0), (F16, BF16)),
    ("flash_attn_3", (9, 0), (F16, BF16)),
    ("flash_attn_4", (9, 0), (F16, BF16)),
    ("flash_attn_4", (10, 0), (F16, BF16)),
    ("auto", (8, 0), (F32, F16, BF16)),
    ("auto", (9, 0), (F32, F16, BF16)),
]
PACKAGES = "xformers", "flash_attn_2", "flash_attn_3", "flash_attn_4"
PARTS, CASES = 8, seeds(3)  # of each part, by the adapters that take its dtype


def some_cases(part: int) -> list[Case]:
    rng, cases = random.Random(part), []
    for _ in CASES:
        case = any_case(rng)
        while case.execution.tile or (case.layout and rng.random() < 0.4):
            case = any_case(rng)  # most of the time goes there
        dtype, d = rng.choice([F32, F16, BF16]), rng.choice([8, 16])
        cases.append(replace(case, dtype=dtype, d=d))
    return cases


def missed(cases, name, capability, packages=PACKAGES) -> dict:
    """What is wrong by an adapter."""
    with gpu(capability, *packages):
        return all_wrong(replace(case, backend=name) for case in cases)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_adapter_is_the_reference_on_random_calls(part):
    """Patterns, fewer K/V heads, odd lengths, strided tensors, cotangents of lse, ranks
    and schemes.
    """
    cases, count = some_cases(part), 0
    for name, capability, dtypes in ON:
        mine = [case for case in cases if case.dtype in dtypes]
        assert not missed(mine, name, capability), (name, capability)
        count += len(mine)
    assert count >= 7 * len(CASES)  # about 2,000 by `make test-all`


@pytest.mark.parametrize("part", range(2))
def test_every_adapter_serves_documents(part):
    """Of one token too, and of lengths that leave a segment one row."""
    rng = random.Random(part)
    for name, capability, dtypes in ON:
        pattern, heads = rng.choice(OF_DOCUMENTS), rng.choice([(4, 2), (4, 4)])
        dtype = rng.choice(dtypes)
        borders = [0, 1, 2, 5, 38, 39, 71, 72]
        case = Case(pattern, 72, dtype, rng.random() < 0.5, 1, *heads, 16, backend=name)
        case = replace(case, documents={"cu_seqlens": borders})
        with gpu(capability, *PACKAGES):
            assert not (missed := wrong_documents(case)), (case, missed)


# --------------------------------------------------------------------------------------
# what a run on an H200 found, one by one


def gradients(pattern, n, dtype, name, capability, heads=4, kv_heads=4, d=64, **how):
    """(error of each result, its bound) of a call through an adapter."""
    case = Case(pattern, n, dtype, False, 1, heads, kv_heads, d, backend=name)
    case = replace(case, **{"lse_cotangent": False} | how)
    with gpu(capability, *PACKAGES):
        return wrong(case)


@pytest.mark.parametrize("name", ["efficient", "xformers"])
@pytest.mark.parametrize("dtype, capability", [(F32, (6, 1)), (F16, (7, 5))])
def test_strided_lse_and_out_are_handed_over_as_the_kernel_reads_them(
    name, dtype, capability
):
    """In fp32 the kernel refused lse, in half precision its dq and dk were wrong."""
    for pattern in (
        Dilated([32, 64], [1, 2]),
        blocks.sliding_window(1, block_size=32),
        blocks.local_global(1, 1, block_size=32),
        Dense(),
    ):
        for kv_heads in (4, 2):
            shape = {"heads": 4, "kv_heads": kv_heads}
            assert not gradients(pattern, 256, dtype, name, capability, **shape)


@pytest.mark.parametrize(
    "pattern, n",
    [
        (Dense(), 1),
        (blocks.sliding_window(0, block_size=1), 40),
        (Dilated([16, 32, 64], [1, 2, 4]), 65),
    ],
)
@pytest.mark.parametrize(
    "name", ["cudnn", "flash", "flash_attn_3", "flash_attn_4", "efficient"]
)
def test_a_row_that_sees_one_key_needs_no_kernel(pattern, n, name):
    """cuDNN refuses it."""
    assert not gradients(pattern, n, BF16, name, (9, 0))


def test_the_gradients_of_one_row_are_zero():
    q, k, v = (torch.randn(1, 1, 2, 16, requires_grad=True) for _ in range(3))
    with gpu((8, 0)):
        out = attention(q, k, v, Dense(), backend="efficient")
        out.backward(torch.randn_like(out))
    assert torch.equal(out, v) and not q.grad.any() and not k.grad.any()


def test_misaligned_rows_are_copied():
    """A slice that begins in the middle of 16 bytes."""
    wide = torch.randn(3, 1, 40, 2, 17, dtype=F16)[..., 1:].requires_grad_()
    for name, capability in (("efficient", (8, 0)), ("cudnn", (9, 0))):
        with gpu(capability):
            out = attention(*wide, Dilated([16, 32], [1, 2]), backend=name)
            out.backward(torch.ones_like(out))
        want = attention(*wide.detach().double(), Dilated([16, 32], [1, 2]))
        assert (out - want).norm() < 2e-3 * want.norm()


SEES = torch.eye(3, dtype=torch.bool)[:, [1, 0, 2]]  # the first sees what is hidden
SEES[2] = False  # and the last nothing


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "pattern, n",
    [
        (blocks.sliding_window(1, block_size=128), 300),
        (blocks.bigbird(0, 1, 1, block_size=128), 513),
        (blocks.from_mask(SEES, block_size=128), 384),
        (blocks.local_global(1, 1, block_size=128), 37),
        (Dense(), 130),
    ],
)
def test_flash_attention_4_takes_blocks_of_128_in_one_call(pattern, n, causal):
    how = {"memory": "packed", "backend": "flash_attn_4_blocks"}
    with gpu((9, 0), "flash_attn_4"):
        for kv_heads, cotangent in ((4, True), (2, False), (1, True)):
            case = Case(pattern, n, BF16, causal, 2, 4, kv_heads, 64, **how)
            assert not wrong(replace(case, lse_cotangent=cotangent))


def test_other_patterns_are_refused_by_the_kernel_of_blocks_of_128():
    q = torch.randn(1, 256, 2, 64, dtype=BF16)
    other = blocks.sliding_window(1, block_size=64)
    with gpu((9, 0), "flash_attn_4"):
        for pattern in (other, Dilated([64, 128], [1, 2])):
            with pytest.raises(NotImplementedError, match="blocks of 128, not"):
                attention(q, q, q, pattern, backend="flash_attn_4_blocks")
        for pattern in (other, replace(other, block_size=128)):
            kind = kernels.kind_of(pattern, 256, 2, 2)
            choice = kernels.choose("cpu", BF16, 64, pattern_kind=kind)
            lists = "triton" if pattern is other else "flash_attn_4_blocks"
            assert choice.name == lists
    with gpu((9, 0)):
        assert kernels.choose("cpu", BF16, 64, pattern_kind=kind).name == "triton"


@pytest.mark.parametrize("strided", [0, 1], ids=["dout", "out"])
def test_cudnn_is_given_dense_out_and_dout(strided):
    """Its graphs are kept by the strides of q, k and v alone: a second call whose dout
    or out lies otherwise would be read by the strides of the first.
    """
    q, k, v, *more = (torch.randn(1, 40, 2, 16, dtype=BF16) for _ in range(5))
    exact = [t.double() for t in (q, k, v, *more)]
    lse = KERNELS["eager"].forward(*exact[:3], False, 0.25)[1]
    want = KERNELS["eager"].backward(exact[3], *exact[:3], exact[4], lse, False, 0.25)
    with gpu((9, 0)):
        for _ in range(2):
            found = KERNELS["cudnn"].backward(
                more[0], q, k, v, more[1], lse.float(), False, 0.25
            )
            for x, y in zip(found, want):
                assert (x - y).norm() < 0.02 * y.norm()
            heads_first = more[strided].transpose(1, 2).contiguous().transpose(1, 2)
            more[strided] = heads_first


# --------------------------------------------------------------------------------------
# choices and probes


class Fails(type(KERNELS["eager"])):
    """An eager kernel that raises ``error`` until it is None."""

    name, error = "cudnn", None

    def forward(self, *args):
        if self.error is not None:
            raise self.error
        return super().forward(*args)


def test_a_failure_that_may_pass_is_raised_and_not_kept(monkeypatch):
    """Memory that ran out during a probe: the kernel was refused for good."""
    with gpu((9, 0)):
        monkeypatch.setitem(KERNELS, "cudnn", failing := Fails())
        failing.error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        ask = ("cpu", BF16, 64)
        with pytest.raises(torch.OutOfMemoryError):
            kernels.choose(*ask)
        failing.error = None
        assert kernels.choose(*ask).name == "cudnn"


def test_auto_says_once_which_faster_kernel_failed(monkeypatch, caplog):
    with gpu((6, 1)), caplog.at_level(logging.WARNING, "ringlab"):
        monkeypatch.setitem(KERNELS, "efficient", failing := Fails())
        failing.error = RuntimeError("no kernel image is available")
        for _ in range(3):
            assert kernels.choose("cpu", F32, 64).name == "eager"
            kernels._kept_choice.cache_clear()
    (line,) = (r.message for r in caplog.records if "without efficient" in r.message)
    assert "RuntimeError: no kernel image is available" in line


@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_a_probe_under_autocast_judges_the_kernel_alone(backend):
    kernels.forget_probes()
    with torch.autocast("cpu", torch.bfloat16):
        first = kernels.choose("cpu", F32, 16, backward=True, backend=backend)
    kernels.forget_probes()
    assert first.name == kernels.choose("cpu", F32, 16, backend=backend).name


@pytest.mark.parametrize("name, widest", [("cudnn", 128), ("flash", 256)])
def test_a_kernel_is_chosen_for_the_head_dim_that_it_gets(name, widest):
    """A gradient of lse makes heads 8 wider: beyond the limit of a kernel it is refused
    in one line, or "auto" takes another one.
    """
    case = Case(Dense(), 24, BF16, False, 1, 2, 2, widest, backend=name)
    with gpu((9, 0)):
        assert not wrong(replace(case, lse_cotangent=False))
        for layout in (None, contiguous(24, 2)):
            with pytest.raises(NotImplementedError, match=f"not {widest + 8}"):
                wrong(replace(case, layout=layout))
            assert not wrong(replace(case, layout=layout, backend="auto"))


def by_pointer(t: torch.Tensor) -> torch.Tensor:
    """What is read where a dense tensor of this shape is expected."""
    return t.as_strided(t.shape, torch.empty(t.shape).stride())


class Careless(type(KERNELS["eager"])):
    """Eager kernels with one fault that the engine's calls meet."""

    name = "careless"

    def __init__(self, fault: str):
        super().__init__()
        self.fault = fault

    def forward(self, q, k, v, causal, scale, bias=None):
        if self.fault == "one row" and q.shape[1] == 1:
            raise RuntimeError("s_q = s_kv = 1 is not supported")
        if self.fault == "few rows" and q.shape[1] % 2:
            q = q.flip(1)
        if self.fault == "strided rows":
            q = by_pointer(q)
        return super().forward(q, k, v, causal, scale, bias)

    def backward(self, dout, q, k, v, out, lse, causal, scale, bias=None):
        if self.fault == "strides of lse":
            lse = by_pointer(lse)
        if self.fault == "dtype of out" and out.dtype != q.dtype:
            raise RuntimeError("query and out must have the same dtype")
        if self.fault == "out of the softmax":
            out, lse = self.forward(q, k, v, causal, scale)
        return super().backward(dout, q, k, v, out, lse, causal, scale, bias)


@pytest.mark.parametrize(
    "fault",
    [
        "one row",
        "few rows",
        "strided rows",
        "strides of lse",
        "dtype of out",
        "out of the softmax",
    ],
)
def test_the_probe_calls_a_kernel_as_the_engine_does(monkeypatch, fault):
    monkeypatch.setitem(KERNELS, "careless", Careless(fault))
    kernels.forget_probes()
    try:
        ask = torch.device("cpu"), BF16, 16, False, True
        why = kernels.probe("careless", *ask)
        assert why and ("wrong result" in why or "RuntimeError" in why)
    finally:
        kernels.forget_probes()


# --------------------------------------------------------------------------------------
# one merge

ONE_MERGE = """
import random
from dataclasses import replace
from doubles import gpu
from matrix import F16, any_case, wrong
from ringlab import Dilated, Execution
from ringlab.kernels import fused_merge

runs = {"forward": 0, "backward": 0}
for name in runs:
    def counted(*args, run=getattr(fused_merge, name), name=name):
        runs[name] += 1
        return run(*args)
    setattr(fused_merge, name, counted)
rng, missed, tried = random.Random(0), [], 0
while tried < 30:
    case = any_case(rng)
    if case.layout or case.n > 90 or not isinstance(case.pattern, Dilated):
        continue
    plain = {"execution": Execution(), "backend": "auto"}
    case = replace(case, dtype=F16, d=rng.choice([8, 16]), **plain)
    with gpu(rng.choice([(8, 0), (9, 0)])):
        found = wrong(case)
    tried += 1
    missed += [(case, found)] if found and not wrong(case) else []
print(runs["forward"], runs["backward"], missed)
"""


def test_one_merge_of_the_adapters_calls_is_the_reference():
    """As "auto" runs dilated patterns: flash and cuDNN on doubles, the merging kernel in
    Triton's interpreter.
    """
    pytest.importorskip("triton")
    env = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", ONE_MERGE]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    forward, backward, missed = done.stdout.split(maxsplit=2)
    assert int(forward) >= 15 and int(backward) >= 15 and missed.strip() == "[]"


def merged(monkeypatch, **how):
    """out and gradients where "auto" would take one merge, which runs out of memory."""

    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    module = SimpleNamespace(forward=fails, backward=fails, refuses=lambda *_: None)
    monkeypatch.setattr(ways, "_merge_works", lambda *_: True)
    monkeypatch.setattr(ways, "_fused_merge", lambda: module)
    case = Case(Dilated([16, 64], [1, 2]), 64, BF16, False, 1, 4, 4, 16)
    with gpu((8, 0)):
        return wrong(replace(case, execution=Execution(**how)))


def test_where_one_merge_is_out_of_memory_calls_are_merged_in_turn(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, "ringlab"):
        assert not merged(monkeypatch)
    assert sum("merged in turn" in r.message for r in caplog.records) == 2


def test_branch_by_branch_is_branch_by_branch_on_a_gpu(monkeypatch, caplog):
    assert not merged(monkeypatch, pool=True)
    assert not caplog.records


@pytest.mark.parametrize("error", [KeyError("x"), Exception("PTXASError")])
def test_whatever_a_kernel_raises_its_probe_says_it(monkeypatch, error):
    """Triton's errors derive from Exception alone."""
    monkeypatch.setitem(KERNELS, "cudnn", failing := Fails())
    failing.error = error
    kernels.forget_probes()
    try:
        why = kernels.probe("cudnn", torch.device("cpu"), F32, 16, False, False)
        assert why.startswith(f"{type(error).__name__}: ")
    finally:
        kernels.forget_probes()


def test_the_rules_hold_in_a_tuple_of_backends_too():
    with gpu((9, 0)):
        ask = {"pattern_kind": "blocks"}
        for backend in ("auto", ("auto", "eager"), ("flash_attn_2", "auto")):
            choice = kernels.choose("cpu", BF16, 64, backend=backend, **ask)
            assert choice.name == "triton"
        choice = kernels.choose("cpu", BF16, 64, backend=("flash", "auto"), **ask)
        assert (choice.name, choice.rule) == ("flash", None)
