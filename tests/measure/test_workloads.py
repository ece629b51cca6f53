"""Systems that measure a cache, a pool, and blocks chosen by content: their checks hold, and fail for what is wrong."""

import contextlib
from dataclasses import replace

import pytest
import torch
from ringlab import adaptive, block_patterns, memory, patterns
from ringlab.measure import Point, cache_systems
from ringlab.measure.systems import build

LOOKUP = Point("cache_workload", block_patterns.sliding_window(2, block_size=16), seq_len=512)
SCRATCH = Point("pool_workload", patterns.Dense(), seq_len=1)
CHOSEN = Point("adaptive", patterns.Dense(), seq_len=250, heads=4, kv_heads=2, head_dim=16,
               options={"block_size": 16, "top_k": 3})  # fmt: skip


def test_a_workload_is_many_patterns_some_of_them_often():
    drawn = cache_systems.workload(LOOKUP)
    assert drawn == cache_systems.workload(LOOKUP) and len(drawn) == cache_systems.LOOKUPS and len(set(drawn)) == 24
    often = sorted((drawn.count(x) for x in set(drawn)), reverse=True)
    assert often[0] > 4 * often[8] and {n for _, n in drawn} == {512, 256, 128, 64}


@pytest.mark.parametrize("options, kept", [
    ({"max_mb": 0, "blocks": "batched"}, 0), ({"max_mb": 0.05, "blocks": "batched"}, None),
    ({"max_mb": 64, "blocks": "batched"}, 176), ({"blocks": "views"}, 176),
])  # fmt: skip
def test_lookups_are_those_of_a_plain_cache(options, kept):
    system = build(LOOKUP.but(options=options), "cpu")
    found = system.run([])
    assert system.check([], found) == ({"out": 0.0}, {"out": 0.0})
    counted = found.counted
    assert counted["cache_hits"] + counted["cache_misses"] == cache_systems.LOOKUPS
    assert counted["cache_hits"] == kept or kept is None and 0 < counted["cache_hits"] < 176
    assert (counted["cache_evictions"] > 0) == (kept is None) and counted["cache_bytes"] <= system.max_bytes
    found.plans = [*found.plans[1:], found.plans[0]]
    assert system.check([], found)[0]["out"] > 0.5


class Same(memory.MemoryPool):
    """Lends one buffer to all."""

    @contextlib.contextmanager
    def borrow(self, shape, dtype=torch.float32, device="cpu"):
        self.buffer = getattr(self, "buffer", torch.empty(shape, dtype=dtype, device=device))
        yield self.buffer


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("pool", [False, True])
def test_scratch_is_ones_own_while_it_is_held(pool, threads):
    before = torch.get_num_threads()
    system = build(SCRATCH.but(options={"size_mb": 0.25, "threads": threads, "pool": pool}), "cpu")
    found = system.run([])
    assert system.check([], found) == ({"out": 0.0}, {"out": 0.0}) and found.out.tolist() == [1.0, 2.0][:threads]
    lent = found.counted["pool_reuses"] + found.counted["pool_allocations"]
    assert lent == pool * threads * cache_systems.BORROWS and found.counted["pool_allocations"] <= threads
    system.pool = Same()
    assert system.check([], found)[0]["out"] >= 1
    assert system.check([], replace(found, out=found.out + 1))[0]["out"] > 0
    system.workers.shutdown()
    torch.set_num_threads(before)


@pytest.mark.parametrize("causal", [False, True])
def test_chosen_blocks_are_checked_with_their_choice(causal, monkeypatch):
    system = build(CHOSEN.but(causal=causal, passes="fwd+bwd"), "cpu")
    given = system.inputs()
    output = system.run(given)
    errors, tolerance = system.check(given, output)
    assert errors.keys() == {"out", "lse", "dq", "dk", "dv"} and all(errors[x] <= tolerance[x] for x in errors)
    assert system.cost.pairs == 4 * adaptive.Adaptive(16, 3).pairs(250, causal)
    spoiled = replace(output, out=output.out * 1.01)
    assert system.check(given, spoiled)[0]["out"] > tolerance["out"]
    choose = adaptive.choose
    monkeypatch.setattr(adaptive, "choose", lambda z, *rest: choose(-z, *rest))
    assert system.check(given, system.run(given))[0]["out"] == float("inf"), "the worst blocks, consistently"
