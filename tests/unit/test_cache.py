"""Pattern cache: keys, LRU by bytes, one build per key, failures, statistics, threads."""

import dataclasses
import gc
import os
import random
import sys
import threading
import time

import pytest
import torch
from ringlab import cache
from ringlab.cache import CacheStats, PatternCache, key
from torch.utils._python_dispatch import TorchDispatchMode

SOAK_SECONDS = float(os.environ.get("RINGLAB_SOAK_SECONDS", "1"))


def filler(nbytes: int):
    return lambda: torch.zeros(nbytes, dtype=torch.uint8)


def run_threads(count: int, work) -> list:
    """Run work(i) in threads; return results in order, re-raise the first error, fail on a hang."""
    results, errors = [None] * count, []

    def call(i: int) -> None:
        try:
            results[i] = work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=SOAK_SECONDS + 30)
    assert not any(thread.is_alive() for thread in threads), "threads hang"
    if errors:
        raise errors[0]
    return results


def wait_until(condition) -> None:
    stop = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < stop, "condition never came true"
        time.sleep(0.001)


# --- keys


@dataclasses.dataclass(frozen=True)
class Pattern:
    segment_lengths: tuple
    dilation_rates: tuple
    mixing: str = "lse"


@dataclasses.dataclass(frozen=True)
class OtherPattern(Pattern):
    pass


def test_every_field_of_a_configuration_changes_the_key():
    base = {
        "pattern": Pattern((8, 16), (1, 2)),
        "n": 64,
        "causal": False,
        "dtype": torch.float32,
        "device": torch.device("cuda", 0),
    }
    changes = {
        "pattern": [Pattern((8, 32), (1, 2)), Pattern((8, 16), (1, 4)), Pattern((8, 16), (1, 2), "head_groups")]
        + [OtherPattern((8, 16), (1, 2))],
        "n": [65],
        "causal": [True],
        "dtype": [torch.float64],
        "device": [torch.device("cuda", 1), torch.device("cpu")],
    }
    keys = [key(base)] + [key({**base, name: value}) for name, values in changes.items() for value in values]
    assert len(set(keys)) == len(keys)
    assert key(base) == key(dict(reversed(base.items())))  # equal configurations, equal keys
    assert key(Pattern((8, 16), (1, 2))) == key(Pattern([8, 16], (1, 2)))


def test_equal_numbers_of_different_type_do_not_share_a_key():
    values = [True, 1, 1.0, "1", b"1", False, 0, 0.0, -0.0, None, "None", float("nan")]
    assert len({key(v) for v in values}) == len(values)
    assert len({key((v,)) for v in values} | {key({"x": v}) for v in values}) == 2 * len(values)
    assert key(float("nan")) == key(float("nan"))


def test_nesting_is_part_of_the_key():
    assert len({key(1, 2, 3), key((1, 2), 3), key(1, (2, 3)), key((1, 2, 3)), key({1, 2, 3}), key(range(1, 4))}) == 6
    assert key(torch.Size([2, 3])) == key((2, 3)) == key([2, 3])
    assert key(slice(0, 8, 2)) != key(slice(1, 8, 2))


def test_device_without_index_is_the_current_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert key(torch.device("cuda")) == key("cuda") == key("cuda:1") == key(torch.device("cuda", 1))
    assert key("cuda") != key("cuda:0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert key("cuda") == key("cuda:0") != key("cuda:1")
    assert key("cpu") == key(torch.device("cpu")) == key(torch.device("cpu", 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match="no CUDA device"):
        key("cuda")


@pytest.mark.parametrize("part", [torch.zeros(2), lambda: 0, object()])
def test_what_has_no_value_is_no_key(part):
    with pytest.raises(TypeError, match="cache key: cannot use a"):
        key("x", part)


# --- one thread


def test_a_hit_is_the_same_object_and_copies_nothing():
    store = PatternCache()
    built = []

    def build():
        built.append(1)
        return {"rows": torch.arange(10), "plan": (1, 2)}

    first = store.get("k", build)
    ops = []

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ops.append(func)
            return func(*args, **(kwargs or {}))

    with Ops():
        second = store.get("k", build)
        assert not ops
        second["rows"].clone()
        assert len(ops) == 1  # the mode does see copies
    assert second is first and second["rows"] is first["rows"] and len(built) == 1
    assert store.stats() == CacheStats(hits=1, misses=1, entries=1, bytes=80)


def test_least_recently_used_goes_first_not_the_oldest():
    store = PatternCache(max_bytes=300)
    for name in "abc":
        store.get(name, filler(100))
    store.get("a", filler(100))  # a hit: a is now the youngest; FIFO would drop it next
    store.get("d", filler(100))
    assert store.stats() == CacheStats(hits=1, misses=4, evictions=1, entries=3, bytes=300)
    for name in "acd":
        store.get(name, lambda: pytest.fail("was evicted"))
    store.get("b", filler(100))
    assert store.stats().misses == 5


def test_bound_counts_bytes_not_entries():
    store = PatternCache(max_bytes=1000)
    for i in range(10):
        store.get(i, filler(100))
    assert store.stats().entries == 10
    store.get("large", filler(950))  # pushes out as many as it needs
    assert store.stats() == CacheStats(misses=11, evictions=10, entries=1, bytes=950)
    store.get("fits beside", filler(50))
    assert store.stats().entries == 2 and store.stats().bytes == 1000


def test_an_entry_above_the_bound_is_returned_but_not_kept():
    store = PatternCache(max_bytes=100)
    store.get("small", filler(60))
    assert store.get("large", filler(101)).numel() == 101
    assert store.get("large", filler(101)).numel() == 101
    assert store.stats() == CacheStats(misses=3, entries=1, bytes=60, uncached=2)
    store.get("small", lambda: pytest.fail("the large entry pushed the small one out"))


def test_entries_without_tensors_are_bounded_too():
    store = PatternCache(max_entries=3)
    for i in range(10):
        store.get(i, lambda: (1, 2, 3))
    assert store.stats() == CacheStats(misses=10, evictions=7, entries=3)
    assert PatternCache(max_entries=0).get("x", lambda: 5) == 5


class Plain:
    def __init__(self, tensor):
        self.tensor = tensor


@dataclasses.dataclass(slots=True)
class Slotted:
    tensor: torch.Tensor


@pytest.mark.filterwarnings("ignore:Sparse")
def test_bytes_are_those_of_the_storages_each_once():
    base = torch.zeros(100, dtype=torch.float64)  # 800 bytes, and a view keeps all of them
    csr = torch.sparse_csr_tensor(torch.arange(9), torch.arange(8), torch.ones(8), (8, 8))
    bsr = torch.sparse_bsr_tensor(torch.arange(3), torch.arange(2), torch.ones(2, 4, 4), (8, 8))
    loop = []
    loop.append(loop)
    for value, expected in [
        (base, 800),
        (base[:1], 800),
        ((base, base[3:], [base.view(10, 10)]), 800),
        ({"a": {"b": (torch.zeros(3, dtype=torch.uint8),)}, torch.zeros(5, dtype=torch.uint8): 1}, 8),
        (Plain(torch.zeros(7)), 28),
        (Slotted(torch.zeros(7)), 28),
        (Pattern(torch.zeros(2), (torch.zeros(3),)), 20),
        (torch.eye(8).to_sparse_coo(), 2 * 8 * 8 + 8 * 4),
        (csr, 9 * 8 + 8 * 8 + 8 * 4),
        (bsr, 3 * 8 + 2 * 8 + 2 * 16 * 4),
        (torch.zeros(9, device="meta"), 0),
        (loop, 0),
        (None, 0),
    ]:
        store = PatternCache()
        store.get("k", lambda value=value: value)
        assert store.stats().bytes == expected, value


def test_none_and_false_are_values():
    store = PatternCache()
    for value in (None, False, 0, ()):
        assert store.get(("v", repr(value)), lambda value=value: value) is value
        assert store.get(("v", repr(value)), lambda: pytest.fail("built again")) is value


def test_a_failed_build_leaves_no_debris():
    store = PatternCache()
    for error in (ValueError("no"), KeyboardInterrupt()):

        def build(error=error):
            raise error

        with pytest.raises(type(error)):
            store.get("k", build)
    assert store.stats() == CacheStats(misses=2)
    assert store.get("k", lambda: 7) == 7
    assert not store._building and not store._waiting


def test_a_build_may_use_other_keys_but_not_its_own():
    store = PatternCache()
    assert store.get("sum", lambda: store.get("a", lambda: 1) + store.get("b", lambda: 2)) == 3
    assert store.stats().entries == 3
    with pytest.raises(RuntimeError, match="'own' needs its own result"):
        store.get("own", lambda: store.get("between", lambda: store.get("own", lambda: 1)))
    assert not store._building and store.get("own", lambda: 4) == 4


def test_clear_forgets_entries_counts_and_builds_in_flight():
    store = PatternCache()
    store.get("a", filler(8))

    def build():
        store.clear()
        return 5

    assert store.get("b", build) == 5
    assert store.stats() == CacheStats()
    store.get("a", filler(8))
    assert store.stats() == CacheStats(misses=1, entries=1, bytes=8)


def test_built_in_inference_mode_serves_training():
    store = PatternCache()
    with torch.inference_mode():
        index = store.get("rows", lambda: torch.arange(3) * 1.5)
    weight = torch.ones(3, requires_grad=True)
    (weight * store.get("rows", lambda: pytest.fail("rebuilt"))).sum().backward()  # saves the cached tensor
    assert not index.is_inference() and weight.grad.tolist() == [0.0, 1.5, 3.0]


def test_values_that_require_grad_are_refused():
    weight = torch.ones(3, requires_grad=True)
    store = PatternCache()
    with torch.no_grad(), pytest.raises(ValueError, match="must not require grad"):
        store.get("w", lambda: [weight * 2])
    assert store.stats() == CacheStats(misses=1)


def test_fake_tensors_are_not_kept():
    from torch._subclasses.fake_tensor import FakeTensorMode

    store = PatternCache()
    with FakeTensorMode():
        store.get("rows", lambda: torch.arange(3))
    assert store.stats() == CacheStats(misses=1, uncached=1)
    assert type(store.get("rows", lambda: torch.arange(3))) is torch.Tensor


@pytest.mark.parametrize("bound", [{"max_bytes": -1}, {"max_entries": -1}])
def test_negative_bounds_are_refused(bound):
    with pytest.raises(ValueError, match="must be >= 0"):
        PatternCache(**bound)


def test_there_is_a_global_cache():
    assert isinstance(cache.GLOBAL, PatternCache) and cache.GLOBAL.max_bytes == 64 << 20


# --- threads


@pytest.mark.parametrize("max_bytes", [1 << 20, 0])  # 0: never kept, and still one build serves those who wait
def test_threads_that_miss_together_build_once(max_bytes):
    store = PatternCache(max_bytes=max_bytes)
    started, release, built = threading.Event(), threading.Event(), []

    def build():
        built.append(1)
        started.set()
        assert release.wait(20)
        return torch.zeros(4)

    def work(i):
        if i == 7:
            started.wait(20)
            wait_until(lambda: len(store._waiting) == 6)
            release.set()
            return None
        return store.get("k", build)

    results = run_threads(8, work)[:7]
    assert len(built) == 1 and len({id(r) for r in results}) == 1
    stats = store.stats()
    assert (stats.hits, stats.misses) == (6, 1)


def test_a_build_does_not_block_other_keys():
    store = PatternCache()
    store.get("warm", lambda: 1)
    started, release = threading.Event(), threading.Event()

    def slow():
        started.set()
        assert release.wait(20)
        return "slow"

    def work(i):
        if i == 0:
            return store.get("slow", slow)
        started.wait(20)
        got = store.get("warm", lambda: 0), store.get("new", lambda: 2), store.stats().entries
        release.set()
        return got

    assert run_threads(2, work) == ["slow", (1, 2, 2)]


def test_waiters_of_a_failed_build_try_again():
    store = PatternCache()
    started, attempts = threading.Event(), []

    def build():
        attempts.append(1)
        if len(attempts) == 1:
            started.set()
            wait_until(lambda: len(store._waiting) == 5)
            raise OSError("first attempt")
        return "good"

    def work(i):
        if i:
            started.wait(20)
        try:
            return store.get("k", build)
        except OSError as error:
            return str(error)

    results = run_threads(6, work)
    assert results == ["first attempt"] + ["good"] * 5 and len(attempts) == 2
    assert not store._building and not store._waiting


def test_a_key_that_needs_itself_across_threads_raises_instead_of_hanging():
    store = PatternCache()
    barrier = threading.Barrier(2)

    def half(own, other):
        def build():
            barrier.wait(20)
            return store.get(other, lambda: pytest.fail("both keys are in the making"))

        return store.get(own, build)

    def work(i):
        try:
            return half(*("xy" if i == 0 else "yx"))
        except RuntimeError as error:
            return str(error)
        except BaseException as error:  # the other half retries once the first has failed
            return type(error).__name__

    assert any("needs its own result" in str(r) for r in run_threads(2, work))
    assert not store._building and not store._waiting


@pytest.fixture
def frequent_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads change places between almost any two bytecodes
    yield
    sys.setswitchinterval(before)


def test_soak_eight_threads(frequent_switches):
    """Random keys, sizes, failures, nested builds and clears: values right, bound kept, counts add up, no growth."""
    store = PatternCache(max_bytes=64 << 10)
    stop = time.monotonic() + SOAK_SECONDS

    def work(i):
        rng, calls = random.Random(i), 0
        while time.monotonic() < stop:
            size = rng.randrange(1, 200)

            def build(size=size):
                if rng.random() < 0.02:
                    raise OSError("injected")
                if size > 150:
                    store.get(("part", size - 150), lambda: torch.full((size - 150,), size - 150))
                return torch.full((size * 10,), size)

            try:
                value = store.get(("size", size), build)
            except OSError:
                continue
            assert value.numel() == size * 10 and value[0] == size == value[-1]
            stats = store.stats()
            assert 0 <= stats.bytes <= store.max_bytes and stats.entries <= 250
            calls += 1
        return calls

    calls = run_threads(8, work)
    assert min(calls) > 10
    stats = store.stats()
    assert stats.bytes == sum(entry.bytes for entry in store._entries.values())
    assert stats.hits + stats.misses >= sum(calls)
    assert not store._building and not store._waiting
    store.clear()
    gc.collect()
    assert store.stats() == CacheStats()
