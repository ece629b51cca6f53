"""Compare two copies of the library bit by bit: ``python tests/same_bits.py BASE_LIB NEW_LIB [--only TEXT]``.

Each copy makes the same few hundred calls: the cases of ``tests/helpers/matrix.py`` by every path, dtype and scheme,
long sequences, the published modules, and a gloo group of three processes. A result is compared by its sha256, an
exception by its type. Prints the results that differ and exits with 1 if there are any. ``--only`` makes the calls
whose names contain a text.
"""

import argparse
import hashlib
import os
import random
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
import torch._dynamo  # here, so that the processes need not
import torch.distributed as dist

RANKS = 3  # processes of each copy: they are the gloo group, and share the calls that need no group
MODULES = (
    "DilatedAttention([32, 64], [1, 2], use_pattern_cache=False, use_gradient_checkpointing=True)",
    "ImprovedDilatedAttention([24, 60], [5, 7], enable_memory_pool=True, memory_pool_threshold_mb=0)",
    *(f"RingDilatedAttention{name}([16, 32, 64, 128], [1, 2, 4, 8], {how})" for name, how in product(
        ("V2", "V2Collective", "V2Robust", "V2Flash", "Production", "Hybrid", "SDPA", "Correct"),
        ("ring_size=3, use_flash_attention=False", "group=group"))),
    "RingDilatedAttentionHilbertGPUOptimized([48], [3], ring_size=3)",
    "BlockSparseRingDilatedAttention([32], [2], block_size=8, group=group)",
    "BlockSparseOptimized(density=0.3, block_size=16, group=group)",
    "BlockSparseTorchSparse(pattern=blocks.bigbird(1, 1, 2, block_size=16))",
    "AdaptiveBlockSparse(16, block_size=16, top_k=2, group=group)",
    "nn.MultiheadAttention(96, 6, Dense(), num_kv_heads=2, group=group)",
    "nn.MultiheadAttention(96, 6, Dilated([24, 60], [5, 7], 'head_groups'), bias=False, config='auto', group=group)",
    "nn.MultiheadAttention(96, 6, blocks.local_global(1, 2, block_size=16), use_gradient_checkpointing=True)",
)  # fmt: skip


def calls(rank: int) -> dict:
    """For each call by name: whether all ranks make it together, and a function that gives its results by name."""
    import matrix
    from matrix import Case, Dense, Dilated, Execution, presets

    found, rng, some = {}, random.Random(0), random.Random(1).choice
    dtypes, no_yes = (matrix.F32, matrix.F64, matrix.BF16, matrix.F16), (False, True)
    heads = [{"heads": 4, "kv_heads": 2}, {"heads": 6, "kv_heads": 6}, {"heads": 6, "kv_heads": 3}]

    def add(case: Case, group: bool = False):
        found[f"{len(found)} {'gloo ' * group}{case}"] = group, partial(run_case, case, rank if group else None)

    for pattern in matrix.PATTERNS:
        for case in matrix.paths(Case(pattern, 101, some(dtypes), some(no_yes), **some(heads))):
            add(case)
    for pattern, dtype in product((Dense(), matrix.LADDER, matrix.BLOCK_SPARSE[0]), dtypes):
        add(Case(pattern, 131, dtype, batch=2))
    for _ in range(100):
        add(matrix.any_case(rng))
    for dtype, causal, weighted in product(dtypes, no_yes, no_yes):
        case = Case(matrix.Adaptive(8, 3), 96, dtype, causal, weighted=weighted, scale=some([None, -0.4, 1e-4]))
        add(case)
        add(replace(case, layout=matrix.contiguous(96, 3)), group=some(no_yes))
    for scheme, layout in product((*matrix.SCHEMES, "auto"), matrix.layouts(101, RANKS)):
        for group, pattern in ((True, some(matrix.PATTERNS)), (True, Dense()), (False, some(matrix.PATTERNS))):
            causal = layout.grid is None and some(no_yes)
            case = Case(pattern, 101, some(dtypes), causal, layout=layout, scheme=scheme, **some(heads[1:]))
            if matrix.fits(pattern, layout, causal, scheme):
                add(replace(case, execution=Execution(cache=some(no_yes), tile=some([None, 16]))), group)
    # Long enough for row blocks, tiles of half precision, strips of wide calls, and memory that is lent.
    long = Dilated([128, 512, 4096], [1, 2, 8])
    wide = [presets.local_global(2, 4), presets.hierarchical([(1, 1), (4, 100)], block_size=64),
            presets.local_global(0, 1, block_size=512), presets.bigbird(1, 1, 2, block_size=300)]  # fmt: skip
    for pattern, dtype, causal in product((long, *wide), (matrix.F32, matrix.BF16), no_yes):
        add(Case(pattern, 2300, dtype, causal, d=32, heads=4, kv_heads=some([1, 4])))
    for pattern, scheme in ((long, "plan"), (long, "ring"), (Dense(), "all_gather"), (wide[0], "plan")):
        add(Case(pattern, 2304, matrix.F32, True, d=32, layout=matrix.zigzag(2304, 2), scheme=scheme))
    for gather in no_yes:
        add(Case(long, 8192, matrix.F32, heads=8, d=64, execution=Execution(gather=gather, pool=gather)))
    add(Case(wide[0], 640, scale=3e38, causal=True))  # infinite scores
    for text, dtype in product(MODULES, ("float32", "bfloat16")):
        group = "group=group" in text
        found[f"{len(found)} {text} {dtype}"] = group, partial(run_module, text, dtype, rank if group else None)
    return found


def run_case(case, rank: int | None) -> dict[str, torch.Tensor]:
    """Results and gradients of a case; of a rank's shards unless ``rank`` is None."""
    import matrix

    inputs, dout, dlse = matrix.drawn(case)
    if rank is None:
        return case.run(inputs, dout, dlse)
    shard = partial(case.layout.shard, rank=rank)
    inputs, z = [shard(t) for t in inputs[:3]], inputs[3:]
    if z:
        z = [matrix.contiguous(z[0].shape[2], RANKS).shard(z[0], rank, 2)]
    return case.run([*inputs, *z], shard(dout), shard(dlse, dim=2), dist.group.WORLD)


def run_module(text: str, dtype: str, rank: int | None) -> dict[str, torch.Tensor]:
    """Output of the module that the text makes, and the gradients of its inputs and weights."""
    import ringlab

    module = eval(text, vars(ringlab) | {"group": None if rank is None else dist.group.WORLD})
    generator = torch.Generator().manual_seed(0)
    weights = [w.detach().copy_(torch.randn(w.shape, generator=generator) / 4) for w in module.parameters()]
    shapes = [(1, 192, 96)] if text.startswith("nn.") else [(1, 192, h, 16) for h in (6, 3, 3)]
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    if rank is not None:
        inputs = [ringlab.ring.contiguous(192, RANKS).shard(t, rank) for t in inputs]
    module, inputs = module.to(getattr(torch, dtype)), [t.to(getattr(torch, dtype)).requires_grad_() for t in inputs]
    out = module(*inputs)
    grads = torch.autograd.grad(out.float().square().sum(), [*inputs, *module.parameters()])
    assert len(grads) == len(inputs) + len(weights)
    return {"out": out, **{f"gradient {i}": grad for i, grad in enumerate(grads)}}


def make(lib: str, rank: int, folder: str, only: str) -> dict[tuple[str, str], str]:
    """The calls of one process: (call, result) to a sha256, or to the type of an exception."""
    sys.path[:0] = lib, str(Path(__file__).parent / "helpers")
    import ringlab

    assert Path(ringlab.__file__).is_relative_to(lib), f"ringlab came from {ringlab.__file__}"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    found = {}
    for i, (name, (group, call)) in enumerate(calls(rank).items()):
        if only not in name or not group and i % RANKS != rank:
            continue
        try:
            for part, t in call().items():
                data = f"{t.dtype} {t.shape}".encode() + bytes(t.detach().flatten().view(torch.uint8).numpy())
                found[name, f"{part} of rank {rank}"] = hashlib.sha256(data).hexdigest()
        except Exception as error:  # noqa: BLE001  both copies must raise the same
            found[name, f"exception of rank {rank}"] = type(error).__name__
    return found


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__.split("``")[1])
    parser.add_argument("libs", nargs=2)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    os.environ |= {"MKL_CBWR": "AUTO", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    copies = []
    for lib in map(os.path.realpath, given.libs):
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(RANKS, get_context("fork")) as pool:
            jobs = [pool.submit(make, lib, rank, folder, given.only) for rank in range(RANKS)]
            copies.append({key: value for job in jobs for key, value in job.result().items()})
    base, new = copies
    differ = [key for key in base | new if base.get(key) != new.get(key)]
    for key in differ:
        print(*key, base.get(key), new.get(key), sep="\n    ")
    print(f"{len({call for call, _ in base | new})} calls, {len({call for call, _ in differ})} differ")
    return int(bool(differ or not base))


if __name__ == "__main__":
    sys.exit(main())
