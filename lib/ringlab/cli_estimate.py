"""``python -m ringlab estimate``: its options, and an estimate as text or JSON."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict

import torch

from . import blocks, hardware
from .advise.records import duration, size
from .cost import PASSES
from .estimate import Estimate, estimate, longest
from .local import Execution
from .patterns import BlockSparse, Dense, Dilated, Pattern, from_dict

UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def add_options(one: argparse.ArgumentParser) -> None:
    """The options of the command; ``--profile`` is there already."""
    add = one.add_argument
    add_pattern(one)
    add("--seq-len", type=int, metavar="N", help="tokens; without it, only the longest sequence")
    add("--batch", type=int, default=1, metavar="N", help="(default: 1)")
    add("--heads", type=int, default=8, metavar="N", help="(default: 8)")
    add("--kv-heads", type=int, metavar="N", help="(default: as many as heads)")
    add("--head-dim", type=int, default=64, metavar="N", help="(default: 64)")
    add("--dtype", metavar="T", help="as float16 (default: the profile's policy)")
    add("--causal", action="store_true", help="(default: no)")
    add("--passes", default="fwd", choices=list(PASSES), help="(default: fwd)")
    add("--ranks", type=int, default=1, metavar="P", help="a device each (default: 1)")
    add("--scheme", default="auto", metavar="S", help="plan, ring, all_gather, ulysses (default: auto)")
    add("--layout", default="contiguous", metavar="L", help="contiguous, zigzag, striped (default: contiguous)")
    add("--backend", default="auto", metavar="B", help="a kernel's name (default: auto)")
    add("--blocks", default="auto", metavar="WAY", help="how a block-sparse pattern runs (default: auto)")
    add("--merge", default="auto", metavar="WAY", help="how results of branches are joined, or fused (default: auto)")
    add("--memory", type=size_in_bytes, metavar="SIZE",
        help="of a rank, as 8GiB, and the longest sequence for it (default: the profile's)")
    add("--json", action="store_true", help="JSON instead of text (default: no)")


def add_pattern(one: argparse.ArgumentParser) -> None:
    """The options that ``pattern_of`` reads."""
    add = one.add_argument
    add("--pattern", default="dilated", metavar="P",
        help="dilated, dense, window, local_global, bigbird, or a pattern's to_dict() as JSON (default: dilated)")
    add("--segments", type=_numbers, metavar="W,W", help="segment lengths of dilated (default: 2048,4096)")
    add("--rates", type=_numbers, metavar="R,R", help="their dilation rates (default: 1,2)")
    add("--block-size", type=int, default=128, metavar="B", help="of block-sparse patterns (default: 128)")


def run(given: argparse.Namespace) -> str:
    """What the command prints; raises ValueError or NotImplementedError, in one line, for what cannot be."""
    machine = hardware.detect()
    profile = hardware.resolve(given.profile, machine).on(machine)
    dtype = profile.default_dtype(machine) if given.dtype is None else getattr(torch, given.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {given.dtype!r}; known: float64, float32, bfloat16, float16")
    pattern = pattern_of(given)
    names = ("heads", "kv_heads", "head_dim", "batch", "causal", "passes", "ranks", "scheme", "layout", "backend")
    call = {name: getattr(given, name) for name in names} | {"dtype": dtype, "profile": profile}
    if given.blocks != "auto" and not isinstance(pattern, BlockSparse):
        raise ValueError(f"--blocks says how block-sparse patterns run; this is {pattern}")
    call["execution"] = Execution(blocks=given.blocks, merge=given.merge)
    found = None if given.seq_len is None else estimate(pattern, seq_len=given.seq_len, **call)
    budget = profile.memory_bytes if given.memory is None else given.memory
    sought = given.seq_len is None or given.memory is not None  # it takes many runs without data
    if sought and budget is None:
        raise ValueError(f"profile {profile.name!r} states no memory; give --memory")
    most = _longest(found, pattern, budget, call) if sought else None
    about = {
        "profile": profile.name, "device": profile.title, "pattern": str(pattern), "dtype": str(dtype)[6:],
        "shape": {name: getattr(given, name) for name in ("seq_len", "batch", "heads", "head_dim")},
        "passes": given.passes, "causal": given.causal, "memory_bytes": budget, "longest": most,
    }  # fmt: skip
    return json.dumps(about | {"estimate": found and as_dict(found)}, indent=1) if given.json else text(about, found)


def _longest(found: Estimate | None, pattern: Pattern, budget: int, call: dict) -> int | None:
    """The longest sequence; where none fits, None beside an estimate that says so, else ValueError."""
    try:
        return longest(pattern, budget, **call)
    except ValueError:
        if found is None or found.peak_bytes <= budget or budget < 1:
            raise
        return None


def pattern_of(given: argparse.Namespace) -> Pattern:
    """The pattern that the options name; ValueError for none."""
    name, block = given.pattern, given.block_size
    if (given.segments or given.rates) and name != "dilated":
        raise ValueError(f"--segments and --rates belong to dilated, not to {name}")
    if name.lstrip().startswith("{"):
        try:
            return from_dict(json.loads(name))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"--pattern {name} is no pattern's to_dict(): {error}") from None
    if name == "dilated":
        return Dilated(given.segments or [2048, 4096], given.rates or [1, 2])
    made = {
        "dense": Dense, "window": lambda: blocks.sliding_window(2, block_size=block),
        "local_global": lambda: blocks.local_global(2, 4, block_size=block),
        "bigbird": lambda: blocks.bigbird(1, 2, 3, block_size=block),
    }  # fmt: skip
    if name not in made:
        raise ValueError(f"unknown pattern {name!r}; known: dilated, {', '.join(made)}, or JSON")
    return made[name]()


def as_dict(found: Estimate) -> dict:
    """An Estimate as JSON holds it."""
    sent = [{"from": a, "to": b, "bytes": nbytes} for (a, b), nbytes in sorted(found.sent.items())]
    return asdict(found) | {"sent": sent, "bound_s": found.bound_s, "binds": found.binds}


def text(about: dict, found: Estimate | None) -> str:
    """An Estimate for people."""
    lines = [f"{about['pattern']}, {about['dtype']}{', causal' if about['causal'] else ''}, {about['passes']}, on "
             f"{about['device']}"]  # fmt: skip
    if found:
        lines += _lines(about, found)
    if about["longest"]:
        lines.append(f"longest    {about['longest']:,} tokens in {size(about['memory_bytes'])} a rank")
    return "\n".join(lines)


def _lines(about: dict, found: Estimate) -> list[str]:
    ranks = f" on {found.ranks} ranks by {found.scheme}" if found.scheme else ""
    cost = found.cost
    lines = [
        f"work       {about['shape']['seq_len']:,} tokens{ranks}: {cost.flops / 1e9:,.1f} GFLOP of use, "
        f"{cost.folded_flops / 1e9:,.1f} to compute, {size(cost.floor_bytes)} of inputs and results",
        f"memory     {size(found.peak_bytes)} a rank" + _fits(about["memory_bytes"], found),
    ]
    lines += [f"  {part:<10} {size(held):>10}" for part, held in found.parts.items() if held]
    if found.ranks > 1:
        lines.append(f"sent       {size(sum(found.sent.values()))} in all"
                     + ("" if found.sent else ": no rank needs rows of another"))  # fmt: skip
        lines += [f"  {a} to {b:<5} {size(nbytes):>10}" for (a, b), nbytes in sorted(found.sent.items())]
    known = ", ".join(f"{name} {duration(seconds)}" for name, seconds in found.bounds.items())
    unknown = [name for name in ("compute", "memory", *["network"] * (found.ranks > 1 and bool(found.sent)))
               if name not in found.bounds]  # fmt: skip
    said = f"at least {duration(found.bound_s)}, by {found.binds}: {known}" if known else "no bound"
    return [*lines, f"time       {said}" + (f"; no rate known for {', '.join(unknown)}" if unknown else "")]


def _fits(budget: int | None, found: Estimate) -> str:
    """What follows from a peak for the memory that there is, and whether the peak may be higher."""
    more = f", at least: {found.at_least}" if found.at_least else ""
    if budget is None:
        return more
    if found.peak_bytes > budget:
        return f", which does not fit {size(budget)}{more}"
    return more or f", which fits {size(budget)}"


def _numbers(said: str) -> list[int]:
    try:
        return [int(part) for part in said.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"numbers with commas between them, as 2048,4096, not {said!r}") from None


def size_in_bytes(said: str) -> int:
    """Bytes from a size as people write it, for argparse.

    >>> size_in_bytes("8GiB"), size_in_bytes("1.5 MB"), size_in_bytes("1024")
    (8589934592, 1500000, 1024)
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)\s*([a-z]*)", said.strip(), re.IGNORECASE)
    if not found or found[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(f"a size is a number and a unit, as 8GiB, got {said!r}")
    return int(float(found[1]) * UNITS[found[2].upper()])
