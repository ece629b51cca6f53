"""The attention layer is the oracle between torch's own projections, on one device,
over ranks and in training.
"""

import copy
import pickle

import pytest
import torch
from matrix import apart
from model import LanguageModel, generate
from ring_cases import (
    copies,
    layer_gradients,
    tensor_parallel,
    unpickled,
)
from ringlab import (
    Adaptive,
    Dense,
    Dilated,
    Execution,
    Simulated,
    blocks,
    nn,
    reference,
)
from ringlab.block_patterns import PerHead
from ringlab.memory import MemoryPool
from ringlab.nn import MultiheadAttention, mean_loss, next_tokens, rotary
from ringlab.ring import SCHEMES, uneven
from ringlab.ring.launch import launch
from ringlab.tracking import LiveStorageTracker
from torch.nn import functional as F

PATTERN = Dilated([12, 36], [1, 2])


def gradients(layer, x, dout):
    out = layer(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], dout)]


def by_torch(layer, x):
    w = dict(layer.named_parameters())
    q, k, v = (
        F.linear(x, w[f"{n}_proj.weight"], w[f"{n}_proj.bias"]).unflatten(-1, (-1, 4))
        for n in "qkv"
    )
    out, _ = reference.attention(q, k, v, layer.pattern, causal=layer.options["causal"])
    return F.linear(out.flatten(2), w["out_proj.weight"], w["out_proj.bias"])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "kv_heads, more",
    [
        (4, {}),
        (2, {}),
        (1, {"group": Simulated(3)}),
        *((4, {"group": Simulated(2), "scheme": scheme}) for scheme in SCHEMES),
    ],
)
def test_the_layer_is_the_oracle_between_projections(causal, kv_heads, more):
    torch.manual_seed(0)
    for pattern in (PATTERN, Dense()):
        layer = MultiheadAttention(
            16,
            4,
            pattern,
            num_kv_heads=kv_heads,
            causal=causal,
            dtype=torch.float64,
            **more,
        )
        x, dout = (
            torch.randn(2, 48, 16, dtype=torch.float64, requires_grad=True),
            torch.randn(2, 48, 16).double(),
        )
        want = by_torch(layer, x)
        want = [
            want.detach(),
            *torch.autograd.grad(want, [x, *layer.parameters()], dout),
        ]
        assert apart(gradients(layer, x, dout), want) <= 1e-12


@pytest.mark.parametrize("causal", [False, True])
def test_it_takes_the_place_of_torchs_layer(causal):
    """With its weights, as it is called, with padding, and inside its encoder layer, in
    training and evaluation.
    """
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64)
    ours = MultiheadAttention.from_torch(theirs, Dense())
    x, (b, n) = torch.randn(3, 20, 32, dtype=torch.float64), (3, 20)
    mask = (
        torch.nn.Transformer.generate_square_subsequent_mask(n).double()
        if causal
        else None
    )
    padding = torch.arange(n) >= torch.tensor([20, 7, 13])[:, None]
    want, _ = theirs(x, x, x, attn_mask=mask, is_causal=causal, need_weights=False)
    for how in (
        {"is_causal": causal},
        {"attn_mask": mask},
        {"attn_mask": mask, "is_causal": causal},
    ):
        out, weights = ours(x, x, x, need_weights=False, **how)
        assert weights is None and apart([out], [want]) <= 1e-12
    hidden = torch.zeros(b, n, dtype=torch.float64).masked_fill(padding, -torch.inf)
    want, _ = theirs(
        x, x, x, attn_mask=mask, key_padding_mask=hidden, need_weights=False
    )
    for given in (padding, hidden):
        out, _ = ours(x, x, x, is_causal=causal, key_padding_mask=given)
        assert apart([out[~padding]], [want[~padding]]) <= 1e-12
    encoder = torch.nn.TransformerEncoderLayer(
        32, 4, 64, dropout=0.0, batch_first=True, dtype=torch.float64
    )
    how = {"src_mask": mask, "is_causal": causal, "src_key_padding_mask": hidden}
    want = encoder(x, **how)
    encoder.self_attn = MultiheadAttention.from_torch(encoder.self_attn, Dense())
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            assert (
                apart([encoder.train(mode)(x, **how)[~padding]], [want[~padding]])
                <= 1e-12
            )
    layer = torch.nn.TransformerEncoderLayer(
        32, 4, 64, dropout=0.0, batch_first=True, dtype=torch.float64
    )
    stack = torch.nn.TransformerEncoder(
        layer, 2
    )  # which would run its own kernel on nested tensors in evaluation
    want = stack(x, src_key_padding_mask=padding)
    for layer in stack.layers:
        layer.self_attn = MultiheadAttention.from_torch(layer.self_attn, Dense())
    with torch.no_grad():
        assert (
            apart(
                [stack.eval()(x, src_key_padding_mask=padding)[~padding]],
                [want[~padding]],
            )
            <= 1e-12
        )


QKV = "qkv"
BY_HEAD = PerHead(tuple(blocks.sliding_window(i, block_size=8) for i in range(4)))
SHARED = [
    (Dense(), 4, 2, QKV),
    (PATTERN, 4, 4, QKV),  # two heads on each rank, and rates that divide two
    (Dilated([12, 36], [1, 3], offsets="branch"), 4, 4, QKV),
    (Dilated([12, 36], [1, 2], offsets="kv_head"), 8, 4, QKV),
    (blocks.sliding_window(1, block_size=8), 4, 4, QKV),
    (Adaptive(8, 2), 4, 4, QKV),
]
NOT_SHARED = [
    (Dilated([12, 36], [1, 3]), 4, 4, QKV, "depends on which: take Dense()"),
    (Dilated([12, 36], [1, 2], offsets="block"), 4, 4, QKV, "depends on which"),
    (Dilated([12, 36], [1, 2], mixing="head_groups"), 4, 4, QKV, "depends on which"),
    (Dilated([12, 36], [1, 2], offsets="kv_head"), 4, 2, QKV, "depends on which"),
    (BY_HEAD, 4, 4, QKV, "the pattern is for 4 query heads, q has 2"),
    (Dense(), 3, 3, QKV, "multiply up to"),
    (Dense(), 6, 3, QKV, "multiply up to"),
    (Dense(), 4, 2, "q", "must share out both alike"),
]


def test_heads_that_a_mesh_shares_out_are_the_layer_or_refused_in_one_line():
    refused = [case[:4] for case in NOT_SHARED]
    for found in launch(tensor_parallel, 2, SHARED + refused):
        right, told = found[: len(SHARED)], found[len(SHARED) :]
        assert max(right) <= 1e-12
        for text, (*_, words) in zip(told, NOT_SHARED):
            assert words in text and "\n" not in text


def test_copies_share_their_group_and_pickles_find_it():
    for wrong, saved in launch(copies, 2):
        assert not wrong
        with pytest.raises(RuntimeError, match="^there is no process group .*$"):
            pickle.loads(saved)
    (text,) = launch(unpickled, 1, saved)
    assert "no process group '1' of 2 ranks" in text
    layer = MultiheadAttention(16, 4, PATTERN, group=Simulated(2))
    cache = layer.make_cache(1, 9)
    for made in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert made.group == cache.group


class LoRA(torch.nn.Module):
    """A wrapper that has no weight."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = torch.nn.Parameter(torch.randn(2, base.in_features).to(base.weight))
        self.up = torch.nn.Parameter(torch.randn(base.out_features, 2).to(base.weight))

    def forward(self, x):
        return self.base(x) + x @ self.down.mT @ self.up.mT


NAMES = ("q_proj", "k_proj", "v_proj", "out_proj")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_projections_that_are_no_linear_layers(dtype):
    torch.manual_seed(0)
    layer = MultiheadAttention(
        16, 4, PATTERN, num_kv_heads=2, causal=True, dtype=dtype
    ).requires_grad_(False)
    merged = copy.deepcopy(layer)
    for name in NAMES:
        lora = LoRA(getattr(layer, name)).requires_grad_(False)
        setattr(layer, name, lora)
        getattr(merged, name).weight += lora.up @ lora.down
    x = torch.randn(2, 40, 16).to(dtype)
    cache = layer.make_cache(2, 40)
    pieces = [layer(t, cache=cache) for t in x.split([13, 27], 1)]
    bound = 1e-12 if dtype == torch.float64 else 0.05
    for got in (layer(x), torch.cat(pieces, 1)):
        assert apart([got.double()], [merged(x).double()]) <= bound
    assert (cache.dtype, cache.policy.kv_heads) == (dtype, 2)
    assert isinstance(layer.in_proj_weight, torch.Tensor)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.make_cache(1, 9).dtype == layer.k_proj(x).dtype


def test_quantised_projections():
    torch.manual_seed(0)
    layer = MultiheadAttention(64, 4, PATTERN, causal=True).requires_grad_(False)
    x = torch.randn(2, 40, 64)
    want = layer(x)
    packed = torch.ao.nn.quantized.dynamic.Linear
    for name in NAMES:
        linear = getattr(layer, name)
        linear.qconfig = torch.ao.quantization.default_dynamic_qconfig
        setattr(layer, name, packed.from_float(linear))
    cache = layer.make_cache(2, 40)
    pieces = [layer(t, cache=cache) for t in x.split([13, 27], 1)]
    for got in (layer(x), torch.cat(pieces, 1)):
        assert 0 < apart([got], [want]) < 0.05


def test_a_default_device_changes_nothing():
    model, tokens = small(rotary_base=100.0), torch.randint(50, (2, 20))
    layer, x = MultiheadAttention(32, 4, PATTERN), torch.randn(2, 20, 32)
    where, packed = torch.arange(20), tokens[:1]
    hidden = (where >= 9).expand(2, -1)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(20)

    def each():
        with torch.no_grad():
            return [
                generate(model, tokens, 3, lengths=[20, 9]),
                layer(x, cache=layer.make_cache(2, 20), is_causal=True),
                loss_of(model, tokens, lengths=[20, 9]),
                loss_of(model, packed, cu_seqlens=[0, 3, 20]),
                layer(x, x, x, key_padding_mask=hidden, attn_mask=mask)[0],
                rotary(x.unflatten(-1, (4, 8)), where),
                nn.positions(packed, [0, 3, 20], Simulated(2)),
            ]

    want = each()
    with torch.device("meta"):
        assert all(map(torch.equal, each(), want))


def test_the_state_dict_is_the_standard_one():
    layer = MultiheadAttention(16, 4, Dense(), num_kv_heads=2, bias=False)
    shapes = {name: tuple(t.shape) for name, t in layer.state_dict().items()}
    assert shapes == {
        "q_proj.weight": (16, 16),
        "k_proj.weight": (8, 16),
        "v_proj.weight": (8, 16),
        "out_proj.weight": (16, 16),
    }
    other = MultiheadAttention(16, 4, PATTERN, num_kv_heads=2, bias=False)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.q_proj.weight, layer.q_proj.weight)


@pytest.mark.parametrize(
    "scheme, layout",
    [
        ("plan", "contiguous"),
        ("ring", "zigzag"),
        ("ulysses", "striped"),
        ("plan", uneven([13, 35])),
    ],
)
def test_over_ranks_gradients_sum_to_those_of_one_device_and_micro_batches_to_those_of_one(
    scheme, layout
):
    whole, _ = layer_gradients(scheme, None)
    everyone = launch(layer_gradients, 2, scheme, layout)
    for once, accumulated in everyone:
        assert apart(accumulated, once) <= 1e-12, "four micro-batches are one batch"
    summed = [sum(parts) for parts in zip(*(once for once, _ in everyone))]
    assert apart(summed, whole) <= 1e-12


def train(steps: int, tracker=None, **options):
    """Losses of ``steps`` steps of a layer, and the live bytes after each where a
    tracker counts them.
    """
    torch.manual_seed(0)
    layer = MultiheadAttention(16, 4, num_kv_heads=2, causal=True, **options)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    losses, live = [], []
    for _ in range(steps):
        x = torch.randn(1, 40, 16).to(layer.q_proj.weight.dtype)
        loss = (layer(x) - x.cumsum(1).tanh()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        del x, loss
        live.append(tracker.current_bytes if tracker else 0)
    return losses, live


@pytest.mark.parametrize(
    "group, pattern, dtype",
    [(None, PATTERN, torch.bfloat16), (Simulated(2), Dense(), torch.bfloat16)],
)
def test_steps_with_checkpointing_and_pool_are_those_without(group, pattern, dtype):
    """Bit for bit; what is alive after a step does not grow."""
    pool = MemoryPool(threshold_bytes=0)
    made = {"group": group, "pattern": pattern, "dtype": dtype}
    losses, _ = train(25, **made)
    with LiveStorageTracker() as tracker:
        checkpointed = {
            "execution": Execution(pool=pool),
            "use_gradient_checkpointing": True,
        }
        same, live = train(25, tracker, **made, **checkpointed)
    assert same == losses and sum(losses[-10:]) < sum(losses[:10])
    assert len(set(live[2:])) == 1, "live memory after a step"
    assert pool.stats().reuses > 25


def test_steps_in_tiles_are_those_without():
    made = {"pattern": PATTERN, "dtype": torch.float64}
    losses, _ = train(25, **made)
    tiled = {"execution": Execution(tile=20), "use_gradient_checkpointing": True}
    found, _ = train(25, **made, **tiled)
    assert max(abs(a - b) / b for a, b in zip(found, losses)) <= 1e-12


# --------------------------------------------------------------------------------------
# the language model


def small(seed: int = 0, **options) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(
        50, 32, 4, [PATTERN, Dense()], num_kv_heads=2, dtype=torch.float64, **options
    )


def loss_of(model, tokens, **documents):
    return mean_loss(model(tokens, **documents), next_tokens(tokens, **documents))


def test_rotary_turns_pairs_and_scores_depend_on_distance_alone():
    t = torch.randn(1, 7, 2, 8, dtype=torch.float64)
    pairs = torch.complex(*t.chunk(2, -1))  # (1, 7, 2, 4)
    angles = torch.arange(7)[:, None] * 100.0 ** (
        -torch.arange(4, dtype=torch.float64) / 4
    )
    want = (
        pairs * torch.polar(torch.ones((), dtype=torch.float64), angles)[None, :, None]
    )
    torch.testing.assert_close(
        rotary(t, torch.arange(7), 100.0),
        torch.cat([want.real, want.imag], -1),
        rtol=1e-12,
        atol=1e-12,
    )
    scores = [
        rotary(t, at + torch.arange(7)) @ rotary(t, at + torch.arange(7)).mT
        for at in (0, 1000)
    ]
    torch.testing.assert_close(*scores)


@pytest.mark.parametrize(
    "more", [{}, {"group": Simulated(2)}, {"use_gradient_checkpointing": True}], ids=str
)
def test_packed_documents_are_learned_as_one_by_one(more):
    """Logits, loss and gradients; padded too, and with rows of no document behind."""
    model, alone = small(**more), small()
    some = [torch.randint(50, (1, n)) for n in (9, 30, 30, 1, 44)]
    losses = [(loss_of(alone, x), x.shape[1] - 1) for x in some if x.shape[1] > 1]
    want = sum(loss * count for loss, count in losses) / sum(
        count for _, count in losses
    )
    want.backward()
    borders = torch.tensor([0, *(x.shape[1] for x in some)]).cumsum(0)
    padded = torch.nn.utils.rnn.pad_sequence([x[0] for x in some], batch_first=True)
    for tokens, how in (
        (torch.cat(some, 1), {"cu_seqlens": borders}),
        (torch.cat([*some, some[1]], 1), {"cu_seqlens": borders.tolist()}),
        (padded, {"lengths": borders.diff()}),
    ):
        model.zero_grad()
        loss = loss_of(model, tokens, **how)
        loss.backward()
        torch.testing.assert_close(loss, want)
        got, wanted = ([p.grad for p in m.parameters()] for m in (model, alone))
        assert apart(got, wanted) <= 1e-12
    logits = model(torch.cat(some, 1), cu_seqlens=borders)
    assert apart([logits], [torch.cat([alone(x) for x in some], 1)]) <= 1e-12


def test_far_positions_are_exact_and_a_batch_without_targets_has_loss_0():
    t, at = torch.randn(1, 3, 1, 64), torch.tensor([10**4, 10**6, 10**7])
    assert reference.error(rotary(t, at), rotary(t.double(), at), 1.0) < 1e-6
    model = small()
    loss = loss_of(model, torch.randint(50, (1, 4)), cu_seqlens=[0, 1, 2, 3, 4])
    loss.backward()
    assert loss == 0 and not model.embedding.weight.grad.isnan().any()


def test_a_buffer_that_is_reused_does_not_change_a_checkpointed_backward():
    layer, borders = (
        MultiheadAttention(16, 4, Dense(), use_gradient_checkpointing=True),
        torch.tensor([0, 5, 12]),
    )
    x = torch.randn(1, 12, 16, requires_grad=True)
    (want,) = torch.autograd.grad(layer(x, cu_seqlens=[0, 5, 12]).square().sum(), x)
    out = layer(x, cu_seqlens=borders)
    borders[1] = 9
    assert torch.equal(torch.autograd.grad(out.square().sum(), x)[0], want)


def by_hand(model, tokens, lengths, count):
    """The most likely tokens, each by a whole forward over all before it, one prompt at
    a time.
    """
    found = []
    for row, length in zip(tokens, lengths):
        row = row[None, :length]
        for _ in range(count):
            row = torch.cat([row, model(row)[:, -1].argmax(-1, keepdim=True)], 1)
        found.append(row[0])
    return found


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_generation_takes_the_tokens_of_whole_forwards(kv_heads):
    """Dense and dilated layers with rotary positions, prompts of different length, cut
    into pieces or not.
    """
    torch.manual_seed(0)
    patterns = [
        Dense(),
        PATTERN,
        Dilated([8, 32], [1, 4]),
        blocks.sliding_window(1, block_size=16),
    ]
    model = LanguageModel(
        50, 32, 4, patterns, num_kv_heads=kv_heads, dtype=torch.float64
    )
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    tokens, lengths = torch.randint(50, (3, 60)), [60, 1, 33]
    want = by_hand(model, tokens, lengths, 14)
    for piece in (8192, 16):
        got = generate(model, tokens, 14, lengths=lengths, piece=piece)
        assert got.shape == (3, 74) and not got[1, 15:].any()
        assert all(
            torch.equal(row[: len(whole)], whole) for row, whole in zip(got, want)
        )
    assert len({tuple(row[-14:].tolist()) for row in want}) == 3


def test_generation_under_autocast():
    torch.manual_seed(0)
    model = LanguageModel(50, 32, 4, [PATTERN] * 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert generate(model, torch.randint(50, (2, 20)), 5).shape == (2, 25)


@pytest.mark.parametrize(
    "dtype", ["int32", "int16", "int8", "uint8", "bool", "float32"]
)
def test_targets_of_any_integer_dtype_have_one_loss_and_others_are_refused(dtype):
    logits, targets = torch.randn(1, 4, 5), torch.tensor([[1, 0, 4, 2]])
    given = targets.to(getattr(torch, dtype))
    if "int" not in dtype:
        with pytest.raises(ValueError, match=f"must be integers.*got torch.{dtype}$"):
            mean_loss(logits, given)
    else:
        assert torch.equal(mean_loss(logits, given), mean_loss(logits, targets))
