"""``python -m ringlab tune``: its options, and what it prints while it times."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from . import hardware
from .cli_compare import folder
from .cli_estimate import add_pattern, pattern_of
from .kernels import triton_choices
from .kernels.triton_sizes import PASSES
from .kernels.triton_tune import Timed, tune

HEAD_DIMS = (64, 128)


def add_options(one: argparse.ArgumentParser) -> None:
    """The options of the command; ``--profile`` is there already."""
    add = one.add_argument
    add_pattern(one)
    add("--seq-len", type=int, default=16384, metavar="N", help="tokens; choices hold for any (default: 16384)")
    add("--batch", type=int, default=1, metavar="N", help="(default: 1)")
    add("--heads", type=int, default=16, metavar="N", help="(default: 16)")
    add("--kv-heads", type=int, metavar="N", help="(default: as many as heads)")
    add("--head-dim", type=int, action="append", metavar="N", help="may be repeated (default: 64 and 128)")
    add("--dtype", metavar="T", help="as float16 (default: the profile's policy)")
    add("--data", type=folder, metavar="DIR", help="where timings go (default: reports/<profile>/data)")
    add("--pass", dest="passes", action="append", choices=PASSES, help="may be repeated (default: all)")


def run(given: argparse.Namespace) -> Iterator[str]:
    """Lines to print, as they are found; raises ValueError, NotImplementedError or OSError for what cannot be."""
    machine = hardware.detect()
    profile = hardware.resolve(given.profile, machine)
    here, why = profile.runnable(machine)
    if profile.kind != "cuda" or not here:
        why = why if profile.kind == "cuda" else f"{profile.name} has none"
        raise ValueError(f"tune times kernels on a GPU: {why}")
    dtype = profile.default_dtype(machine) if given.dtype is None else getattr(torch, given.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {given.dtype!r}; known: float32, bfloat16, float16")
    kv_heads = given.kv_heads or given.heads
    if min(given.seq_len, given.batch, kv_heads) < 1 or given.heads % kv_heads:
        raise ValueError("--seq-len, --batch and --heads are positive, and --heads a multiple of --kv-heads")
    pattern, every = pattern_of(given), []
    for head_dim in given.head_dim or HEAD_DIMS:
        q, k, v = (torch.randn(given.batch, given.seq_len, heads, head_dim, device="cuda", dtype=dtype)
                   for heads in (given.heads, kv_heads, kv_heads))  # fmt: skip
        for causal in (False, True):
            for name in given.passes or PASSES:
                for found in tune(q, k, v, pattern, causal=causal, passes=(name,)):
                    yield from lines(found)
                    every.append(found)
    shape = {"pattern": pattern.to_dict(), "seq_len": given.seq_len, "batch": given.batch, "heads": given.heads,
             "kv_heads": kv_heads}  # fmt: skip
    yield str(record(every, shape, given.data or _data(profile.name), q.device))
    yield str(triton_choices.path(q.device))


def _data(profile: str) -> Path:
    from .report.places import reports_folder

    return reports_folder() / profile / "data"


def record(found: list[Timed], shape: dict, data: Path, device: torch.device) -> Path:
    """Write what was timed beside the rows of a report, in place of what an earlier tuning wrote; returns the file."""
    from .measure import provenance

    commit, dirty = provenance.git_state()
    stamp = dict(triton_choices.stamp(device))
    about = {"torch": str(torch.__version__), "commit": commit or "unknown", "dirty": dirty} | stamp
    timed = [
        {"use": str(one.use), "dtype": str(one.use.dtype).removeprefix("torch."), "size": asdict(size)}
        | {name: getattr(one.use, name) for name in ("name", "head_dim", "causal", "joins")}
        | {"seconds": one.seconds.get(size), "why": one.refused.get(size)}
        | {"default": size == one.default, "kept": size == one.best}
        for one in found for size in (*one.seconds, *one.refused)
    ]  # fmt: skip
    data.mkdir(parents=True, exist_ok=True)
    file, made = data / "tuned.json", data / ".tuned.json.tmp"
    made.write_text(json.dumps({"about": about, "shape": shape, "timed": timed}, indent=1), encoding="utf-8")
    os.replace(made, file)
    return file


def lines(found: Timed) -> Iterator[str]:
    """What came of one use: every candidate, the fastest first, and those that were refused.

    >>> from ringlab.kernels.triton_choices import Use
    >>> from ringlab.kernels.triton_sizes import Sizes
    >>> first, second = Sizes(128, 64, 8, 2), Sizes(64, 64, 4, 2)
    >>> use = Use.of("forward", 64, torch.float16, False, False, 1)
    >>> print(*lines(Timed(use, first, {first: 0.002, second: 0.0015}, {})), sep="\\n")
    forward, head_dim 64, float16, groups of 1
        1.500 ms  64 x 64, 4 warps, 2 stages, pointers: kept
        2.000 ms  128 x 64, 8 warps, 2 stages, pointers: the default
    """
    yield str(found.use)
    for size, seconds in sorted(found.seconds.items(), key=lambda x: x[1]):
        said = ["kept"] * (size == found.best) + ["the default"] * (size == found.default)
        yield f"{seconds * 1e3:9.3f} ms  {size}" + (f": {', '.join(said)}" if said else "")
    for size, why in found.refused.items():
        yield f"{'refused':>12}  {size}: {why}"
