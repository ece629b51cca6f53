"""Compare two copies of the library bit by bit.

``python tests/same_bits.py BASE_LIB NEW_LIB [--only TEXT]``

Each copy makes the same few hundred calls: the cases of ``tests/helpers/matrix.py`` by
every path, random ones, many of them over simulated ranks (processes give the same
bits, as ``tests/ring`` checks), long sequences, and the published modules. A result is compared
by its sha256, an exception by its type. Prints the results that differ and exits with 1
if there are any. ``--only`` makes the calls whose names contain a text.
"""

import argparse
import hashlib
import os
import random
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
import torch._dynamo  # here, so that the processes need not

PROCESSES, RANKS = 3, 3  # that share the calls of each copy; of the calls over ranks
MODULES = (
    "DilatedAttention([32, 64], [1, 2], use_pattern_cache=False, use_gradient_checkpointing=True)",
    "ImprovedDilatedAttention([24, 60], [5, 7], enable_memory_pool=True, memory_pool_threshold_mb=0)",
    *(
        f"RingDilatedAttention{name}([16, 32, 64, 128], [1, 2, 4, 8], ring_size=3{how})"
        for name, how in product(
            "V2 V2Collective V2Robust V2Flash Production Hybrid SDPA Correct".split(),
            (", use_flash_attention=False", ""),
        )
    ),
    "RingDilatedAttentionHilbertGPUOptimized([48], [3], ring_size=3)",
    "BlockSparseRingDilatedAttention([32], [2], block_size=8, group=Simulated(3))",
    "BlockSparseOptimized(density=0.3, block_size=16, group=Simulated(3))",
    "BlockSparseTorchSparse(pattern=blocks.bigbird(1, 1, 2, block_size=16))",
    "AdaptiveBlockSparse(16, block_size=16, top_k=2, group=Simulated(3))",
    "nn.MultiheadAttention(96, 6, Dense(), num_kv_heads=2, bias=False, group=Simulated(3))",
    "nn.MultiheadAttention(96, 6, Dilated([24, 60], [5, 7], 'head_groups'), group=Simulated(3))",
    "nn.MultiheadAttention(96, 6, blocks.local_global(1, 2, block_size=16), use_gradient_checkpointing=True)",
)


def calls() -> dict:
    """By name, a function that gives the results of a call by name."""
    import matrix
    from matrix import Case, Dense, Dilated, presets

    found, rng, some = {}, random.Random(0), random.Random(1).choice
    dtypes, no_yes = (matrix.F32, matrix.F64, matrix.BF16, matrix.F16), (False, True)
    heads = [
        {"heads": 4, "kv_heads": 2},
        {"heads": 6, "kv_heads": 6},
        {"heads": 6, "kv_heads": 3},
    ]

    def add(case: Case):
        found[f"{len(found)} {case.pattern} {case.scheme}"] = lambda: case.run(
            *matrix.drawn(case)
        )

    for pattern in matrix.PATTERNS:
        for case in matrix.every_path(
            Case(pattern, 101, some(dtypes), some(no_yes), **some(heads))
        ):
            add(case)
    for _ in range(200):  # over ranks, too
        add(matrix.any_case(rng))
    for dtype, causal, weighted in product(dtypes, no_yes, no_yes):
        case = Case(
            matrix.Adaptive(8, 3),
            96,
            dtype,
            causal,
            weighted=weighted,
            scale=some([None, -0.4, 1e-4]),
        )
        add(case)
        add(replace(case, layout=matrix.contiguous(96, RANKS)))
    # Long enough for row blocks, tiles of half precision, strips of wide calls, and
    # memory that is lent.
    long = Dilated([128, 512, 4096], [1, 2, 8])
    wide = [
        presets.local_global(2, 4),
        presets.hierarchical([(1, 1), (4, 100)], block_size=64),
        presets.local_global(0, 1, block_size=512),
        presets.bigbird(1, 1, 2, block_size=300),
    ]
    for pattern, dtype, causal in product(
        (long, *wide), (matrix.F32, matrix.BF16), no_yes
    ):
        add(Case(pattern, 2300, dtype, causal, d=32, heads=4, kv_heads=some([1, 4])))
    for pattern, scheme in (
        (long, "plan"),
        (long, "ring"),
        (Dense(), "all_gather"),
        (wide[0], "plan"),
    ):
        add(
            Case(
                pattern,
                2304,
                matrix.F32,
                True,
                d=32,
                layout=matrix.zigzag(2304, 2),
                scheme=scheme,
            )
        )
    add(Case(long, 8192, matrix.F32, heads=8, d=64))
    add(Case(wide[0], 640, scale=3e38, causal=True))  # infinite scores
    for text, dtype in product(MODULES, ("float32", "bfloat16")):
        found[f"{len(found)} {text} {dtype}"] = partial(run_module, text, dtype)
    return found


def run_module(text: str, dtype: str) -> dict[str, torch.Tensor]:
    """Output of the module that the text makes, and the gradients of its inputs and
    weights.
    """
    import ringlab

    module = eval(text, vars(ringlab))
    generator = torch.Generator().manual_seed(0)
    weights = [
        w.detach().copy_(torch.randn(w.shape, generator=generator) / 4)
        for w in module.parameters()
    ]
    shapes = (
        [(1, 192, 96)]
        if text.startswith("nn.")
        else [(1, 192, h, 16) for h in (6, 3, 3)]
    )
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    module, inputs = (
        module.to(getattr(torch, dtype)),
        [t.to(getattr(torch, dtype)).requires_grad_() for t in inputs],
    )
    out = module(*inputs)
    grads = torch.autograd.grad(
        out.float().square().sum(), [*inputs, *module.parameters()]
    )
    assert len(grads) == len(inputs) + len(weights)
    return {"out": out, **{f"gradient {i}": grad for i, grad in enumerate(grads)}}


def make(lib: str, number: int, only: str) -> dict[tuple[str, str], str]:
    """The calls of one process: (call, result) to a sha256, or to the type of an
    exception.
    """
    sys.path[:0] = lib, str(Path(__file__).parent / "helpers")
    import ringlab

    assert Path(ringlab.__file__).is_relative_to(lib), (
        f"ringlab came from {ringlab.__file__}"
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {}
    for name, call in [*calls().items()][number::PROCESSES]:
        if only not in name:
            continue
        try:
            for part, t in call().items():
                data = f"{t.dtype} {t.shape}".encode() + bytes(
                    t.detach().flatten().view(torch.uint8).numpy()
                )
                found[name, part] = hashlib.sha256(data).hexdigest()
        except Exception as error:  # noqa: BLE001  both copies must raise the same
            found[name, "exception"] = type(error).__name__
    return found


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__.split("``")[1])
    parser.add_argument("libs", nargs=2)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    os.environ |= {"MKL_CBWR": "AUTO", "CUDA_VISIBLE_DEVICES": ""}
    copies = []
    for lib in map(os.path.realpath, given.libs):
        with ProcessPoolExecutor(PROCESSES, get_context("fork")) as pool:
            jobs = [
                pool.submit(make, lib, number, given.only)
                for number in range(PROCESSES)
            ]
            copies.append(
                {key: value for job in jobs for key, value in job.result().items()}
            )
    base, new = copies
    differ = [key for key in base | new if base.get(key) != new.get(key)]
    for key in differ:
        print(*key, base.get(key), new.get(key), sep="\n    ")
    print(
        f"{len({call for call, _ in base | new})} calls, {len({call for call, _ in differ})} differ"
    )
    return int(bool(differ or not base))


if __name__ == "__main__":
    sys.exit(main())
