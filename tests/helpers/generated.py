"""Random generations with a cache, whose unused slots hold NaN, and the oracle's rows;
and what a step calls.
"""

import copy
import io
import random
from unittest import mock

import torch
from document_cases import PATTERNS
from matrix import cache_for
from ringlab import (
    Dense,
    Dilated,
    KVCache,
    Simulated,
    attention,
    blocks,
    kv_cache,
    reference,
)
from ringlab.engine import live_rows, retention
from ringlab.kernels import decode
from ringlab.torch_private import outside_modes
from torch.utils._python_dispatch import TorchDispatchMode

# Rows leave at every step of the first ones.
LEAVING = [blocks.sliding_window(tokens=7), blocks.local_global(3, 2, block_size=1)]
HEADS = [(1, 1), (4, 2), (6, 1), (4, 4), (20, 1)]
NAN = torch.nan


def drawn(
    seed: int, device="cpu", dtypes=(torch.float32, torch.float16), spoil=True
) -> dict:
    """A random generation: the greatest errors of out and lse, the bound of out, and
    whether out was 0 and lse -inf where nothing is seen, and there alone, and all
    lengths were right.

    Sequences of other lengths take one position or several, padded with NaN, and are
    reordered, cropped, saved and copied.
    """
    rng, draws = random.Random(seed), torch.Generator().manual_seed(seed)
    pattern, n = rng.choice([*PATTERNS, *LEAVING * 3]), rng.choice([7, 30, 80])
    (heads, kv_heads), b = rng.choice(HEADS), rng.randint(1, 3)
    dtype, d = rng.choice(dtypes), rng.choice([16, 24, 40, 64, 128, 256])
    scale, max_crop = rng.choice([None, -0.3]), rng.choice([0, 4])
    made = {"batch": b, "heads": heads, "kv_heads": kv_heads, "head_dim": d}
    made |= {"max_seq_len": n, "dtype": dtype, "device": device, "max_crop": max_crop}
    made["group"] = rng.choice([None, Simulated(2)])
    cache = KVCache(pattern, **made)
    if spoil:  # only the kernel reads no unused slot
        spoiled(cache)
    shapes = [(n, h, d) for h in (heads, kv_heads, kv_heads)]
    history = [torch.zeros(b, *shape, dtype=dtype) for shape in shapes]
    found = {"case": f"{seed}: {pattern}, {n}, {made}", "out": 0.0, "lse": 0.0}
    found |= {"bound": 1.0, "zeros": True}
    at, peak = [0] * b, [0] * b
    for _ in range(12):
        most = rng.choice([1, 1, 1, 2, rng.randint(1, n)])
        lengths = [min(n - start, rng.choice([0, 1, 1, most])) for start in at]
        if rng.random() < 0.7:
            lengths = [min(n - start, 1) for start in at]
        rows = max(1, *lengths) + rng.choice([0, 0, 1])
        chunk = [torch.full((b, rows, *s[1:]), NAN, dtype=dtype) for s in shapes]
        for piece, whole in zip(chunk, history):
            for i, length in enumerate(lengths):
                new = torch.randn(length, *whole.shape[2:], generator=draws)
                piece[i, :length] = whole[i, at[i] : at[i] + length] = new.to(dtype)
        how = {"causal": True, "scale": scale}
        want = reference.attention(*history, pattern, **how)
        bound = reference.tolerance(*history, pattern=pattern, **how)["out"]
        found["bound"] = min(found["bound"], bound)
        chunk = [x.to(device) for x in chunk]
        how |= {"cache": cache, "lengths": lengths, "return_lse": True}
        out, lse = (x.cpu().double() for x in attention(*chunk, pattern, **how))
        for i, length in enumerate(lengths):
            rows = slice(at[i], at[i] + length)
            wanted, weights = want[0][i, rows], want[1][i, :, rows]
            dead = weights == -torch.inf  # (h, length)
            none = out[i, :length].transpose(0, 1)[dead], out[i, length:]
            found["zeros"] &= torch.equal(lse[i, :, :length] == -torch.inf, dead)
            found["zeros"] &= not any(map(torch.any, none))
            if length:
                error = reference.error(out[i, :length], wanted, 1.0)
                off = (lse[i, :, :length] - weights).masked_fill(dead, 0).abs().max()
                found["out"] = max(found["out"], error / bound)
                found["lse"] = max(found["lse"], float(off))
        at = [start + length for start, length in zip(at, lengths)]
        peak = list(map(max, at, peak))
        if rng.random() < 0.2:
            order = [rng.randrange(b) for _ in range(b)]
            cache.reorder(order)
            history = [x[order] for x in history]
            at, peak = ([some[i] for i in order] for some in (at, peak))
        if max_crop and rng.random() < 0.3:
            at = [
                min(start, max(0, most - rng.randint(0, max_crop)))
                for start, most in zip(at, peak)
            ]
            cache.crop(at)
        draw = rng.random()
        if draw < 0.1:
            file = io.BytesIO()
            torch.save(cache.state_dict(), file)
            file.seek(0)
            cache = KVCache(pattern, **made)
            cache.load_state_dict(torch.load(file))
        elif draw < 0.2:
            cache = copy.deepcopy(cache)
        found["zeros"] &= cache.lengths == at
    return found


def drafted(pattern, heads=8, kv_heads=2, counts=(3, 1, 16, 2, 5, 9)) -> dict:
    """A few positions at once: how far they are off, and the launches of each draft
    that no row leaves.
    """
    rows = [torch.randn(2, 40, h, 16) for h in (heads, kv_heads, kv_heads)]
    want = reference.attention(*rows, pattern, causal=True)[0]
    cache = spoiled(cache_for(pattern, *rows[:2], 40))
    t, off, launches, launch = 0, 0.0, [], []

    def counted(*args, run=decode.launch, **constants):
        launch.append(1)
        run(*args, **constants)

    with mock.patch.object(decode, "launch", counted):
        for count in counts:
            some = [x[:, t : t + count] for x in rows]
            out = attention(*some, pattern, causal=True, cache=cache)
            off = max(off, reference.error(out, want[:, t : t + count], 1.0))
            launches.append(len(launch))
            launch.clear()
            t += count
    return {"off": off, "launches": launches}


class Graph(TorchDispatchMode):
    """A CUDA graph's contract on a CPU: while it records, nothing runs, memory is
    reserved, and what waits for the device or copies from the host is refused; a replay
    runs what was recorded, on the same memory.
    """

    def __init__(self):
        super().__init__()
        self.recorded, self.launch = [], decode.launch

    def __enter__(self):
        decode.launch = lambda *args, **constants: self.recorded.append(
            lambda: self.launch(*args, **constants)
        )
        kv_cache._capturing = lambda q: True
        return super().__enter__()

    def __exit__(self, *failure):
        decode.launch, kv_cache._capturing = self.launch, lambda q: False
        return super().__exit__(*failure)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func._schema.name, kwargs or {}
        if name in ("aten::_local_scalar_dense", "aten::_to_copy", "aten::nonzero"):
            raise RuntimeError(f"{name} is not permitted when a stream is capturing")
        if func.is_view or name.startswith(("aten::empty", "aten::detach")):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self.recorded.append(lambda: func(*args, **kwargs))
            return args[0]
        made = func(*args, **kwargs)
        self.recorded.append(lambda: made.copy_(func(*args, **kwargs)))
        return made.fill_(NAN)

    def replay(self) -> None:
        for call in self.recorded:
            call()


class CudaGraph:
    """The same on a GPU."""

    def __enter__(self):
        self.graph = torch.cuda.CUDAGraph()
        self.context = torch.cuda.graph(self.graph)
        self.context.__enter__()
        return self

    def __exit__(self, *failure):
        return self.context.__exit__(*failure)

    def replay(self) -> None:
        self.graph.replay()


def replayed(pattern, scale: float | None = None, device="cpu", record=Graph) -> dict:
    """A step in a graph, replayed between calls without one: how far it is off, whether
    the same rows are kept, and what comes of replays that were not prepared.
    """
    rows = [torch.randn(2, 40, h, 16, device=device) for h in (4, 2, 2)]
    made = {"max_crop": 4, "device": device}
    plain, cache = (
        spoiled(cache_for(pattern, *rows[:2], 40, **made)) for _ in range(2)
    )
    still, t, off, graph = [x[:, :1].clone() for x in rows], 0, 0.0, None
    call = {"causal": True, "scale": scale}
    # Positions outside of a graph, then replays.
    for calls, replays in (([5, 1], 11), ([1, 3], 2), ([], 1), ([1], 5)):
        for count in calls:
            some = [x[:, t : t + count] for x in rows]
            attention(*some, pattern, cache=plain, **call)
            attention(*some, pattern, cache=cache, **call)
            t += count
        for _ in range(replays):
            some = [x[:, t : t + 1] for x in rows]
            want = attention(*some, pattern, cache=plain, **call)
            cache.prepare_step()
            if graph is None:
                with record() as graph:
                    out = attention(*still, pattern, cache=cache, **call)
            for x, new in zip(still, some):
                x.copy_(new)
            graph.replay()
            off = max(off, reference.error(out, want.double(), 1.0))
            t += 1
        for one in (plain, cache):
            one.crop(t - 2)
        t -= 2
    alike = [x.live_rows() for x in (plain, cache)]
    same = all(map(torch.equal, *alike))
    nothing, why = [], []
    graph.replay()  # not prepared, after calls without a graph
    nothing.append(bool(out.isnan().all()))
    cache.prepare_step()
    graph.replay()
    nothing.append(not bool(out.isnan().any()))
    for _ in range(live_rows.MAX_STEPS + 4):
        graph.replay()
        nothing.append(bool(out.isnan().all()))
    for _ in range(2):
        try:
            attention(*some, pattern, cache=cache, **call)
        except RuntimeError as error:
            why.append(str(error))
    cache.reset()
    graph.replay()
    nothing.append(bool(out.isnan().all()))
    found = {"off": off, "same": same, "nan": all(nothing), "why": why}
    if device != "cpu":
        return found
    cache.reset()
    with Graph() as again:
        try:
            attention(*still, pattern, cache=cache, **call)
        except RuntimeError as error:
            found["unprepared"] = str(error)
    return found | {"runs": len(graph.recorded), "again": len(again.recorded)}


def spoiled(cache: KVCache) -> KVCache:
    for part in cache._parts:
        part.k.fill_(NAN), part.v.fill_(NAN)
    return cache


class Seen(TorchDispatchMode):
    """Notes each operator but those that only allocate or view, and those on the tables
    of the host: these are integers, and none lies where the rows do.
    """

    def __init__(self, there: list[torch.Tensor]):
        super().__init__()
        self.there = {t.untyped_storage().data_ptr() for t in there}
        self.noted: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in (*args, *(kwargs or {}).values()) if torch.is_tensor(x)]
        mine = not any(
            t.is_floating_point() or t.untyped_storage().data_ptr() in self.there
            for t in given
        )
        name = func._schema.name.removeprefix("aten::")
        free = mine or name.startswith("empty") or name == "transpose"
        if not free or name in ("_to_copy", "_local_scalar_dense", "nonzero"):
            self.noted.append(name)
        return func(*args, **kwargs or {})


def called(pattern, steps: int = 40) -> dict:
    """What steps between two look-ahead ones call: operators, and launches at most."""
    launches, ahead, noted = [], 0, []
    rows = [torch.randn(2, steps, h, 16) for h in (4, 2, 2)]
    cache = cache_for(pattern, *rows[:2], 80)
    launch, (kept,) = decode.launch, cache._parts

    def counted(*args, **constants):
        launches[-1] += 1
        with outside_modes():
            launch(*args, **constants)

    decode.launch = counted
    for t in range(steps):
        some = [x[:, t : t + 1] for x in rows]
        prepared = kept._prepared and kept._prepared.decoder
        prepared = prepared if prepared and len(kept._prepared.steps) > 1 else None
        launches.append(0)
        there = [kept.k, kept.v, kept.masks, *some]
        with Seen(there if prepared is None else [*there, prepared.table]) as mode:
            attention(*some, pattern, causal=True, cache=cache)
        if prepared is not None:
            ahead += 1
            noted += mode.noted
    decode.launch = launch
    return {"noted": noted, "launches": max(launches), "prepared": ahead}


CALLED = {
    "window": LEAVING[0],
    "ladder": Dilated([16, 32, 64], [1, 2, 4]),
    "dense": Dense(),
}


def shown(show, seeds: int) -> None:
    """Print all of it."""
    decode.TILE, decode.PART = 1024, 5  # few rows are several tiles and parts
    for seed in range(seeds):
        decode.PROGRAMS = 1 + seed % 4
        show(**drawn(seed))
    retention.PIECE = 5  # positions whose masks are computed at once
    show(**drawn(seeds))
    for name, pattern in CALLED.items():
        show(case=name, **called(pattern))
        show(case=f"{name}, drafts", **drafted(pattern))
    show(case="gap, drafts", **drafted(Dilated([8, 64], [1, 3]), 1, 1, (17, 4, 4, 7)))
    live_rows.MAX_STEPS = 8
    for name, pattern in CALLED.items():
        show(case=f"{name}, in a graph", **replayed(pattern, -0.3))
    decode.PROGRAMS = 0  # one part of several tiles
    show(case="one part, drafts", **drafted(CALLED["ladder"]))
