"""Compare two copies of the library bit by bit: ``python tests/same_bits.py BASE_LIB NEW_LIB [--only TEXT]``.

Both make the same calls, in processes with one thread, by names that the package publishes. A call draws its inputs
from its name. Its results are known by their sha256, or by the type of the exception; nothing is stored. Prints the
calls that differ or that one copy alone could make, and exits with 1 if there are any.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

ENV = {"OMP_NUM_THREADS": "1", "MKL_CBWR": os.environ.get("MKL_CBWR", "AUTO"), "PYTHONHASHSEED": "0",
       "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
SIMULATED = "simulated 1", "simulated 2", "simulated 3", "simulated 4"
RANKS = {2: ("gloo 2", "mesh 2"), 3: ("gloo 3",), 0: (None, "", *SIMULATED)}  # by the processes of a group
MIXINGS, OFFSETS = ("lse", "head_groups"), ("head", "block", "branch", "kv_head")
DTYPES = "float32", "float64", "bfloat16", "float16"
MEMORY = "contiguous", "heads first", "packed", "every other"
ODD, FOUR = "[24, 60], [5, 7]", "[16, 32, 64, 128], [1, 2, 4, 8]"
LADDERS = ODD, FOUR, "[32, 64], [1, 2]", "[48], [3]", "[40, 4096], [1, 16]", "[8, 8, 50], [4, 2, 3]"
THREE = "Dense()", f"Dilated({FOUR})", "local_global(1, 2, block_size=16)"
WIDE = "BlockSparse([Window(2), Global(4)], 128)"
BLOCKS = ("bigbird(1, 1, 2, block_size=16)", "sliding_window(1, block_size=16)", THREE[2],
          "from_mask((torch.arange(64).view(8, 8) % 5 < 2) & (torch.arange(8) != 2)[:, None], block_size=16)",
          "hierarchical([(1, 1), (3, 6)], block_size=16)", "sliding_window(1, block_size=16).with_density(0.4, 256)",
          "sliding_window(1, block_size=16) | BlockSparse([Random(2)], 16)",
          *(f"BlockSparse([{parts}], 16)" for parts in (
              "Window(2, 0)", "Window(0, 1)", "Window(1), Coarse(4, 100)", "Window(0), Strided(3)", "Strided(2, 2)",
              "Segment(4), Segment(8, 2)", "Random(3, 5)", "Window(0), Global(1, True, False)", "Window(2), Global(4)",
              "Global(2, False, True)", "Global(1), Window(99)", "Window(0), Random(1)")))  # fmt: skip
SWITCHES = ("gather=True", "gather=True, pool=True, cache=False", "gather=True, tile=16", "cache=False", "pool=True",
            "tile=17, pool=True", "tile=worn", "results=False", "merge='eager'", "merge='fused'")  # fmt: skip
MODULES = ("DilatedAttention", "ImprovedDilatedAttention", *(f"RingDilatedAttention{name}" for name in (
    "V2 V2Collective V2Robust V2Flash Production Hybrid SDPA Correct HilbertGPUOptimized").split()))  # fmt: skip
ringlab = None  # imported by the processes of the two copies; the one that compares them needs none


def made(text: str, group=None):
    """The pattern, switches or module that a text describes, by the library's names and some of ours."""
    names = {name: getattr(owner, name) for owner in (ringlab.blocks, ringlab) for name in dir(owner)}
    names |= {"torch": torch, "group": group, "worn": ringlab.Ladder((24, 8))}
    names["worn"].level = 1  # memory has run out once
    return eval(text, names)


def place(ranks: str, layout: str, n: int):
    """(the group or None, the layout, what takes a tensor's part here); ranks as "", "simulated 2" or "gloo 2"."""
    if not ranks:
        return None, layout, lambda t, dim=1: t
    kind, p = ranks.split()[0], int(ranks.split()[1])
    sizes = {"hilbert": (7, n // 7, p), "uneven": ([n - 7 * (p - 1)] + [7] * (p - 1),)}.get(layout, (n, p))
    found = getattr(ringlab.ring, layout)(*sizes)
    if kind == "simulated":
        return ringlab.Simulated(p), found if layout in ("hilbert", "uneven") else layout, lambda t, dim=1: t
    group = dist.init_device_mesh("cpu", (p,)) if kind == "mesh" else dist.group.WORLD
    return group, found, lambda t, dim=1: found.shard(t, dist.get_rank(), dim)


def drawn(generator, *shape: int, dtype: str = "float32", memory: str = "contiguous"):
    """A random tensor, rounded from float64, as it lies in memory of that kind."""
    t = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
    t = t[..., ::2] if memory == "every other" else t[..., : shape[-1]]
    if memory == "heads first":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    return t.contiguous() if memory == "contiguous" else t


def results(call, leaves: dict, dout, dlse=None, cotangents: str = "both") -> dict:
    """What a call returns, its gradients, and what it returns once more, without gradients and with a cached plan."""
    for t in leaves.values():
        t.requires_grad_(cotangents != "none")
    out, lse = call(*leaves.values())
    found, pairs = {"out": out, "lse": lse}, [(out, dout)] if cotangents in ("both", "out") else []
    if dlse is not None and cotangents in ("both", "lse"):
        pairs.append((lse, dlse.masked_fill(lse == -torch.inf, 0).to(lse.dtype)))
    if pairs:
        grads = torch.autograd.grad([t for t, _ in pairs], [*leaves.values()], [g for _, g in pairs])
        found |= {f"d{name}": grad for name, grad in zip(leaves, grads)}
    with torch.no_grad():
        found |= dict(zip(("out again", "lse again"), call(*leaves.values())))
    return {name: t for name, t in found.items() if t is not None}


def attend(draw, over, n=96, heads=(4, 2), d=16, batch=1, dtype="float32", memory="contiguous", cotangents="both",
           ranks="", layout="contiguous", scheme="auto", execution="", z="", **how):  # fmt: skip
    """A call of attention, of adaptive_attention or of a module: of that which ``over`` describes."""
    group, layout, mine = place(ranks, layout, n)
    pattern, whole = made(over, group), [(batch, n, heads[0] * d)] * 2
    shapes = whole if over.startswith("nn.") else [(batch, n, h, d) for h in (*heads, heads[1], heads[0])]
    *inputs, dout = (mine(draw(*shape, dtype=dtype, memory=memory)) for shape in shapes)
    leaves = dict(zip("qkv", inputs))
    if isinstance(pattern, torch.nn.Module):
        how = {} if over.startswith("nn.") else {"is_causal": how["causal"]}
        with torch.no_grad():
            weights = {name: w.copy_(draw(*w.shape) / 4) for name, w in pattern.named_parameters()}
        return results(lambda *t: (pattern(*t[: len(leaves)], **how), None), leaves | weights, dout)
    if z:
        count = -(-n // pattern.block_size)
        leaves["z"] = place(ranks, "contiguous", count)[2](draw(batch, heads[0], count, count, dtype=z), 2)
    dlse, how = mine(draw(batch, heads[0], n, dtype="float64"), 2), how | {"group": group, "return_lse": True}
    call = ringlab.adaptive_attention
    if "Adaptive" not in over:
        call = partial(ringlab.attention, layout=layout, scheme=scheme, execution=made(f"Execution({execution})"))
    return results(lambda q, k, v, *z: call(q, k, v, pattern, *z, **how), leaves, dout, dlse, cotangents)


def cases() -> dict[str, dict]:
    """The arguments of all calls by their names."""
    found, some, no_yes = {}, random.Random(0).choice, (False, True)

    def add(over, **how):
        found[" ".join([over, *(f"{name}={value}" for name, value in how.items())])] = {"over": over, **how}

    def mixed(dtypes=DTYPES, **fixed):
        heads = some([(4, 4), (4, 2), (6, 2), (8, 2), (5, 1)])
        return {"dtype": some(dtypes), "heads": heads, "batch": some([1, 2]), "causal": some(no_yes)} | fixed

    # One device.
    for over in map("Dilated({0[0]}, {0[1]!r}, {0[2]!r})".format, product(LADDERS, MIXINGS, OFFSETS)):
        add(over, n=some([64, 97, 131, 200]), memory=some(MEMORY), cotangents=some(["both", "out", "lse"]), **mixed())
    for over, dtype, causal, heads in product(THREE, DTYPES, no_yes, ((4, 4), (4, 2))):
        add(over, dtype=dtype, causal=causal, heads=heads)
    for over, n in product((*THREE[:2], f"Dilated({ODD})", "bigbird(1, 1, 2, block_size=1)"), (1, 2, 3, 7, 33)):
        add(over, n=n, **mixed())
    for over, (name, value) in product((*THREE, f"Dilated({ODD}, 'head_groups')", f"Dilated({LADDERS[4]})"), (
        *product(["memory"], MEMORY), *product(["scale"], (-0.3, 0.0, 2.5)), *product(["execution"], SWITCHES),
        *product(["backend"], ("eager", "sdpa", ("sdpa", "eager"), "triton")))):  # fmt: skip
        add(over, **{name: value}, **mixed(DTYPES[::2]), cotangents=some(["both", "out"]))
    for over, way, causal in product(BLOCKS, ("views", "batched", "rows", "bsr"), no_yes):
        add(over, n=128 if "mask" in over else some([160, 150, 131]), execution=f"blocks={way!r}",
            **mixed(DTYPES[: 2 if way == "bsr" else 4], causal=causal))  # fmt: skip
    # Long enough for pieces, tiles of halves, strips, joined nodes, and memory that is lent.
    for over, (dtype, causal) in product((
        THREE[1], f"Dilated({ODD})", WIDE, "bigbird(1, 1, 2)", "BlockSparse([Window(1), Coarse(4, 100)], 64)",
        "BlockSparse([Random(3)], 128)", "BlockSparse([Global(2, False)], 300)", "local_global(0, 1, block_size=512)",
        "from_mask((torch.arange(18)[:, None] % 9 == 3).expand(18, 18))"), product(DTYPES[::2], no_yes)):  # fmt: skip
        add(over, n=some([2300, 2304]), d=32, heads=some([(4, 4), (5, 1)]), dtype=dtype, causal=causal)
    for how in ("", "gather=True, pool=True"):
        add(THREE[1], n=8192, heads=(8, 8), d=64, cotangents="none", execution=how)
    add("Dilated([512, 4096], [1, 8])", n=4096, heads=(1, 1), d=64, batch=16, dtype="bfloat16", execution="pool=True")
    add(WIDE, n=640, scale=3e38, causal=True)  # infinite scores
    # Ranks: every scheme over every layout, with few of the calls that are refused.
    schemes, long = ("plan", "ring", "all_gather", "ulysses", "auto"), "Dilated([512, 4096], [1, 8])"
    layouts, few = ("contiguous", "zigzag", "uneven", "hilbert", "striped"), ("", "simulated 3", "gloo 2")
    for ranks, scheme, layout in product((*SIMULATED, "gloo 2", "gloo 3"), schemes, layouts):
        dilated = f"Dilated({some(LADDERS)}, {some(['lse', 'head_groups'])!r})"
        for over in ("Dense()", dilated, some(BLOCKS[:3] + BLOCKS[6:])):
            fits = scheme in ("ulysses", "auto") or layout != "striped" and (over == dilated or scheme == "plan")
            if ranks == "simulated 2" or over == "Dense()" or fits and some(no_yes):
                way = mixed(cotangents=some(["both", "out"]), **{"causal": False} if layout == "hilbert" else {})
                add(over, ranks=ranks, scheme=scheme, layout=layout, n=some([91, 98]), memory=some(MEMORY[::2]), **way)
    for ranks, scheme, over in product(("simulated 3", *RANKS[2]), ("plan", "ulysses"), (THREE[1], BLOCKS[0])):
        for how in ("cache=False", "pool=True", "tile=16", "tile=worn", "merge='fused'", "blocks='batched'"):
            add(over, ranks=ranks, scheme=scheme, execution=how, scale=some([None, -0.5, 0.0]), **mixed())
    for scheme, over in (*product(schemes, [long]), ("ring", "Dense()"), ("plan", WIDE), ("ulysses", WIDE)):
        add(over, ranks="simulated 2", scheme=scheme, n=2304, d=32, heads=(8, 4), causal=some(no_yes))
    # Blocks chosen by content; modules.
    for dtype, causal, z, top_k in product(DTYPES, no_yes, ("", "float32", "float64"), (1, 3)):
        way = mixed([dtype], causal=causal, n=some([96, 131]), memory=some(MEMORY), scale=some([None, -0.4, 1e-4]))
        add(f"Adaptive(16, {top_k})", z=z, backend=some(["auto", "eager"]), cotangents=some(["both", "out"]), **way)
    add("Adaptive(64, 3)", n=2048, d=32, z="float32", heads=(8, 2), causal=True)
    for ranks, z, causal in product(("", "simulated 2", "simulated 3", "gloo 2", "gloo 3"), ("", "float32"), no_yes):
        add("Adaptive(16, 2)", ranks=ranks, z=z, **mixed(causal=causal))
        add("AdaptiveBlockSparse(16, block_size=16, top_k=2, group=group)", ranks=ranks, **mixed(causal=causal))
    for system, how in product(MODULES, (
        "use_pattern_cache=False, enable_memory_pool=True, memory_pool_threshold_mb=0, use_gradient_checkpointing=True",
        "use_flash_attention=False", "dtype=torch.bfloat16, config='auto'", "ring_size=3", "group=group")):  # fmt: skip
        add(f"{system}({some(LADDERS)}, {how})", ranks="gloo 2" if "group" in how else "", **mixed(DTYPES[::2]))
    given = "density=0.3, block_size=16", f"{FOUR}, block_size=8", f"pattern={BLOCKS[0]}"
    for name, how, ranks in product(("RingDilatedAttention", "Optimized", "TorchSparse"), given, few):
        add(f"BlockSparse{name}({how}, group=group)", n=some([192, 160]), ranks=ranks, **mixed(DTYPES[:2]))
    given = "num_kv_heads=2", "bias=False, causal=True, use_gradient_checkpointing=True, execution=Execution(tile=16)"
    for over, how, ranks in product((*THREE, f"Dilated({ODD}, 'head_groups')"), (*given, "config='auto'"), few):
        add(f"nn.MultiheadAttention(64, 4, {over}, {how}, group=group)", ranks=ranks, batch=2)
    return found


def make(calls: dict, rank: int, ranks: int, folder: str) -> None:
    """Make the calls of one process, of one rank of so many or of none, and write down the sha256 of each result."""
    if ranks:
        dist.init_process_group("gloo", f"file://{folder}/store{ranks}", timedelta(seconds=60), ranks, rank)
    found = {}
    for name, how in calls.items():
        generator = torch.Generator().manual_seed(random.Random(name).getrandbits(32))
        try:
            found[name] = {}
            for part, t in attend(partial(drawn, generator), **how).items():
                data = f"{t.dtype} {t.shape}".encode() + bytes(t.detach().flatten().view(torch.uint8).numpy())
                found[name][f"{part} of rank {rank}"] = hashlib.sha256(data).hexdigest()
        except Exception as error:  # noqa: BLE001  whatever one copy raises, the other must raise
            found[name] = {f"exception of rank {rank}": type(error).__name__, "message": str(error).partition("\n")[0]}
    Path(folder, f"{ranks}.{rank}.json").write_text(json.dumps(found))


def side(lib: str, folder: str, only: str) -> int:
    """Make the calls of one copy of the library, in a process for each rank and one for the rest."""
    global ringlab
    import ringlab

    assert Path(ringlab.__file__).is_relative_to(Path(lib).resolve()), f"ringlab came from {ringlab.__file__}"
    torch.set_num_threads(1)
    x = torch.ones(1, requires_grad=True)  # its checkpoint lets torch import what the processes then share
    torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    calls, jobs = {name: how for name, how in cases().items() if only in name}, []
    for ranks, kinds in RANKS.items():
        mine = {name: how for name, how in calls.items() if how.get("ranks") in kinds}
        for rank in range(max(ranks, 1) if mine else 0):
            jobs.append(multiprocessing.get_context("fork").Process(target=make, args=(mine, rank, ranks, folder)))
            jobs[-1].start()
    return int(any([job.join() or job.exitcode for job in jobs]))


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__.split("``")[1])
    parser.add_argument("libs", nargs=2)
    parser.add_argument("--only", default="")
    given, started, found, differ = parser.parse_args(), [], ({}, {}), 0
    with tempfile.TemporaryDirectory() as folder:
        for i, lib in enumerate(map(os.path.abspath, given.libs)):
            Path(folder, str(i)).mkdir()
            command = [sys.executable, __file__, "--side", lib, f"{folder}/{i}", given.only]
            started.append(subprocess.Popen(command, env=os.environ | ENV | {"PYTHONPATH": lib}))
        died = sum(bool(process.wait()) for process in started)
        for path in Path(folder).glob("?/*.json"):
            for name, parts in json.loads(path.read_text()).items():
                found[int(path.parent.name)].setdefault(name, {}).update(parts)
    for name in found[0] | found[1]:
        one, other = (each.get(name, {"exception": "never made"}) for each in found)
        if parts := sorted(k for k in one.keys() | other.keys() if k != "message" and one.get(k) != other.get(k)):
            differ += 1
            print(name, ", ".join(parts), one.get("message", ""), other.get("message", ""), sep="\n    ")
    print(f"{len(found[0] | found[1])} calls, {differ} differ" + f"; {died} copies died" * bool(died))
    return int(bool(differ or died or not found[0]))


if __name__ == "__main__":
    sys.exit(side(*sys.argv[2:]) if sys.argv[1:2] == ["--side"] else main())
