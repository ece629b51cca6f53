"""What only a GPU can show: every kernel that runs there against the oracle, graphs,
memory that runs out, ranks.

`RINGLAB_TEST_DEVICE=cpu` runs what a CPU can of it.
"""

import os
from dataclasses import replace

import pytest
import torch
from document_cases import wrong as wrong_documents
from matrix import Case, errors, judged, wrong
from ring_cases import parity
from ringlab import (
    Dense,
    Dilated,
    Execution,
    OOMBackoff,
    attention,
    block_patterns,
    kernels,
    reference,
)
from ringlab.kernels import fused_merge, triton, triton_config
from ringlab.measure import Point, systems
from ringlab.memory import MemoryPool
from ringlab.nn import DecoderBlock
from ringlab.ring import contiguous, zigzag
from ringlab.ring.launch import launch

DEVICE = torch.device(os.environ.get("RINGLAB_TEST_DEVICE", "cuda"))
GPU = DEVICE.type == "cuda"
if GPU and not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
gpu_only = pytest.mark.skipif(not GPU, reason="needs a GPU")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Segments that keep 128 rows or more of a class, so that the kernels take the tiles
# that long sequences take.
FOLDED = Dilated([256, 512, 1024], [1, 2, 4])


FIRST_TOKENS = block_patterns.BlockSparse(
    [block_patterns.Window(255), block_patterns.Global(4, rows=False)], 1
)


def kernel_for(name: str, dtype, head_dim: int) -> kernels.Kernel:
    """The kernel of this name, or a skipped test that says why it does not serve these
    here.
    """
    why = kernels.KERNELS[name].refuses(DEVICE, dtype, head_dim)
    if why is not None:
        pytest.skip(f"{name}: {why}")
    return kernels.KERNELS[name]


def draw(*shape, dtype, seed: int) -> torch.Tensor:
    """Random (b, n, h, d), the same for each seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(
        DEVICE, dtype
    )


def part(t: torch.Tensor) -> torch.Tensor:
    """The same as a part of wider rows, as q is of a product that makes q, k and v. A
    read past a row gives NaN.
    """
    b, n, h, d = t.shape
    return torch.full((b, n, 3, h, d), torch.nan, device=t.device, dtype=t.dtype)[
        :, :, 1
    ].copy_(t)


def needs_merge(dtype) -> None:
    """Skip, with the reason, where no kernel joins the results of calls."""
    if why := fused_merge.refuses(DEVICE, dtype):
        pytest.skip(why)


def missed(lay=lambda t: t, **changes) -> dict:
    """The error and the bound of each result of a call on ``DEVICE`` that misses it;
    ``lay`` lays tensors out.
    """
    usual = {"pattern": FOLDED, "n": 1031, "dtype": BF16, "d": 64}
    return wrong(Case(**usual | {"lse_cotangent": False} | changes), DEVICE, lay)


# --------------------------------------------------------------------------------------
# kernels


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_every_kernel_that_is_not_refused_passes_its_probe(dtype, causal):
    wrong = {}
    for head_dim in (32, 64, 128, 256):
        for name, runs, why, _ in kernels.table(DEVICE, dtype, head_dim, causal=causal):
            if (
                not runs
                and kernels.KERNELS[name].refuses(DEVICE, dtype, head_dim) is None
            ):
                wrong[name, head_dim] = why
    assert wrong == {}


@pytest.mark.parametrize(
    "dtype, d, causal",
    [
        (BF16, 32, True),
        (BF16, 64, False),
        (BF16, 80, True),
        (BF16, 128, True),
        (BF16, 256, False),
        (F16, 64, True),
        (F16, 128, False),
        (F32, 64, False),
        (F32, 128, True),
    ],
)
@pytest.mark.parametrize("name", kernels.KERNELS)
def test_a_kernel_runs_a_pattern_as_the_oracle_does(name, dtype, d, causal):
    """Branches that fold, of an odd length, with K/V heads that serve two heads each."""
    kernel_for(name, dtype, d)
    assert not missed(dtype=dtype, d=d, causal=causal, backend=name)


@pytest.mark.parametrize("lay", [torch.clone, part])
@pytest.mark.parametrize(
    "name, dtype, d, causal",
    [
        ("cudnn", BF16, 128, True),
        ("cudnn", F16, 64, False),
        ("flash", BF16, 256, True),
        ("efficient", F32, 64, False),
    ],
)
def test_one_join_of_a_kernels_results_is_the_oracles(name, dtype, d, causal, lay):
    kernel_for(name, dtype, d)
    needs_merge(dtype)
    how = {"dtype": dtype, "d": d, "causal": causal, "backend": name}
    assert not missed(lay, batch=2, **how)
    assert not missed(
        lay,
        pattern=Dilated([384, 768], [3, 2], offsets="branch"),
        n=1024,
        kv_heads=4,
        **how,
    )


@pytest.mark.parametrize("name", kernels.KERNELS)
def test_a_kernels_log_sum_exp_and_its_backward_with_the_final_one(name):
    """Keys in two unequal parts, read by stride: gradients by the merged (out, lse) are
    those of the whole.
    """
    kernel, (m, h, d) = kernel_for(name, BF16, 64), (320, 3, 64)
    q, k, v, dout = (draw(2, 2 * m, h, d, dtype=BF16, seed=i)[:, ::2] for i in range(4))
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    want_out, want_lse = reference.attention(*exact, Dense())
    want = torch.autograd.grad(want_out, exact, dout.double())
    bound, floor = (
        reference.tolerance(q, k, v, dout),
        reference.gradient_floor(q, k, dout),
    )
    parts = [(k[:, some], v[:, some]) for some in (slice(0, 128), slice(128, m))]
    lses = [kernel.forward(q, *part, False, d**-0.5)[1] for part in parts]
    assert all((tuple(lse.shape), lse.dtype) == ((2, h, m), F32) for lse in lses)
    assert reference.error(torch.logaddexp(*lses), want_lse, 1.0) <= bound["lse"]
    final = want_out.detach().to(BF16), want_lse.detach().float()
    dqs, dks, dvs = zip(
        *(kernel.backward(dout, q, *part, *final, False, d**-0.5) for part in parts)
    )
    found = {
        "dq": dqs[0].float() + dqs[1],
        "dk": torch.cat(dks, 1),
        "dv": torch.cat(dvs, 1),
    }
    for (what, mine), ref in zip(found.items(), want):
        assert reference.error(mine, ref, floor) <= bound[what], what


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [
        Dilated([256, 512], [1, 2], offsets="kv_head"),
        Dilated([256, 512], [1, 2], "head_groups", "branch"),
        Dilated([200, 700], [3, 5]),
        block_patterns.local_global(1, 1, block_size=128),
        block_patterns.bigbird(1, 1, 1, block_size=64),
        FIRST_TOKENS,
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_patterns_whose_tiles_are_full_are_the_oracles(backend, pattern, causal):
    """Small ones are in the matrix."""
    if backend == "triton":
        kernel_for("triton", BF16, 64)
    assert not missed(
        pattern=pattern,
        n=1157,
        causal=causal,
        backend=backend,
        lse_cotangent=True,
        batch=2,
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["auto", "efficient", "triton"])
@pytest.mark.parametrize("d", [64, 128])
def test_a_window_of_tokens_of_a_model_is_the_oracles(d, backend, causal):
    if backend != "auto":
        kernel_for(backend, BF16, d)
    window = block_patterns.sliding_window(tokens=1024)
    case = {"pattern": window, "n": 4096, "heads": 2, "kv_heads": 1, "d": d}
    assert not missed(**case, causal=causal, backend=backend)


@pytest.mark.parametrize(
    "lay", [lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), part]
)
@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient", "triton"])
def test_rows_are_read_where_they_lie(backend, lay):
    kernel_for(backend, BF16, 128)
    assert not missed(lay, n=1024, kv_heads=4, d=128, causal=True, backend=backend)


def test_flex_attention_runs_a_block_sparse_pattern():
    pattern = block_patterns.local_global(1, 1, block_size=128)
    point = Point("flex", pattern, seq_len=1024, causal=True, dtype="bfloat16")
    system = systems.build(point, "cuda")
    inputs = system.inputs()
    errors, tolerance = system.check(inputs, system.run(inputs))
    assert errors["out"] <= tolerance["out"]


@gpu_only
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_every_default_size_is_right(monkeypatch, causal, head_dim):
    kernel, pattern = (
        kernel_for("triton", BF16, head_dim),
        Dilated([1024, 2048], [1, 2]),
    )
    q, k, v = (
        draw(1, 2048, heads, head_dim, dtype=BF16, seed=0) for heads in (4, 2, 2)
    )
    default = triton_config.sizes
    for name in triton_config.TILE_PASSES:
        kind = triton.kind_of_launch(name, q)
        for size in {default(kind), triton_config.pointer_sizes(kind)}:
            of = {name: size}
            monkeypatch.setattr(
                triton_config,
                "sizes",
                lambda kind, of=of: of.get(kind.name) or default(kind),
            )
            (one,) = kernel.launches(name, (q, k, v), pattern, causal)
            assert one.size == size
            assert not missed(
                pattern=pattern, n=2048, d=head_dim, causal=causal, backend="triton"
            )


# --------------------------------------------------------------------------------------
# memory


@gpu_only
def test_memory_that_runs_out_drives_the_backoff():
    """Scores of n x n in fp32 take 1 GiB a copy; what is left is half of that."""
    n, heads, d = 8192, 4, 64
    q, k, v, dout = (draw(1, n, heads, d, dtype=F32, seed=i) for i in range(4))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    backoff, total = OOMBackoff(), torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved(DEVICE) + (512 << 20)) / total
    )
    try:
        with pytest.raises(torch.OutOfMemoryError):
            attention(q, k, v, Dense(), causal=True, backend="eager")
        out, lse = attention(
            q,
            k,
            v,
            Dense(),
            causal=True,
            backend="eager",
            return_lse=True,
            execution=Execution(tile=backoff),
        )
        grads = torch.autograd.grad(out, (q, k, v), dout)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert backoff.level >= 1
    found = reference.sampled_errors(
        q.detach(),
        k.detach(),
        v.detach(),
        Dense(),
        out=out.detach(),
        lse=lse.detach(),
        causal=True,
        dout=dout,
        grads=grads,
    )
    assert max(found.values()) <= reference.EXACT[F32], found


@gpu_only
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_peak_memory_of_a_training_step(backend):
    """At most 1.2 times q, k, v, out and the gradients of the four."""
    kernel_for("triton" if backend == "triton" else "eager", BF16, 128)
    n, pattern = 65536, Dilated([2048, 4096, 8192], [1, 2, 4])

    def step():
        out = attention(q, k, v, pattern, backend=backend)
        return out, torch.autograd.grad(out, (q, k, v), dout)

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(DEVICE)
    q, k, v, dout = (
        torch.randn(1, n, 16, 128, dtype=BF16, device=DEVICE) for _ in range(4)
    )
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    step()  # plans and lists stay
    torch.cuda.reset_peak_memory_stats(DEVICE)
    step()
    held = (torch.cuda.max_memory_allocated(DEVICE) - before) / (
        8 * q.numel() * q.element_size()
    )
    assert held <= 1.2


@gpu_only
def test_a_pool_lends_a_streams_memory_to_that_stream_alone():
    pool, side = MemoryPool(threshold_bytes=0), torch.cuda.Stream()
    first = pool.lend((1 << 20,), F32, DEVICE).data_ptr()
    with torch.cuda.stream(side):
        assert pool.lend((1 << 20,), F32, DEVICE).data_ptr() != first
    assert pool.lend((1 << 20,), F32, DEVICE).data_ptr() == first
    assert (pool.stats().reuses, pool.stats().allocations) == (1, 2)
    torch.cuda.synchronize()
    pattern = Dilated([256, 512], [1, 2])
    q, k, v = (draw(1, 1024, 4, 64, dtype=BF16, seed=i) for i in range(3))
    plain = attention(q, k, v, pattern)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        pooled = attention(q, k, v, pattern, execution=Execution(pool=pool))
    torch.cuda.synchronize()
    assert torch.equal(plain, pooled)


# --------------------------------------------------------------------------------------
# graphs, and ranks


def recorded(step):
    """``step`` as one CUDA graph: replayed by calling what is returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(
            3
        ):  # kernels are chosen, compiled and loaded, and plans are made
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    return lambda: graph.replay() or made


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["auto", "flash", "triton", "sdpa"])
def test_a_training_step_is_captured_and_replayed_on_new_data(backend, causal):
    kernel_for(backend if backend in kernels.KERNELS else "eager", BF16, 64)
    q, k, v, dout = (draw(1, 1024, 4, 64, dtype=BF16, seed=i) for i in range(4))
    q, k, v = (t.requires_grad_() for t in (q, k, v))

    def step():
        out = attention(q, k, v, FOLDED, causal=causal, backend=backend)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    run = recorded(step) if GPU else step
    with torch.no_grad():
        for i, t in enumerate((q, k, v, dout)):
            t.copy_(draw(*t.shape, dtype=BF16, seed=10 + i))
    found = [t.detach().clone() for t in run()]
    bound = reference.tolerance(q, k, v, dout, pattern=FOLDED, causal=causal)
    floors = (1.0, *[reference.gradient_floor(q, k, dout)] * 3)
    for name, mine, ref, floor in zip(("out", "dq", "dk", "dv"), found, step(), floors):
        assert reference.error(mine, ref, floor) <= (
            0.0 if backend == "triton" else bound[name]
        ), name


def test_a_training_step_of_a_small_model_is_captured_and_replayed_on_new_data():
    """Two blocks of a decoder, windows and LongNet's branches, with K/V heads that two
    query heads share: the gradients of all parameters.
    """
    made = {"num_kv_heads": 2, "device": DEVICE, "dtype": BF16}
    patterns = block_patterns.sliding_window(1, block_size=64), FOLDED
    torch.manual_seed(0)
    blocks = [DecoderBlock(256, 4, pattern, **made) for pattern in patterns]
    model = torch.nn.Sequential(*blocks)
    x = draw(2, 1024, 256, dtype=BF16, seed=0)

    def step():
        loss = model(x).float().square().mean()
        return torch.autograd.grad(loss, [*model.parameters()])

    run = recorded(step) if GPU else step
    x.copy_(draw(2, 1024, 256, dtype=BF16, seed=1))
    found = [t.clone() for t in run()]
    for mine, ref in zip(found, step()):
        assert (mine - ref).norm() <= 1e-2 * ref.norm()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    "pattern", [FOLDED, block_patterns.bigbird(1, 1, 1, block_size=64)], ids=str
)
def test_packed_and_padded_documents_are_attended_alone(pattern, dtype):
    borders = [0, 1, 130, 386, 642, 1031]  # one row; two of one length
    for how in ({"cu_seqlens": borders}, {"lengths": [1, 700]}):
        n, batch = (1031, 1) if "cu_seqlens" in how else (700, 2)
        case = Case(pattern, n, dtype, True, batch, d=64, lse_cotangent=False)
        case = replace(case, documents=how)
        assert not wrong_documents(case, DEVICE, pattern=pattern), how


@gpu_only
def test_borders_on_the_gpu_are_read_once_and_again_after_a_change():
    q, k, v = (draw(1, 512, 4, 64, dtype=BF16, seed=i) for i in range(3))
    borders = torch.tensor([0, 200, 512], device=DEVICE)

    def call(cu_seqlens):
        return attention(q, k, v, FOLDED, causal=True, cu_seqlens=cu_seqlens)

    for border in (200, 130):
        borders[1] = border
        want = call([0, border, 512])
        assert torch.equal(call(borders), want)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = call(borders)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(found, want)


@gpu_only
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_random_generations_are_the_oracles(dtype):
    pytest.importorskip("triton")
    from generated import drawn

    for seed in range(12):
        found = drawn(seed, DEVICE, [dtype])
        assert found["zeros"] and found["out"] <= 1 and found["lse"] <= 2e-3, found


@gpu_only
@pytest.mark.parametrize(
    "pattern", [Dense(), FOLDED, block_patterns.sliding_window(tokens=7)]
)
def test_a_step_of_generation_is_captured_and_replayed(pattern):
    pytest.importorskip("triton")
    from generated import CudaGraph, replayed

    found = replayed(pattern, -0.3, DEVICE, CudaGraph)
    assert found["off"] < 1e-5 and found["same"] and found["nan"] and found["why"]


def test_two_ranks_on_one_device_are_one_device():
    """By gloo, which carries them through the CPU: what is shown is that the results
    are right, no speed.
    """
    ladder, of_two = Dilated([128, 512], [1, 4]), contiguous(512, 2)
    ways = [
        ("plan", of_two),
        ("ring", of_two),
        ("plan", zigzag(512, 2)),
        ("all_gather", of_two),
        ("ulysses", of_two),
    ]
    cases = [
        Case(
            ladder,
            512,
            dtype,
            True,
            d=64,
            lse_cotangent=dtype == F32,
            layout=layout,
            scheme=scheme,
        )
        for scheme, layout in ways
        for dtype in (F32, BF16)
    ]
    everyone = launch(parity, 2, cases, str(DEVICE), timeout_s=120.0)
    for i, case in enumerate(cases):
        (q, k, _), dout, _, want, bound = judged(case)
        found = errors(case.joined([each[i][0] for each in everyone]), want, q, k, dout)
        assert not {
            name: (e, bound[name]) for name, e in found.items() if not e <= bound[name]
        }, case
