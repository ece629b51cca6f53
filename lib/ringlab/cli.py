"""The commands of ``python -m ringlab``, and their options. All but ``report``,
``compare`` and ``check`` need torch alone.
"""

import argparse
import codecs
import errno
import io
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from . import __version__, hardware, measure
from .advise import NEEDS, SECONDS, advise, columns, dtype_name
from .checks import check_choice, parse_bytes, parse_count, parse_counts, parse_dtype
from .cost import PASSES, format_bytes, format_seconds
from .estimate import SHAPE, estimate, longest
from .measure import suites
from .patterns import Pattern, from_dict
from .presets import NAMED, named
from .report import templates
from .report.evidence import learned, stored
from .report.places import (
    ReportError,
    UsageError,
    changes,
    reports_folder,
    run_target,
)

STOPPED = "interrupted: what is done is kept; run again to go on"
# What an impossible call raises.
CALL = (
    ValueError,
    NotImplementedError,
    torch.OutOfMemoryError,
)
# Exit codes: done; a notebook or worker failed; asked for what cannot be.
OK, FAILED, REFUSED = 0, 1, 2
# What pyproject.toml's [report] installs, asked for before minutes are spent on
# measuring.
REPORT_PACKAGES = (
    "filelock",
    "ipykernel",
    "jinja2",
    "matplotlib",
    "nbclient",
    "nbconvert",
    "nbformat",
    "pandas",
    "papermill",
    "seaborn",
)
ROWS = "a profile with rows, a folder with samples.jsonl, such a file, or REVISION:PROFILE, as committed"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; what a user can cause is answered in
    one line on stderr.

    >>> main(["measure", "--profile", "gtx180"])
    2
    """
    _open_streams()
    parser = _parser()
    argv = sys.argv[1:] if argv is None else argv
    for option in argv:  # argparse reads this value as none, some or "--", by version
        if option.startswith("--") and option.endswith("=--"):
            parser.error(f"argument {option[:-3]}: expected one argument")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code = args.run(args) or OK
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as stop:
        print(f"\nringlab: {stop.args[0] if stop.args else STOPPED}", file=sys.stderr)
        return 130
    except ReportError as error:
        return _refuse(str(error), error.exit_code)
    except measure.Busy as error:
        return _refuse(str(error), FAILED)
    except (hardware.UnknownProfile, *args.refuses) as error:
        return _refuse(" ".join(str(error).split()))
    except OSError as error:
        # What is buffered would fail again at exit.
        if error.errno in (
            errno.EPIPE,
            errno.ENOSPC,
        ):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # the reader of our output left
            return FAILED
        return _refuse(
            f"cannot read or write {error.filename or 'data'}: {error.strerror or error}",
            FAILED,
        )


# What stands for characters that a terminal lacks; "?" for all others.
PLAIN = {"µ": "u", "≥": ">=", "×": "x", "–": "-", "…": "...", "·": "-"}


def _open_streams() -> None:
    """Open what is closed of stdin, stdout and stderr, so that no other file takes its
    place, and let them replace characters that they cannot encode.
    """

    def plain(error: UnicodeError) -> tuple[str, int]:
        lacking = error.object[error.start : error.end]
        return "".join(PLAIN.get(x, "?") for x in lacking), error.end

    codecs.register_error("ringlab", plain)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="ringlab")


def _refuse(message: str, code: int = REFUSED) -> int:
    print(f"ringlab: {message}", file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(REFUSED, f"ringlab: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m ringlab", description="Attention measured on your own hardware."
    )
    parser.add_argument("--version", action="version", version=f"ringlab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(
        name: str, run, summary: str, refuses: tuple = (), profile: bool = True
    ):
        one = commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
        )
        one.set_defaults(run=run, refuses=refuses, parser=one)
        if profile:
            one.add_argument(
                "--profile",
                default="auto",
                metavar="NAME",
                help="auto: this machine (default: auto)",
            )
        return one.add_argument

    add = command(
        "report", _report, "measure what is missing and write reports/<profile>/"
    )
    add(
        "--strict",
        action="store_true",
        help="refuse all but real measurements, exit 2 (default: no)",
    )
    add(
        "--reports",
        type=folder,
        metavar="DIR",
        help="where reports go (default: reports/ of the checkout)",
    )
    add(
        "--force",
        action="store_true",
        help="run and render the notebooks even if nothing changed (default: no)",
    )
    add(
        "--remeasure",
        action="store_true",
        help="measure again what is there already (default: no)",
    )

    add = command(
        "measure",
        _measure,
        "measure what is missing, without a report (torch alone)",
        (ValueError,),
    )
    add(
        "--suite",
        default="all",
        metavar="NAME",
        help="the points of which pages (default: all)",
    )
    add(
        "--group",
        action="append",
        metavar="NAME",
        help="only this group of points; may be repeated (default: all)",
    )
    add(
        "--minutes",
        type=float,
        metavar="N",
        help="begin no group after so long; a rerun goes on (default: none)",
    )
    add(
        "--data",
        type=folder,
        metavar="DIR",
        help="where rows go (default: reports/<profile>/data)",
    )
    add(
        "--force",
        action="store_true",
        help="measure again what is there already (default: no)",
    )

    add = command(
        "compare",
        _compare,
        "set two runs side by side: ratios with intervals",
        profile=False,
    )
    add("first", metavar="A", help=ROWS)
    add("second", metavar="B", help="the same; ratios are A over B")
    _add_comparison(add)

    add = command(
        "check",
        _compare,
        "exit 1 where rows became significantly slower or larger",
        profile=False,
    )
    add("second", metavar="BASE", help=ROWS)
    add(
        "--against",
        dest="first",
        default="auto",
        metavar="ROWS",
        help="rows to check (default: auto, this machine's)",
    )
    add(
        "--tolerance",
        type=float,
        default=0.10,
        metavar="PART",
        help="allowed slowdown (default: 0.10)",
    )
    _add_comparison(add)

    add = command(
        "estimate",
        _estimate,
        "what a call would need; with --memory, or without --seq-len, the longest sequence that fits",
        (*CALL, TypeError),
    )
    _add_call(add, "dilated")
    add(
        "--scheme",
        default="auto",
        metavar="S",
        help="plan, ring, all_gather, ulysses (default: auto)",
    )
    add(
        "--layout",
        default="contiguous",
        metavar="L",
        help="contiguous, zigzag, striped (default: contiguous)",
    )
    add(
        "--backend", default="auto", metavar="B", help="a kernel's name (default: auto)"
    )

    add = command(
        "advise",
        _advise,
        "say what to run for a length, on what evidence, with code (torch alone)",
        CALL,
    )
    _add_call(add, "auto")
    _add_counts(add, layers=1)
    add(
        "--need",
        default="far",
        choices=NEEDS,
        help="beyond dense attention: every key, keys from far away, or neighbours (default: far)",
    )
    add(
        "--seconds",
        type=float,
        metavar="S",
        default=SECONDS,
        help=f"up to which dense attention is advised, a call (default: {SECONDS:g})",
    )
    add(
        "--show",
        choices=("text", "code"),
        help="what to print (default: text and code)",
    )

    command(
        "profiles",
        _profiles,
        "list the hardware profiles and which of them run here",
        profile=False,
    )
    return parser


def reads(parse: Callable) -> Callable:
    """``parse`` as a type of an option, so that what it refuses is told as it is."""

    def read(text: str):
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


COUNT = reads(parse_count)
COUNTS = reads(parse_counts)


def _add_call(add, pattern: str) -> None:
    """The options of one call of attention that ``estimate`` and ``advise`` share."""
    _add_pattern(add, pattern)
    _add_counts(
        add,
        seq_len=None,
        batch=1,
        heads=8,
        kv_heads=None,
        head_dim=64,
    )
    text = "float32 or fp32, bfloat16 or bf16, float16 or fp16, float64 or fp64 (default: the profile's policy)"
    add("--dtype", type=reads(parse_dtype), metavar="D", help=text)
    add("--causal", action="store_true", help="hide what comes after (default: no)")
    add("--passes", default="fwd", choices=list(PASSES), help="(default: fwd)")
    _add_counts(add, ranks=1)
    text = "of a rank, as 8GiB (default: the profile's)"
    add("--memory", type=reads(parse_bytes), metavar="SIZE", help=text)


def _add_counts(add, **defaults: int | None) -> None:
    texts = {
        "seq_len": "tokens of the whole sequence, as 131072, 128K, 1M or 1e6",
        "ranks": "GPUs or processes that share it",
        "batch": "sequences at a time",
        "heads": "query heads",
        "kv_heads": "K/V heads; None: as many as heads",
        "head_dim": "size of a head",
        "layers": "layers that keep their tensors from forward to backward",
    }
    for name, default in defaults.items():
        text = f"{texts[name]} (default: {default})"
        option = f"--{name.replace('_', '-')}"
        add(option, type=COUNT, default=default, metavar="N", help=text)


# Options of patterns, each an argument of what makes the pattern.
PATTERN_OPTIONS = {
    "segment_lengths": (COUNTS, "of dilated, as 2K,4K (default: 2048,4096)"),
    "dilation_rates": (COUNTS, "of dilated (default: 1,2)"),
    "block_size": (COUNT, "of window, local_global, bigbird (default: 128)"),
    "before": (COUNT, "blocks of their window, either way (default: 2)"),
    "count": (COUNT, "global blocks of local_global, bigbird (default: 2)"),
    "random": (COUNT, "random blocks of bigbird (default: 3)"),
}


def _add_pattern(add, default: str) -> None:
    """The options that ``_pattern_of`` reads."""
    text = f"{', '.join(NAMED)}, or a pattern's to_dict() as JSON (default: {default})"
    add("--pattern", default=default, metavar="P", help=text)
    for name, (kind, text) in PATTERN_OPTIONS.items():
        add(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=text)


def _add_comparison(add) -> None:
    add(
        "--reports",
        type=folder,
        metavar="DIR",
        help="where profiles lie (default: reports/ of the checkout)",
    )
    add(
        "--markdown",
        action="store_true",
        help="tables as Markdown (default: aligned text)",
    )
    add(
        "--all",
        action="store_true",
        help="every row (default: the largest differences)",
    )


def folder(text: str) -> Path:
    """A folder that is there or may be made."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError("a folder needs a name")
    try:
        if Path(text).exists() and not Path(text).is_dir():
            raise argparse.ArgumentTypeError(f"{text} is a file, not a folder")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    return Path(text)


def _report(args) -> int | None:
    if lacking := [name for name in REPORT_PACKAGES if find_spec(name) is None]:
        return _refuse(
            f"reports need what is not installed here: {', '.join(lacking)}; pip install -e './lib[report]'"
        )
    try:
        from ringlab.report import driver
    except (ValueError, OSError) as error:  # matplotlib reads them as it is imported
        return _refuse(f"matplotlib does not start with its settings: {error}")

    reports = args.reports or reports_folder()

    def told(*lines: str) -> str:
        return "\n".join(filter(None, [*lines, changes(reports)]))

    try:
        written = driver.run(
            args.profile,
            strict=args.strict,
            reports=reports,
            force=args.force,
            remeasure=args.remeasure,
        )
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(told(*stop.args or [STOPPED])) from None
    state = f"{len(written)} files written" if written else "up to date"
    print(told(f"{state}: start at {os.path.relpath(reports / 'index.html')}"))


def _compare(args) -> int:
    """Print two sides, the verdict first; with a tolerance the rows that are worse, and
    FAILED if there is one.
    """
    reports = args.reports or reports_folder()
    tolerance = vars(args).get("tolerance")
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise UsageError(f"'{tolerance:g}' is no part: 0.10 is 10 %")
    from .report import compare

    first = hardware.match(hardware.detect()) if args.first == "auto" else args.first
    sides = (
        compare.read_side(first, reports),
        compare.read_side(args.second, reports),
    )
    if tolerance is None:
        comparison = compare.compare(*sides)
        failures = []
        parts = []
    else:
        comparison, failures = compare.check(*sides, tolerance)
        parts = [compare.worse(comparison, failures, tolerance)]
    if tolerance is None or args.all:
        parts += compare.sections(comparison, args.all)
    print(compare.text(parts, args.markdown))
    return FAILED if failures else OK


def _profiles(args) -> None:
    machine = hardware.detect()
    lines = [("profile", "device", "sm", "memory", "dtype", "runnable here")]
    for name, profile in hardware.profiles().items():
        runnable, why = profile.runnable(machine)
        here = profile.on(machine)
        memory = here.memory_bytes and f"{here.memory_bytes / 2**30:.0f} GiB"
        lines.append(
            (
                name + " *" * (name == hardware.match(machine)),
                here.title,
                hardware.sm(here.capability),
                memory or "-",
                dtype_name(here.default_dtype()),
                f"{'yes' if runnable else 'no'}: {why}",
            )
        )
    print(*columns(lines), "", "* matches this machine (GPU=auto)", sep="\n")


def _measure(args) -> None:
    check_choice("suite", args.suite, ("all", *suites.SUITES))
    names = suites.SUITES if args.suite == "all" else [args.suite]
    machine = hardware.detect()
    folders = (reports_folder(), args.data or "")
    target = run_target(args.profile, machine, *folders, strict=True)
    groups = [g for name in names for g in suites.SUITES[name](target.profile)]
    if not groups:
        raise ValueError(
            f"suite {args.suite!r} has no points for {target.profile.name!r} here: it is for a GPU"
        )
    known = [g.name for g in groups]
    if unknown := [name for name in args.group or () if name not in known]:
        raise ValueError(
            f"unknown group {unknown[0]!r}; known here: {'; '.join(known)}"
        )
    groups = [g for g in groups if not args.group or g.name in args.group]
    options = {
        "profile": target.profile,
        "force": args.force,
        "minutes": args.minutes,
    }
    measure.run(groups, target.data, progress=True, **options)
    print(os.path.relpath(target.data))


def _pattern_of(args) -> Pattern | str:
    """The pattern that the options name, or "auto"; ValueError for none."""
    name = args.pattern
    in_json = args.pattern.lstrip().startswith("{")
    options = {
        option: value
        for option in PATTERN_OPTIONS
        if (value := getattr(args, option)) is not None
    }
    if options and (name == "auto" or in_json):
        option = next(iter(options)).replace("_", "-")
        raise ValueError(f"--{option} needs a --pattern by name: {', '.join(NAMED)}")
    if not in_json:
        if name == "auto":
            return name
        return named(name, args.seq_len, args.heads, **options)
    try:
        return from_dict(json.loads(name))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"--pattern {name} is no pattern's to_dict(): {error}"
        ) from None


def _options(args, *more: str) -> dict:
    """The options of a call that ``estimate`` and ``advise`` share, and ``more``."""
    return {name: getattr(args, name) for name in (*SHAPE, *more)}


def _estimate(args) -> None:
    profile = hardware.resolve(args.profile).on(hardware.detect())
    dtype = args.dtype or profile.default_dtype()
    pattern = _pattern_of(args)
    if args.ranks == 1 and (args.scheme, args.layout) != ("auto", "contiguous"):
        raise ValueError("--scheme and --layout are for several ranks: give --ranks N")
    call = _options(args, "scheme", "layout", "backend")
    call |= {"dtype": dtype, "profile": profile}
    estimated = (
        None
        if args.seq_len is None
        else estimate(pattern, seq_len=args.seq_len, **call)
    )
    budget = profile.memory_bytes if args.memory is None else args.memory
    most = None
    if estimated is None or args.memory is not None:  # it takes many runs without data
        if budget is None:
            raise ValueError(
                f"profile {profile.name!r} states no memory; give --memory"
            )
        try:
            most = longest(pattern, budget, **call)
        except ValueError:  # an estimate says itself that it does not fit
            if estimated is None or budget < 1:
                raise
    print(
        f"{pattern}, {dtype_name(dtype)}{', causal' if args.causal else ''}, {args.passes}, on {profile.title}"
    )
    if estimated:
        unknown = [
            name for name in ("compute", "memory") if name not in estimated.bounds
        ]
        unknown += ["network"] * (
            bool(estimated.sent) and "network" not in estimated.bounds
        )
        templates.ENVIRONMENT.filters |= {
            "bytes": format_bytes,
            "seconds": format_seconds,
        }
        call = {"seq_len": args.seq_len, "budget": budget, "unknown": unknown}
        print(*templates.lines_of("estimate", e=estimated, **call), sep="\n")
    if most:
        print(
            f"longest    {most:,} tokens in {format_bytes(budget)} a rank, of attention alone"
        )


def _advise(args) -> None:
    profile, rows, choosing = stored(
        hardware.resolve(args.profile).on(hardware.detect())
    )
    if args.seq_len is None:
        raise ValueError("advise needs --seq-len")
    advice = advise(
        profile,
        args.seq_len,
        pattern=_pattern_of(args),
        memory_bytes=args.memory,
        rows=rows,
        choosing=choosing,
        trained=learned(),
        **_options(args, "layers", "dtype", "need", "seconds"),
    )
    print(
        getattr(advice, args.show)()
        if args.show
        else f"{advice.text()}\n\n{advice.code()}"
    )
