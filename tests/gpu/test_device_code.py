"""The Gluon kernels and the fused merge, compiled for compute capability 9.0: they fit,
and they are the code that was measured.

Their times on an H200 (2026-11-26, tree 8f63b8c) hold for this device code alone. Who
changes one of these kernels takes its line out of what ``backend="auto"`` chooses until
it is measured again, and then writes its new hash here.
"""

import hashlib
import re
from importlib.metadata import version
from itertools import product

import pytest
from compiled import fed, fits, resources, used
from ringlab.kernels import fused_merge
from ringlab.kernels.triton_config import GLUON

pytest.importorskip("triton.experimental.gluon")
pytestmark = pytest.mark.slow

TRITON = "3.7.1"  # which made the PTX of these hashes
# By pass, head_dim and causal, in bfloat16.
CALLS = product(("forward", "backward_q", "backward_kv"), (64, 128), (False, True))
HASHES = """
6917b3342834 896a89f3e00f 4a154fbbdae4 0e57f72633fd
804e71ad92df cf30587830d8 1e7df6a46598 976ac84d1b85
dc253457d1fa 476f33a0b3b0 8bdb5521074c 7a7e12c6cc4e
"""
KERNELS = dict(zip(CALLS, HASHES.split(), strict=True))
# By head_dim, and whether results are weighed, as in a forward, or summed.
MERGES = {
    (64, True): "e703650770c8",
    (64, False): "e5d9b08da863",
    (128, True): "2b95c382535a",
    (128, False): "c129b369a6e7",
}


def hash_of(ptx: str) -> str:
    """12 hex digits over PTX without comments, line information and names of files."""
    code, *_ = re.split(r"^\s*\.section\s+\.debug", ptx, maxsplit=1, flags=re.M)
    lines = (re.sub(r"//.*", "", line).strip() for line in code.splitlines())
    about = re.compile(r"\.(loc|file|version)\b|\$L__(tmp|func_begin|func_end)\d+:")
    kept = "\n".join(line for line in lines if line and not about.match(line))
    return hashlib.sha256(kept.encode()).hexdigest()[:12]


def was_measured(ptx: str, known: str) -> None:
    """Assert that a kernel's PTX is that which was measured."""
    if version("triton") != TRITON:
        pytest.skip(f"the hashes are of Triton {TRITON}, not {version('triton')}")
    assert hash_of(ptx) == known


@pytest.mark.parametrize("name, head_dim, causal", KERNELS)
def test_gluon_kernels_are_those_that_were_measured(
    name, head_dim, causal, tmp_path, monkeypatch
):
    """They spill nothing and compute while products run."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    size = GLUON[name, head_dim]
    found, ptx = resources(name, 90, head_dim, size, causal=causal)
    was_measured(ptx, KERNELS[name, head_dim, causal])
    assert fits(found, 90) and fed(name, found, size)


@pytest.mark.parametrize("head_dim, weigh", MERGES)
def test_the_fused_merge_is_the_one_that_was_measured(
    head_dim, weigh, tmp_path, monkeypatch
):
    """Six calls, as of segments of 2,048 to 8,192 at rates 1, 2 and 4, whose first
    result is the output.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    lse = "*fp32" if weigh else "*bf16"
    kinds = {
        "parts": ("*bf16",) * 6,
        "lses": (lse,) * 6,
        "out": "*bf16",
        "lse": lse,
        "table": "*i64",
        "firsts": "*i64",
    }
    fixed = {
        "WEIGH": weigh,
        "OVER": True,
        "GROUP": 1,
        "ROWS": fused_merge.ELEMENTS // head_dim,
        "DIM": head_dim,
        "PAD": head_dim,
        "ALIGNED": 16,
    }
    found, ptx = used(fused_merge.join, kinds, fixed, 90, num_warps=4)
    assert (found["stack"], found["local"]) == (0, 0)
    was_measured(ptx, MERGES[head_dim, weigh])
