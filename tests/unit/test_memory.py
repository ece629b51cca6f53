"""Memory: huge-page advice, the scoped pool and its refusals, the storage tracker, the high-water mark."""

import contextlib
import functools
import gc
import mmap
import os
import platform
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from ringlab import memory, tracking
from ringlab.memory import MemoryPool
from ringlab.tracking import LiveStorageTracker
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

SOAK_SECONDS = float(os.environ.get("RINGLAB_SOAK_SECONDS", "1"))
F32, MIB = torch.float32, 1 << 20


def small_pool(**options) -> MemoryPool:
    return MemoryPool(**{"threshold_bytes": 0, "max_bytes": 1 << 20, **options})


def address_of(pool: MemoryPool, shape, dtype=F32) -> int:
    with pool.borrow(shape, dtype, "cpu") as t:
        return t.data_ptr()


# --- allocation


def test_advise_huge_says_whether_the_system_accepted():
    expected = Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()
    big = torch.arange(2 * MIB, dtype=torch.int32)
    assert memory.advise_huge(big) is expected
    assert memory.advise_huge(big[5:6]) is expected  # a view speaks for its storage
    assert torch.equal(big, torch.arange(2 * MIB, dtype=torch.int32))
    assert memory.advise_huge(torch.empty(4 * MIB - 1, dtype=torch.uint8)) is False
    assert memory.advise_huge(torch.empty(64 * MIB, device="meta")) is False
    assert memory.advise_huge(torch.eye(4).to_sparse_coo()) is False


def test_advise_huge_is_silent_elsewhere(monkeypatch):
    memory._madvise.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory.advise_huge(torch.empty(8 * MIB, dtype=torch.uint8)) is False
    memory._madvise.cache_clear()


def test_advice_stays_inside_the_buffer(monkeypatch):
    calls = []
    monkeypatch.setattr(
        memory, "_madvise", lambda: lambda start, size, advice: calls.append((start, size, advice)) or 0
    )
    for nbytes in (4 * MIB, 4 * MIB + 1, 9 * MIB - 64):
        t = memory.empty((nbytes,), torch.uint8)
        start, size, advice = calls.pop()
        assert advice == 14 and start % 4096 == 0 == size % 4096
        assert t.data_ptr() <= start < t.data_ptr() + 65536
        assert t.data_ptr() + nbytes - 65536 < start + size <= t.data_ptr() + nbytes
    monkeypatch.setattr(memory, "_madvise", lambda: lambda *a: -1)
    assert memory.advise_huge(t) is False


def test_empty_is_torch_empty():
    for shape in ((), (0,), (3, 5), (1024, 2048)):
        t = memory.empty(shape, torch.bfloat16, "cpu")
        assert t.shape == torch.Size(shape) and t.dtype is torch.bfloat16 and t.is_contiguous() and not t.requires_grad


REWRITE = """
import resource, torch
from ringlab.memory import MemoryPool
pool = MemoryPool()
def faults(make):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    make((40 << 20,), dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(*[min(faults(make) for _ in range(4)) for make in (torch.empty, pool.lend)])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators may keep what is freed")
def test_lent_memory_costs_no_page_faults():
    """A tensor of 40 MiB, let go and made again: a page fault for each of its pages, or none."""
    done = subprocess.run(
        [sys.executable, "-c", REWRITE], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    fresh, lent = map(int, done.stdout.split())
    assert fresh >= (40 * MIB) // mmap.PAGESIZE and lent < 100


# --- pool: reuse and bounds


def test_bytes_are_reused_across_shapes_and_dtypes():
    pool = small_pool()
    first = address_of(pool, (10, 10), torch.float32)
    assert address_of(pool, (25, 2, 4), torch.bfloat16) == first
    assert address_of(pool, (50,), torch.float64) == first
    stats = pool.stats()
    assert (stats.borrows, stats.reuses, stats.allocations, stats.bypassed) == (3, 2, 1, 0)
    assert (stats.idle_bytes, stats.live_bytes, stats.held_bytes) == (448, 0, 0)  # 400 rounded up to 64


def test_a_borrowed_tensor_is_fresh_contiguous_and_aligned():
    pool = small_pool()
    for shape, dtype in [((3, 5, 7), torch.float16), ((1,), torch.float64), ((2, 9), torch.bool), ((), torch.int64)]:
        for _ in range(2):
            with pool.borrow(shape, dtype, "cpu") as t:
                assert t.shape == torch.Size(shape) and t.dtype is dtype and t.is_contiguous()
                assert t.data_ptr() % 64 == 0
                assert t.is_leaf and not t.requires_grad and t.grad_fn is None and t._base is None
                t.zero_()
    assert pool.stats().borrows == 8 and pool.stats().refused == 0


def test_waste_is_bounded():
    pool = small_pool()
    address_of(pool, (6400,), torch.uint8)
    for nbytes, reused in [(6401, False), (6400, True), (3200, True), (3136, False)]:
        pool.clear()
        address_of(pool, (6400,), torch.uint8)
        address_of(pool, (nbytes,), torch.uint8)
        assert pool.stats().reuses == reused, nbytes
    assert small_pool(waste=1).waste == 1


def test_the_tightest_idle_buffer_is_taken():
    pool = small_pool()
    with pool.borrow((6400,), torch.uint8), pool.borrow((4480,), torch.uint8) as tight:
        expected = tight.data_ptr()
    assert address_of(pool, (4000,), torch.uint8) == expected


def test_two_borrowers_never_share_bytes():
    pool = small_pool()
    address_of(pool, (64,))
    with pool.borrow((64,)) as a, pool.borrow((64,)) as b:
        a.fill_(1)
        b.fill_(2)
        assert a.eq(1).all() and b.eq(2).all()
        assert pool.stats().live_bytes == 512 and pool.stats().idle_bytes == 0
    assert pool.stats().live_bytes == 0 and pool.stats().idle_bytes == 512


def test_small_requests_bypass_the_pool():
    pool = MemoryPool()
    assert pool.threshold_bytes == 16 << 20
    with pool.borrow(((16 << 20) - 1,), torch.uint8) as t:
        assert t.numel() == (16 << 20) - 1 and pool.stats().live_bytes == 0
    assert t.shape == (0,)  # the same contract at every size
    with pool.borrow((16 << 20,), torch.uint8):
        assert pool.stats().live_bytes == 16 << 20
    stats = pool.stats()
    assert (stats.borrows, stats.bypassed, stats.allocations, stats.idle_bytes) == (2, 1, 1, 16 << 20)


def test_zero_elements_and_meta_bypass():
    pool = small_pool()
    with pool.borrow((4, 0, 3)) as t, pool.borrow((4, 2), F32, "meta") as m:
        assert t.shape == (4, 0, 3) and m.shape == (4, 2) and m.device.type == "meta"
    assert pool.stats().bypassed == 2


def test_the_least_recently_used_buffer_goes_first_not_the_oldest():
    pool = small_pool(max_bytes=3 * 1024 + 4096, waste=1)
    sizes = [1024, 1088, 1152]
    for size in sizes:
        address_of(pool, (size,), torch.uint8)
    address_of(pool, (1024,), torch.uint8)  # used again: FIFO would drop it next
    address_of(pool, (4096,), torch.uint8)  # too many bytes now
    assert pool.stats().evictions == 1
    for size, reused in [(1024, 1), (1152, 1), (1088, 0)]:
        before = pool.stats().reuses
        address_of(pool, (size,), torch.uint8)
        assert pool.stats().reuses - before == reused, size


def test_idle_bytes_stay_within_the_bound():
    pool = small_pool(max_bytes=10_000)
    rng = random.Random(0)
    for _ in range(300):
        address_of(pool, (rng.randrange(1, 6000),), torch.uint8)
        assert pool.stats().idle_bytes <= 10_000
    kept = pool.stats()
    address_of(pool, (20_000,), torch.uint8)  # larger than the bound: it goes, the others stay
    assert pool.stats().idle_bytes == kept.idle_bytes and pool.stats().evictions == kept.evictions + 1


def test_other_places_get_their_own_buffers(monkeypatch):
    pool, place = small_pool(), [("cuda", 0, 7)]
    monkeypatch.setattr(MemoryPool, "_place", lambda pool, device, nbytes: place[0])
    address_of(pool, (64,))
    for other in [("cuda", 1, 7), ("cuda", 0, 8), ("cpu", 0, 0)]:
        place[0] = other
        before = pool.stats().reuses
        address_of(pool, (64,))
        assert pool.stats().reuses == before
    place[0] = ("cuda", 0, 7)
    address_of(pool, (64,))
    assert pool.stats().reuses == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_buffers_belong_to_a_stream():
    pool = small_pool()
    with pool.borrow((64,), F32, "cuda") as t:
        first = t.data_ptr()
    with torch.cuda.stream(torch.cuda.Stream()), pool.borrow((64,), F32, "cuda") as t:
        assert t.data_ptr() != first
    with pool.borrow((64,), F32, torch.device("cuda", torch.cuda.current_device())) as t:
        assert t.data_ptr() == first


OUT = [torch.OutOfMemoryError("injected"), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]


@pytest.mark.parametrize("error", OUT, ids=["cuda", "cpu"])
def test_out_of_memory_first_gives_up_what_is_idle(error, monkeypatch):
    pool, real, left = small_pool(), memory.empty, [1]

    def fail_once(*args):
        if left[0]:
            left[0] -= 1
            raise error
        return real(*args)

    address_of(pool, (64,))
    monkeypatch.setattr(memory, "empty", fail_once)
    address_of(pool, (1024,))
    assert pool.stats().idle_bytes == 4096 and pool.stats().evictions == 1
    pool.clear()
    left[0] = 1
    with pytest.raises(type(error), match="injected|you tried"), pool.borrow((64,)):
        pass
    assert pool.stats().live_bytes == 0
    address_of(pool, (64,))
    left[0], error = 1, RuntimeError("no lack of memory")
    with pytest.raises(RuntimeError, match="no lack"):
        pool.lend((1024,))
    assert pool.stats().idle_bytes == 256 and pool.stats().live_bytes == 0


def test_clear_and_close():
    pool = small_pool()
    address_of(pool, (64,))
    with pool.borrow((128,)) as t:
        pool.clear()
        t.fill_(1)
        assert pool.stats() == memory.PoolStats(live_bytes=512)
    assert pool.stats().idle_bytes == 512
    with pool.borrow((128,)) as t:
        pool.close()
        assert t.fill_(3).sum() == 384
    assert pool.stats() == memory.PoolStats()
    with pytest.raises(RuntimeError, match="closed"), pool.borrow((1,)):
        pass


@pytest.mark.parametrize(
    "options", [{"max_bytes": -1}, {"threshold_bytes": -1}, {"waste": 0.5}, {"waste": float("nan")}]
)
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match="memory pool: .* got"):
        MemoryPool(**options)


def test_negative_sizes_are_refused():
    with pytest.raises(ValueError, match=r"got \(2, -3\)"), small_pool().borrow((2, -3)):
        pass


# --- pool: nothing escapes


def test_after_the_scope_the_name_holds_nothing():
    pool = small_pool()
    with pool.borrow((8, 8)) as t:
        t.fill_(1)
    assert t.shape == (0,) and pool.stats().refused == 0
    with pool.borrow((8, 8)) as other:
        other.fill_(2)
        with pytest.raises(RuntimeError):
            t + torch.ones(8, 8)
    assert pool.stats().reuses == 1


def test_a_returned_tensor_keeps_its_bytes():
    pool = small_pool()

    def scratch_as_result():
        with pool.borrow((8, 8)) as t:
            return t.fill_(1)

    result = scratch_as_result()
    with pool.borrow((8, 8)) as other:
        other.fill_(2)
    assert result.shape == (8, 8) and result.eq(1).all() and pool.stats().refused == 1
    del result
    assert pool.stats().idle_bytes == 512


ESCAPES = {
    "name": lambda t: t,
    "list": lambda t: [t],
    "closure": lambda t: lambda: t,
    "view": lambda t: t[2:],
    "transpose": lambda t: t.t(),
    "detach": lambda t: t.detach(),
    "reinterpreted": lambda t: t.view(torch.int32),
    "storage": lambda t: t.untyped_storage(),
    "data": lambda t: t.data,
    "dlpack": lambda t: torch.utils.dlpack.from_dlpack(t),
}


@pytest.mark.parametrize("escape", ESCAPES)
def test_escaped_bytes_are_not_reused_until_they_are_let_go(escape):
    pool = small_pool()
    with pool.borrow((8, 8)) as t:
        t.fill_(1)
        address = t.data_ptr()
        kept = ESCAPES[escape](t)
    assert pool.stats().refused == 1 and pool.stats().held_bytes == 256 and pool.stats().idle_bytes == 0
    with pool.borrow((8, 8)) as other:
        assert other.data_ptr() != address
        other.fill_(2)
    assert t.eq(1).all()  # whoever kept the bytes keeps them unchanged
    del kept, t
    assert pool.stats().held_bytes == 0 and pool.stats().idle_bytes == 512


@pytest.mark.parametrize("escape", [*ESCAPES, "numpy", "saved"])
def test_lent_bytes_are_not_lent_again_until_they_are_let_go(escape):
    pool = small_pool()
    t = pool.lend((8, 8)).fill_(1)
    address, weight = t.data_ptr(), torch.ones(8, 8, requires_grad=True)
    escapes = ESCAPES | {"numpy": lambda t: t.numpy(), "saved": lambda t: weight * t}
    kept = escapes[escape](t)
    del t
    other = pool.lend((8, 8)).fill_(2)
    held = 256 if escape == "numpy" else 512  # what is exported to NumPy is given up at once
    assert other.data_ptr() != address and pool.stats().held_bytes == held and pool.stats().refused == 0
    if escape == "saved":
        kept.sum().backward()
        assert weight.grad.eq(1).all()
    del kept
    again, reused = pool.lend((4, 16)), escape != "numpy"  # what was given up, malloc may still hand out again
    assert pool.stats().reuses == reused and (again.data_ptr() == address or not reused) and other.eq(2).all()


def test_lent_tensors_have_storages_of_their_own_size():
    pool = small_pool()
    address_of(pool, (100,))
    lent = pool.lend((5, 5), torch.bfloat16)
    assert lent.untyped_storage().nbytes() == 50 and pool.stats().idle_bytes == 448
    with torch.inference_mode():
        assert pool.lend((3,)).is_inference()  # as any other result
    assert not pool.lend((3,)).is_inference() and pool.stats().reuses == 1
    assert pool.lend((0, 4)).shape == (0, 4) and pool.lend((4, 2), F32, "meta").is_meta
    assert MemoryPool().lend((4,)).shape == (4,) and MemoryPool().lend((4, 2), device="cpu").is_contiguous()
    with pytest.raises(ValueError, match=r"got \(2, -3\)"):
        pool.lend((2, -3))
    pool.close()
    assert lent.fill_(1).sum() == 25
    with pytest.raises(RuntimeError, match="closed"):
        pool.lend((1,))


def test_what_was_lent_last_is_kept_whatever_was_there_before():
    pool = small_pool(max_bytes=1024)
    old = [pool.lend((128,)) for _ in range(2)]
    del old
    for _ in range(6):
        pool.lend((64,))
    assert (pool.stats().reuses, pool.stats().evictions, pool.stats().idle_bytes) == (5, 1, 768)
    kept = [pool.lend((100 + i,)).fill_(i) for i in range(5)]
    assert pool.stats().held_bytes == 4 * (103 + 104) and [t.mean().item() for t in kept] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("way", ["lend", "borrow"])
def test_tracers_get_no_memory_of_the_pool(way):
    def take(pool):
        with contextlib.ExitStack() as stack:
            t = pool.lend((8, 8)) if way == "lend" else stack.enter_context(pool.borrow((8, 8)))
            return t.fill_(1).sum()

    pool = small_pool()
    for mode in (contextlib.nullcontext, FakeTensorMode, contextlib.nullcontext):
        with torch._dynamo.config.patch(fake_tensor_cache_enabled=False), mode():
            total = take(pool)
        assert total.is_meta or type(total) is not torch.Tensor or total == 64
    stats = pool.stats()
    assert (stats.reuses, stats.bypassed, stats.live_bytes) == (1, 1, 0)
    graph = make_fx(lambda x: x + take(pool))(torch.zeros(3))
    assert graph(torch.ones(3)).tolist() == [65.0] * 3 and pool.stats().bypassed == 2


def test_an_error_while_it_is_lent_loses_no_count(monkeypatch):
    pool = small_pool()
    monkeypatch.setattr(memory, "_tensor", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pool.lend((8, 8))
    assert pool.stats().live_bytes == 0 and pool.stats().idle_bytes == 256


def test_a_lent_storage_that_grows_is_no_longer_the_pools():
    pool = small_pool()
    t = pool.lend((8, 8))
    t.resize_(1 << 16)
    assert pool.stats().held_bytes == 0 and t.fill_(1).sum() == 1 << 16


def test_threads_never_share_what_is_lent():
    pool, wrong = small_pool(), []

    def work(number: int):
        rng, kept = random.Random(number), []
        for i in range(400):
            t = pool.lend((rng.choice([64, 65, 128]),)).fill_(1000 * number + i)
            kept.append((t, 1000 * number + i))
            if len(kept) > 5:
                t, value = kept.pop(rng.randrange(5))
                wrong.extend([value] * bool(t.ne(value).any()))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and pool.stats().reuses > 0 and pool.stats().borrows == 2400


def test_held_bytes_are_bounded_and_given_up_first():
    pool = small_pool(max_bytes=1024)
    address_of(pool, (32,))
    kept = []
    for i in range(5):
        with pool.borrow((100,)) as t:
            kept.append(t.fill_(i)[1:])
    stats = pool.stats()
    assert (stats.refused, stats.evictions, stats.held_bytes, stats.idle_bytes) == (5, 3, 2 * 448, 128)
    assert [view.mean().item() for view in kept] == [0, 1, 2, 3, 4]


def test_numpy_exports_are_given_up():
    pytest.importorskip("numpy")
    pool = small_pool()
    with pool.borrow((8,)) as t:
        array = t.fill_(1).numpy()
    del t
    address_of(pool, (8,))
    assert array.sum() == 8 and pool.stats().refused == 1 and pool.stats().reuses == 0
    del array
    assert pool.stats().held_bytes == 0 and pool.stats().idle_bytes == 64  # an exported storage never comes back


@pytest.mark.parametrize("change", ["resize_", "share_memory_", "set_", "data"])
def test_changed_storages_are_given_up(change):
    pool = small_pool()
    with pool.borrow((8,)) as t:
        if change == "resize_":
            t.resize_(4096)
        elif change == "share_memory_":
            t.share_memory_()
        elif change == "set_":
            t.set_(torch.ones(3))
        else:
            t.data = torch.ones(3)
    if change in ("set_", "data"):
        assert t.tolist() == [1, 1, 1] and pool.stats().idle_bytes == 64  # left alone, and the pool's bytes are free
    else:
        assert pool.stats().idle_bytes == pool.stats().held_bytes == 0


def test_tensors_with_history_are_refused_for_good():
    weight = torch.ones(8, requires_grad=True)
    for use in (lambda t: t.fill_(1).mul_(weight), lambda t: t[2:].copy_(weight[2:]), lambda t: t.requires_grad_()):
        pool = small_pool()
        with pool.borrow((8,)) as t:
            use(t)
        assert t.requires_grad and t.shape == (8,)
        del t
        assert pool.stats() == memory.PoolStats(borrows=1, allocations=1, refused=1)
        with pool.borrow((8,)) as t:
            assert not t.requires_grad and t.grad_fn is None


class SaveForBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, t):
        ctx.save_for_backward(t)
        return x * t

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


@pytest.mark.parametrize("multiply", [torch.mul, SaveForBackward.apply])
def test_saved_for_backward_is_not_overwritten(multiply):
    pool = small_pool()
    weight = torch.ones(8, requires_grad=True)
    with pool.borrow((8,)) as t:
        t.fill_(3)
        out = multiply(weight, t)
    with pool.borrow((8,)) as other:
        other.fill_(-1)
    out.sum().backward()
    assert weight.grad.tolist() == [3.0] * 8
    assert pool.stats().refused == 1
    del out, t
    assert pool.stats().held_bytes == 0 and pool.stats().idle_bytes == 128


@pytest.mark.parametrize("checkpointed", [False, True])
def test_three_training_steps(checkpointed):
    """Scratch from the pool inside a step, with and without checkpointing: the gradients of plain allocation."""
    pool = small_pool()
    x = torch.linspace(-1, 1, 32)

    def forward(weight, scratch):
        with scratch((32,)) as t:
            torch.mul(weight.detach(), x, out=t)
            shift = t.sum()
        with scratch((32,)) as t:
            return (weight * t.copy_(x)).sin() + shift  # t is saved by autograd

    run = functools.partial(checkpoint, forward, use_reentrant=False) if checkpointed else forward

    def train(scratch):
        weight = torch.linspace(0, 1, 32).requires_grad_()
        for _ in range(3):
            out = run(weight, scratch)
            (grad,) = torch.autograd.grad(out.square().sum(), weight)
            weight = (weight - 0.1 * grad).detach().requires_grad_()
        return weight

    plain = train(lambda shape: contextlib.nullcontext(torch.empty(shape)))
    assert torch.equal(train(pool.borrow), plain)
    assert pool.stats().live_bytes == 0


def test_inference_mode_and_training_share_a_pool():
    pool = small_pool()
    with torch.inference_mode(), pool.borrow((8,)) as t:
        t.add_(1)
        assert not t.is_inference()
    weight = torch.ones(8, requires_grad=True)
    with pool.borrow((8,)) as t:
        (weight * t.fill_(2)).sum().backward()
    assert weight.grad.tolist() == [2.0] * 8 and pool.stats().reuses == 1


def test_an_exception_returns_the_buffer():
    pool = small_pool()
    with pytest.raises(KeyError), pool.borrow((64,)) as t:
        t.fill_(1)
        raise KeyError("inside")
    assert t.shape == (0,)
    stats = pool.stats()
    assert (stats.live_bytes, stats.idle_bytes, stats.refused) == (0, 256, 0)
    address_of(pool, (64,))
    assert pool.stats().reuses == 1

    def fail(tensor):
        raise KeyError("its frame is part of the traceback and still refers to the tensor")

    def step():
        with pool.borrow((64,)) as t:
            fail(t)

    with contextlib.suppress(KeyError):
        step()
    stats = pool.stats()
    assert (stats.live_bytes, stats.idle_bytes, stats.refused) == (0, 256, 1)


def test_an_abandoned_scope_is_ended_by_the_collector():
    pool = small_pool()

    def suspended():
        with pool.borrow((64,)) as t:
            yield t.data_ptr()

    next(suspended())
    gc.collect()
    assert pool.stats().live_bytes == 0 and pool.stats().idle_bytes == 256


def test_no_growth_and_no_deadlock_over_many_odd_sizes():
    pool = small_pool(max_bytes=8192)
    for i in range(1000):
        address_of(pool, (1 + i % 37, 3), torch.float16)
    stats = pool.stats()
    assert stats.borrows == 1000 == stats.reuses + stats.allocations
    assert stats.idle_bytes <= 8192 and stats.live_bytes == stats.held_bytes == 0


@pytest.mark.parametrize("call", [MemoryPool.stats, MemoryPool.clear, lambda pool: address_of(pool, (64,))])
def test_every_access_waits_for_the_lock(call):
    pool = small_pool()
    with pool._lock:
        thread = threading.Thread(target=call, args=(pool,), daemon=True)
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
    thread.join(20)
    assert not thread.is_alive()


def test_there_is_a_global_pool():
    assert isinstance(memory.GLOBAL_POOL, MemoryPool) and memory.GLOBAL_POOL.threshold_bytes == 16 << 20


@pytest.fixture
def frequent_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads change places between almost any two bytecodes
    yield
    sys.setswitchinterval(before)


def test_soak_eight_threads(frequent_switches):
    """Random sizes, nesting, escapes, exceptions: contents stay the borrower's, bounds hold, memory does not grow."""
    pool = small_pool(max_bytes=4 * MIB)
    stop, errors, loops = time.monotonic() + SOAK_SECONDS, [], [0] * 8
    resident = []

    def step(rng, mark):
        with pool.borrow((rng.randrange(1, 60_000),), rng.choice([F32, torch.float16, torch.int64])) as t:
            t.fill_(mark)
            kept = t[:1] if rng.random() < 0.1 else None
            if rng.random() < 0.3:
                with pool.borrow((rng.randrange(1, 60_000),)) as inner:
                    inner.fill_(mark + 8)
                    assert inner.min() == inner.max() == mark + 8
            if rng.random() < 0.1:
                raise OSError("injected")
            assert t.min() == t.max() == mark
        assert (kept is None) == (t.numel() == 0)
        assert kept is None or kept.item() == mark

    def work(i):
        rng = random.Random(i)
        try:
            while time.monotonic() < stop:
                with contextlib.suppress(OSError):
                    step(rng, i + 1)
                loops[i] += 1
                stats = pool.stats()
                assert stats.idle_bytes + stats.held_bytes <= 4 * MIB
                if i == 0 and loops[0] % 50 == 0:
                    resident.append(tracking.resident_bytes() or 0)
                    if rng.random() < 0.1:
                        pool.clear()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOAK_SECONDS + 30)
    assert not any(thread.is_alive() for thread in threads), "threads hang"
    assert not errors, errors[0]
    assert min(loops) > 10
    gc.collect()
    stats = pool.stats()
    assert stats.live_bytes == stats.held_bytes == 0 and stats.borrows == stats.reuses + stats.allocations
    if SOAK_SECONDS >= 5:  # less is all warm-up
        half = len(resident) // 2
        assert max(resident[half:]) <= max(resident[:half]) + 16 * MIB


# --- tracker


def test_peak_of_a_chain_of_ops_is_the_hand_computed_one():
    n = 1000  # 4000 bytes each
    with LiveStorageTracker() as tracker:
        a = torch.ones(n)  # a
        b = a + 1  # a b
        c = b * 2  # a b c: the peak, 12000
        assert tracker.current_bytes == 12000
        del b
        assert tracker.current_bytes == 8000
        d = c.view(10, 100)[:, ::2].t()  # nothing
        c.add_(1).mul_(2)  # nothing
        e = d.sum()  # 4 more
        assert tracker.current_bytes == 8004
        del c, d
        assert tracker.current_bytes == 4004
    assert tracker.peak_bytes == 12000
    del a, e
    assert tracker.current_bytes == 0 and tracker.peak_bytes == 12000


def test_a_view_keeps_its_whole_storage_alive():
    with LiveStorageTracker() as tracker:
        a = torch.ones(1000)[3:4]
        assert tracker.current_bytes == 4000
        del a
        assert tracker.current_bytes == 0


def test_memory_from_before_counts_once_and_only_when_registered():
    x, other = torch.ones(1000), torch.ones(1000)
    with LiveStorageTracker() as tracker:
        other.view(10, 100).add_(1)
        assert tracker.peak_bytes == 0
        tracker.register(x, x[5:], x)
        assert tracker.current_bytes == 4000
        x.view(10, 100).add_(1)
        assert tracker.current_bytes == 4000
        x = x + other
    assert tracker.peak_bytes == 8000 and tracker.current_bytes == 4000
    with LiveStorageTracker(count_arguments=True) as tracker:
        x.add_(other)
    assert tracker.peak_bytes == 8000
    with pytest.raises(TypeError, match="expected tensors, got list"):
        tracker.register([x])


def test_out_arguments_resizes_and_constructors():
    a = torch.ones(1000)
    empty = torch.empty(0)
    with LiveStorageTracker() as tracker:
        torch.add(a, a, out=empty)  # grows
        assert tracker.current_bytes == 4000
        empty.resize_(2000)
        assert tracker.current_bytes == 8000
        empty.untyped_storage().resize_(0)
        t = torch.tensor([1.0, 2.0])
        assert tracker.peak_bytes == 8008
        del t
        torch.split(torch.ones(1000), 10)  # many outputs, one storage
        assert tracker.peak_bytes == 12000


def test_sparse_tensors_count_all_their_parts():
    with LiveStorageTracker() as tracker:
        s = torch.sparse_coo_tensor(torch.zeros(2, 5, dtype=torch.int64), torch.ones(5), (4, 4))
        assert tracker.current_bytes == 2 * 5 * 8 + 5 * 4
        del s
        assert tracker.current_bytes == 0


def test_backward_is_seen():
    n = 1000
    x = torch.ones(n, requires_grad=True)
    with LiveStorageTracker() as tracker:
        tracker.register(x)
        y = x.exp()  # x y, and y is saved
        loss = y.sum()  # + 4
        del y
        assert tracker.current_bytes == 8004 == tracker.peak_bytes  # the graph holds y
        loss.backward()  # + ones_like(loss) 4, + grad * y 4000
        assert tracker.peak_bytes == 12008
        del loss
        assert tracker.current_bytes == 8000  # x and x.grad: y went with the graph
    x.grad = None
    assert tracker.current_bytes == 4000


def test_nested_trackers_each_see_the_ops_inside():
    with LiveStorageTracker() as outer:
        a = torch.ones(1000)
        with LiveStorageTracker() as inner:
            b = a + 1
            del b
        with outer:  # entered again: still counted once
            c = a + 1
        del a, c
    assert (outer.peak_bytes, inner.peak_bytes, outer.current_bytes) == (8000, 4000, 0)


def test_a_tracker_can_be_used_again():
    tracker = LiveStorageTracker()
    with tracker:
        a = torch.ones(1000)
        b = a + 1
    del b
    assert tracker.peak_bytes == 8000
    with tracker:
        assert torch.cat([a, a]).shape == (2000,)
    assert tracker.peak_bytes == 12000


def test_released_addresses_are_not_mistaken_for_old_storages():
    with LiveStorageTracker() as tracker:
        for i in range(1, 200):
            t = torch.ones(i)
            assert tracker.current_bytes == 4 * i
            del t
    assert tracker.peak_bytes == 4 * 199 and tracker.current_bytes == 0 and not tracker._live


def test_pool_memory_is_seen_by_the_tracker():
    pool = small_pool()
    with LiveStorageTracker() as tracker:
        for _ in range(3):
            with pool.borrow((16, 16)) as t:
                t.fill_(1)[2:].add_(1)
        assert pool.stats().refused == 0  # watching changes nothing
        assert tracker.current_bytes == tracker.peak_bytes == 1024
        pool.clear()
        assert tracker.current_bytes == 0


# --- high-water mark


@pytest.mark.skipif(not tracking.reset_high_water(), reason="the system has no resettable high-water mark")
def test_high_water_mark_rises_with_touched_memory_and_resets():
    nbytes = 64 * MIB
    assert tracking.reset_high_water()
    start = tracking.high_water_bytes()
    assert abs(start - tracking.resident_bytes()) < 4 * MIB
    torch.empty(nbytes, dtype=torch.uint8)
    assert tracking.high_water_bytes() - start < nbytes / 4  # untouched memory costs nothing
    t = torch.ones(nbytes, dtype=torch.uint8)
    del t
    assert nbytes * 0.95 < tracking.high_water_bytes() - start < nbytes * 1.25
    assert tracking.reset_high_water()
    assert tracking.high_water_bytes() - start < nbytes / 4


def test_high_water_mark_says_when_it_cannot_tell(monkeypatch, tmp_path):
    monkeypatch.setattr(tracking, "_PROC", tmp_path / "absent")
    assert tracking.reset_high_water() is False
    assert tracking.high_water_bytes() is None and tracking.resident_bytes() is None
    monkeypatch.setattr(tracking, "_PROC", tmp_path)  # /proc without VmHWM, as some sandboxes have it
    (tmp_path / "status").write_text("Name:\tx\nVmRSS:\t     512 kB\n")
    assert tracking.reset_high_water() is False
    assert tracking.high_water_bytes() is None and tracking.resident_bytes() == 512 * 1024
    (tmp_path / "status").write_text("VmHWM:\t    1024 kB\nVmRSS:\t     512 kB\n")
    assert tracking.reset_high_water() is True and (tmp_path / "clear_refs").read_text() == "5"
    assert tracking.high_water_bytes() == 1 << 20
