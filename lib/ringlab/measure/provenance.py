"""Where a row comes from: code, versions, machine and its state; and which rows count
(``KEY``). No host name, no user name, no path.
"""

import ast
import functools
import hashlib
import os
import platform
import re
import subprocess
import time
import uuid
from pathlib import Path

import torch

from .. import __version__, hardware

PACKAGE = Path(__file__).resolve().parent.parent
# What a measured call runs, by folder or module of the package, and what of these only
# starts it.
ENGINE = (
    "patterns",
    "block_patterns",
    "cache",
    "memory",
    "attention",
    "kv_cache",
    "adaptive",
    "selected",
    "selection",
    "baselines",
    "compat",
    "tiles",
    "kernels",
    "engine",
    "ring",
    "native",
    "torch_private",
)
NOT_RUN = ("ring/launch", "ring/watch")
# What decides how a call is timed and checked; in measure/ the others name the points,
# run them and keep the rows.
METHOD = (
    "cost",
    "reference",
    "tracking",
    "hardware",
    "measure/systems",
    "measure/cache_systems",
    "measure/model_systems",
    "measure/selection_systems",
    "measure/peers",
    "measure/links",
    "measure/workers",
    "measure/timing",
    "measure/stats",
)
SALT = "ringlab measurement"  # keeps the id of a machine from being looked up elsewhere
# Rows count as done only where all of these agree.
KEY = (
    "engine",
    "method",
    "torch",
    "device",
    "device_name",
    "machine",
    "threads",
)


class _Code(ast.NodeTransformer):
    """Drops docstrings and the messages of errors from a syntax tree, and takes
    f-strings apart, whose quotes depend on the version of Python.
    """

    def visit_JoinedStr(self, node):
        self.generic_visit(node)
        values = [x for x in node.values if getattr(x, "value", None) != ""]
        return ast.Tuple(values, ast.Load())

    def visit_FormattedValue(self, node):
        self.generic_visit(node)
        spec = node.format_spec or ast.Constant(None)
        parts = [node.value, ast.Constant(node.conversion), spec]
        return ast.Tuple(parts, ast.Load())

    def visit_Expr(self, node):
        text = isinstance(getattr(node.value, "value", None), str)
        return None if text else self.generic_visit(node)

    def visit_Raise(self, node):
        return ast.Raise(getattr(node.exc, "func", node.exc), node.cause)


def code_hash(paths, root: Path) -> str:
    """12 hex digits over files: Python without comments, docstrings, layout and
    messages of errors; C++ as it is.
    """
    sha = hashlib.sha256()
    for path in sorted(paths):
        code = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            code = ast.unparse(_Code().visit(ast.parse(code)))
        sha.update(f"{path.relative_to(root).as_posix()}\n{code}\n".encode())
    return sha.hexdigest()[:12]


def _hash_of(package: Path, names: tuple[str, ...]) -> str:
    paths = {
        path
        for name in names
        for path in (*package.glob(f"{name}.*"), *(package / name).rglob("*"))
        if path.suffix in (".py", ".cpp")
    }
    return code_hash(paths - {package / f"{name}.py" for name in NOT_RUN}, package)


@functools.cache
def engine_hash(package: Path = PACKAGE) -> str:
    """Hash of the code that a measured call runs."""
    return _hash_of(package, ENGINE)


@functools.cache
def method_hash(package: Path = PACKAGE) -> str:
    """Hash of the code that decides how a point is measured: its inputs, checks,
    timing, bounds and statistics.
    """
    return _hash_of(package, METHOD)


@functools.cache
def machine_id() -> str:
    """12 hex digits that name this machine and tell nothing about it.

    Its processor and GPUs are part of the name: machines started from one image share
    the rest.
    """
    name = (hardware.Probe().read("/etc/machine-id") or "").strip()
    node = uuid.getnode()
    if not name:  # getnode() without a network card is random, and then has its lowest bit of the first octet set
        name = f"{node:x}" if not node >> 40 & 1 else platform.node()
    machine = hardware.detect()
    parts = [machine.cpu_model, os.cpu_count(), *(gpu.name for gpu in machine.gpus)]
    return hashlib.sha256(f"{SALT}:{name}:{parts}".encode()).hexdigest()[:12]


# By which git tells its hooks of a repository, whatever folder it is asked in.
HOOKS = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
)


class NoGit(RuntimeError):
    """git is not installed, or refused; the message is one line and says why."""


def git(folder: Path, *arguments: str) -> bytes:
    """What git prints, asked in ``folder``; raises NoGit."""
    own = {name: x for name, x in os.environ.items() if name not in HOOKS}
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=20, env=own | {"LC_ALL": "C"}
        )
    except FileNotFoundError:
        raise NoGit("git is not installed") from None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise NoGit(f"git cannot be asked: {error}") from None
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise NoGit(why.removeprefix("fatal: ") or "git failed")
    return done.stdout


def git_state(package: Path = PACKAGE) -> tuple[str, bool | str]:
    """(commit, dirty) of the checkout that holds this package; changes in reports/ do
    not count.

    Outside of git the commit is the hash in the environment variable RINGLAB_COMMIT, or
    "unknown", and dirty is "unknown".
    """
    try:
        git(package, "ls-files", "--error-unmatch", "patterns.py")
        commit = git(package, "rev-parse", "HEAD").decode().strip()
    except NoGit:
        named = re.fullmatch(r"[0-9a-f]{7,40}", os.environ.get("RINGLAB_COMMIT", ""))
        return named[0] if named else "unknown", "unknown"
    try:
        changes = git(
            package, "status", "--porcelain", "--", ":/", ":(exclude,top)reports"
        )
        return commit, bool(changes)
    except NoGit:
        return commit, "unknown"


def threads() -> int:
    """The physical cores that this process may run on, at most what its control group
    grants: one thread each.
    """
    probe = hardware.Probe()
    quota = hardware.detect().cpu_quota
    path = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    siblings = {
        (probe.read(path.format(core)) or str(core)).strip()
        for core in probe.affinity()
    }
    return max(1, min(len(siblings), int(quota) if quota else len(siblings)))


def collect(device: str) -> dict:
    """Everything that stays the same during a run on ``device`` ("cpu" or "cuda")."""
    machine = hardware.detect()
    commit, dirty = git_state()
    on_gpu = device == "cuda"
    gpu = machine.gpus[0] if on_gpu and machine.gpus else None
    return {
        "commit": commit,
        "dirty": dirty,
        "ringlab": __version__,
        "engine": engine_hash(),
        "method": method_hash(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "driver": gpu.driver if gpu else None,
        "device": device,
        "device_name": gpu.name if gpu else machine.cpu_model,
        "device_memory_bytes": gpu.memory_bytes if gpu else machine.ram_bytes,
        "cpu": machine.cpu_model,
        "cpu_capability": machine.cpu_capability,
        "threads": threads(),
        "machine": machine_id(),
    }


def device_of(origin: dict) -> str:
    """What a row was measured on; a CPU with its instruction set, since "AMD EPYC" is
    the name of several.
    """
    name = str(origin.get("device_name", "an unnamed device"))
    capability = origin.get("cpu_capability")
    on_cpu = origin.get("device") == "cpu"
    return f"{name} ({capability})" if on_cpu and capability else name


def utc() -> str:
    """This second, as 2026-11-28T17:20:00Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def moment(device: str) -> dict:
    """What changes from group to group: UTC time, and the state of a GPU."""
    values = {"utc": utc()}
    if state := device_state(device):
        values["gpu_before"] = state
    return values


GPU_STATE = {  # fields of nvidia-smi --query-gpu, by our names
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "max_sm_clock_mhz": "clocks.max.sm",
    "temperature_c": "temperature.gpu",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "throttle_reasons": "clocks_throttle_reasons.active",
    "performance_state": "pstate",
}


def device_state(device: str) -> dict:
    """Clocks, temperature, power and throttle reasons of the first GPU now, by
    nvidia-smi; {} elsewhere.
    """
    text = (
        hardware.Probe().nvidia_smi([*GPU_STATE.values()]) if device == "cuda" else None
    )
    if not text:
        return {}
    values = [value.strip() for value in text.splitlines()[0].split(",")]
    number = re.compile(r"-?\d+(\.\d+)?")  # others are "[N/A]", a bit mask, "P0"
    return {
        name: float(x) if number.fullmatch(x) else x
        for name, x in zip(GPU_STATE, values)
    }


def key(provenance: dict) -> tuple:
    """What must agree for a row to count as done."""
    return tuple(provenance.get(name) for name in KEY)


def differs(one: dict, other: dict) -> list[str]:
    """Which of these do not agree."""
    return [name for name in KEY if one.get(name) != other.get(name)]
