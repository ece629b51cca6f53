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
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from . import __version__, hardware, measure
from .advise import NEEDS, advise, columns, dtype_name
from .call import CallSpec
from .checks import check_choice, parse_bytes, parse_count, parse_counts, parse_dtype
from .cost import PASSES, format_bytes
from .estimate import SHAPE, estimate, longest
from .measure import suites
from .patterns import from_dict
from .presets import DEFAULTS, NAMED, named
from .report import templates
from .report.evidence import advised
from .report.places import (
    ReportError,
    UsageError,
    changes,
    home,
    reports_folder,
    run_target,
)

STOPPED = "interrupted: what is done is kept; run again to go on"
# Exit codes: done; a notebook or worker failed; asked for what cannot be.
OK = 0
FAILED = 1
REFUSED = 2
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
    "scipy",
    "seaborn",
)


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

    for run, options in {
        _report: REPORT,
        _measure: MEASURE,
        _compare: COMPARE,
        _check: CHECK,
        _estimate: ESTIMATE,
        _advise: ADVISE,
        _judge: JUDGE,
        _profiles: {},
    }.items():
        about = run.__doc__
        one = commands.add_parser(
            run.__name__.strip("_"), help=about, description=about
        )
        one.set_defaults(run=run, refuses=REFUSES.get(run, ()), parser=one)
        for option, text in options.items():
            _add(one, option, text)
    commands.choices["estimate"].set_defaults(pattern="dilated")
    return parser


def reads(parse: Callable) -> Callable:
    """``parse`` as a type of an option, so that what it refuses is told as it is."""

    def read(text: str):
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def folder(text: str) -> Path:
    """A folder that is there or may be made; ValueError for another."""
    if not text.strip() or "\0" in text:
        raise ValueError("a folder needs a name")
    try:
        is_file = Path(text).exists() and not Path(text).is_dir()
    except OSError as error:
        raise ValueError(f"{text}: {error.strerror}") from None
    if is_file:
        raise ValueError(f"{text} is a file, not a folder")
    return Path(text)


# --------------------------------------------------------------------------------------
# the options of each command


# How a value is read, by what stands for it behind the name of an option.
READ = {
    "N": parse_count,
    "N,N": parse_counts,
    "X": float,
    "SIZE": parse_bytes,
    "DTYPE": parse_dtype,
    "DIR": folder,
}
# Options of a call and of advice have the defaults of the code.
VALUES = {
    **advise.__kwdefaults__,
    "scheme": CallSpec.scheme,
    "layout": CallSpec.layout,
    "backend": CallSpec.backend,
    "profile": "auto",
    "suite": "all",
    "against": "auto",
    "tolerance": 0.10,
}


def _add(command: argparse.ArgumentParser, option: str, text: str) -> None:
    """Add an option: "--heads N", "--group NAME..." (may be repeated), "--passes
    fwd|fwd+bwd", or a flag without a value; or what stands without a name, as "BASE".
    The help of an option ends with its default unless the text says it.
    """
    name, _, value = option.partition(" ")
    if not name.startswith("--"):
        command.add_argument(name, help=text, nargs=value or None)
        return
    default = VALUES.get(name[2:].replace("-", "_"))
    how = {"default": default, "metavar": value, "type": reads(READ.get(value, str))}
    if "..." in value:
        how["action"] = "append"
    elif "|" in value:
        how = {"default": default, "choices": value.split("|")}
    elif not value:
        how = {"action": "store_true"}
    if "(default: " not in text:
        text += f" (default: {'%(default)s' if value else 'no'})"
    command.add_argument(name, help=text, **how)


PROFILE = {"--profile NAME": "auto: this machine"}
REPORTS = {"--reports DIR": "where profiles lie (default: reports/ of the checkout)"}
REPORT = {
    **PROFILE,
    **REPORTS,
    "--strict": "refuse all but real measurements, exit 2",
    "--force": "run and render the notebooks even if nothing changed",
    "--remeasure": "measure again what is there already",
}
MEASURE = {
    **PROFILE,
    "--suite NAME": "the points of which pages",
    "--group NAME...": "only this group of points; may be repeated (default: all)",
    "--minutes X": "begin no group after so long; a rerun goes on (default: none)",
    "--data DIR": "where rows go (default: reports/<profile>/data)",
    "--force": "measure again what is there already",
}
COMPARISON = {
    **REPORTS,
    "--markdown": "tables as Markdown",
    "--all": "every row, not only the largest differences",
}
ROWS = "a profile with rows, a folder with samples.jsonl, such a file, or REVISION:PROFILE, as committed"
COMPARE = {"A": ROWS, "B": "the same; ratios are A over B", **COMPARISON}
CHECK = {
    "BASE": ROWS,
    "--against NAME": "rows to check; auto: this machine's",
    "--tolerance X": "allowed slowdown",
    **COMPARISON,
}
# Of one call of attention.
CALL_OPTIONS = {
    **PROFILE,
    "--pattern NAME": f"{', '.join(NAMED)}, or a pattern's to_dict() as JSON",
    "--segment-lengths N,N": "of dilated, as 2K,4K (default: 2048,4096)",
    "--dilation-rates N,N": "of dilated (default: 1,2)",
    "--block-size N": "of window, local_global, bigbird (default: 128)",
    "--before N": "blocks of their window, either way (default: 2)",
    "--count N": "global blocks of local_global, bigbird (default: 2)",
    "--random N": "random blocks of bigbird (default: 3)",
    "--seq-len N": "tokens of the whole sequence, as 131072, 128K, 1M or 1e6",
    "--batch N": "sequences at a time",
    "--heads N": "query heads",
    "--kv-heads N": "K/V heads (default: as many as heads)",
    "--head-dim N": "size of a head",
    "--dtype DTYPE": "float32 or fp32, bfloat16 or bf16, float16 or fp16, float64 or fp64 "
    "(default: the profile's policy)",
    "--causal": "hide what comes after",
    f"--passes {'|'.join(PASSES)}": "forward, or a training step",
    "--ranks N": "GPUs or processes that share it",
    "--memory SIZE": "of a rank, as 8GiB (default: the profile's)",
}
ESTIMATE = {
    **CALL_OPTIONS,
    "--scheme NAME": "plan, ring, all_gather, ulysses",
    "--layout NAME": "contiguous, zigzag, striped",
    "--backend NAME": "a kernel's name",
}
ADVISE = {
    **CALL_OPTIONS,
    "--layers N": "layers that keep their tensors from forward to backward",
    f"--need {'|'.join(NEEDS)}": "beyond dense attention: every key, keys from far away, or neighbours",
    "--seconds X": "up to which dense attention is advised, a call",
    "--show text|code": "what to print (default: text and code)",
}
JUDGE = {
    "NAME *": "the beginning of an implementation's name (default: all of them)",
    "--adapter FILE": "a Python file with ADAPTERS of your own (default: ours)",
    "--statement NAME...": "only this statement; may be repeated (default: all)",
    "--again": "ask again what is answered already",
    "--data DIR": "where rows go (default: reports/judge/data; of single statements nowhere)",
}


# --------------------------------------------------------------------------------------
# the commands


def _report(args) -> int | None:
    """Measure what is missing and write reports/<profile>/."""
    if lacking := [name for name in REPORT_PACKAGES if find_spec(name) is None]:
        raise UsageError(
            f"it needs {', '.join(lacking)}, not installed here; pip install -e './lib[report]'"
        )
    try:
        # matplotlib reads its settings as figures import it, before minutes of measuring.
        from ringlab.report import driver
        from ringlab.report import figures as _  # noqa: F401
    except (ValueError, OSError) as error:
        return _refuse(f"matplotlib does not start with its settings: {error}")

    reports = args.reports or reports_folder()

    def told(*lines: str) -> str:
        return "\n".join(filter(None, [*lines, changes(reports)]))

    try:
        written = driver.run(
            args.profile,
            reports=reports,
            **_options(args, "strict", "force", "remeasure"),
        )
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(told(*stop.args or [STOPPED])) from None
    state = f"{len(written)} files written" if written else "up to date"
    print(told(f"{state}: start at {os.path.relpath(reports / 'index.html')}"))


def _compare(args) -> None:
    """Set two runs side by side: ratios with intervals."""
    from .report import compare

    sides = (compare.read_side(name, args.reports) for name in (args.A, args.B))
    parts = compare.sections(compare.compare(*sides), args.all)
    print(compare.text(parts, args.markdown))


def _check(args) -> int:
    """Exit 1 where rows became significantly slower or larger."""
    tolerance = args.tolerance
    if not 0 <= tolerance < math.inf:
        raise UsageError(f"'{tolerance:g}' is no part: 0.10 is 10 %")
    from .report import compare

    first = args.against
    if first == "auto":
        first = hardware.match(hardware.detect())
    sides = (compare.read_side(name, args.reports) for name in (first, args.BASE))
    comparison, failures = compare.check(*sides, tolerance)
    parts = [compare.worse(comparison, failures, tolerance)]
    if args.all:
        parts += compare.sections(comparison, everything=True)
    print(compare.text(parts, args.markdown))
    return FAILED if failures else OK


def _profiles(args) -> None:
    """List the hardware profiles and which of them run here."""
    machine = hardware.detect()
    lines = [("profile", "device", "sm", "memory", "dtype", "runnable here")]
    for name, profile in hardware.profiles().items():
        runnable, why = profile.runnable(machine)
        here = profile.on(machine)
        memory = format_bytes(here.memory_bytes) if here.memory_bytes else "-"
        lines.append(
            (
                name + " *" * (name == hardware.match(machine)),
                here.title,
                hardware.sm(here.capability),
                memory,
                dtype_name(here.default_dtype()),
                f"{'yes' if runnable else 'no'}: {why}",
            )
        )
    print(*columns(lines), "", "* matches this machine (GPU=auto)", sep="\n")


def _measure(args) -> None:
    """Measure what is missing, without a report (torch alone)."""
    check_choice("suite", args.suite, ("all", *suites.SUITES))
    machine = hardware.detect()
    folders = (reports_folder(), args.data or "")
    target = run_target(args.profile, machine, *folders, strict=True)
    suite = suites.SUITES.get(args.suite, suites.every_group)
    groups = suite(target.profile)
    if not groups:
        raise ValueError(
            f"suite {args.suite!r} has no points for {target.profile.name!r} here: kernels is for GPUs, links for CPUs"
        )
    known = [g.name for g in groups]
    for name in args.group or ():
        if name not in known:
            raise ValueError(f"unknown group {name!r}; known here: {'; '.join(known)}")
    groups = [g for g in groups if not args.group or g.name in args.group]
    measure.run(
        groups,
        target.data,
        profile=target.profile,
        progress=True,
        **_options(args, "force", "minutes"),
    )
    print(os.path.relpath(target.data))


def _resolve(args) -> None:
    """Replace the profile and the pattern of the options by what they name ("auto" stays)
    or raise ValueError.
    """
    args.profile = hardware.resolve(args.profile).on(hardware.detect())
    name = args.pattern
    given = {x: v for x in DEFAULTS if (v := getattr(args, x)) is not None}
    if name != "auto" and not name.lstrip().startswith("{"):
        args.pattern = named(name, args.seq_len, args.heads, **given)
        return
    if given:
        option = next(iter(given)).replace("_", "-")
        raise ValueError(f"--{option} needs a --pattern by name: {', '.join(NAMED)}")
    if name == "auto":
        return
    try:
        args.pattern = from_dict(json.loads(name))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"--pattern {name} is no pattern's to_dict(): {error}"
        ) from None


def _options(args, *names: str) -> dict:
    """Return options by name, as keyword arguments of another function."""
    return {name: getattr(args, name) for name in names}


def _estimate(args) -> None:
    """What a call would need; with --memory, or without --seq-len, the longest sequence
    that fits.
    """
    _resolve(args)
    args.dtype = args.dtype or args.profile.default_dtype()
    if args.ranks == 1 and (args.scheme, args.layout) != ("auto", "contiguous"):
        raise ValueError("--scheme and --layout are for several ranks: give --ranks N")
    fields = "pattern", "profile", "scheme", "layout", "backend", "dtype"
    call = _options(args, *SHAPE, *fields)
    estimated = most = None
    if args.seq_len is not None:
        estimated = estimate(seq_len=args.seq_len, **call)
    budget = args.profile.memory_bytes if args.memory is None else args.memory
    if estimated is None or args.memory is not None:  # it takes many runs without data
        if budget is None:
            raise ValueError(
                f"profile {args.profile.name!r} states no memory; give --memory"
            )
        try:
            most = longest(memory_bytes=budget, **call)
        except ValueError:  # an estimate says itself that it does not fit
            if estimated is None or budget < 1:
                raise
    about = vars(args) | {"e": estimated, "budget": budget, "most": most}
    print(*templates.lines_of("estimate", **about), sep="\n")


def _advise(args) -> None:
    """Say what to run for a length, on what evidence, with code (torch alone)."""
    _resolve(args)
    if args.seq_len is None:
        raise ValueError("advise needs --seq-len")
    fields = "profile", "seq_len", "pattern", "layers", "dtype", "need", "seconds"
    advice = advised(memory_bytes=args.memory, **_options(args, *SHAPE, *fields))
    print(getattr(advice, args.show)() if args.show else advice)


def _judge(args) -> int:
    """Ask public implementations of attention whether they are right (in a checkout)."""
    sys.path.insert(0, str(home() / "notebooks" / "judge"))
    ask = import_module("judge").ask
    return ask(args.NAME, args.adapter, args.statement, args.again, args.data)


# What a command raises where an impossible call is asked for.
CALL = ValueError, TypeError, NotImplementedError, torch.OutOfMemoryError
REFUSES = {_measure: (ValueError,), _estimate: CALL, _advise: CALL}
