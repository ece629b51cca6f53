"""Kernel variants that were never measured. They run only where tuning, or
``Execution(merge="fused")``, asks for them.

For the Triton kernels: other ways to read tensors than by pointers. "descriptors": by
tensor descriptors, which the copy engine serves. "specialized" (forward only): the
same, by extra warps that only read. "gluon" and "persistent": the kernels in Gluon for
Hopper, with one program per tile, or with as many programs as run at once.

A descriptor spans the view (b, stride, h, n / stride, d) of a tensor, in which the rows
of a tile, ``stride`` apart, are a block. The host makes it for each call, except that
of the queries of specialized warps.

A kernel in Gluon waits for barriers that its source places by hand, so a mistake can
hang the GPU. ``trial`` therefore runs a candidate first in a process of its own.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from contextvars import copy_context

import torch
from torch import Tensor

from ...patterns import Dilated
from ..external import missing
from ..tile_schedule import TileSchedule
from ..triton import LOG2E, Launch, shortened, start
from ..triton_config import Sizes, Use, padded

READS = ("descriptors", "specialized", "gluon", "persistent")
IN_GLUON = READS[2:]
HOPPER = "triton.experimental.gluon.nvidia.hopper"
GROUP_ROWS = 64  # of a warp group in Gluon: a descriptor of a program's own rows reads those of one group
REGISTERS = 168  # of a thread of the twelve warps in Gluon, before the computing ones take from the one that reads
ALIGNED = 16  # bytes: what a tensor descriptor requires of addresses and strides

# By first digit of the compute capability, pass and head_dim up to: tiles, warps and
# stages, as in Sizes.
DESCRIPTORS = {
    (9, "forward", 64): [(128, 128, 8, 2), (128, 64, 8, 3)],
    (9, "forward", 128): [(128, 64, 8, 3), (128, 128, 8, 2)],
    (9, "forward", 256): [(128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2)],
    (9, "backward_q", 64): [(128, 64, 8, 3), (128, 128, 8, 2)],
    (9, "backward_q", 128): [(128, 64, 8, 3), (128, 64, 8, 2)],
    (9, "backward_q", 256): [(64, 32, 8, 2)],
    (9, "backward_kv", 64): [(128, 64, 8, 3), (128, 64, 8, 2)],
    (9, "backward_kv", 128): [(128, 32, 8, 2), (64, 64, 8, 2)],
    (10, "forward", 64): [(128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2)],
    (10, "forward", 128): [(128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 4, 2)],
    (10, "forward", 256): [(128, 64, 8, 2), (128, 32, 8, 2)],
    (10, "backward_q", 64): [(128, 64, 8, 3)],
    (10, "backward_kv", 64): [(128, 64, 8, 2)],
    (10, "backward_kv", 128): [(128, 32, 8, 2)],
}
# For 9.0, in tiles of 128 rows: columns, warps and stages. Triton adds reading warps to
# the four of "specialized" (forward alone), the code in Gluon adds eight.
SPECIALIZED = {64: [(128, 4, 2), (64, 4, 3)], 128: [(64, 4, 3), (128, 4, 2)]}
GLUON = {
    ("forward", 64): (128, 4, 3),
    ("forward", 128): (128, 4, 2),
    ("forward", 256): (32, 4, 3),
    ("backward_q", 64): (128, 4, 2),
    ("backward_q", 128): (64, 4, 3),
    ("backward_kv", 64): (64, 4, 3),
    ("backward_kv", 128): (32, 4, 3),
}


def candidates(
    name: str, head_dim: int, compute: tuple[int, int], joins: bool
) -> tuple[Sizes, ...]:
    """The sizes to time besides those read by pointers, in 2-byte dtypes."""
    if joins or head_dim != padded(
        head_dim
    ):  # they start from nothing, and descriptors read whole rows
        return ()
    most = next(x for x in (64, 128, 256) if head_dim <= x)
    found = [
        Sizes(*x, "descriptors") for x in DESCRIPTORS.get((compute[0], name, most), ())
    ]
    if compute[0] == 9 and name == "forward":
        found += [Sizes(128, *x, "specialized") for x in SPECIALIZED.get(most, ())]
    if compute[0] == 9 and head_dim >= 64 and (name, most) in GLUON:
        found += [Sizes(128, *GLUON[name, most], reads) for reads in IN_GLUON]
    return tuple(found)


def unfit(
    size: Sizes,
    schedule: TileSchedule,
    tensors: tuple[Tensor, ...],
    joins: bool = False,
) -> str | None:
    """Why sizes that do not read by pointers cannot read ``tensors`` (b, n, h, d) in a
    launch, or None.

    ``joins``: the launch adds to the results of an earlier one.
    """
    in_gluon = size.reads in IN_GLUON
    if in_gluon and joins:
        return "the kernels in Gluon start from nothing"
    if in_gluon and any(t.shape[:3].numel() >= 1 << 31 for t in tensors):
        return "the kernels in Gluon count rows of all heads in 32 bits"
    if why := (
        missing(HOPPER, "Triton 3.6 or newer") if in_gluon else None
    ) or shortened(size, schedule):
        return why
    if not schedule.stride or any(t.shape[1] % schedule.stride for t in tensors):
        return "the rows of a tile are no block of the sequence"
    if any(t.shape[3] != padded(t.shape[3]) or not t.numel() for t in tensors):
        return "descriptors take a head_dim of 2 to some power, and something to read"
    for t in tensors:
        steps = [s * t.element_size() for s in t.stride()[:3]]
        if t.data_ptr() % ALIGNED or any(s % ALIGNED or s < ALIGNED for s in steps):
            return f"descriptors take addresses and strides of {ALIGNED} bytes"
    return None


def run(
    name, launch: Launch, read, rows, results, scale: float, causal: bool, join: bool
) -> None:
    """One launch as ``triton.start`` makes it, reading by ``launch.size.reads``."""
    (size, schedule, _), step = launch, launch.schedule.stride
    in_gluon, arguments = size.reads in IN_GLUON, []
    for i, t in enumerate(read):
        owned = (i >= len(read) - 2) == (
            name == "backward_kv"
        )  # dout and q, or k and v
        by_kernel = (
            owned and size.reads == "specialized"
        )  # such a kernel makes the descriptor itself
        rows_of_block = (
            size.cols if not owned else GROUP_ROWS if in_gluon else size.rows
        )
        arguments.append(
            t if by_kernel else descriptor(t, step, rows_of_block, in_gluon)
        )
    arguments += [*rows, *results]
    if in_gluon:
        return _run_gluon(name, launch, read, arguments, scale, causal)
    constants, context = {"READS": size.reads, "STEP": step}, copy_context()
    if name == "forward":
        constants["MASK"] = size.reads != "specialized" or not schedule.whole
    if (
        size.reads == "specialized"
    ):  # a kernel that makes a descriptor asks for memory; Triton's allocator stays
        from triton import set_allocator

        context.run(
            set_allocator,
            lambda size, *_: torch.empty(size, dtype=torch.int8, device=read[0].device),
        )
    context.run(
        start,
        name,
        launch,
        read,
        arguments,
        results[0],
        scale,
        causal,
        join,
        **constants,
    )


def _run_gluon(name, launch: Launch, read, arguments: list, scale, causal) -> None:
    (size, schedule, _), (q, k) = launch, read[-3:-1]
    (b, n, heads, _), programs = q.shape, len(schedule.tiles)
    work = at_once = programs * b
    if size.reads == "persistent":  # two for the CPU of a test
        at_once = min(
            work,
            torch.cuda.get_device_properties(q.device).multi_processor_count
            if q.is_cuda
            else 2,
        )
    if (
        name != "forward"
    ):  # lse in log2, inf for rows that see nothing, so that their probabilities are 0
        arguments[4] = torch.where(
            arguments[4] == -torch.inf, torch.inf, arguments[4] * LOG2E
        )
    lengths = (n, k.shape[1]) if name == "backward_kv" else (n,)
    constants = {"STEP": schedule.stride, "CAUSAL": causal, "STAGES": size.stages}
    kernel = getattr(importlib.import_module(f"{__name__}.gluon"), name)[(at_once,)]
    with torch.cuda.device_of(q):
        kernel(
            *arguments,
            schedule.tiles,
            schedule.entries,
            scale * LOG2E,
            programs,
            work,
            heads,
            heads // k.shape[2],
            *lengths,
            **constants,
            num_warps=size.warps,
            maxnreg=REGISTERS,
        )


def descriptor(t: Tensor, stride: int, rows: int, in_gluon: bool):
    """A descriptor of ``t`` (b, n, h, d) for blocks of ``rows`` rows that lie
    ``stride`` apart.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    (b, n, h, d), (s_b, s_n, s_h, _) = t.shape, t.stride()
    view = (
        [b, stride, h, n // stride, d],
        [s_b, s_n, s_h, stride * s_n, 1],
        [1, 1, 1, rows, d],
    )
    if in_gluon:
        return importlib.import_module(HOPPER).TensorDescriptor(
            t, *view, layout(d, 8 * t.element_size())
        )
    return TensorDescriptor(t, *view)


def layout(head_dim: int, bits: int):
    """The layout of a block in shared memory, for the kernels in Gluon."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(
        swizzle_byte_width=min(128, head_dim * bits // 8), element_bitwidth=bits, rank=5
    )


# --------------------------------------------------------------------------------------
# the first run of a kernel in Gluon

SECONDS = 120  # for a process that imports torch, compiles two kernels and runs them in milliseconds
REPEATS = 20  # each with the same bits, or there is a race
TRIAL_PATTERN = Dilated([1024, 2048], [1, 2])
TRIAL_LENGTH = 5000  # a last segment that ends early, tiles that are not full, more programs than run at once
TRIAL_HEADS = 8  # so many tiles that a persistent program serves three: the phase of every barrier returns


def trial(use: Use, size: Sizes, device: torch.device) -> str | None:
    """Run a candidate in Gluon in another process. Why that failed, or None: its last
    line, or that it did not end.
    """
    load = "import pickle, sys; arguments = pickle.loads(bytes.fromhex(sys.argv[1]))"
    code = f"{load}; from {__name__} import prove; sys.exit(prove(*arguments))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, pickle.dumps((use, size, device)).hex()]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"hangs: a first run did not end within {SECONDS} s"
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [
            "nothing was printed"
        ]
        return f"a first run ended with status {done.returncode}: {lines[-1][:200]}"
    return None


def prove(use: Use, size: Sizes, device: torch.device) -> str | None:
    """What is wrong with a pass by these sizes on a GPU, compared with the defaults, or
    None.
    """
    from .. import PROBE_ERROR
    from ..triton_tune import Calls, differs

    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, TRIAL_LENGTH, heads, use.head_dim, generator=generator).to(
            device, use.dtype
        )
        for heads in (TRIAL_HEADS * use.group, TRIAL_HEADS, TRIAL_HEADS)
    )
    calls = Calls(q, k, v, TRIAL_PATTERN, use.causal)
    tried = {calls.use(use.name, joins): size for joins in (False, True)}
    if why := next(
        (launch.why for launch in calls.launches(use.name, tried) if launch.why), None
    ):
        return why
    want, call = calls.call(use.name, {})(), calls.call(use.name, tried)
    first = call()
    if why := differs(first, want, PROBE_ERROR.get(use.dtype, 0.05)):
        return why
    same = all(torch.equal(x, y) for _ in range(REPEATS) for x, y in zip(call(), first))
    return None if same else "other bits the next time"
