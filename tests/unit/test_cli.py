"""The command line: exit codes, one line for what a user can cause, and torch alone
where that is promised.
"""

import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from ringlab import block_patterns, cli, hardware, measure
from ringlab.hardware.profiles import load
from ringlab.measure import suites
from ringlab.presets import NAMED, named
from ringlab.report import driver

LIB = Path(cli.__file__).resolve().parents[1]
PASCAL = hardware.Gpu("NVIDIA GeForce GTX 1080", (6, 1), 8_510_000_000, driver="580.65")
UNDRIVABLE = hardware.Machine(
    gpus=(PASCAL,),
    torch="2.13.0",
    torch_cuda="13.0",
    arch_list=("sm_75", "sm_80", "sm_90"),
)


def said(capsys, *argv):
    try:
        code = cli.main(argv)
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    "command, rows", [("report", "--reports"), ("measure", "--data")]
)
def test_profiles_that_cannot_be_measured_here(
    capsys, monkeypatch, tmp_path, command, rows
):
    def refused(*argv):
        code, out, err = said(capsys, command, rows, str(tmp_path), "--profile", *argv)
        assert (code, out, list(tmp_path.iterdir())) == (
            2,
            "",
            [],
        ) and "Traceback" not in err
        return err

    err = refused("gtx180")
    assert "unknown profile 'gtx180'" in err and all(
        name in err for name in hardware.profiles()
    )
    monkeypatch.setattr(
        hardware, "detect", lambda probe=None: hardware.Machine(cpu_model="a CPU")
    )
    err = refused("gtx1080", *["--strict"] * (command == "report"))
    assert err.count("\n") == 1 and "no GPU here" in err
    monkeypatch.setattr(hardware, "detect", lambda probe=None: UNDRIVABLE)
    err = refused("auto")
    assert (
        len(err.splitlines()) < 12
        and "pip install torch==2.13.0+cu126 --extra-index-url https://download" in err
    )


def test_profiles_lists_each_with_its_policy_and_why_not(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(
        hardware,
        "detect",
        lambda probe=None: hardware.Machine(cpu_model="a CPU", cores=2),
    )
    code, out, err = said(capsys, "profiles")
    lines = {line.split()[0]: line for line in out.splitlines()[1:] if line}
    assert code == 0 and set(hardware.profiles()) <= set(lines)
    assert (
        "sm_61" in lines["gtx1080"]
        and "float32" in lines["gtx1080"]
        and "8 GiB" in lines["gtx1080"]
    )
    assert "no: needs NVIDIA GeForce GTX 1080" in lines["gtx1080"]
    (tmp_path / "cpu.toml").write_text("name = cpu")
    monkeypatch.setattr(
        hardware, "profiles", lambda: {"cpu": load(tmp_path / "cpu.toml")}
    )
    code, out, err = said(capsys, "profiles")
    assert (code, out, err.count("\n")) == (
        2,
        "",
        1,
    ) and "cpu.toml is no profile: Invalid value" in err


CALL = "--profile gtx1080 --seq-len"
NUMBERS = "seq-len", "batch", "heads", "kv-heads", "head-dim", "ranks"


@pytest.mark.parametrize(
    "argv, message",
    [
        (
            "",
            "the following arguments are required: command; see python -m ringlab --help",
        ),
        ("reprot", "invalid choice: 'reprot'"),
        ("profiles x", "unrecognized arguments: x"),
        (
            "measure --minutes soon",
            "argument --minutes: could not convert string to float: 'soon'",
        ),
        (
            "estimate --dilation-rates '1;2'",
            "argument --dilation-rates: each must be a whole number, as 131072, 128K, ",
        ),
        (
            "estimate --dtype nn",
            "argument --dtype: unknown dtype 'nn'; known: float64, float32, ",
        ),
        ("estimate --foo 5", "--foo 5; see python -m ringlab estimate --help"),
        ("advise --nothing=x", "--nothing=x; see python -m ringlab advise --help"),
        ("estimate --memory 80", "memory is a number with a unit, as 80GiB"),
        ("advise --seq-len 1.3X", "--seq-len: it must be a whole number, as "),
        (
            "report --profile",
            "argument --profile: expected one argument; see python -m ringlab report --help",
        ),
        (f"measure --data {__file__}", "test_cli.py is a file, not a folder"),
        ("measure --data ' '", "a folder needs a name"),
        ("measure --group=--", "argument --group: expected one argument"),
        ("check cpu --tolerance=--", "argument --tolerance: expected one argument"),
        (
            f"advise --seq-len 1 --memory {'9' * 5000}",
            "memory is a number with a unit, as 80GiB or 80GB, got '9999",
        ),
        ("estimate --pattern=--", "argument --pattern: expected one argument"),
        *(
            (f"{command} {name}", "--")
            for command in ("measure --data", "check cpu --reports")
            for name in ("a\0b", "x" * 5000)
        ),
        (f"estimate {CALL} 4K --scheme ring", "--ranks N"),
        # Numbers that no float holds.
        *(
            (f"{command} {CALL} 64 --{name} {'9' * 300}", "")
            for command in ("estimate", "advise")
            for name in NUMBERS
        ),
    ],
)
def test_a_wrong_call_is_one_line(capsys, argv, message):
    code, out, err = said(capsys, *shlex.split(argv))
    assert (code, out, err.count("\n")) == (2, "", 1) and message in err
    assert err.startswith("ringlab: ") and len(err.replace("x", "")) < 500


@pytest.mark.parametrize(
    "command", ["report", "measure", "compare", "check", "estimate", "advise"]
)
def test_help_shows_the_default_of_every_option(capsys, command):
    _, out, _ = said(capsys, command, "--help")
    options = " ".join(out.split("options:")[1].split()).split(" --")[2:]
    assert options and all("(default: " in option for option in options), options


def test_measure_takes_suites_groups_and_minutes(capsys, monkeypatch, tmp_path):
    asked = []

    def run(groups, data, **how):
        asked.append(([g.name for g in groups], data, how["minutes"]))

    monkeypatch.setattr(measure, "run", run)
    monkeypatch.setattr(
        suites.peers, "installed", lambda name: None
    )  # each that is there adds a group
    how = f"measure --profile cpu --data {tmp_path}"
    chosen = "--group lengths --group implementations"
    for more in ("", chosen, "--suite landscape --minutes 8.5"):
        assert said(capsys, *f"{how} {more}".split())[0] == 0
    every = sum(
        len(make(hardware.get_profile("cpu"))) for make in suites.SUITES.values()
    )
    assert len(asked[0][0]) == every > 20 and asked[1] == (
        ["implementations", "lengths"],
        tmp_path,
        None,
    )
    assert len(asked[2][0]) == 5 and asked[2][2] == 8.5
    for more, message in (
        (
            "--group length",
            "unknown group 'length'; known here: implementations; lengths; ",
        ),
        (
            "--suite kernels",
            "suite 'kernels' has no points for 'cpu' here: kernels is for GPUs",
        ),
        (
            "--suite nothing",
            "unknown suite 'nothing'; known: all, kernels, optimization",
        ),
    ):
        code, _, err = said(capsys, *f"{how} {more}".split())
        assert code == 2 and message in err and err.count("\n") == 1
    assert len(asked) == 3


def test_report_packages_are_those_that_the_extra_installs():
    project = tomllib.loads((LIB / "pyproject.toml").read_text())["project"]
    assert list(cli.REPORT_PACKAGES) == project["optional-dependencies"]["report"]


def test_a_report_says_what_it_wrote_and_how_to_keep_or_drop_it(
    capsys, monkeypatch, tmp_path
):
    how = "report", "--reports", str(tmp_path)
    monkeypatch.setattr(cli, "changes", lambda folder: f"git checkout {folder.name}")
    for written, text in (([tmp_path], "1 files written"), ([], "up to date")):
        monkeypatch.setattr(driver, "run", lambda *_, w=written, **__: w)
        code, out, err = said(capsys, *how)
        assert (code, err) == (0, "") and text in out
        assert out.splitlines()[1:] == [f"git checkout {tmp_path.name}"]


@pytest.mark.parametrize(
    "command, rows", [("report", "--reports"), ("measure", "--data")]
)
@pytest.mark.parametrize("error, code", [(measure.Busy, 1), (measure.Interrupted, 130)])
def test_a_folder_in_use_and_an_interrupted_run_are_one_line(
    capsys, monkeypatch, tmp_path, command, rows, error, code
):
    def stop(*_, **__):
        raise error("3 points are kept")

    monkeypatch.setattr(measure, "run", stop)
    monkeypatch.setattr(cli, "changes", lambda folder: "git checkout")
    found = said(capsys, command, "--profile", "cpu", rows, str(tmp_path))
    assert found[:2] == (code, "") and "ringlab: 3 points are kept" in found[2]
    assert ("git checkout" in found[2]) == (code == 130 and command == "report")


def shown(capsys, *argv) -> str:
    code, out, err = said(capsys, *argv)
    assert (code, err) == (0, "")
    return out


def test_lengths_and_dtypes_are_read_as_people_write_them(capsys):
    def asked(how: str):
        return shown(capsys, *shlex.split(f"estimate {CALL} {how}"))

    plain = asked("131072 --dtype float32")
    for length in ("128K", "131_072", "128k", "0.125M", "131.072e3"):
        assert asked(f"{length} --dtype fp32") == plain
    assert " 1,000,000 tokens" in asked("1e6 --dtype bf16")
    given = "--segment-lengths '2K, 4K' --dilation-rates '1 2'"
    assert asked(f"128K {given}") == plain
    # The options of a pattern are the arguments of its function.
    options = "--before 1 --count 2 --random 3 --block-size 64"
    pattern = block_patterns.bigbird(1, 2, 3, block_size=64)
    out = asked(f"4K --pattern bigbird {options}")
    assert out.startswith(f"{pattern}, float32")


@pytest.mark.parametrize("name", NAMED)
def test_estimate_and_advise_share_the_names_of_patterns(capsys, name):
    shape = *CALL.split(), "4K", "--pattern", name
    assert shown(capsys, "estimate", *shape).startswith(f"{named(name, 4096)}, float32")
    out = shown(capsys, "advise", *shape, "--dtype", "fp16")
    assert str(named(name, 4096)) in out
    assert "float16" in out and "forward\n" in out


RECORDED = [f"tests/report/recorded/{name}.jsonl" for name in ("later", "earlier")]
ALL = (
    "advise --profile gtx1080 --seq-len 4096 --memory 8GiB",
    "estimate --profile gtx1080 --seq-len 4096",
    "profiles",
    " ".join(["compare", *RECORDED]),
    "check {1} --against {0}".format(*RECORDED),
)
RUN = """import sys
from ringlab.cli import main
codes = {main(x.split()) for x in sys.argv[2:]}
print(codes, file=open(sys.argv[1], "w"))
"""
LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    "streams, changed",
    [
        (">&-", {}),
        ("2>&-", {}),
        ("<&- >&- 2>&-", {}),
        ("", {"PYTHONIOENCODING": "ascii"}),
        ("", LOCALE),
        ("", {"HOME": "/proc", "MPLCONFIGDIR": "/proc/x", "TMPDIR": "/proc"}),
    ],
    ids=str,
)
def test_every_command_answers_whatever_surrounds_it(tmp_path, streams, changed):
    env = os.environ | {"PYTHONPATH": str(LIB)} | changed
    said = tmp_path / "said"
    command = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-c", RUN]
    done = subprocess.run(
        [*command, said, *ALL],
        env=env,
        cwd=LIB.parent,
        capture_output=True,
        timeout=300,
    )
    assert said.read_text() == "{0}\n" and not done.stderr, done
    out = done.stdout.decode("utf-8" if "HOME" in changed or not changed else "ascii")
    assert bool(out) == (">&-" not in streams.split()) and "?" not in out
    assert not out or (">= " if out.isascii() else "≥ ") in out


@pytest.mark.parametrize("name", ["MPLBACKEND", "MATPLOTLIBRC"])
def test_settings_of_matplotlib_that_do_not_work_are_one_line(tmp_path, name):
    (tmp_path / "matplotlibrc").write_bytes(b"\xff")
    env = os.environ | {"PYTHONPATH": str(LIB), name: str(tmp_path)}
    command = [sys.executable, "-m", "ringlab", "report", "--reports", str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("ringlab: matplotlib ")
