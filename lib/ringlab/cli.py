"""``python -m ringlab estimate``: its options, and an estimate as text or JSON.

``python -m ringlab compare`` and ``check``: their options, and two runs side by side as text.

``python -m ringlab advise``: its options, and an advice as text, table or code.

``python -m ringlab measure``: its options, and which groups of points they ask for.

``python -m ringlab tune``: its options, and what it prints while it times.

``python -m ringlab report``, ``measure``, ``estimate`` and others. All but ``report`` need torch alone.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import torch

from . import __version__, block_patterns, hardware
from .advise import advise
from .advise.render import duration, size
from .block_patterns import BlockSparse
from .cost import PASSES
from .engine import Execution
from .estimate import Estimate, estimate, longest
from .kernels import triton_config
from .kernels.triton_config import TILE_PASSES
from .kernels.triton_tune import Timed, tune
from .patterns import Dense, Dilated, Pattern, from_dict

UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def _estimate_options(one: argparse.ArgumentParser) -> None:
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
    add(
        "--memory",
        type=size_in_bytes,
        metavar="SIZE",
        help="of a rank, as 8GiB, and the longest sequence for it (default: the profile's)",
    )
    add("--json", action="store_true", help="JSON instead of text (default: no)")


def add_pattern(one: argparse.ArgumentParser) -> None:
    """The options that ``pattern_of`` reads."""
    add = one.add_argument
    add(
        "--pattern",
        default="dilated",
        metavar="P",
        help="dilated, dense, window, local_global, bigbird, or a pattern's to_dict() as JSON (default: dilated)",
    )
    add("--segments", type=_numbers, metavar="W,W", help="segment lengths of dilated (default: 2048,4096)")
    add("--rates", type=_numbers, metavar="R,R", help="their dilation rates (default: 1,2)")
    add("--block-size", type=int, default=128, metavar="B", help="of block-sparse patterns (default: 128)")


def estimate_text(given: argparse.Namespace) -> str:
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
        "dense": Dense, "window": lambda: block_patterns.sliding_window(2, block_size=block),
        "local_global": lambda: block_patterns.local_global(2, 4, block_size=block),
        "bigbird": lambda: block_patterns.bigbird(1, 2, 3, block_size=block),
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


ROWS = "a profile with rows, a folder with samples.jsonl, such a file, or REVISION:PROFILE, as committed"


def _compare_options(one: argparse.ArgumentParser) -> None:
    """The options of ``compare``."""
    one.add_argument("first", metavar="A", help=ROWS)
    one.add_argument("second", metavar="B", help="the same; ratios are A over B")
    _add_shared(one)


def _check_options(one: argparse.ArgumentParser) -> None:
    """The options of ``check``."""
    one.add_argument("base", metavar="BASE", help=ROWS)
    one.add_argument(
        "--against", default="auto", metavar="ROWS", help="which rows are checked; auto: this machine's (default: auto)"
    )
    one.add_argument(
        "--tolerance", type=_part, default=0.10, metavar="PART", help="slower by so much is no failure (default: 0.10)"
    )
    _add_shared(one)


def _add_shared(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--reports", type=folder, metavar="DIR", help="where profiles lie (default: reports/ of the checkout)"
    )
    one.add_argument("--markdown", action="store_true", help="tables as Markdown (default: aligned text)")
    one.add_argument("--csv", type=Path, metavar="FILE", help="write every row to this file (default: none)")


def folder(text: str) -> Path:
    """A folder that is there or may be made."""
    if not text.strip():
        raise argparse.ArgumentTypeError("a folder needs a name")
    if Path(text).exists() and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a file, not a folder")
    return Path(text)


def _part(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no part: 0.10 is 10 %")
    return found


def compare_text(given: argparse.Namespace) -> str:
    """Two sides, every pair of rows; raises report's UsageError."""
    return _side_by_side(given, given.first, given.second)[0]


def check_text(given: argparse.Namespace) -> tuple[str, bool]:
    """What differs of one side from the other, and whether any of it is worse; raises report's UsageError."""
    from ringlab import hardware

    now = hardware.match(hardware.detect()) if given.against == "auto" else given.against
    return _side_by_side(given, now, given.base, tolerance=given.tolerance)


def _side_by_side(given, first: str, second: str, tolerance: float | None = None) -> tuple[str, bool]:
    from ringlab.report import compare_table
    from ringlab.report.compare import check
    from ringlab.report.compare import compare
    from ringlab.report.compare_sides import read_side
    from ringlab.report.places import reports_folder

    reports = given.reports or reports_folder()
    sides = read_side(first, reports), read_side(second, reports)
    found, failures = (compare(*sides), []) if tolerance is None else check(*sides, tolerance)
    if given.csv:
        compare_table.write_csv(given.csv, found)
    failed = [pair for pair, _ in failures]
    differ = None if tolerance is None else [p for p in found.pairs if p.longer or p.shorter or p in failed]
    parts = compare_table.sections(found, differ)
    if tolerance is not None:
        parts.append(compare_table.worse(found, failures, tolerance))
    return compare_table.text(parts, given.markdown), bool(failures)


NUMBERS = {
    "--seq-len": (None, "tokens of the whole sequence"), "--ranks": (1, "GPUs or processes that share it"),
    "--batch": (1, "sequences at a time"), "--heads": (8, "query heads"),
    "--kv-heads": (None, "K/V heads (default: as many as heads)"), "--head-dim": (64, "size of a head"),
    "--layers": (1, "layers that keep their tensors from forward to backward"),
}  # fmt: skip
SHOWN = ("text", "table", "code")


def _advise_options(one: argparse.ArgumentParser) -> None:
    """The options of the command; ``--profile`` is there already."""
    add = one.add_argument
    for name, (default, about) in NUMBERS.items():
        about += "" if default is None else f" (default: {default})"
        add(name, type=int, default=default, metavar="N", help=about, required=name == "--seq-len")
    add("--causal", action="store_true", help="hide what comes after (default: no)")
    add("--passes", default="fwd+bwd", choices=list(PASSES), help="(default: fwd+bwd)")
    add("--pattern", default="auto", help="auto, dense, ladder or local (default: auto)")
    add("--memory", type=size_in_bytes, metavar="SIZE", help="of a rank, as 8GiB (default: the profile's)")
    add("--seconds", type=float, metavar="S", help="what a call may take at its bound (default: any)")
    add("--show", choices=SHOWN, help="text, Markdown table or code alone (default: text and code)")


def advise_text(given: argparse.Namespace) -> str:
    """What the command prints; raises ValueError, in one line, for what cannot be."""
    from ringlab.report.evidence import stored  # after the options are known to be right: it reads all rows

    machine = hardware.detect()
    profile = hardware.resolve(given.profile, machine).on(machine)
    asked = ("ranks", "batch", "heads", "kv_heads", "head_dim", "layers", "causal", "passes", "pattern", "seconds")
    advice = advise(profile, given.seq_len, memory_bytes=given.memory, rows=stored(profile),
                    **{name: getattr(given, name) for name in asked})  # fmt: skip
    return getattr(advice, given.show)() if given.show else f"{advice.text()}\n\n{advice.code()}"


def _measure_options(one: argparse.ArgumentParser) -> None:
    """The options of the command; ``--profile`` is there already."""
    add = one.add_argument
    add("--suite", default="all", metavar="NAME", help="the points of which pages (default: all)")
    add("--group", action="append", metavar="NAME", help="only this group of points; may be repeated (default: all)")
    add("--minutes", type=_minutes, metavar="N", help="begin no group after so long; a rerun goes on (default: none)")
    add("--data", type=folder, metavar="DIR", help="where rows go (default: reports/<profile>/data)")
    add("--strict", action="store_true", help="refuse a rehearsal, exit 2 (default: no, or STRICT=1)")
    add("--force", action="store_true", help="measure again what is there already (default: no)")


def _minutes(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes")
    return found


def strict(given: argparse.Namespace) -> bool:
    """Whether a rehearsal is refused, by the option or by the environment."""
    return given.strict or os.environ.get("STRICT", "") not in ("", "0")


def measure_rows(given: argparse.Namespace) -> Path:
    """Measure, and return the folder of the rows.

    Raises ValueError, report's UsageError, measure.Busy, or OSError with the name of what cannot be written.
    """
    from ringlab import hardware
    from ringlab import measure
    from ringlab.measure import suites
    from ringlab.report.places import reports_folder
    from ringlab.report.plan import plan

    if given.suite not in ("all", *suites.SUITES):
        raise ValueError(f"unknown suite {given.suite!r}; known: all, {', '.join(suites.SUITES)}")
    asked_for = [given.suite] if given.suite != "all" else list(suites.SUITES)
    reports = reports_folder()
    asked = plan(given.profile, hardware.detect(), reports, strict=strict(given), recorded=False)
    how = {"device": asked.device, "rehearsal": asked.rehearsal}
    groups = [g for name in asked_for for g in suites.SUITES[name](asked.profile, **how)]
    if not groups:
        raise ValueError(f"suite {given.suite!r} has no points for {asked.profile.name!r} here: it is for a GPU")
    known = [g.name for g in groups]
    if unknown := [name for name in given.group or () if name not in known]:
        raise ValueError(f"unknown group {unknown[0]!r}; known here: {'; '.join(known)}")
    groups = [g for g in groups if not given.group or g.name in given.group]
    if asked.why:
        print(f"{asked.profile.name}: {asked.why}; rehearsal on this CPU", file=sys.stderr)
    data = given.data or reports / asked.folder / "data"
    how |= {"profile": asked.profile, "force": given.force, "minutes": given.minutes}
    try:
        measure.run(groups, data, progress=True, **how)
    except OSError as error:
        error.filename = error.filename or str(data)
        raise
    return data


HEAD_DIMS = (64, 128)


def _tune_options(one: argparse.ArgumentParser) -> None:
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
    add("--pass", dest="passes", action="append", choices=TILE_PASSES, help="may be repeated (default: all)")


def tune_lines(given: argparse.Namespace) -> Iterator[str]:
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
            for name in given.passes or TILE_PASSES:
                for found in tune(q, k, v, pattern, causal=causal, passes=(name,)):
                    yield from lines(found)
                    every.append(found)
    shape = {"pattern": pattern.to_dict(), "seq_len": given.seq_len, "batch": given.batch, "heads": given.heads,
             "kv_heads": kv_heads}  # fmt: skip
    yield str(record(every, shape, given.data or _data(profile.name), q.device))
    yield str(triton_config.path(q.device))


def _data(profile: str) -> Path:
    from ringlab.report.places import reports_folder

    return reports_folder() / profile / "data"


def record(found: list[Timed], shape: dict, data: Path, device: torch.device) -> Path:
    """Write what was timed beside the rows of a report, in place of what an earlier tuning wrote; returns the file."""
    from ringlab.measure import provenance

    commit, dirty = provenance.git_state()
    stamp = dict(triton_config.stamp(device))
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

    >>> from ringlab.kernels.triton_config import Use
    >>> from ringlab.kernels.triton_config import Sizes
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


STOPPED = "interrupted: what is done is kept; run again to go on"
OK, FAILED, REFUSED = 0, 1, 2  # exit codes: done; a notebook, worker or browser failed; asked for what cannot be
# What pyproject.toml's [report] installs, asked for before minutes are spent on measuring.
REPORT_PACKAGES = ("ipykernel", "matplotlib", "nbclient", "nbconvert", "nbformat", "pandas", "papermill", "seaborn")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; what a user can cause is answered in one line on stderr.

    >>> main(["measure", "--profile", "gtx180"])
    2
    """
    arguments = _parser().parse_args(argv)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as stop:
        print(f"\nringlab: {stop.args[0] if stop.args else STOPPED}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output left
        _drop_output()
        return FAILED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        return _refuse(f"cannot write what was asked for: {error.strerror}", FAILED)


def _drop_output() -> None:
    """Nothing that is still held back is written at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(REFUSED, f"ringlab: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m ringlab", description="Attention measured on your own hardware.")
    parser.add_argument("--version", action="version", version=f"ringlab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, run, about: str):
        one = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        one.set_defaults(run=run)
        return one

    def choose_profile(one) -> None:
        one.add_argument(
            "--profile", default="auto", metavar="NAME", help="a profile's name, or auto: this machine (default: auto)"
        )

    report = command("report", _report, "measure what is missing and write reports/<profile>/")
    choose_profile(report)
    report.add_argument(
        "--strict", action="store_true", help="refuse a rehearsal or recorded rows, exit 2 (default: no, or STRICT=1)"
    )
    report.add_argument(
        "--reports", type=folder, metavar="DIR", help="where reports go (default: reports/ of the checkout)"
    )
    report.add_argument(
        "--force", action="store_true", help="run and render the notebooks even if nothing changed (default: no)"
    )
    report.add_argument("--remeasure", action="store_true", help="measure again what is there already (default: no)")

    measure = command("measure", _measure, "measure what is missing, without a report (torch alone)")
    choose_profile(measure)
    _measure_options(measure)

    pdf = command("pdf", _pdf, "print the reports that are there to PDF, by a headless Chromium")
    choose_profile(pdf)
    pdf.add_argument(
        "--reports", type=folder, metavar="DIR", help="where reports are (default: reports/ of the checkout)"
    )

    about = "set two runs side by side: ratios with intervals (torch alone)"
    _compare_options(command("compare", _compare, about))
    about = "exit 1 where rows are significantly slower or larger than earlier ones"
    _check_options(command("check", _check, about))

    ask = command("estimate", _estimate, "what a call needs, without running it, and the longest sequence that fits")
    choose_profile(ask)
    _estimate_options(ask)

    advise = command("advise", _advise, "say what to run for a length, on what evidence, with code (torch alone)")
    choose_profile(advise)
    _advise_options(advise)

    tune = command("tune", _tune, "time the Triton kernels' tile sizes on this GPU and keep the fastest")
    choose_profile(tune)
    _tune_options(tune)

    command("profiles", _profiles, "list the hardware profiles and which of them run here")
    return parser


def _refuse(message: str, code: int = REFUSED) -> int:
    print(f"ringlab: {message}", file=sys.stderr)
    return code


def _report(arguments) -> int:
    if lacking := [name for name in REPORT_PACKAGES if not _installed(name)]:
        return _refuse(f"reports need what is not installed here: {', '.join(lacking)}; pip install -e './lib[report]'")
    from ringlab.report import driver
    from ringlab.report.places import ReportError

    try:
        pages = driver.run(
            arguments.profile, strict=strict(arguments), reports=arguments.reports, force=arguments.force,
            remeasure=arguments.remeasure,
        )  # fmt: skip
    except ReportError as error:
        return _refuse(str(error), error.exit_code)
    return _show(pages)


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # an import hook that hides it
        return False


def _show(paths: Sequence[Path]) -> int:
    for path in paths:
        print(os.path.relpath(path))
    return OK


def _measure(arguments) -> int:
    from ringlab import measure
    from ringlab.report.places import UsageError

    try:
        return _show([measure_rows(arguments)])
    except measure.Busy as error:
        return _refuse(str(error), FAILED)
    except (UsageError, ValueError) as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"cannot write {error.filename or 'rows'}: {error.strerror or error}", FAILED)


def _compare(arguments) -> int:
    from ringlab.report.places import UsageError

    try:
        print(compare_text(arguments))
    except UsageError as error:
        return _refuse(str(error))
    return OK


def _check(arguments) -> int:
    from ringlab.report.places import UsageError

    try:
        said, worse = check_text(arguments)
    except UsageError as error:
        return _refuse(str(error))
    print(said)
    return FAILED if worse else OK


def _pdf(arguments) -> int:
    from ringlab.report import pdf
    from ringlab.report.places import ReportError

    try:
        return _show(pdf.run(arguments.profile, reports=arguments.reports))
    except ReportError as error:
        return _refuse(str(error), error.exit_code)


def _estimate(arguments) -> int:
    try:
        print(estimate_text(arguments))
    except (ValueError, NotImplementedError, TypeError) as error:  # JSON that is none is a ValueError too
        return _refuse(" ".join(str(error).split()))
    return OK


def _advise(arguments) -> int:
    try:
        print(advise_text(arguments))
    except (ValueError, NotImplementedError) as error:
        return _refuse(" ".join(str(error).split()))
    return OK


def _tune(arguments) -> int:
    import torch

    try:
        for line in tune_lines(arguments):
            print(line, flush=True)
    except (ValueError, NotImplementedError, torch.OutOfMemoryError) as error:
        return _refuse(" ".join(str(error).split()))
    except OSError as error:
        return _refuse(f"cannot write {error.filename}: {error.strerror or error}", FAILED)
    return OK


def _profiles(arguments) -> int:
    from ringlab import hardware

    rows = [("profile", "device", "sm", "memory", "dtype", "runnable here")]
    for row in hardware.table():
        memory = f"{row['memory_bytes'] / 2**30:.0f} GiB" if row["memory_bytes"] else "-"
        runs = ("yes: " if row["runnable"] else "no: ") + row["why"]
        name = f"{row['name']} *" if row["matches"] else row["name"]
        rows.append((name, row["title"], row["sm"], memory, row["dtype"], runs))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for row in rows:
        print("  ".join([*(text.ljust(width) for text, width in zip(row, widths)), row[5]]).rstrip())
    print("\n* matches this machine (GPU=auto)")
    return OK
