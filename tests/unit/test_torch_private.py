"""Each private interface of torch answers right, and without it values stay right."""

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import ringlab
import torch
import torch.distributed as dist
from matrix import Case, wrong
from ringlab import Dilated, Simulated, attention, memory
from ringlab import torch_private as private
from ringlab.engine import autograd
from ringlab.nn import MultiheadAttention
from ringlab.ring import contiguous, counting
from ringlab.tracking import LiveStorageTracker, storages
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

PATTERN = Dilated([16, 32], [1, 2])
ONE = Case(PATTERN, 64, causal=True)
RANKS = Case(PATTERN, 64, causal=True, layout=contiguous(64, 2), scheme="plan")
PRIVATE = r"torch\._[a-z]|_C\.|_dynamo\b|_dynamo_|forward_ad|\._(version|cdata|indices|values|forward_pre_hooks)\b"


def test_no_other_file_names_what_is_private_to_torch():
    package = Path(ringlab.__file__).parent
    lines = [
        f"{path.relative_to(package)}: {line.strip()}"
        for path in package.rglob("*.py")
        if path.name != "torch_private.py"
        for line in path.read_text().splitlines()
        if re.search(PRIVATE, line)
    ]
    assert not lines, "\n".join(lines)


MODES = ("dispatch_modes", "without_dispatch_modes", "without_function_modes")


@pytest.mark.parametrize("absent", [None, *MODES])
def test_modes(monkeypatch, absent):
    if absent:
        plain = list if absent == "dispatch_modes" else nullcontext
        monkeypatch.setattr(private, absent, plain)
    with FlopCounterMode(display=False) as flops, LiveStorageTracker() as tracker:
        modes = private.dispatch_modes()
        counters = private.flop_counters()
        assert not wrong(ONE)
        before = tracker.operators, flops.get_total_flops()
        with private.outside_modes():
            torch.ones(4, 4) @ torch.ones(4, 4)
    counted = tracker.operators - before[0], flops.get_total_flops() - before[1]
    told = absent != "dispatch_modes"
    suspended = absent in (None, "without_function_modes")
    assert [m is tracker for m in modes] == [False, True] * told
    assert counters == [flops] * told and counted == (3, 0 if suspended else 128)
    with FakeTensorMode(), private.without_dispatch_modes():
        assert private.is_fake(torch.ones(1)) == (absent == "without_dispatch_modes")
    with torch.device("meta"), private.outside_modes():
        assert torch.ones(1).is_meta == (absent == "without_function_modes")


def test_recording(monkeypatch):
    def answers(x):
        seen.append(private.is_traced())
        private.refuse_recording("this", "eager")
        return x + 1

    for make, traced in (
        (make_fx, True),
        (lambda f: make_fx(f, pre_dispatch=True), False),
    ):
        seen = []
        with pytest.raises(NotImplementedError, match="cannot record this"):
            make(answers)(torch.ones(2))
        assert seen == [traced]
    assert answers(1) == 2 and not seen[-1]
    with FakeTensorMode():
        assert private.is_traced() and private.is_fake(torch.ones(1))
    monkeypatch.delitem(sys.modules, "torch.fx.experimental.proxy_tensor")
    assert make_fx(answers)(torch.ones(2))(torch.ones(2)).tolist() == [2, 2]
    monkeypatch.delattr(torch._C, "_get_dispatch_mode")
    pool = memory.MemoryPool(threshold_bytes=0)
    assert private.is_traced() and pool.lend((3,)).fill_(1).sum() == 3
    assert pool.stats().bypassed == 1


def test_transforms(monkeypatch):
    q = torch.randn(1, 64, 2, 8)
    seen = []
    note = lambda t: (seen.append(private.is_transformed()), t.sum())[1]  # noqa: E731
    torch.func.grad(note)(q)
    with forward_ad.dual_level():
        note(q)
    note(q)
    assert seen == [True, True, False]
    for module in (private, autograd):
        monkeypatch.setattr(module, "in_functorch", private._unknown)
    assert private.is_transformed() and not private.is_transformed(q)
    assert not wrong(ONE) and not wrong(RANKS)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q)
        for group in (None, Simulated(2)):
            with pytest.raises(NotImplementedError, match="forward-mode"):
                attention(q, dual, q, PATTERN, group=group)


def test_graphs(monkeypatch):
    calls = []

    @private.constant_in_graphs
    def text(value):
        calls.append(value)
        return str(value)

    step = lambda x: x + int(text(2))  # noqa: E731
    if private.IN_GRAPHS:
        compiled = torch.compile(step, backend="eager", fullgraph=True)
        assert [compiled(torch.zeros(1)).item() for _ in range(2)] == [2, 2]
        assert calls == [2]
    monkeypatch.setattr(autograd, "IN_GRAPHS", False)
    torch.manual_seed(0)
    q = torch.randn(1, 64, 2, 8)
    plain = lambda q: attention(q, q, q, PATTERN) * 2  # noqa: E731
    assert torch.equal(torch.compile(plain, backend="eager")(q), plain(q))


def test_values_of_threads(monkeypatch):
    if torch.__version__ >= (2, 13):
        assert private.keep("this", 7) is None and private.kept("this") == 7
        assert private.keep("this", None) == 7
    value = object()
    before = sys.getrefcount(value)
    for _ in range(3):
        private.keep("that", value)
        private.keep("that", None)
    assert sys.getrefcount(value) == before and private.kept("that") is None
    monkeypatch.setattr(private, "_is_kept", None)
    with counting() as traffic:
        assert not wrong(RANKS)
    assert private.kept("this") is None and traffic.total == 0


def test_process_groups(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert private.group_named(world.group_name) is world
        monkeypatch.delattr(dist.distributed_c10d, "_resolve_process_group")
        private.keep_name(world)
        assert private.group_named(world.group_name) is world
        assert private.group_named("another") is None
    finally:
        dist.destroy_process_group()


def test_storages(monkeypatch):
    t, other = torch.zeros(8), torch.zeros(8)
    ids = [private.storage_id(x.untyped_storage()) for x in (t, t[2:], other)]
    assert ids[0] == ids[1] != ids[2]
    sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,))  # not coalesced
    assert sorted(s.nbytes() for s in storages(sparse)) == [8, 16]
    storage = t.untyped_storage()
    counts = [private.storage_references(storage)]
    view = t[1:]
    counts.append(private.storage_references(storage))
    del view
    assert private.storage_references(storage) == counts[0] == counts[1] - 1
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    assert memory.COUNTED and not memory.counts_references()


def test_versions_and_hooks():
    t = torch.zeros(2)
    before = private.version_of(t)
    t.add_(1)
    assert private.version_of(t) == before + 1
    with torch.inference_mode():
        assert private.version_of(torch.zeros(2)) is None
    assert private.version_of(SimpleNamespace(is_inference=lambda: False)) is None
    layer = torch.nn.Linear(2, 2)
    assert not private.has_pre_hooks(layer) and private.has_pre_hooks(object())
    layer.register_forward_pre_hook(lambda *args: None)
    assert private.has_pre_hooks(layer)


@pytest.mark.parametrize("asked", [True, False])
def test_torchs_encoder_runs_our_layer(monkeypatch, asked):
    if not asked:  # as by a torch that asks something else
        monkeypatch.setattr(private.NotTorchsAttention, "_qkv_same_embed_dim", True)
    encoder = torch.nn.TransformerEncoderLayer(16, 2, 8, 0.0, batch_first=True).eval()
    encoder.self_attn = MultiheadAttention.from_torch(encoder.self_attn, PATTERN)
    calls = []
    encoder.self_attn.register_forward_hook(lambda *args: calls.append(1))
    with torch.no_grad():
        encoder(torch.randn(1, 64, 16))
    assert calls == [1]
