"""The project itself: dependencies agree, imports go down, the engine needs torch
alone, the tree is tidy.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, distributions
from itertools import product
from pathlib import Path

import durations
import pytest
from ringlab.hardware.profiles import TORCH
from ringlab.measure.provenance import code_hash
from size import size_of
from started import make

ROOT = Path(__file__).resolve().parents[2]
LIB = ROOT / "lib"
PACKAGE = LIB / "ringlab"
TESTS = ROOT / "tests"
MAKEFILE = (ROOT / "Makefile").read_text()
# Limits. A commit may lower one; it may raise one only to a figure that an issue names.
MOST_TOKENS = 225_410
MOST_IN_NOTEBOOKS = 37_590  # tokens in cells and modules, without the judge's
MOST_IN_JUDGE = 14_000  # tokens of notebooks/judge/*.py
MOST_IN_TESTS = 258_870  # tokens
MOST_TOKENS_A_LINE = 8.9
MOST_S = 300 - 60  # of `make test` on two cores, without the start of its processes
FEWEST_TESTS = 1_500  # of `make test`

# --------------------------------------------------------------------------------------
# dependencies: pyproject says what, constraints says which, environment.yml points to both


def project() -> dict:
    return tomllib.loads((LIB / "pyproject.toml").read_text())["project"]


def name_of(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower().replace("_", "-")


def pins(path: Path = LIB / "constraints.txt") -> dict[str, str]:
    lines = [
        line
        for line in path.read_text().splitlines()
        if line and not line.startswith("#")
    ]
    parsed = [
        re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][0-9A-Za-z.]*)", line) for line in lines
    ]
    bad = [line for line, match in zip(lines, parsed) if match is None]
    assert not bad, f"not an exact pin without local label or address: {bad}"
    return {name_of(match[1]): match[2] for match in parsed}


def test_every_requirement_is_named_once_and_pinned_in_constraints():
    assert [name_of(r) for r in project()["dependencies"]] == ["torch"]
    required = [
        r for extra in project()["optional-dependencies"].values() for r in extra
    ] + ["torch"]
    for requirement in required:
        assert name_of(requirement) in pins(), (
            f"{requirement} has no pin in constraints.txt"
        )
        assert "==" not in requirement.split(";")[0], (
            f"{requirement}: versions are pinned in constraints.txt"
        )
    names = [name_of(r) for r in required]
    assert len(set(names)) == len(names) and pins()["torch"] == TORCH == "2.13.0"
    cuda = [name for name in pins() if name.startswith(("nvidia", "cuda"))]
    assert not cuda, f"torch pins its own CUDA packages: {cuda}"


def test_environment_names_python_pip_and_the_library():
    yaml = pytest.importorskip("yaml")
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, section = environment["dependencies"]
    assert (
        re.fullmatch(r"python=3\.\d+", python)
        and pip == "pip"
        and list(section) == ["pip"]
    )
    constraints, library = section["pip"]
    assert constraints == "-c lib/constraints.txt"
    extras = re.fullmatch(r"-e \./lib\[([a-z,]+)\]", library)[1].split(",")
    assert {*extras, "peers"} == {*project()["optional-dependencies"]}, (
        "one environment for all but other packages"
    )
    assert f"./lib[{','.join(extras)}]" in (LIB / "setup.sh").read_text(), (
        "conda and make install the same"
    )


def test_installed_versions_are_the_pinned_ones_where_set_up_made_the_environment():
    """A .venv made by `make` holds exactly the pins (any local label, as +cpu, is
    fine), but for those that gave way to a chosen torch.
    """
    if Path(sys.prefix).resolve() != ROOT / ".venv":
        pytest.skip("not running in the .venv that make builds")
    # The path alone: the compiler's setuptools adds packages of its own to sys.path.
    have = {
        name_of(d.name): d.version.split("+")[0]
        for d in distributions(path=[sysconfig.get_path("purelib")])
    }
    free = (
        "ringlab",
        "pip",
        "nvidia",
        "cuda",
        "torchscale",
    )  # torchscale's commit is in setup.sh
    own = pins(Path(sys.prefix) / "constraints.txt")
    free += tuple({*pins()} - {*own})
    wrong = {
        n: v for n, v in have.items() if own.get(n) != v and not n.startswith(free)
    }
    assert not wrong, f"installed, but not as pinned: {wrong}"


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_what_each_python_installs_is_pinned(python):
    """The requirements of what is installed here, as they read on another Python."""
    requirements = pytest.importorskip("packaging.requirements")
    machine = {"python_version": python, "python_full_version": f"{python}.0"}
    machine |= {"sys_platform": "linux", "platform_machine": "x86_64"}
    extras = set(project()["optional-dependencies"]) - {"peers"}
    todo, done = [("ringlab", extras)], set()
    while todo:
        name, extras = todo.pop()
        try:
            lines = distribution(name).requires or []
        except PackageNotFoundError:  # installed on that other Python alone
            lines = []
        for line, extra in product(lines, ("", *extras)):
            one = requirements.Requirement(line)
            if one.marker is None or one.marker.evaluate(machine | {"extra": extra}):
                needed = name_of(one.name), frozenset(one.extras)
                todo += [needed] if needed not in done else []
                done.add(needed)
    names = {name for name, _ in done if not name.startswith(("nvidia", "cuda"))}
    assert len(names) > 100 and names <= {*pins(), "ringlab"}, names - {*pins()}


def test_pins_allow_the_oldest_python_that_the_library_allows():
    """Distributions stay at an early patch release (Debian 12: 3.11.2); a pin that
    refuses it breaks set-up there.
    """
    specifiers = pytest.importorskip("packaging.specifiers")
    oldest = re.fullmatch(r">=(3\.\d+)", project()["requires-python"])[1] + ".0"
    for found in distributions():
        if pins().get(name_of(found.name)) == found.version:
            wants = found.metadata.get("Requires-Python", "")
            assert specifiers.SpecifierSet(wants).contains(oldest), (
                f"{found.name} {found.version} wants Python {wants}"
            )


# --------------------------------------------------------------------------------------
# set-up: run lib/setup.sh with a stand-in for Python that writes down what it is asked

STAND_IN = """#!/bin/sh
case "$*" in
  *"%d.%d.%d"*) echo {version} ;;
  *version_info*) exit {old} ;;
  *ensurepip*) exit {no_venv} ;;
  "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *torchscale*) exit 1 ;;
  *"import ringlab"*) exit {broken} ;;
  "-m pip"*) echo "$*" >>calls; env | grep ^PIP_ | sort >variables
    echo "WARNING: noise"; echo "ERROR: the disk is full"; exit {pip_fails} ;;
esac
"""


def set_up(
    folder: Path,
    capability=None,
    index="",
    version="3.12.1",
    old=0,
    no_venv=0,
    pip_fails=0,
    broken=0,
    **variables,
):
    (folder / "lib").mkdir(exist_ok=True)
    for name in ("setup.sh", "constraints.txt"):
        shutil.copy(LIB / name, folder / "lib" / name)
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    python, smi = tools / "python", tools / "nvidia-smi"
    python.write_text(
        STAND_IN.format(
            version=version,
            old=old,
            no_venv=no_venv,
            pip_fails=pip_fails,
            broken=broken,
        )
    )
    smi.write_text(
        f"#!/bin/sh\necho {capability}\n" if capability else "#!/bin/sh\nexit 9\n"
    )
    for tool in (python, smi):
        tool.chmod(0o755)
    env = {
        "PATH": f"{tools}:/usr/bin:/bin",
        "PYTHON": str(python),
        "TORCH_INDEX": index,
        **variables,
    }
    done = subprocess.run(
        ["sh", "lib/setup.sh", ".venv/.ready-x"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )
    calls = (folder / "calls").read_text() if (folder / "calls").exists() else ""
    return done, calls, (folder / ".venv" / ".ready-x").exists()


@pytest.mark.parametrize(
    "capability, old", [("6.1", 1), ("7.0", 1), ("7.5", 0), ("10.0", 0), (None, 0)]
)
def test_old_gpus_get_the_torch_build_that_drives_them_and_a_chosen_index_wins(
    tmp_path, capability, old
):
    done, calls, ready = set_up(tmp_path, capability)
    assert done.returncode == 0 and ready, done.stderr
    assert ("torch==2.13.0+cu126" in calls and "whl/cu126" in calls) == old
    assert done.stdout.count("\n") == (2 if old else 1)
    assert "-e ./lib[report,lab,gpu,transformers,test]" in calls
    calls = set_up(tmp_path, capability, index="cpu")[1][len(calls) :]
    assert "torch==2.13.0+cpu" in calls and "cu126" not in calls


def test_other_packages_are_installed_on_request_alone_and_one_that_cannot_be_is_named(
    tmp_path,
):
    done, calls, ready = set_up(tmp_path)
    assert ready and "peers" not in calls and "--no-deps" not in calls
    done, calls, ready = set_up(tmp_path, PEERS="peers")
    assert done.returncode == 0 and ready and "-e ./lib[peers]" in calls, done.stderr
    assert (
        "--no-deps dilated-attention-pytorch" in calls
        and "dilated-attention-pytorch" in pins()
    )
    assert "torchscale cannot be installed from GitHub" in done.stdout.splitlines()[-1]
    assert (tmp_path / ".venv" / ".ready-x").read_text() == " peers\n"


@pytest.mark.parametrize(
    "trouble, said",
    [
        (dict(version="3.9.2", old=1), "Python 3.11 or newer is needed"),
        (dict(no_venv=1), "apt install python3-venv"),
    ],
)
def test_unfit_python_is_refused_in_one_line(tmp_path, trouble, said):
    done, calls, ready = set_up(tmp_path, **trouble)
    assert done.returncode != 0 and not ready and not calls
    assert said in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""


def test_failed_set_up_shows_the_log_and_leaves_what_is_there_in_use(tmp_path):
    done, _, ready = set_up(tmp_path, pip_fails=1)
    assert done.returncode != 0 and not ready
    assert "ERROR: the disk is full" in done.stderr and "WARNING" not in done.stderr
    done, _, ready = set_up(tmp_path, index="cpu")  # and the next try starts again
    assert done.returncode == 0 and ready
    done, _, ready = set_up(tmp_path, index="cpuu", pip_fails=1)
    assert done.returncode != 0 and "torch==2.13.0+cpuu is not to be had" in done.stderr
    assert ready and (tmp_path / ".venv" / ".ready-x").read_text() == "cpu\n"


def test_set_up_is_done_only_when_what_it_installed_can_be_imported(tmp_path):
    done, calls, ready = set_up(tmp_path, broken=1)
    assert done.returncode != 0 and calls and not ready
    assert "cannot be imported" in done.stderr.splitlines()[-1]


def test_pip_is_told_where_packages_come_from_and_nothing_else(tmp_path):
    kept = "CACHE_DIR CERT CONFIG_FILE EXTRA_INDEX_URL FIND_LINKS INDEX_URL PROXY"
    gone = "NO_DEPS PREFIX PYTHON ROOT TARGET USER"
    names = [f"PIP_{name}" for name in (kept + " " + gone).split()]
    done, _, ready = set_up(tmp_path, **dict.fromkeys(names, "/x"))
    assert done.returncode == 0 and ready, done.stderr
    seen = (tmp_path / "variables").read_text()
    assert seen == "".join(f"PIP_{name}=/x\n" for name in kept.split())


def test_a_chosen_torch_lets_the_pins_give_way_that_hold_for_one_torch(tmp_path):
    free = {"torch", "triton", "xformers", "setuptools"}
    for torch, asked in (("newest", "torch"), ("2.11.0", "torch==2.11.0"), ("", "")):
        done, calls, ready = set_up(tmp_path, TORCH=torch)
        assert done.returncode == 0 and ready, done.stderr
        own = pins(tmp_path / ".venv" / "constraints.txt")
        assert {*pins()} - {*own} == (free if torch else set())
        assert not asked or f"--upgrade {asked} " in calls
        assert (
            tmp_path / ".venv" / ".ready-x"
        ).read_text() == f"{torch and ' '}{torch}\n"
    done, *_ = set_up(tmp_path, TORCH="newest", index="cpu")
    assert done.returncode != 0 and done.stderr.count("\n") == 1


def test_make_help_lists_every_target():
    listed = make("help").stdout
    targets = re.search(r"^\.PHONY: (.* test test-all .*)$", MAKEFILE, re.M)[1].split()
    assert [x for x in targets if not re.search(rf"^  {x} ", listed, re.M)] == []


@pytest.mark.parametrize(
    "target, missing, extra",
    [
        ("report", "torch", "[report]"),
        (
            "report PEERS=1",
            "torch, local_attention, ring_attention_pytorch",
            "[report,peers]",
        ),
        ("profiles", "torch", ""),
        ("compare A=cpu B=cpu", "torch", "[report]"),
        ("lab", "torch, pandas, jupyterlab", "[report,lab]"),
        ("test", "torch, papermill, nbconvert, pandas, pytest, xdist", "[report,test]"),
        ("lint", "ruff, basedpyright, pyrefly", "[test]"),
    ],
)
def test_an_interpreter_that_lacks_something_is_one_line(
    tmp_path, target, missing, extra
):
    bare = tmp_path / "python"
    bare.write_text(
        f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n'
    )  # this interpreter without its packages
    bare.chmod(0o755)
    done = make(*target.split(), "NOENV=1", f"PYTHON={bare}")
    line, makes_own = done.stderr.splitlines()
    assert (
        done.returncode == 2 and done.stdout == "" and makes_own.startswith("make: ***")
    )
    assert line.startswith(
        f"ringlab: '{bare}' has no {missing}; run: {bare} -m pip install"
    )
    assert f"-e './lib{extra}'" in line


def test_an_interpreter_that_is_none_or_too_old_is_one_line(tmp_path):
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho is Python 3.9.2, and 3.11 or newer is needed\n")
    old.chmod(0o755)
    for python, said in (
        ("nowhere/python", "is not a working Python; name one"),
        (old, "is Python 3.9.2, and 3.11"),
    ):
        done = make("env", "NOENV=1", f"PYTHON={python}")
        assert (
            done.returncode == 2
            and f"ringlab: '{python}' {said}" in done.stderr
            and done.stderr.count("\n") == 2
        )


def test_gpu_names_the_profile_and_nothing_else_does():
    for given, profile in (
        ((), "auto"),
        (("GPU=",), "auto"),
        (("GPU= h100 ",), "h100"),
        (("GPU=a b",), "a b"),
    ):
        shown = make("-n", "report", "QUALITY=1", "NOENV=1", *given).stdout
        assert shown.count(f'--profile "{profile}"') == 2, shown
    for given in ("gpu=h100", "PROFILE=h100"):
        done = make("-n", "report", given)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert "a profile is chosen by GPU=name" in done.stderr


def test_make_pdf_says_in_one_line_what_to_do_instead():
    done = make("pdf", "GPU=cpu")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "make pdf was removed; open a page of reports/ in a browser" in done.stderr


# --------------------------------------------------------------------------------------
# layers: a module imports its own layer and those below

LAYERS = [
    {
        "patterns",
        "block_patterns",
        "blocks",
        "cost",
        "reference",
        "cache",
        "memory",
        "tracking",
        "checks",
        "hardware",
        "native",
        "selected",
        "presets",
        "torch_private",
    },
    {"tiles"},
    {"kernels"},
    {"engine"},
    {"attention", "call", "ring", "kv_cache"},
    {
        "estimate",
        "meta_run",
        "advise",
        "adaptive",
        "selection",
        "baselines",
        "compat",
        "nn",
        "integrations",
    },
    {"measure"},
    {"report", "cli", "__main__"},
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
PROBED = {
    "xformers",
    "flash_attn",
    "flash_attn_interface",
    "triton",
}  # in kernels/ and hardware/ only
TORCH_ALONE = set().union(*LAYERS[:7]) - {"integrations"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def top_name(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path):
    """(dotted name, line) of every import in a file, relative ones resolved."""
    here = ("ringlab", *path.relative_to(PACKAGE).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else ()
            dotted = ".".join([*base, *([node.module] if node.module else [])])
            names = (
                [f"{dotted}.{alias.name}" for alias in node.names]
                if dotted == "ringlab"
                else [dotted]
            )
        else:
            continue
        for name in names:
            yield name, node.lineno


def test_imports_go_down_only_and_the_engine_and_measuring_import_torch_and_the_standard_library_alone():
    wrong = []
    for path in modules():
        module = top_name(path)
        here = LAYER.get(module)
        for name, line in imports(path):
            top, *rest = name.split(".")
            if top == "ringlab":
                fits = here is None or not rest or LAYER.get(rest[0], -1) <= here
            else:
                probe = top in PROBED and module in ("kernels", "hardware")
                alone = module in TORCH_ALONE | {"__init__"}
                fits = (
                    not alone
                    or top == "torch"
                    or top in sys.stdlib_module_names
                    or probe
                )
            if not fits:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)
    assert {top_name(path) for path in modules()} <= {*LAYER, "__init__"}


def test_all_but_reports_need_torch_alone(tmp_path):
    """With every other package blocked, all that measures is imported, and points are
    measured and listed.
    """
    absent = [
        *PROBED,
        *"numpy pandas matplotlib scipy seaborn papermill nbconvert nbformat nbclient yaml".split(),
    ]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({absent}))
import {", ".join(sorted(f"ringlab.{name}" for name in TORCH_ALONE))}
from ringlab import cli, measure
from ringlab.measure import suites
measure.run = lambda groups, data, **k: print(len(groups), "groups for", k["profile"].name)
assert cli.main(["measure", "--profile", "cpu", "--data", {str(tmp_path)!r}]) == 0
assert cli.main(["profiles"]) == 0
assert cli.main(["advise", "--profile", "gtx1080", "--seq-len", "4096", "--passes", "fwd"]) == 0
assert cli.main(["report", "--profile", "cpu"]) == 2
assert cli.main(["compare", "nowhere", "cpu"]) == 2
"""
    env = {"PYTHONPATH": str(LIB)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    assert "groups for cpu" in done.stdout
    assert (
        "matplotlib, nbclient, nbconvert, " in done.stderr
        and "; pip install -e './lib[report]'" in done.stderr
    )
    assert done.stderr.count("ringlab: ") == 2 and "Traceback" not in done.stderr


# --------------------------------------------------------------------------------------
# the tree


def tracked() -> list[str]:
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


def test_size_is_counted_alike_by_every_python():
    text = '"""Doc."""\n# Comment.\nx = f"{a + b} and {c!r}" + "d"\n'
    assert size_of(text) == (5, 1)


def test_the_library_is_no_larger_and_no_denser():
    """Size in tokens, not in lines: the formatter decides the layout."""
    sizes = [size_of(path.read_text(encoding="utf-8")) for path in modules()]
    tokens, lines = map(sum, zip(*sizes))
    assert tokens <= MOST_TOKENS, f"{tokens:,} tokens"
    assert tokens / lines <= MOST_TOKENS_A_LINE, f"{tokens / lines:.2f} a code line"


def test_the_tests_are_no_larger():
    sources = [path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")]
    tokens = sum(size_of(source)[0] for source in sources)
    assert tokens <= MOST_IN_TESTS, f"{tokens:,} tokens"


def test_what_make_test_runs_is_short_and_enough(request):
    """By the stored durations. In a run of some files, their number is not judged."""
    known, items = durations.stored(), request.session.items
    short = [item for item in items if not item.get_closest_marker("slow")]
    total = sum(durations.seconds(known, item.nodeid) for item in short)
    assert total <= 2 * MOST_S, f"{total:.0f} s"
    files = {item.path for item in items} | {Path(__file__)}
    if files >= {*TESTS.glob("*/test_*.py")}:
        assert len(short) >= FEWEST_TESTS


def test_top_level_holds_only_what_was_agreed():
    allowed = {
        "environment.yml",
        "Makefile",
        "README.md",
        "LICENSE",
        "lib",
        "notebooks",
        "reports",
        "tests",
    }
    allowed |= {".ci", ".gitattributes", ".gitignore", ".pytest.ini", ".ruff.toml"}
    extra = {name.split("/")[0] for name in tracked()} - allowed
    assert not extra, f"not in the agreed top level: {sorted(extra)}"


def test_readme_names_files_and_targets_that_are_there():
    text = (ROOT / "README.md").read_text()
    paths = re.findall(r"`((?:lib|tests|notebooks)/[\w./-]*)`", text)
    assert len(paths) > 3 and [p for p in paths if not (ROOT / p).exists()] == []
    targets = set(re.findall(r"`make (?:[A-Z_]+=\S+ )*([a-z-]+)", text))
    known = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
    assert {"report", "compare", "test"} <= targets <= known


def test_lib_readme_names_every_module_and_nothing_that_is_gone():
    text = (LIB / "README.md").read_text()
    tree, *flows = text.split("```")[1::2]
    named, here = set(), PACKAGE
    for line in filter(None, tree.splitlines()):
        if not (inside := line.startswith(" ")):
            here = PACKAGE / line.split()[0]
        for name in re.findall(r"\w+\.(?:py|cpp)|\w+/", line):
            named.add((here if inside else PACKAGE) / name)
    known = {path.name for path in PACKAGE.rglob("*")}
    assert {path.name for path in named} <= known
    folders = {path.parent for path in named}
    listed = {path for path in modules() if path.parent in folders}
    assert {path for path in listed if path.name != "__init__.py"} <= named

    prose = "".join(text.split("```")[::2])
    paths = re.findall(r"`((?:[\w-]+/)+[\w.-]*|\w+\.(?:py|txt))`", prose)
    gone = [p for p in paths if not ((ROOT / p).exists() or (PACKAGE / p).exists())]
    assert paths and not gone
    names = re.findall(r"`([\w.]+)`", prose)
    names += re.findall(r"^ +([A-Z]\w+\.\w+|\w+)", "".join(flows), re.M)
    sources = [*modules(), *(ROOT / "tests").rglob("*.py")]
    words = set(re.findall(r"\w+", "".join(p.read_text() for p in sources)))
    gone = {word for name in names for word in name.split(".")} - words
    assert gone <= {"toml", "ipynb"}
    assert len(text.splitlines()) <= 150


def test_readme_examples_run(tmp_path, monkeypatch):
    """As written but for the length."""
    data = tmp_path / "reports" / "cpu" / "data"
    data.mkdir(parents=True)
    (data / "summary.csv").write_text(
        "system,median\nringlab,0.1\n"
    )  # what `make report` writes
    code = "\n".join(
        re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    )
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code.replace("8192", "2048"), names)
    assert names["out"].shape == names["q"].grad.shape
    assert names["ringlab"].reference.attention and names["ringlab"].kernels.table


def test_tracked_files_hold_no_path_of_a_machine():
    private = re.compile(
        rb"(?<![\w.~-])/(?:home|root|Users|work)/[\w.]|/tmp/ipykernel_"
    )
    here = os.fsencode(str(ROOT) + "/") if len(ROOT.parts) > 2 else None
    wrong = []
    for name in tracked():
        data = (ROOT / name).read_bytes()
        if b"\0" in data[:8000] or name == "tests/unit/test_project.py":
            continue
        for number, line in enumerate(data.splitlines(), 1):
            if private.search(line) or (here and here in line):
                wrong.append(f"{name}:{number}")
    assert not wrong, f"a path of somebody's machine in {wrong[:10]}"


NOTEBOOKS = [
    *(ROOT / "notebooks").glob("*.ipynb"),
    *(ROOT / "notebooks").glob("[!.]*/*.ipynb"),
]


def test_notebooks_are_short():
    modules = {p: p.read_text() for p in (ROOT / "notebooks").rglob("*.py")}
    judge = [text for p, text in modules.items() if p.parent.name == "judge"]
    tokens = sum(size_of(text)[0] for text in judge)
    assert tokens <= MOST_IN_JUDGE, f"{tokens:,} tokens"
    sources = [text for text in modules.values() if text not in judge]
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                sources.append("".join(cell["source"]))
    tokens = sum(size_of(source)[0] for source in sources)
    assert tokens <= MOST_IN_NOTEBOOKS, f"{tokens:,} tokens"


@pytest.mark.parametrize("path", sorted(NOTEBOOKS), ids=lambda path: path.stem)
def test_notebook_is_committed_clean(path):
    notebook = json.loads(path.read_text())
    kernel = notebook["metadata"]["kernelspec"]
    assert (kernel["name"], kernel.get("language", "python")) == ("python3", "python")
    assert "papermill" not in notebook["metadata"]
    cells = notebook["cells"]
    tags = [cell["metadata"].get("tags", []) for cell in cells]
    assert sum("parameters" in t for t in tags) == 1, "exactly one parameters cell"
    assert not any("injected-parameters" in t for t in tags)
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        assert not {"papermill", "execution"} & set(cell["metadata"]), "run metadata"
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, (
                "clear the outputs before committing"
            )


def test_every_python_hashes_code_alike(tmp_path):
    """Rows that one Python measured count for the others: quotes of f-strings differ."""
    code = """print(f"{' '.join(x)} {y!r:>{width}}", f'{"a"}', "b")"""
    (tmp_path / "a.py").write_text(code)
    assert code_hash([tmp_path / "a.py"], tmp_path) == "561f21818b41"
