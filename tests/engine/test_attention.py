"""What attention does besides its value: arguments, memory, gradients, compilers, and
rounding that must not add up.
"""

import warnings
from functools import partial
from itertools import product

import pytest
import torch
from matrix import Case, differentiated, drawn, errors, paths
from refusals import refused
from ringlab import (
    Adaptive,
    Dense,
    Dilated,
    Execution,
    Simulated,
    advise,
    attention,
    baselines,
    blocks,
    cache_bytes,
    estimate,
    ladder,
    longest,
    memory,
    nn,
    reference,
)
from ringlab.call import CallSpec
from ringlab.patterns import show
from ringlab.presets import NAMED, named
from ringlab.ring import SCHEMES, contiguous
from ringlab.torch_private import IN_GRAPHS
from torch._subclasses.fake_tensor import FakeTensorMode

LADDER = Dilated([150, 300], [1, 2])
BF16 = torch.bfloat16
GOOD = torch.zeros(1, 16, 4, 8)


REFUSED = {
    ValueError: [
        (dict(pattern="longnet"), "unknown pattern 'longnet'; known: dilated"),
        (dict(q=GOOD[..., 0]), r"q must be \(batch, .*, got shape \(1, 16, 4\)"),
        (
            dict.fromkeys("kv", GOOD[:, :15]),
            "only Dense.. takes k and v of another .*, heads, head_dim",
        ),
        (
            dict.fromkeys("kv", GOOD[:, :15]) | dict(pattern=Dense(), causal=True),
            "16 queries, 15 keys: causal needs as many keys, or more",
        ),
        (
            dict.fromkeys("kv", GOOD.expand(2, -1, -1, -1)),
            "q and k must agree in batch and head_dim",
        ),
        (
            dict.fromkeys("kv", GOOD[..., :6]),
            "q and k must agree in batch and head_dim",
        ),
        (
            dict(v=GOOD[:, :, :2]),
            "k and v must agree in batch, seq and heads.*, seq, heads, head_dim",
        ),
        (
            dict.fromkeys("kv", GOOD[:, :, :3]),
            "multiple of K/V heads: 4 and 3.*, seq, heads, head_dim",
        ),
        (dict(q=GOOD.long()), "q must be float64, .* got torch.int64"),
        (dict(k=GOOD.double()), "one dtype"),
        (dict(v=GOOD.to("meta")), "one device"),
        (dict.fromkeys("qkv", GOOD[:, :0]), "q is empty"),
        (
            dict(q=GOOD.to_sparse()),
            "q must be a plain tensor, got a torch.sparse_coo one",
        ),
        (dict(scale=1e300), "scale must be finite"),
        (dict(layout="zigzag"), "a layout is for several ranks"),
        (dict(scheme="ring"), "a scheme is for several ranks"),
        (dict(scheme="rings"), "unknown scheme 'rings'; known: auto, plan"),
        (
            dict(group=Simulated(2), scheme="rings"),
            "unknown scheme 'rings'; known: auto, plan, ring",
        ),
        (dict(group=Simulated(2), layout="spiral"), "unknown layout 'spiral'"),
        (
            dict(causal=True, is_causal=False),
            "causal=True and is_causal=False disagree",
        ),
    ],
    TypeError: [
        (dict(softmax_scale=0.5), "cannot honour 'softmax_scale': it is called scale"),
        (
            dict(max_seqlen=16),
            "'max_seqlen': cu_seqlens alone says how long documents are",
        ),
        (
            dict(window_size=(4, 0)),
            "'window_size': a window is a pattern: ringlab.blocks.sliding_window.tokens=",
        ),
        (dict(pattern=3), "pattern must be ringlab.Dense.*, got 3"),
        (dict(dropout_p=0.1), "'dropout_p': attention dropout is not supported"),
        (dict(attn_mask=GOOD), "'attn_mask': masks are not arguments"),
        (dict(is_causal=1), "is_causal must be True or False"),
        (dict(window=None), "'window': unknown argument"),
    ],
    NotImplementedError: [
        (
            dict.fromkeys("qkv", GOOD.to("meta")),
            "runs on cpu and cuda tensors, got meta",
        )
    ],
}


@pytest.mark.parametrize(
    "error, given, message",
    [(error, *row) for error, rows in REFUSED.items() for row in rows],
)
def test_wrong_arguments_are_refused_in_one_line(error, given, message):
    with refused(error, match=message):
        attention(
            **{"q": GOOD, "k": GOOD, "v": GOOD, "pattern": Dilated([8], [2])} | given
        )


def test_cache_and_pool_never_change_a_bit():
    """Not even of an earlier result, whose memory a pool might lend again."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 300, 4, 16, requires_grad=True) for _ in range(3))
    gather = partial(baselines.attend, way="gather")
    for run in (partial(attention, return_lse=True), gather):
        seen = []
        for cache in (False, True, True):
            for pool in (False, memory.MemoryPool(threshold_bytes=0)):
                how = {"causal": True, "execution": Execution(cache, pool)}
                out, _ = run(q, k, v, LADDER, **how)
                seen.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
                run(torch.randn_like(q), k, v, LADDER, **how)
        for other in seen[1:]:
            assert all(torch.equal(a, b) for a, b in zip(seen[0], other))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_results_are_contiguous_and_inputs_stay_as_they_are(dtype):
    strided = torch.randn(2, 4, 256, 16, dtype=dtype).transpose(1, 2)
    sparse = [
        blocks.local_global(1, 1, block_size=32),
        blocks.sliding_window(1, block_size=64),
    ]
    for q in (strided, strided[..., ::2], strided[:1].expand(2, -1, -1, -1)):
        copy = q.clone()
        for pattern in (
            *sparse,
            Dilated([64], [1]),
            Dilated([64, 128], [1, 2]),
            Dense(),
        ):
            for causal in (False, True):
                out = attention(q, q, q, pattern, causal=causal)
                assert (
                    out.is_contiguous() and out.untyped_storage().nbytes() == out.nbytes
                ), (str(pattern), causal)
                assert torch.equal(q, copy) and torch.equal(
                    out, attention(copy, copy, copy, pattern, causal=causal)
                )


@pytest.mark.parametrize(
    "pattern", [LADDER, Dense(), blocks.local_global(1, 1, block_size=32)]
)
def test_results_have_the_memory_of_those_let_go(pattern):
    pool = memory.MemoryPool(threshold_bytes=0)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 300, 4, 16, requires_grad=True) for _ in range(3))

    def call(execution):
        out = attention(q, k, v, pattern, execution=execution)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    fresh, held = call(Execution(results=False)), call(Execution(results=pool))
    view = call(Execution(results=pool))[0].detach()[
        :, -1:
    ]  # of what is let go, a view of the result is held
    stats = pool.stats()
    assert (stats.borrows, stats.allocations, stats.held_bytes) == (
        2,
        2,
        2 * 4 * q.numel(),
    )  # gradients are not lent
    held_at, view_at = held[0].data_ptr(), view.untyped_storage().data_ptr()
    third = call(Execution(results=pool))[0].data_ptr()
    again = call(Execution(results=pool))
    assert again[0].data_ptr() == third not in (held_at, view_at)
    assert (pool.stats().allocations, pool.stats().reuses) == (3, 1) and torch.equal(
        view, fresh[0][:, -1:]
    )
    for a, b, c in zip(fresh, held, again):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_only_large_results_on_a_cpu_are_lent():
    lent, short = [], Dilated([256], [1])
    for n, results_ in (
        (2**14, True),
        (2**13, True),
        (2**14, False),
        (2**14, memory.MemoryPool(max_bytes=1 << 20)),
    ):
        q, before = torch.zeros(1, n, 4, 64), memory.RESULTS.stats().borrows
        attention(q, q, q, short, execution=Execution(results=results_))
        lent.append(memory.RESULTS.stats().borrows - before)
        assert (
            results_ in (True, False) or results_.stats().borrows == 0
        )  # it would not be kept
    assert lent == [1, 0, 0, 0]
    before = memory.RESULTS.stats().borrows
    with FakeTensorMode():
        attention(*[torch.zeros(1, 2**14, 4, 64)] * 3, short)
    assert memory.RESULTS.stats().borrows == before


def test_no_gradient_is_computed_where_none_is_asked_for():
    q, k, v = (torch.randn(1, 40, 2, 8) for _ in range(3))
    assert not attention(q, k, v, LADDER).requires_grad
    v.requires_grad_()
    (dv,) = torch.autograd.grad(attention(q, k, v, LADDER).sum(), v)
    assert dv.shape == v.shape


def test_what_torchs_attention_takes_too_is_taken():
    q, k, v = torch.randn(1, 40, 4, 8), *(torch.randn(1, 40, 2, 8) for _ in range(2))
    harmless = {
        "enable_gqa": True,
        "dropout_p": 0.0,
        "attn_mask": None,
        "group": None,
        "scheme": "auto",
    }
    found = attention(q, k, v, LADDER, is_causal=True, **harmless)
    assert torch.equal(found, attention(q, k, v, LADDER, causal=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16])
@pytest.mark.parametrize("n, keys", [(40, 90), (90, 40), (1, 33), (50, 1)])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (3, 1)])
def test_cross_attention_and_values_of_another_width_are_the_reference(
    n, keys, heads, kv_heads, dtype
):
    """Dense with keys of another length, all of which queries see, or of which they are
    the last positions; v wider or narrower than q, also of patterns and over ranks.
    """
    torch.manual_seed(0)
    causals = (False, True) if n < keys else (False,)
    shapes_of_v = (16, False), (24, True), (8, False)
    for causal, (width, alike) in product(causals, shapes_of_v):
        m = n if alike else keys
        shapes = (
            (n, heads, 16),
            (m, kv_heads, 16),
            (m, kv_heads, width),
            (n, heads, width),
        )
        q, k, v, dout = (torch.randn(2, *shape, dtype=dtype) for shape in shapes)
        dlse = torch.randn(2, heads, n) if causal else None
        how = {"causal": causal}
        patterns = (
            [(LADDER, None), (LADDER, Simulated(2))]
            if alike and n % 2 == 0
            else [(Dense(), None)]
        )
        for pattern, group in patterns:
            leaves, exact = (
                [t.to(of, copy=True).requires_grad_() for t in (q, k, v)]
                for of in (dtype, torch.float64)
            )
            found = differentiated(
                *attention(*leaves, pattern, group=group, **how, return_lse=True),
                leaves,
                dout,
                dlse,
            )
            want = differentiated(
                *reference.attention(*exact, pattern, **how), exact, dout, dlse
            )
            assert found["out"].shape == dout.shape and found["out"].is_contiguous()
            limit = reference.EXACT.get(dtype, 0.02)
            assert max(errors(found, want, q, k, dout).values()) <= limit, (
                width,
                pattern,
                group,
            )


def test_weights_are_the_probabilities():
    q, k, v = (torch.randn(2, 20, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    prob = reference.weights(q, k, LADDER, causal=True)
    assert prob.shape == (2, 4, 20, 20) and torch.allclose(
        prob.sum(-1), torch.ones(2, 4, 20).double()
    )
    out = torch.einsum("bhqk,bkhd->bqhd", prob, v.repeat_interleave(2, 2))
    assert torch.allclose(out, attention(q, k, v, LADDER, causal=True), atol=1e-12)


@pytest.mark.parametrize(
    "ranks", [{}, *({"group": Simulated(2), "scheme": scheme} for scheme in SCHEMES)]
)
def test_autocast_casts_as_torchs_attention_does(ranks):
    """Also where dtypes differ, as after a rotary embedding in fp32; the backward does
    not follow autocast again.
    """
    q, k, v = (torch.randn(1, 300, 2, 16, requires_grad=True) for _ in range(3))
    low = [t.detach().to(BF16).requires_grad_() for t in (q, k, v)]
    for backend in ("cpu_flash", "eager"):
        want = attention(*low, LADDER, backend=backend, **ranks)
        (wanted,) = torch.autograd.grad(want.sum(), low[0])
        with torch.autocast("cpu", BF16):
            out = attention(q, k, v.to(BF16), LADDER, backend=backend, **ranks)
            assert (
                out.dtype
                == torch.nn.functional.scaled_dot_product_attention(
                    q, k, v.to(BF16)
                ).dtype
                == BF16
            )
            (dq,) = torch.autograd.grad(out.sum(), q)
        assert torch.equal(out, want) and torch.equal(dq, wanted.float())
    with torch.autocast("cpu", BF16):
        assert (
            attention(*(t.detach().double() for t in (q, k, v)), LADDER, **ranks).dtype
            == torch.float64
        )


@pytest.mark.parametrize("group", [None, Simulated(2)])
def test_torch_compile_takes_it_at_any_length(group):
    """On one device as one operator, without a break; over simulated ranks, whose plans
    change with n, around it.
    """
    torch._dynamo.reset()

    def step(q, pattern):
        return attention(2 * q, q, q, pattern, group=group) + 1

    compiled = torch.compile(
        step, backend="aot_eager", fullgraph=group is None and IN_GRAPHS
    )
    for pattern in (
        LADDER,
        Dilated([8], [1]),
        blocks.local_global(1, 1, block_size=8),
    ):  # one code, three patterns
        for n in (32, 48):
            q = torch.randn(1, n, 2, 8, requires_grad=True)
            out, want = compiled(q, pattern), step(q, pattern)
            assert torch.equal(out, want)
            assert torch.equal(
                *(
                    torch.autograd.grad(some.square().sum(), q)[0]
                    for some in (out, want)
                )
            )


@pytest.mark.parametrize(
    "make",
    [
        lambda n: Dilated([n // 4, n], [1, 2]),
        lambda n: blocks.sliding_window(1, block_size=n // 4),
        lambda n: (
            blocks.sliding_window(tokens=5) | blocks.BlockSparse([blocks.Random(2)], 1)
        ),
        lambda n: "dense",
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_function_makes_the_pattern(make, whole):
    """Without a break for lengths that are constants."""
    calls = ({},) if whole else ({}, {"lengths": [20]}, {"group": Simulated(2)})
    for how in calls:
        torch._dynamo.reset()

        def step(q, how=how):
            return attention(q, q, q, make(q.shape[1]), causal=True, **how) + 1

        compiled = torch.compile(
            step,
            backend="aot_eager",
            fullgraph=whole and IN_GRAPHS,
            dynamic=False if whole else None,
        )
        for n in (32, 64):
            q = torch.randn(1, n, 2, 8, requires_grad=True)
            out, want = compiled(q), step(q)
            assert torch.equal(out, want)
            grads = (torch.autograd.grad(x.square().sum(), q)[0] for x in (out, want))
            assert torch.equal(*grads)


def test_dense_has_a_name():
    for how in ({}, {"causal": True}, {"group": Simulated(2)}):
        q = torch.randn(2, 16, 2, 8)
        assert torch.equal(
            attention(q, q, q, "dense", **how), attention(q, q, q, Dense(), **how)
        )
    assert cache_bytes("dense", max_seq_len=64) == cache_bytes(Dense(), max_seq_len=64)
    assert longest("dense", 1 << 24) == longest(Dense(), 1 << 24)
    assert show("dense", 3) == show(Dense(), 3)


@pytest.mark.parametrize(
    "shape, kv_heads, warned",
    [
        ((1, 8, 256, 8), 256, True),  # of torch, for 8 heads at 256 positions
        ((1, 8, 64, 8), 64, False),
        ((1, 12, 197, 8), 197, True),  # of torch, for a small vision model
        ((1, 1, 197, 8), 197, False),  # a step of generation
        ((1, 12, 40, 8), 40, False),  # few tokens
        ((1, 256, 256, 8), 256, False),
        ((1, 8, 256, 8), 1, False),
    ],
)
def test_more_heads_than_positions_are_warned_of(shape, kv_heads, warned):
    q, (batch, n, _, d) = torch.randn(shape), shape
    k = torch.randn(batch, n, kv_heads, d)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        attention(q, k, k, Dense())
    assert [one.filename for one in found] == [__file__] * warned
    assert all("(batch, seq, heads, head_dim)" in str(one.message) for one in found)


def test_forward_mode_around_a_compiled_call_is_refused():
    torch._dynamo.reset()
    q = torch.randn(1, 32, 2, 8)
    compiled = torch.compile(lambda q: attention(q, q, q, LADDER), backend="aot_eager")
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError):
        compiled(torch.autograd.forward_ad.make_dual(q, q))


def test_an_exported_layer_equals_the_layer_at_any_length(tmp_path):
    layer = nn.MultiheadAttention(
        16, 2, Dilated([8, 16], [1, 2]), causal=True, rotary_base=1e4
    )
    shapes = ({1: torch.export.Dim("n", min=2, max=100)},)
    torch.export.save(
        torch.export.export(layer, (torch.randn(2, 32, 16),), dynamic_shapes=shapes),
        tmp_path / "layer.pt2",
    )
    x = torch.randn(2, 57, 16)
    assert torch.equal(torch.export.load(tmp_path / "layer.pt2").module()(x), layer(x))


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)  # by torch.func.jvp itself
def test_torch_func_derives_once_and_refuses_the_rest_in_one_line():
    q, k, v = (torch.randn(1, 20, 2, 8, requires_grad=True) for _ in range(3))

    def loss(q):
        return sum(
            x.square().sum()
            for x in attention(
                q, k.detach(), v.detach(), Dilated([8], [1]), return_lse=True
            )
        )

    assert torch.equal(torch.func.grad(loss)(q), torch.autograd.grad(loss(q), q)[0])
    calls = {
        "vmap": lambda: torch.func.vmap(loss)(q.expand(2, *q.shape)),
        "vmap or batched": lambda: torch.func.jacrev(loss)(q),
        "jvp": lambda: torch.func.jvp(loss, (q,), (q,)),
        "double backward": lambda: torch.func.grad(
            lambda q: torch.func.grad(loss)(q).sum()
        )(q),
    }
    for words, call in calls.items():
        with refused(NotImplementedError, match=words):
            call()


# --------------------------------------------------------------------------------------
# rounding and cotangents that an error of twice a dense call's would hide


@pytest.mark.parametrize(
    "pattern",
    [Dense(), Dilated([32, 128], [1, 2]), blocks.local_global(1, 1, block_size=32)],
)
def test_gradients_of_shared_keys_are_summed_before_they_are_rounded(pattern):
    """What two query heads send to one K/V head nearly cancels: rounded one by one,
    their rounding would be left.
    """
    case = Case(pattern, 128, BF16, heads=16, kv_heads=1, lse_cotangent=False)
    (q, k, v), dout, dlse = drawn(case)
    q[:, :, 1::2] = q[:, :, ::2]
    dout[:, :, 1::2] = -0.97 * dout[:, :, ::2]
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    out, lse = reference.attention(*exact, pattern)
    want = differentiated(out, lse, exact, dout, None)
    for how in paths(case):
        found = how.run((q, k, v), dout, dlse)
        for name in ("dk", "dv"):
            apart = reference.error(found[name], want[name], 1e-6)
            assert apart <= torch.finfo(BF16).eps, (how, name, apart)


@pytest.mark.parametrize("layout", [None, contiguous(128, 2)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_cotangent_of_lse_is_not_rounded(dtype, layout):
    """Halfway between two numbers of the dtype, the same in every row: rounded, all
    gradients would be off by it.
    """
    for pattern in (
        Dense(),
        Dilated([64, 128], [1, 2]),
        blocks.local_global(1, 1, block_size=32),
    ):
        case = Case(pattern, 128, dtype, layout=layout, scheme="plan")
        (q, k, v), _, dlse = drawn(case)
        eps = torch.finfo(dtype).eps
        dlse, dout = torch.full_like(dlse, 1 + eps / 2), torch.zeros_like(q)
        exact = [t.double().requires_grad_() for t in (q, k, v)]
        want = differentiated(*reference.attention(*exact, pattern), exact, dout, dlse)
        found = case.run((q, k, v), dout, dlse)
        for name in ("dq", "dk"):
            size = float(
                (found[name].double() * want[name]).sum() / want[name].square().sum()
            )
            assert abs(size - 1) < eps / 8, (str(pattern), name, size)


def test_what_the_command_line_takes_as_text_python_takes_too():
    q = torch.randn(1, 100, 2, 8, dtype=torch.float64)
    for name in NAMED:
        if name != "dense":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of 100 tokens a ladder is dense
                pattern = named(name, 100, 2)
                want = attention(q, q, q, pattern)
                assert torch.equal(attention(q, q, q, name), want)
                exact = [reference.attention(q, q, q, p)[0] for p in (name, pattern)]
                assert torch.equal(*exact)
                sizes = {"heads": 2, "max_seq_len": 100}
                assert cache_bytes(name, **sizes) == cache_bytes(pattern, **sizes)
                assert show(name, 100) == show(named(name, 100, 1), 100)
            how = {"seq_len": "8K", "passes": "fwd", "estimates": False}
            advised = advise("gtx1080", pattern=name, memory_bytes="8GiB", **how)
            assert advised.advised.pattern == named(name, 8192, 8)
            assert advised.budget_bytes == 8 << 30
        if name != "ladder":
            assert nn.MultiheadAttention(8, 2, name).pattern == named(name)
    for call in (lambda x: nn.DecoderBlock(8, 2, x), lambda x: longest(x, "1GiB")):
        with pytest.raises(ValueError, match="ringlab.ladder"):
            call("ladder")  # which depends on the length
    assert CallSpec("ladder", "8K").pattern == named("ladder", 8192, 8)
    assert estimate("dense", seq_len="8K") == estimate(Dense(), seq_len=8192)
    listed = attention(q, q, q, "dense", sinks=[0.0] * 2)
    assert torch.equal(listed, attention(q, q, q, "dense", sinks=torch.zeros(2)))
    with pytest.raises(TypeError, match="adaptive_attention"):
        attention(q, q, q, Adaptive(64, 4))
    with pytest.warns(UserWarning, match="run nowhere"):
        attention(*[q[:, :, :1]] * 3, Dilated([8, 16], [1, 2], mixing="head_groups"))
    with pytest.warns(UserWarning, match="is Dense"):
        assert ladder(1024) == Dense()
    assert blocks.local_global(2) == blocks.local_global(2, 2)
    assert blocks.bigbird() == blocks.bigbird(2, 2, 3)
