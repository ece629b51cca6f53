"""Where a row comes from: code, versions, machine and its state. No host name, no user name, no path."""

from __future__ import annotations

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
from ..kernels import triton_config

PACKAGE = Path(__file__).resolve().parent.parent
# What a measured call runs, by folder or module of the package, and what of these only starts or tunes it.
ENGINE = (
    "patterns", "block_patterns", "cache", "memory", "attention", "adaptive", "compat", "kernels", "engine",
    "ring",
)  # fmt: skip
NOT_RUN = ("kernels/triton_tune", "ring/launch")
# What decides how a call is timed and checked; in measure/ the others name the points, run them and keep the rows.
METHOD = (
    "cost", "reference", "tracking", "hardware", "measure/systems", "measure/cache_systems", "measure/peers",
    "measure/workers", "measure/timing", "measure/stats",
)  # fmt: skip
SALT = "ringlab measurement"  # keeps the id of a machine from being looked up elsewhere
# Rows count as done only where all of these agree.
KEY = ("engine", "method", "torch", "device", "device_name", "machine", "threads", "tuning")


def code_hash(paths, root: Path) -> str:
    """12 hex digits over Python files: their code, without comments, docstrings, layout and messages of errors.

    The syntax tree is written out by hand because ``ast.dump`` differs between Python versions.
    """
    sha = hashlib.sha256()
    for path in sorted(paths):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        sha.update(f"{path.relative_to(root).as_posix()}\n{_written(tree)}\n".encode())
    return sha.hexdigest()[:12]


def _written(node, raised: bool = False) -> str:
    if isinstance(node, list):
        return f"[{','.join(_written(each, raised) for each in node if not _is_text(each))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    raised = raised or isinstance(node, ast.Raise)
    if raised and (isinstance(node, ast.JoinedStr) or isinstance(node, ast.Constant) and isinstance(node.value, str)):
        return "''"
    fields = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
    return f"{type(node).__name__}({','.join(f'{name}={_written(value, raised)}' for name, value in fields)})"


def _is_text(node) -> bool:
    """A statement that is only a string: a docstring."""
    value = getattr(node, "value", None)
    return isinstance(node, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str)


def _hash_of(package: Path, names: tuple[str, ...]) -> str:
    found = [
        *(package / f"{name}.py" for name in names),
        *(p for name in names for p in (package / name).rglob("*.py")),
    ]
    left_out = {package / f"{name}.py" for name in NOT_RUN}
    return code_hash([path for path in found if path.exists() and path not in left_out], package)


@functools.cache
def engine_hash(package: Path = PACKAGE) -> str:
    """Hash of the code that a measured call runs."""
    return _hash_of(package, ENGINE)


@functools.cache
def method_hash(package: Path = PACKAGE) -> str:
    """Hash of the code that decides how a point is measured: its inputs, checks, timing, bounds and statistics."""
    return _hash_of(package, METHOD)


@functools.cache
def machine_id() -> str:
    """12 hex digits that name this machine and tell nothing about it.

    Its processor and GPUs are part of the name: machines started from one image share the rest.
    """
    name, node = (hardware.Probe().read("/etc/machine-id") or "").strip(), uuid.getnode()
    if not name:  # getnode() without a network card is random, and then has its lowest bit of the first octet set
        name = f"{node:x}" if not node >> 40 & 1 else platform.node()
    found = hardware.detect()
    parts = [found.cpu_model, os.cpu_count(), *(g.name for g in found.gpus)]
    return hashlib.sha256(f"{SALT}:{name}:{parts}".encode()).hexdigest()[:12]


def git_state(package: Path = PACKAGE) -> tuple[str, bool | str]:
    """(commit, dirty) of the checkout that holds this package, reports/ aside.

    A copy outside of git is of the commit whose hash RINGLAB_COMMIT holds, or of an "unknown" one; whether it was
    changed is "unknown".
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(package), *arguments], capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    ours = top is not None and git("ls-files", "--error-unmatch", str(package / "patterns.py")) is not None
    commit = git("rev-parse", "HEAD") if ours else None
    if commit is None:
        told = re.fullmatch(r"[0-9a-f]{7,40}", os.environ.get("RINGLAB_COMMIT", ""))
        return told[0] if told else "unknown", "unknown"
    changed = git("status", "--porcelain", "--", top, ":(exclude,top)reports")
    return commit, bool(changed) if changed is not None else "unknown"


def threads() -> int:
    """The physical cores that this process may run on, at most what its control group grants: one thread each."""
    probe, quota = hardware.Probe(), hardware.detect().cpu_quota
    path = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    siblings = {(probe.read(path.format(core)) or str(core)).strip() for core in probe.affinity()}
    return max(1, min(len(siblings), int(quota) if quota else len(siblings)))


def tuning() -> str | None:
    """12 hex digits over the tile sizes that ``ringlab tune`` keeps for list kernels; None where it has kept none."""
    files = sorted(triton_config.folder().glob(triton_config.FILES))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:12] if files else None


def collect(device: str) -> dict:
    """Everything that stays the same during a run on ``device`` ("cpu" or "cuda")."""
    machine = hardware.detect()
    commit, dirty = git_state()
    on_gpu = torch.device(device).type == "cuda"
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
        "device": torch.device(device).type,
        "device_name": gpu.name if gpu else machine.cpu_model,
        "device_memory_bytes": gpu.memory_bytes if gpu else machine.ram_bytes,
        "cpu": machine.cpu_model,
        "cpu_capability": machine.cpu_capability,
        "threads": threads(),
        "machine": machine_id(),
        "tuning": tuning() if on_gpu else None,
    }


def moment(device: str) -> dict:
    """What changes from group to group: UTC time, load average of the last minute, clocks and temperature."""
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    state = device_state(device)
    found = {"utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "load_average": load, "cpu_mhz": _cpu_mhz()}
    return found | ({"gpu_before": state} if state else {})


GPU_STATE = {  # fields of nvidia-smi --query-gpu, by our names
    "sm_clock_mhz": "clocks.sm", "memory_clock_mhz": "clocks.mem", "max_sm_clock_mhz": "clocks.max.sm",
    "temperature_c": "temperature.gpu", "power_w": "power.draw", "power_limit_w": "power.limit",
    "throttle_reasons": "clocks_throttle_reasons.active", "performance_state": "pstate",
}  # fmt: skip


def device_state(device: str) -> dict:
    """Clocks, temperature, power and throttle reasons of the first GPU now, by nvidia-smi; {} elsewhere."""
    if torch.device(device).type != "cuda":
        return {}
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_STATE.values())}", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
    number = re.compile(r"-?\d+(\.\d+)?")  # others are "[N/A]", a bit mask, "P0"
    return {name: float(x) if number.fullmatch(x) else x for name, x in zip(GPU_STATE, values)}


def _cpu_mhz() -> float | None:
    """Mean clock of the cores now, as the kernel tells it; None where it does not."""
    lines = (hardware.Probe().read("/proc/cpuinfo") or "").splitlines()
    found = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
    return round(sum(found) / len(found)) if found else None


def key(provenance: dict) -> tuple:
    """What must agree for a row to count as done."""
    return tuple(provenance.get(name) for name in KEY)


def differs(one: dict, other: dict) -> list[str]:
    """Which of these do not agree."""
    return [name for name in KEY if one.get(name) != other.get(name)]
