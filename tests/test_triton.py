"""The Triton backend without a GPU: its values by the interpreter, its device code by the compiler, and its refusals.

No test here can say how fast it is.
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
from ringlab import Dilated, attention, kernels
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
    checked = {name: found for name, found in interpreted.items() if "bound" in found and name != "each pair once"}
    assert len(checked) == 9
    for name, found in checked.items():
        assert found["error"].keys() == {"out", "lse", "dq", "dk", "dv"}
        for what, error in found["error"].items():
            assert error <= found["bound"][what] < 2e-3, (name, what)


@needs_triton
def test_a_multiplicity_left_out_is_found(interpreted):
    assert min(interpreted["each pair once"]["error"].values()) > 0.01


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
    import triton
    from ringlab.kernels import triton_code
    from triton.backends.compiler import GPUTarget

    kernel, kind = getattr(triton_code, name), torch.float32 if dtype == "fp32" else torch.bfloat16
    size = triton_lists.sizes(name, head_dim, kind, divmod(capability, 10))
    fixed = {"ROWS": size.rows, "COLS": size.cols, "DIM": head_dim, "PAD": triton_lists.padded(head_dim),
             "CAUSAL": causal, "JOIN": False, "PRECISION": triton_lists.precision(head_dim, kind),
             "EARLY": triton_lists.early(divmod(capability, 10))}  # fmt: skip
    kinds = {"scale": "fp32", "lse": "*fp32", "less": "*fp32", "tiles": "*i32", "entries": "*i32"}
    kinds |= dict.fromkeys(ELEMENTS, f"*{dtype}") | dict.fromkeys(fixed, "constexpr")
    signature = {argument: kinds.get(argument, "i32") for argument in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, (argument, kind) in enumerate(signature.items())
               if kind[0] == "*" or argument.startswith("s_")}  # fmt: skip
    source = triton.compiler.ASTSource(kernel, signature, constexprs=fixed, attrs=aligned)
    options = {"num_warps": size.warps, "num_stages": size.stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    cubin = Path(os.environ["TRITON_CACHE_DIR"]) / f"{name}.cubin"
    cubin.write_bytes(made.asm["cubin"])
    shown = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    registers, stack, _, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", shown).groups())
    return {"registers": registers, "stack": stack, "local": local, "shared": made.metadata.shared}


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
