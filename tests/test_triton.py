"""The Triton kernels without a GPU: their values by the interpreter, device code by the compiler, and refusals.

No test here can say how fast they are.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from ringlab import Dilated, attention, fused, kernels
from ringlab.kernels import triton_lists

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict]:
    """What interpreted.py printed, by case; a process of its own, for Triton decides as it is imported."""
    path = os.pathsep.join([str(HERE.parent / "lib"), str(HERE), *sys.path])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(HERE / "interpreted.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return {found.pop("case"): found for found in map(json.loads, done.stdout.splitlines())}


@needs_triton
def test_values_equal_the_oracle_forward_and_backward(interpreted):
    checked = {name: found for name, found in interpreted.items() if "bound" in found and name not in WRONG}
    assert len(checked) == 9 + 7
    for name, found in checked.items():
        assert found["error"].keys() == {"out", "lse", "dq", "dk", "dv"}
        for what, error in found["error"].items():
            assert error <= found["bound"][what] < (2e-2 if "bfloat16" in name else 2e-3), (name, what)


WRONG = ("each pair once", "joined, all parts weigh alike", "joined, a head forgotten")


@needs_triton
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_found(interpreted, name):
    assert min(interpreted[name]["error"].values()) > 0.01


@needs_triton
@pytest.mark.parametrize("name", ["in place", "short segments, grouped"])
def test_a_join_moves_the_bytes_that_are_told_and_leaves_rows_of_one_call_alone(interpreted, name):
    found = interpreted[f"joined, bytes, {name}"]
    assert found["moved"] == found["told"] and min(found["told"]) > 0 and found["untouched"]


@needs_triton
def test_what_a_join_holds_is_told(interpreted):
    found = interpreted["joined, held"]
    assert found["peak"] == found["told"] and found["grads"] == 3


@needs_triton
def test_it_compiles_into_one_graph_with_the_same_bits(interpreted):
    assert all(interpreted["compiled"]["same"].values())
    assert set(interpreted["compiled"]["checks"].values()) == {"SUCCESS"}


@needs_triton
def test_what_the_interpreter_gets_wrong_is_refused(interpreted):
    assert "bfloat16" in interpreted["bfloat16"]["refusal"]


# ---------------------------------------------------------------------------------------------------------------------
# the device code, compiled for GPUs that are not here

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB a program may take (CUDA programming guide)
ELEMENTS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")  # of the tensors' own dtype


def resources(name: str, capability: int, head_dim: int, dtype: str = "bf16", *, causal: bool = True) -> dict[str, int]:
    """What a program with the default sizes takes: registers, stack, local and shared bytes."""
    from ringlab.kernels import triton_code

    kernel, kind = getattr(triton_code, name), torch.float32 if dtype == "fp32" else torch.bfloat16
    size = triton_lists.sizes(name, head_dim, kind, divmod(capability, 10))
    fixed = {"ROWS": size.rows, "COLS": size.cols, "DIM": head_dim, "PAD": triton_lists.padded(head_dim),
             "CAUSAL": causal, "JOIN": False, "PRECISION": triton_lists.precision(head_dim, kind),
             "EARLY": triton_lists.early(divmod(capability, 10))}  # fmt: skip
    kinds = {"scale": "fp32", "lse": "*fp32", "less": "*fp32", "tiles": "*i32", "entries": "*i32"}
    kinds |= dict.fromkeys(ELEMENTS, f"*{dtype}")
    return used(kernel, kinds, fixed, capability, num_warps=size.warps, num_stages=size.stages)[0]


def used(kernel, kinds: dict, fixed: dict, capability: int, **options) -> tuple[dict[str, int], str]:
    """The same of any kernel, and its PTX; what is not in ``kinds`` is an int, strides and pointers are aligned."""
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
    source = triton.compiler.ASTSource(kernel, signature, constexprs=fixed, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    cubin = Path(os.environ["TRITON_CACHE_DIR"]) / f"{kernel.__name__}.cubin"
    cubin.write_bytes(made.asm["cubin"])
    shown = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    registers, stack, _, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", shown).groups())
    found = {"registers": registers, "stack": stack, "local": local, "shared": made.metadata.shared}
    return found, made.asm["ptx"]


@needs_triton
@pytest.mark.parametrize(
    "name, capability, head_dim",
    [
        ("forward", 80, 128),
        ("backward_q", 86, 64),
        ("backward_kv", 89, 64),
        ("forward", 90, 128),
        ("forward", 100, 64),
        ("backward_q", 120, 64),
    ],
)
def test_default_sizes_fit_every_architecture(name, capability, head_dim, tmp_path, monkeypatch):
    """A sample: no spills to memory, and no more shared memory than there is."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = resources(name, capability, head_dim)
    assert (found["stack"], found["local"]) == (0, 0) and 0 < found["registers"] <= 255
    assert 0 < found["shared"] <= SHARED[capability] * 1024


def join_resources(capability: int, head_dim: int, parts: int, weigh: bool, over: bool, group: int, dtype: str):
    """The same of the join of so many calls, and its PTX."""
    from ringlab.kernels import triton_merge

    pad = triton_lists.padded(head_dim)
    fixed = {"WEIGH": weigh, "OVER": over, "GROUP": group, "ROWS": fused.tile_rows(head_dim), "DIM": head_dim,
             "PAD": pad, "ALIGNED": 8 if head_dim % 16 else 16}  # fmt: skip
    kinds = {"parts": (f"*{dtype}",) * parts, "lses": ("*fp32" if weigh else f"*{dtype}",) * parts, "out": f"*{dtype}",
             "lse": "*fp32" if weigh else f"*{dtype}", "table": "*i64", "firsts": "*i64"}  # fmt: skip
    return used(triton_merge.join, kinds, fixed, capability, num_warps=4)


@needs_triton
@pytest.mark.parametrize(
    "case",
    [
        (80, 64, 3, True, True, 1, "bf16"),
        (86, 128, 3, True, False, 1, "bf16"),
        (89, 64, 2, False, True, 1, "fp32"),
        (90, 128, 3, True, True, 1, "bf16"),
        (100, 64, 2, False, False, 4, "bf16"),
        (120, 136, 2, False, False, 1, "bf16"),
    ],
    ids=lambda case: f"{case[0]}-{case[1]}",
)
def test_joins_fit_every_architecture_and_read_16_bytes_at_a_time(case, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found, ptx = join_resources(*case)
    assert (found["stack"], found["local"]) == (0, 0) and 0 < found["registers"] <= 255
    assert re.search(r"ld\.global\S*v4\.b32", ptx) and not re.search(r"ld\.global\S*b16", ptx)
    if case[4]:  # in place: what stands there is read by all before one writes
        assert ptx.rindex("ld.global") < ptx.rindex("bar.sync") < ptx.index("st.global")


# ---------------------------------------------------------------------------------------------------------------------
# where it does not run


def test_without_a_gpu_it_is_listed_and_refused():
    rows = {name: (runs, why, chosen) for name, runs, why, chosen in kernels.table("cpu", torch.float32)}
    assert rows["triton"] == (False, "needs a CUDA device, this is cpu", False) and list(rows)[-1] == "triton"
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(NotImplementedError, match="'triton' cannot run on cpu.*needs a CUDA device, this is cpu"):
        attention(q, q, q, Dilated([4, 8], [1, 2]), backend="triton")


def test_what_it_cannot_serve_on_a_gpu_is_said(monkeypatch):
    gpu, refuses = torch.device("cuda", 0), triton_lists.TritonLists().refuses
    monkeypatch.setattr("ringlab.kernels.base.capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "triton", None)
    assert refuses(gpu, torch.bfloat16, 64).startswith("triton is not installed (")
    monkeypatch.setitem(sys.modules, "triton", sys)
    assert refuses(gpu, torch.bfloat16, 64) is None and refuses(gpu, torch.float32, 5) is None
    assert refuses(gpu, torch.float64, 64) == "takes float32, float16, bfloat16, not float64"
    assert refuses(gpu, torch.bfloat16, 264) == "needs a head_dim of at most 256, not 264"
    monkeypatch.setattr("ringlab.kernels.base.capability", lambda device: (7, 5))
    assert refuses(gpu, torch.float16, 64) == "needs compute capability 8.0 or newer, this is 7.5"
