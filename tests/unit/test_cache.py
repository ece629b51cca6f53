"""The pattern cache: eviction by bytes, one build per key, failures, counts, threads."""

import contextlib
import copy
import pickle
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from ringlab import cache
from ringlab.cache import CacheStats, PatternCache
from torch._subclasses.fake_tensor import FakeTensorMode


def filler(nbytes: int):
    return lambda: torch.zeros(nbytes, dtype=torch.uint8)


def run_threads(count: int, work) -> list:
    """The results of work(i) in as many threads, in order; raises the first error."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(work, range(count)))


def test_bounds_evict_the_least_recently_used_and_a_value_above_them_is_not_stored():
    store = PatternCache(max_bytes=300)
    for name in "abc":
        store.get(name, filler(100))
    store.get("a", filler(100))  # a hit: "a" is now the most recently used
    store.get("d", filler(100))
    assert store.stats() == CacheStats(
        hits=1, misses=4, evictions=1, entries=3, bytes=300
    )
    for name in "acd":
        store.get(name, lambda: pytest.fail("was evicted"))
    store.get("large", filler(250))  # evicts as many as it needs
    for _ in range(2):
        assert store.get("too large", filler(301)).numel() == 301
    assert store.stats() == CacheStats(
        hits=4, misses=7, evictions=4, entries=1, bytes=250
    )
    store = PatternCache(max_entries=3)
    for i in range(10):
        store.get(i, lambda: (1, 2, 3))
    assert store.stats() == CacheStats(misses=10, evictions=7, entries=3)
    assert PatternCache(max_entries=0).get("x", lambda: 5) == 5


BASE = torch.zeros(100, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda: BASE[:1], 800),  # a view keeps the whole storage
        (lambda: (BASE, BASE[3:], [BASE.view(10, 10)]), 800),
        (lambda: {"a": {"b": (torch.zeros(3, dtype=torch.uint8),)}, "c": (1, 2)}, 3),
        (lambda: SimpleNamespace(tensors=[torch.zeros(7)]), 28),
        (lambda: torch.eye(8).to_sparse_coo(), 2 * 8 * 8 + 8 * 4),
        (
            lambda: torch.sparse_csr_tensor(
                torch.arange(9), torch.arange(8), torch.ones(8), (8, 8)
            ),
            9 * 8 + 8 * 8 + 8 * 4,
        ),
        (
            lambda: torch.sparse_bsr_tensor(
                torch.arange(3), torch.arange(2), torch.ones(2, 4, 4), (8, 8)
            ),
            40 + 32 * 4,
        ),
        (lambda: torch.zeros(9, device="meta"), 0),
        (lambda: None, 0),
    ],
)
def test_bytes_are_those_of_the_storages_each_once(make, expected):
    store = PatternCache()
    value = store.get("k", make)
    assert store.get("k", lambda: pytest.fail("built again")) is value
    assert store.stats() == CacheStats(hits=1, misses=1, entries=1, bytes=expected)


def test_a_storage_that_several_values_share_counts_once_until_the_last_is_gone():
    store, shared = PatternCache(max_bytes=1000), torch.zeros(100)
    for i in range(5):
        store.get(i, lambda i=i: (shared[i:], filler(i)()))
    assert store.stats() == CacheStats(misses=5, entries=5, bytes=410)
    store.get("large", filler(595))  # evicts "0" to "3", which hold nothing but 6 bytes
    assert store.stats() == CacheStats(misses=6, evictions=4, entries=2, bytes=999)
    store.get("larger", filler(600))
    assert store.stats() == CacheStats(misses=7, evictions=6, entries=1, bytes=600)


@pytest.mark.parametrize(
    "build", [lambda: [].pop(), lambda: [torch.ones(3, requires_grad=True) * 2]]
)
def test_a_failed_build_and_a_value_that_requires_grad_are_not_stored(build):
    store = PatternCache()
    with pytest.raises((IndexError, ValueError)):
        store.get("k", build)
    assert store.stats() == CacheStats(misses=1)
    assert store.get("k", lambda: 7) == 7 and store.stats() == CacheStats(
        misses=2, entries=1
    )


def test_a_value_may_grow_while_its_bytes_are_counted():
    """As an object does whose properties are computed, and kept, when another thread
    first asks for them.
    """

    class Grows:
        @property
        def __dict__(self):
            value.more = torch.zeros(9)
            return {}

    value = SimpleNamespace(inner=Grows(), rows=torch.zeros(4))
    store = PatternCache()
    assert store.get("k", lambda: value) is value and store.stats().bytes == 16


def test_clear_drops_entries_and_counts_and_copies_have_the_same_bounds():
    store = PatternCache(100, 7)
    for _ in range(2):
        store.get("a", filler(8))
        assert store.stats() == CacheStats(misses=1, entries=1, bytes=8)
        for made in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
            assert (made.max_bytes, made.max_entries, made.stats()) == (
                100,
                7,
                CacheStats(),
            )
        store.clear()
    assert store.stats() == CacheStats() and cache.GLOBAL.max_bytes == 64 << 20


def test_built_in_inference_mode_serves_training():
    store = PatternCache()
    with torch.inference_mode():
        index = store.get("rows", lambda: torch.arange(3) * 1.5)
    weight = torch.ones(3, requires_grad=True)
    (
        weight * store.get("rows", lambda: pytest.fail("rebuilt"))
    ).sum().backward()  # saves the cached tensor
    assert not index.is_inference() and weight.grad.tolist() == [0.0, 1.5, 3.0]


@pytest.mark.parametrize("mode", [FakeTensorMode, partial(torch.device, "meta")])
def test_values_are_built_outside_of_the_modes_of_the_caller(mode):
    store = PatternCache()
    with mode():
        found = store.get("rows", lambda: torch.arange(3))
    assert type(found) is torch.Tensor and found.tolist() == [0, 1, 2]
    assert store.stats() == CacheStats(misses=1, entries=1, bytes=24)


@pytest.mark.parametrize("fails", [False, True])
def test_threads_that_miss_together_build_once_and_try_again_after_a_failure(fails):
    store, entered, built = PatternCache(), threading.Semaphore(0), []

    def build():
        built.append(1)
        if len(built) == 1:
            for _ in range(6):
                assert entered.acquire(timeout=20)
            time.sleep(0.2)  # now all wait for this build
            if fails:
                raise OSError("first attempt")
        return torch.zeros(4)

    def work(i):
        entered.release()
        try:
            return store.get("k", build)
        except OSError as error:
            return str(error)

    results = run_threads(6, work)
    assert len(built) == 1 + fails and len({id(r) for r in results}) == 1 + fails
    assert sum(r == "first attempt" for r in results if isinstance(r, str)) == fails
    assert (store.stats().hits, store.stats().misses) == (5 - fails, 1 + fails)


def test_a_build_does_not_block_other_keys():
    store = PatternCache()
    started, release = threading.Event(), threading.Event()

    def slow():
        started.set()
        assert release.wait(20)
        return "slow"

    def work(i):
        if i == 0:
            return store.get("slow", slow)
        started.wait(20)
        got = (
            store.get(
                "sum", lambda: store.get("a", lambda: 1) + store.get("b", lambda: 2)
            ),
            store.stats().entries,
        )
        release.set()
        return got

    assert run_threads(2, work) == ["slow", (3, 3)]


def test_eight_threads(frequent_switches):
    """Random keys, sizes, failures and nested builds: values right, bound kept, counts
    add up.
    """
    store, stop = PatternCache(max_bytes=64 << 10), time.monotonic() + 1

    def work(i):
        rng, calls = random.Random(i), 0
        while time.monotonic() < stop:
            size = rng.randrange(1, 200)

            def build(size=size):
                if size > 150:
                    store.get(("part", size - 150), filler(size - 150))
                return (
                    [].pop() if rng.random() < 0.02 else torch.full((size * 10,), size)
                )

            with contextlib.suppress(IndexError):
                value, stats = store.get(("size", size), build), store.stats()
                assert value.numel() == size * 10 and value[0] == size == value[-1]
                assert 0 <= stats.bytes <= store.max_bytes and stats.entries <= 250
                calls += 1
        return calls

    calls = run_threads(8, work)
    assert min(calls) > 10 and store.stats().hits + store.stats().misses >= sum(calls)
    store.get(
        "all of it", filler(64 << 10)
    )  # fits only if every other entry's bytes were counted rightly
    assert (store.stats().entries, store.stats().bytes) == (1, 64 << 10)
