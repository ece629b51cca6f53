"""The Triton kernels without a GPU: values by the interpreter, device code by the
compiler, and refusals.

No test here can say how fast they are. The Gluon kernels are in test_gluon.
"""

import random
import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from typing import NamedTuple

import pytest
import torch
from compiled import fits, resources
from interpreted import PLAIN, printed, within_bounds
from ringlab import Dense, Dilated
from ringlab.block_patterns import sliding_window
from ringlab.cache import PatternCache
from ringlab.kernels import gluon, triton, triton_config
from ringlab.kernels.base import HALF, DeviceSpec
from ringlab.kernels.triton_config import TILE_PASSES, LaunchKind

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed"
)


@pytest.fixture(autouse=True, scope="module")
def interpreted():
    """Computed for the whole file, not for its first test."""
    if find_spec("triton"):
        printed("plain")


@needs_triton
def test_values_equal_the_oracle_forward_and_backward():
    within_bounds({name: printed("plain")[name] for name in PLAIN})
    assert (
        min(printed("plain")["each pair once"]["error"].values()) > 0.01
    )  # a wrong answer is found


@needs_triton
def test_it_compiles_into_one_graph_with_the_same_bits():
    found = printed("plain")["compiled"]
    assert all(found["same"].values()) and set(found["checks"].values()) == {"SUCCESS"}


@needs_triton
def test_what_the_interpreter_gets_wrong_is_refused():
    assert "bfloat16" in printed("plain")["bfloat16"]["refusal"]


# --------------------------------------------------------------------------------------
# the device code, compiled for GPUs that are not here


@needs_triton
@pytest.mark.parametrize(
    "name, capability, head_dim, band",
    [
        ("forward", 80, 128, True),
        ("backward_q", 86, 64, False),
        ("backward_kv", 89, 64, True),
        ("forward", 90, 128, False),
        ("forward", 100, 64, True),
        ("backward_q", 120, 64, True),
    ],
)
def test_default_sizes_fit_every_architecture(
    name, capability, head_dim, band, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kind = LaunchKind(name, head_dim, torch.bfloat16, divmod(capability, 10))
    size = triton_config.pointer_sizes(kind)
    found, _ = resources(name, capability, head_dim, size, band=band)
    assert fits(found, capability)


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("name", TILE_PASSES)
def test_gluon_is_the_default_where_it_was_measured(name, joins):
    """For compute capability 9.0, in half precision, in launches that start from
    nothing.
    """
    for compute in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
        for head_dim, dtype in product((32, 64, 96, 128, 256), (*HALF, torch.float32)):
            kind = LaunchKind(name, head_dim, dtype, compute, joins=joins)
            size = triton_config.sizes(kind)
            known = head_dim in (64, 128) and dtype in HALF and not joins
            if compute == (9, 0) and known:
                assert size == triton_config.GLUON[name, head_dim]
                assert (size.rows, size.reads) == (128, "gluon")
            else:
                assert size.reads == "pointers"


def test_a_launch_that_adds_to_an_earlier_one_has_sizes_of_its_own(monkeypatch):
    """The default holds fewer registers; the kernel asks for each launch's own."""
    first = LaunchKind("forward", 128, torch.bfloat16, (9, 0))
    later, older = replace(first, joins=True), replace(first, capability=(8, 6))
    assert triton_config.pointer_sizes(later) == triton_config.pointer_sizes(older)
    assert triton_config.pointer_sizes(later) != triton_config.pointer_sizes(first)
    sizes = triton_config.Sizes(64, 64, 4, 1), triton_config.Sizes(32, 32, 4, 1)
    monkeypatch.setattr(triton_config, "sizes", lambda kind: sizes[kind.joins])
    kernel = triton.TritonKernel()
    q = torch.zeros(1, 512, 2, 64)
    launches = kernel.launches("forward", (q, q, q), Dilated([256, 512], [1, 2]), False)
    assert tuple(launch.size for launch in launches) == sizes


def test_a_hopper_gpu_takes_gluon_unless_the_call_does_not_suit_it(monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    monkeypatch.setattr(triton, "compute_of", lambda q: (9, 0))
    kernel, folded = triton.TritonKernel(), Dilated([512, 1024], [1, 2])

    def reads(n, head_dim=64, dtype=torch.bfloat16, pattern=folded):
        q = torch.zeros(1, n, 2, head_dim, dtype=dtype)
        return [
            launch.size.reads
            for name in TILE_PASSES
            for launch in kernel.launches(
                name, (q,) * (3 if name == "forward" else 4), pattern, False
            )
        ]

    monkeypatch.setattr(triton.tile_schedule, "MIN_TILES", 1)
    assert reads(2048) == reads(2048, 128) == reads(900, dtype=HALF[0]) == ["gluon"] * 3
    assert reads(2047) == reads(2048, 96) == reads(2048, 256) == ["pointers"] * 3
    assert set(reads(2048, dtype=torch.float32)) == {"pointers"}
    assert reads(2048, pattern=Dilated([16], [1])) == ["pointers"] * 3
    assert reads(2048, pattern=sliding_window(tokens=512)) == ["pointers"] * 3
    monkeypatch.setattr(
        triton.tile_schedule, "MIN_TILES", 64
    )  # a launch for each branch
    assert reads(2048) == ["gluon", "pointers"] * 3


def test_without_gluon_pointers_are_read_and_the_log_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(triton, "compute_of", lambda q: (9, 0))
    monkeypatch.setitem(sys.modules, gluon.HOPPER, None)
    gluon.unavailable.cache_clear()
    q = torch.zeros(1, 256, 1, 64, dtype=torch.bfloat16)
    try:
        for _ in range(2):
            (launch,) = triton.TritonKernel().launches(
                "forward", (q, q, q), Dilated([256], [1]), False
            )
    finally:
        gluon.unavailable.cache_clear()
    assert launch.size.reads == "pointers"
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("ringlab", "WARNING")
    assert "slower Triton kernels run instead" in record.getMessage()
    assert "is not installed" in record.getMessage()


# --------------------------------------------------------------------------------------
# launches that are kept


def special(x):
    """What Triton compiles a kernel for, of an argument."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, bool | str):
        return x
    if isinstance(x, float):
        return "float"
    return "int", x == 1, x % 16 == 0, abs(x) < 1 << 31


class Jitted:
    """A kernel that computes nothing and has the contract of one of Triton's: what its
    first call returns may be launched for the same kinds of arguments alone.
    """

    def __init__(self, kernel):
        self.names, self.compiled, self.launched = kernel.arg_names, 0, 0

    def __getitem__(self, grid):
        def call(*arguments, num_warps=4, num_stages=3, **constants):
            assert [*constants] == self.names[len(arguments) :]
            self.compiled += 1
            return Ready(self, [*map(special, (*arguments, *constants.values()))])

        return call


class Ready(NamedTuple):
    kernel: Jitted
    kinds: list

    def __getitem__(self, grid):
        assert len(grid) == 3

        def call(*arguments):
            assert [*map(special, arguments)] == self.kinds
            self.kernel.launched += 1

        return call


def shifted(shape, by: int, dtype) -> torch.Tensor:
    """Zeros that begin ``by`` elements after an aligned address."""
    return torch.zeros(by + torch.Size(shape).numel(), dtype=dtype)[by:].view(shape)


@needs_triton
def test_a_kept_launch_gets_what_it_was_compiled_for(monkeypatch):
    """Whatever changes between calls: lengths, heads, strides, addresses, dtypes, and
    patterns of one and of several launches.
    """
    from ringlab.kernels import triton_kernels

    jitted = {}
    for name in (*TILE_PASSES, "row_sums"):
        jitted[name] = Jitted(getattr(triton_kernels, name))
        monkeypatch.setattr(triton_kernels, name, jitted[name])
    kernel, cached = triton.TritonKernel(), PatternCache().get
    choose = random.Random(0).choice
    for _ in range(60):
        n, heads = choose((64, 65, 128)), choose((1, 2, 4))
        d, dtype, causal = choose((16, 20)), choose(HALF), choose((False, True))
        pattern = choose(
            (Dense(), Dilated([16, 32], [1, 2]), sliding_window(1, block_size=16))
        )
        shift = choose((0, 1, 8))  # elements before the first
        q, k, v, dout = (
            shifted((2, n, h, d), shift, dtype) for h in (heads, 1, 1, heads)
        )
        call = pattern, causal, 1.0, cached
        for repeated in (False, True):
            before = sum(each.compiled for each in jitted.values())
            out, lse = kernel.attend(q, k, v, *call)
            if shift:  # an lse that begins anywhere
                lse = shifted(lse.shape, 1, lse.dtype)
            kernel.gradients(dout, None, q, k, v, out, lse, *call)
            more = sum(each.compiled for each in jitted.values()) - before
            assert not (repeated and more)
    assert all(each.launched > each.compiled for each in jitted.values())


# --------------------------------------------------------------------------------------
# where it does not run


def test_what_it_cannot_serve_on_a_gpu_is_said(monkeypatch):
    gpu, refuses = DeviceSpec("cuda", (9, 0)), triton.TritonKernel().refuses
    monkeypatch.setitem(sys.modules, "triton", None)
    assert refuses(gpu, torch.bfloat16, 64).startswith("triton is not installed (")
    monkeypatch.setitem(sys.modules, "triton", sys)
    assert (
        refuses(gpu, torch.bfloat16, 64) is None
        and refuses(gpu, torch.float32, 5) is None
    )
    assert (
        refuses(gpu, torch.float64, 64)
        == "takes float32, float16, bfloat16, not float64"
    )
    assert (
        refuses(gpu, torch.bfloat16, 264) == "needs a head_dim of at most 256, not 264"
    )
    turing = DeviceSpec("cuda", (7, 5))
    assert (
        refuses(turing, torch.float16, 64)
        == "needs compute capability 8.0 or newer, this is 7.5"
    )
