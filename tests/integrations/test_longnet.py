"""torchscale's LongNet on ringlab: the values of its own layer with its padding, those
of the pattern without, and its weights as they are.
"""

import copy
import pickle

import pytest
import torch
import torchscale_double as double
from refusals import refused
from ringlab import Dilated, reference
from ringlab.compat import longnet
from torchscale_double import GIGAPATH, settings

SMALL = [8, 24, 60], [1, 2, 4]


def pair(lengths, rates, padding="zeros", **more):
    """Our encoder and torchscale's, float64, with equal weights."""
    torch.manual_seed(0)
    theirs = double.LongNetEncoder(settings(lengths, rates, **more)).double()
    for weight in theirs.parameters():
        with torch.no_grad():  # biases and norms as after training
            weight += 0.3 * torch.randn_like(weight)
    return longnet(copy.deepcopy(theirs), padding=padding), theirs


def off(got, want) -> float:
    return ((got - want).norm() / want.norm()).item()


def results(model, x, dout, **how):
    """Its output, and the gradients of x and of all weights."""
    x = x.clone().requires_grad_()
    out = model(x, **how)["encoder_out"]
    grads = torch.autograd.grad(out, [x, *model.parameters()], dout)
    return {"out": out, "x": grads[0]} | dict(
        zip(dict(model.named_parameters()), grads[1:])
    )


def check(ours, theirs, n: int, b: int = 2, **how):
    x, dout = torch.randn(2, b, n, 32, dtype=torch.float64)
    got, want = (results(model, x, dout, **how) for model in (ours, theirs))
    # The bias of k changes no softmax whose keys are all turned by it: its gradient is 0
    # but for padding, so each gradient is measured by that of x.
    for name in want:
        scale = max(want[name].norm(), 1e-3 * want["x"].norm())
        assert (got[name] - want[name]).norm() <= 1e-12 * scale, name


@pytest.mark.parametrize("n", [1, 2, 7, 9, 24, 25, 59, 97, 120])
def test_with_padding_values_and_gradients_are_those_of_torchscale(n):
    check(*pair(*SMALL), n)


@pytest.mark.parametrize(
    "lengths, rates, more",
    [
        ([8, 16], [2, 4], {}),  # rows that no branch selects
        ([8, 32], [1, 8], {"encoder_attention_heads": 2}),  # fewer heads than the rate
        ([12, 60], [3, 5], {}),  # blocks of unequal size
        ([16, 48], [1, 16], {"encoder_attention_heads": 16}),
        ([8, 999], [1, 4], {"subln": False}),
        ([8, 24], [1, 2], {"xpos_rel_pos": True}),
        ([8, 24], [1, 2], {"flash_attention": False}),
    ],
)
def test_settings_of_an_encoder_are_honoured(lengths, rates, more):
    ours, theirs = pair(lengths, rates, **more)
    for n in (5, 77):
        check(ours, theirs, n)


@pytest.mark.parametrize("n", [1023, 1025, 5793, 7919, 12000])
def test_the_segments_of_prov_gigapath(n):
    with torch.no_grad():
        ours, theirs = pair(*GIGAPATH, encoder_layers=1)
        x = torch.randn(1, n, 32, dtype=torch.float64)
        assert off(ours(x)["encoder_out"], theirs(x)["encoder_out"]) <= 1e-12


def attention_of(model):
    return model.layers[0].self_attn


@pytest.mark.parametrize("padding", ["zeros", "none"])
def test_a_causal_call_sees_no_padding(padding):
    ours, theirs = map(attention_of, pair(*SMALL, padding=padding))
    xs = torch.randn(3, 2, 77, 32, dtype=torch.float64)
    got, want = (layer(*xs, is_causal=True)[0] for layer in (ours, theirs))
    assert off(got, want) <= 1e-12


def test_without_padding_it_is_the_pattern_in_float64():
    layer = attention_of(pair(*SMALL, padding="none", subln=False)[0])
    x = torch.randn(2, 77, 32, dtype=torch.float64)
    q, k, v = (
        proj(x).unflatten(2, (4, 8))
        for proj in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    want, _ = reference.attention(q, k, v, Dilated(*SMALL, offsets="block"))
    assert off(layer(x, x, x)[0], layer.out_proj(want.flatten(2))) <= 1e-12
    longnet(layer)  # again, with padding, which is not the same
    assert off(layer(x, x, x)[0], layer.out_proj(want.flatten(2))) > 1e-3


def test_padding_matters_only_where_a_segment_is_not_full():
    (ours, _), (theirs, _) = pair(*SMALL, padding="none"), pair(*SMALL)
    x = torch.randn(1, 120, 32, dtype=torch.float64)
    assert off(ours(x)["encoder_out"], theirs(x)["encoder_out"]) <= 1e-12


def test_without_padding_a_mask_leaves_each_sequence_alone():
    ours, _ = pair(*SMALL, padding="none")
    x = torch.randn(2, 50, 32, dtype=torch.float64)
    mask = torch.zeros(2, 50, dtype=torch.bool)
    mask[1, 33:] = True
    out = ours(x, encoder_padding_mask=mask)["encoder_out"]
    assert off(out[:1], ours(x[:1])["encoder_out"]) <= 1e-12
    assert off(out[1:, :33], ours(x[1:, :33])["encoder_out"]) <= 1e-12


def test_weights_stay_what_they_are():
    theirs = double.LongNetEncoder(settings(xpos_rel_pos=True))
    before = theirs.state_dict()
    places = [weight.data_ptr() for weight in theirs.parameters()]
    hooked = []
    attention_of(theirs).register_forward_hook(lambda *_: hooked.append(1))
    ours = longnet(theirs)
    assert ours is theirs
    assert [weight.data_ptr() for weight in ours.parameters()] == places
    assert list(ours.state_dict()) == list(before)
    ours.load_state_dict(before)
    x = torch.randn(1, 30, 32)
    want = ours(x)["encoder_out"]
    assert hooked
    attention_of(ours)._forward_hooks.clear()
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(other(x)["encoder_out"], want)


def test_autocast_and_half_precision():
    ours, theirs = pair(*SMALL)
    x = torch.randn(1, 77, 32)
    want = theirs(x.double())["encoder_out"]
    with torch.autocast("cpu", torch.bfloat16):
        assert off(ours.float()(x)["encoder_out"].double(), want) <= 0.02


def module_of(kind):
    """A module of a class of its own, as another library has it."""
    return torch.nn.Sequential(kind(settings(), 32, 4))


def masked(model, name, value):
    x = torch.zeros(1, 30, 32)
    return lambda: attention_of(model)(x, x, x, **{name: value})


@pytest.mark.parametrize(
    "build, error, said",
    [
        (
            lambda: longnet(torch.nn.Linear(2, 2)),
            ValueError,
            "Linear has no torchscale",
        ),
        (
            lambda: longnet(module_of(type("Other", (double.DilatedAttention,), {}))),
            NotImplementedError,
            "Other is a subclass",
        ),
        (lambda: pair(*SMALL, padding="ones"), ValueError, "known: zeros, none"),
        (
            lambda: pair(*SMALL, seq_parallel=True),
            NotImplementedError,
            "seq_parallel",
        ),
        (lambda: pair([8], [1, 2]), ValueError, "differ in length: 1 and 2"),
        (
            lambda: pair([27, 9], [1, 2])[0](torch.zeros(1, 30, 32).double()),
            NotImplementedError,
            "of 9 at rate 2",
        ),
        (
            lambda: attention_of(pair([27, 9], [1, 2])[0])(
                *[torch.zeros(1, 30, 32).double()] * 3, is_causal=True
            ),
            NotImplementedError,
            "of 9 at rate 2",
        ),
        (
            lambda: pair(*SMALL, attention_dropout=0.1)[0](
                torch.zeros(1, 3, 32).double()
            ),
            NotImplementedError,
            "attention dropout",
        ),
        *(
            (masked(longnet(double.LongNetEncoder(settings())), *given), error, said)
            for given, error, said in [
                (("attn_mask", torch.zeros(30, 30)), TypeError, "attn_mask"),
                (("rel_pos", torch.zeros(4, 30, 30)), TypeError, "rel_pos"),
                (("incremental_state", {}), TypeError, "incremental_state"),
                (
                    ("key_padding_mask", torch.ones(1, 30)),
                    NotImplementedError,
                    "key_padding_mask",
                ),
            ]
        ),
    ],
)
def test_what_is_not_honoured_is_refused_in_one_line(build, error, said):
    with refused(error, match=said):
        build()


def test_dropout_of_attention_is_off_outside_of_training():
    ours, theirs = pair(*SMALL, attention_dropout=0.1)
    x = torch.randn(1, 30, 32, dtype=torch.float64)
    got, want = (model.eval()(x)["encoder_out"] for model in (ours, theirs))
    assert off(got, want) <= 1e-12


def exact_flash(q, k, v, dropout=0.0, bias=None, softmax_scale=None, is_causal=False):
    """out (b, n, h, d) and log-sum-exp (b, h, n), as flash-attn gives them."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    return out, scores.logsumexp(-1)


@pytest.mark.parametrize("n", [1, 77, 120])
@pytest.mark.parametrize("xpos", [False, True])
def test_torchscale_itself_where_it_is_installed(n, xpos, monkeypatch):
    """Its gradient takes the weights that mix the branches as constant; the double's
    does with ``constant_weights``.
    """
    name = "torchscale.component"
    module = pytest.importorskip(f"{name}.dilated_attention")
    base = pytest.importorskip(f"{name}.multihead_attention")
    monkeypatch.setattr(base, "flash_attn_func", exact_flash)
    args = settings(*SMALL, xpos_rel_pos=xpos)
    theirs = module.DilatedAttention(args, 32, 4, self_attention=True, subln=True)
    theirs = theirs.double()
    as_double = double.DilatedAttention(args, 32, 4).double()
    as_double.load_state_dict(theirs.state_dict())
    as_double.constant_weights = True
    x, dout = torch.randn(2, 2, n, 32, dtype=torch.float64)

    def run(layer):
        y = x.clone().requires_grad_()
        out, _ = layer(y, y, y)
        return out, *torch.autograd.grad(out, [y], dout)

    want = run(theirs)
    assert max(map(off, run(as_double), want)) <= 1e-12
    assert off(run(longnet(theirs))[0], want[0]) <= 1e-12
