"""Each switch of ``Execution`` on each path: what it changes is seen, or it is refused,
or, where ``help(Execution)`` says so, there is nothing for it to change.
"""

import pytest
import torch
from ringlab import (
    Adaptive,
    Dense,
    Dilated,
    Execution,
    KVCache,
    OOMBackoff,
    Simulated,
    adaptive_attention,
    attention,
    blocks,
    cache,
)
from ringlab.blocks import PerHead
from ringlab.cache import PatternCache
from ringlab.kernels import KERNELS
from ringlab.memory import MemoryPool
from ringlab.reference import error
from torch.utils.flop_counter import FlopCounterMode

N = 128
LADDER = Dilated([64, 64, 64], [1, 1, 2])  # folded by the eager kernel, too
BIGBIRD = blocks.bigbird(1, 1, 2, block_size=16)
WINDOW = blocks.sliding_window(1, block_size=16)
SCHEMES = ("plan", "ring", "all_gather", "ulysses")
CUTS = {"cu_seqlens": [0, 60, N]}


def call(pattern, n=N, **how):
    """A path: the results of a call by ``Execution``, and the gradients."""

    def path(execution, dtype):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(1, rows, heads, 8, generator=generator, dtype=torch.float64)
            .to(dtype)
            .requires_grad_()
            for rows, heads in ((n, 4), (N, 2), (N, 2))
        )
        out = attention(
            q, k, v, pattern, backend="auto" if "softcap" in how else "eager",
            execution=execution, **how,
        )  # fmt: skip
        return (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))

    return path


def generation(pattern):
    def path(execution, dtype):
        generator = torch.Generator().manual_seed(0)
        kept = KVCache(
            pattern,
            batch=1,
            max_seq_len=N,
            heads=4,
            kv_heads=2,
            head_dim=8,
            dtype=dtype,
        )
        found = []
        for rows in (N - 40, 1, 39):
            q, k, v = (
                torch.randn(1, rows, h, 8, generator=generator).to(dtype)
                for h in (4, 2, 2)
            )
            how = {"causal": True, "cache": kept, "backend": "eager"}
            with torch.no_grad():
                found.append(attention(q, k, v, pattern, execution=execution, **how))
        return found

    return path


def adaptive(execution, dtype):
    q = torch.randn(1, N, 4, 8, dtype=dtype)
    return [adaptive_attention(q, q, q, Adaptive(16, 2), execution=execution)]


PATHS = {
    "dense": call(Dense()),
    "dilated": call(LADDER),
    "blocks": call(BIGBIRD),
    "by head": call(PerHead((BIGBIRD, BIGBIRD, WINDOW, WINDOW))),
    "other keys": call(Dense(), N // 2, causal=True),
    "documents": call(LADDER, **CUTS),
    "documents, blocks": call(BIGBIRD, **CUTS),
    "sinks": call(LADDER, sinks=torch.ones(4, dtype=torch.float64)),
    "softcap": call(LADDER, softcap=20.0),
    "generation": generation(LADDER),
    "generation, blocks": generation(BIGBIRD),
    "adaptive": adaptive,
    **{x: call(LADDER, group=Simulated(2), scheme=x) for x in SCHEMES},
    "plan, blocks": call(BIGBIRD, group=Simulated(2), scheme="plan"),
    "ulysses, blocks": call(BIGBIRD, group=Simulated(2), scheme="ulysses"),
    "ranks, documents": call(LADDER, group=Simulated(2), scheme="plan", **CUTS),
}
SWITCHES = {
    "cache": PatternCache,
    "no cache": lambda: False,
    "pool": lambda: MemoryPool(threshold_bytes=0),
    "tile": lambda: 24,
    "back-off": lambda: OOMBackoff((24,)),
    "results": lambda: MemoryPool(threshold_bytes=0),
}
FIELDS = {"no cache": "cache", "back-off": "tile"}
# h: honoured; r: refused; -: nothing to change, as help(Execution) says.
TABLE = """
                    cache no_cache pool tile back-off results
dense                 h      h      h    h      h       h
dilated               h      h      h    h      h       h
blocks                h      h      h    h      h       h
by_head               h      h      h    h      h       h
other_keys            h      h      h    h      h       h
documents             h      h      h    h      h       h
documents,_blocks     h      h      h    h      h       h
sinks                 h      h      h    h      h       h
softcap               h      h      h    h      h       h
generation            h      h      h    h      h       -
generation,_blocks    -      -      h    h      h       -
adaptive              r      r      r    r      r       r
plan                  h      h      h    h      h       -
ring                  h      h      h    h      h       -
all_gather            h      h      h    h      h       -
ulysses               h      h      h    h      h       -
plan,_blocks          h      h      h    h      h       -
ulysses,_blocks       h      h      h    h      h       -
ranks,_documents      h      h      h    h      h       h
"""


def expected():
    names, *lines = [line.split() for line in TABLE.strip().splitlines()]
    for path, *marks in lines:
        for switch, mark in zip(names, marks, strict=True):
            yield (
                path.replace("_", " ").replace("all ", "all_"),
                switch.replace("_", " "),
                mark,
            )


def test_the_table_names_every_path_and_switch():
    pairs = {(path, switch) for path, switch, _ in expected()}
    assert pairs == {(path, switch) for path in PATHS for switch in SWITCHES}
    assert {FIELDS.get(name, name) for name in SWITCHES} == set(vars(Execution()))


PLAIN: dict[tuple, tuple] = {}  # results, kernel calls, whether plans are kept


@pytest.fixture
def calls(monkeypatch):
    """(queries, heads times keys) of each kernel call; memory runs out above ``most``
    scores.
    """

    class Calls(list):
        most = float("inf")

    found = Calls()
    eager = type(KERNELS["eager"])
    forward = eager.forward

    def recorded(self, q, k, v, *how):
        b, m, h, _ = q.shape
        if 1 < m > found.most / (b * h * k.shape[1]):
            raise torch.OutOfMemoryError("scores")
        found.append((m, b * h * k.shape[1]))
        return forward(self, q, k, v, *how)

    monkeypatch.setattr(eager, "forward", recorded)
    return found


@pytest.mark.parametrize("path, switch, mark", [*expected()])
def test_a_switch_is_honoured_or_refused(path, switch, mark, calls):
    value, name = SWITCHES[switch](), FIELDS.get(switch, switch)
    dtype = torch.bfloat16 if switch == "pool" else torch.float64
    if mark == "r":
        with pytest.raises((ValueError, TypeError, NotImplementedError)) as refused:
            PATHS[path](Execution(**{name: value}), dtype)
        assert "\n" not in str(refused.value) and not calls
        return
    if (path, dtype) not in PLAIN:
        PATHS[path](Execution(), dtype)  # kernels are probed
        calls.clear()
        start = cache.GLOBAL.stats()
        want = PATHS[path](Execution(), dtype)
        PLAIN[path, dtype] = want, [*calls], cache.GLOBAL.stats() != start
        calls.clear()
    want, plain, cached = PLAIN[path, dtype]
    before = cache.GLOBAL.stats()
    calls.most = 24**2 if switch == "back-off" else calls.most
    got = PATHS[path](Execution(**{name: value}), dtype)
    floor = float(max(t.norm() for t in want))
    for a, b in zip(got, want, strict=True):
        assert error(a, b, 1e-3 * floor) < (1e-12 if dtype == torch.float64 else 1e-9)
    changed = {
        "cache": lambda: value.stats().misses,
        "no cache": lambda: cached and cache.GLOBAL.stats() == before,
        "pool": lambda: value.stats().borrows,
        "tile": lambda: max(m * keys for m, keys in calls if m > 1) <= 24**2,
        "back-off": lambda: calls != plain,
        "results": lambda: value.stats().borrows,
    }.get(switch, lambda: calls != plain)
    assert bool(changed()) == (mark == "h")


def test_a_flop_counter_which_takes_default_calls_whole_leaves_options_their_effect():
    kept = PatternCache()
    with FlopCounterMode(display=False):
        PATHS["dilated"](Execution(cache=kept), torch.float64)
    assert kept.stats().misses
