"""Device code compiled for GPUs that are not here: what it takes of them, and the order
of its instructions.
"""

import importlib
import os
import re
import subprocess
from pathlib import Path

import torch
from ringlab.kernels import gluon, triton_config
from ringlab.kernels.triton_config import Sizes

SHARED = {
    80: 163,
    86: 99,
    89: 99,
    90: 227,
    100: 227,
    120: 99,
}  # KiB a program may take (CUDA programming guide)
ELEMENTS = ("q", "k", "v", "dout")  # of the tensors' own dtype
RESULTS = ("out", "dq", "dk", "dv")  # the same, or fp32 where several launches add up


def resources(
    name: str,
    capability: int,
    head_dim: int,
    size: Sizes,
    dtype: str = "bf16",
    *,
    causal: bool = True,
    join: bool = False,
    band: bool = False,
) -> tuple[dict[str, int], str]:
    """What a program takes: registers, stack, local and shared bytes, warps; and how
    often some instructions occur. Then its PTX.
    """
    kinds = {
        "scale": "fp32",
        "lse": "*fp32",
        "log2": "*fp32",
        "less": "*fp32",
        "tiles": "*i32",
        "entries": "*i32",
    }
    kinds |= dict.fromkeys(ELEMENTS, f"*{dtype}") | dict.fromkeys(
        RESULTS, "*fp32" if join else f"*{dtype}"
    )
    if size.reads == "gluon":
        code = "gluon_kernels"
        fixed = {"STEP": 4, "CAUSAL": causal, "STAGES": size.stages}
        options = {"num_warps": size.warps, "maxnreg": gluon.REGISTERS}
        owned = ("k", "v") if name == "backward_kv" else ("q", "dout")
        for x in ELEMENTS:
            rows = gluon.GROUP_ROWS if x in owned else size.cols
            block, layout = [1, 1, 1, rows, head_dim], gluon.layout(head_dim, 16)
            kinds[x] = f"tensordesc<{dtype}{block},{layout!r}>"
    else:
        code = "triton_kernels"
        kind = torch.float32 if dtype == "fp32" else torch.bfloat16
        fixed = {
            "ROWS": size.rows,
            "COLS": size.cols,
            "DIM": head_dim,
            "PAD": triton_config.padded(head_dim),
            "CAUSAL": causal,
            "BAND": band,
            "JOIN": join,
            "PRECISION": triton_config.precision(head_dim, kind),
            "EARLY": triton_config.early(divmod(capability, 10)),
        }
        options = {"num_warps": size.warps, "num_stages": size.stages}
    kernel = getattr(importlib.import_module(f"ringlab.kernels.{code}"), name)
    return used(kernel, kinds, fixed, capability, **options)


def used(
    kernel, kinds: dict, fixed: dict, capability: int, **options
) -> tuple[dict[str, int], str]:
    """The same of any kernel, and its PTX; what is not in ``kinds`` is an int, strides
    and pointers are aligned.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    kinds = kinds | dict.fromkeys(fixed, "constexpr")
    signature = {argument: kinds.get(argument, "i32") for argument in kernel.arg_names}
    aligned = {}
    for i, (argument, kind) in enumerate(signature.items()):
        if isinstance(kind, tuple):
            aligned |= {(i, j): [["tt.divisibility", 16]] for j in range(len(kind))}
        elif kind[0] == "*" or argument.startswith("s_"):
            aligned[i,] = [["tt.divisibility", 16]]
    runtime = importlib.import_module("triton.experimental.gluon._runtime")
    made = (
        runtime.GluonASTSource
        if isinstance(kernel, runtime.GluonJITFunction)
        else triton.compiler.ASTSource
    )
    source = made(kernel, signature, constexprs=fixed, attrs=aligned)
    made = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=options
    )
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    cubin = Path(os.environ["TRITON_CACHE_DIR"]) / f"{kernel.__name__}.cubin"
    cubin.write_bytes(made.asm["cubin"])
    shown = subprocess.run(
        [tool, "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    registers, stack, _, local = map(
        int,
        re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", shown).groups(),
    )
    found = {
        "registers": registers,
        "stack": stack,
        "local": local,
        "shared": made.metadata.shared,
    }
    if capability == 90:
        lines = subprocess.run(
            [tool, "-sass", cubin], capture_output=True, text=True, check=True
        ).stdout
        found |= {x: lines.count(x) for x in ("HGMMA", "WARPGROUP.DEPBAR", "UTMALDG")}
        found["beside"] = beside_products(lines)
    return found | {"warps": made.metadata.num_warps}, made.asm["ptx"]


def fits(found: dict[str, int], capability: int) -> bool:
    """No spills to memory, and no more shared memory than there is."""
    shared = 0 < found["shared"] <= SHARED[capability] * 1024
    return (
        not found["stack"]
        and not found["local"]
        and 0 < found["registers"] <= 255
        and shared
    )


def beside_products(sass: str) -> float:
    """The share of exponentials between the issue of a product and the next wait for
    one.
    """
    issued, beside, every = False, 0, 0
    for x in re.findall(r"HGMMA|WARPGROUP\.DEPBAR|MUFU\.EX2", sass):
        every += x == "MUFU.EX2"
        beside += issued and x == "MUFU.EX2"
        issued = x == "HGMMA" or issued and x == "MUFU.EX2"
    return beside / max(every, 1)


def fed(name: str, found: dict[str, int], size: Sizes) -> bool:
    """On 9.0: products of warp groups, not one after the other; Gluon reads by the copy
    engine and a warp of its own.

    There, each of two groups waits as often as the source says, and computes while its
    products run.
    """
    in_gluon = size.reads == "gluon"
    waits = 4 if name == "forward" else 8
    if in_gluon:
        waits = 2 * {"forward": 4, "backward_q": 7, "backward_kv": 5}[name]
    return (
        (found["HGMMA"] > 0 or size.rows < 64)
        and found["WARPGROUP.DEPBAR"] <= waits
        and (found["beside"] > 0.4 or not in_gluon)
        and (found["UTMALDG"] > 0) == in_gluon
        and found["warps"] == (12 if in_gluon else size.warps)
    )
