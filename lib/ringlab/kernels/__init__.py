"""Which kernel runs. Kernels are ordered by hardware and probed by a tiny call; each
refusal is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from .. import checks
from ..checks import LARGEST, check_bool, check_choice, check_int, short_repr
from .base import (
    OVERRIDE,
    DeviceSpec,
    Kernel,
    PatternKernel,
    capability,
    override_kernel,
    supports_lower_right_causal,
)
from .compiled import Compiled
from .external import FlashAttn2, FlashAttn3, Xformers
from .torch_kernels import CpuFlash, CuDNN, Eager, Efficient, Flash
from .triton import TritonKernel

KERNELS: dict[str, Kernel] = {
    k.name: k()
    for k in (
        Compiled,
        CpuFlash,
        FlashAttn3,
        CuDNN,
        FlashAttn2,
        Flash,
        Xformers,
        Efficient,
        Eager,
        TritonKernel,
    )
}
CPU = ("compiled", "cpu_flash")
SDPA = (
    "cpu_flash",
    "cudnn",
    "flash",
    "efficient",
)  # the kernels of torch's scaled_dot_product_attention
PROBE_ERROR = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
}  # far above rounding, far below a wrong function
PROBE_ROWS = 160


@dataclass(frozen=True)
class Choice:
    """The kernel that will run, and for each kernel that was tried before it the reason
    why it cannot.
    """

    kernel: Kernel
    refusals: dict[str, str]

    @property
    def name(self) -> str:
        return self.kernel.name


def choose(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    causal: bool = False,
    backward: bool = False,
    backend: str | tuple[str, ...] = "auto",
) -> Choice:
    """Pick the kernel for (device, dtype, head_dim), the fastest known for the hardware
    first.

    ``backend`` is "auto", "sdpa" (any of torch's own kernels), one name of ``KERNELS``,
    or a tuple of names to try in that order. Raises ValueError for an unknown name and
    NotImplementedError, with every reason, if no kernel that was asked for can run.

    >>> choose("cpu", torch.float64, 64).name
    'cpu_flash'
    """
    if (forced := OVERRIDE.get()) is not None:
        return Choice(forced[0], {})
    asked = _with_index(device), dtype, head_dim, causal, backward, backend
    try:
        return _choose(*asked)
    except TypeError:  # a list of names, or another argument without a hash
        return _choose.__wrapped__(*asked)


@lru_cache(maxsize=1024, typed=True)  # typed: 1 must not pass as True
def _choose(device: torch.device, dtype, head_dim, causal, backward, backend) -> Choice:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"dtype must be a torch.dtype, as torch.float32, got {short_repr(dtype)}"
        )
    head_dim = check_int("head_dim", head_dim, most=LARGEST)
    check_bool("causal", causal)
    check_bool("backward", backward)
    backend, names = checks.check_backend(backend), ()
    for name in (backend,) if isinstance(backend, str) else backend:
        check_choice("backend", name, ("auto", "sdpa", *KERNELS))
        names += (
            order(device) if name == "auto" else SDPA if name == "sdpa" else (name,)
        )
    refusals = {}
    for name in names:
        why = probe(name, device, dtype, head_dim, causal, backward)
        if why is None:
            return Choice(KERNELS[name], refusals)
        refusals[name] = why
    reasons = "; ".join(f"{name}: {why}" for name, why in refusals.items())
    raise NotImplementedError(
        f"backend {backend!r} cannot run on {device.type} in {dtype}: {reasons}"
    )


def forget_probes() -> None:
    """Probe again at the next choice."""
    probe.cache_clear()
    _choose.cache_clear()


def expected(
    kind: str, having: tuple[int, int] | None, dtype: torch.dtype, head_dim: int
) -> Choice:
    """The kernel that "auto" should choose on a device that this machine may not have;
    none is called.

    ``kind`` is "cpu" or "cuda", ``having`` its compute capability. Kernels of other
    packages, where installed, come before it. Raises NotImplementedError for a GPU of
    unknown capability.

    >>> expected("cuda", (6, 1), torch.float32, 64).name
    'efficient'
    """
    if kind == "cuda" and having is None:
        raise NotImplementedError(
            "which kernel runs depends on the compute capability, and that is not known"
        )
    device = DeviceSpec(kind, having)
    names = [
        name for name in order(device) if name in (*CPU, *SDPA, "eager")
    ]  # of torch and of this library
    why = {name: KERNELS[name].refuses(device, dtype, head_dim) for name in names}
    name = next(name for name in why if why[name] is None)  # eager refuses nothing
    return Choice(
        KERNELS[name], {tried: reason for tried, reason in why.items() if reason}
    )


def order(device: torch.device | DeviceSpec) -> tuple[str, ...]:
    """The names of all kernels, the fastest expected on ``device`` first. Kernels that
    were never timed come last.
    """
    if device.type != "cuda":
        timed = (
            *CPU,
            "flash_attn_3",
            "cudnn",
            "flash_attn_2",
            "flash",
            "xformers",
            "efficient",
            "eager",
        )
    elif capability(device) >= (9, 0):
        timed = (
            "flash_attn_3",
            "cudnn",
            "flash_attn_2",
            "flash",
            "xformers",
            "efficient",
            "eager",
            *CPU,
        )
    else:
        timed = (
            "flash_attn_2",
            "flash",
            "cudnn",
            "xformers",
            "efficient",
            "eager",
            "flash_attn_3",
            *CPU,
        )
    return *timed, "triton"


def table(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int = 64,
    *,
    causal: bool = False,
    backward: bool = True,
) -> list[tuple[str, bool, str | None, bool]]:
    """Every kernel as (name, runs, reason for a refusal, chosen by "auto"), in the
    order of preference.
    """
    device = _with_index(device)
    chosen = choose(device, dtype, head_dim, causal=causal, backward=backward).name
    reasons = {
        name: probe(name, device, dtype, head_dim, causal, backward)
        for name in order(device)
    }
    return [(name, why is None, why, name == chosen) for name, why in reasons.items()]


@lru_cache(maxsize=1024)
def probe(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    causal: bool,
    backward: bool,
):
    """Why (str) the kernel ``name`` cannot run with these arguments, or None. A tiny
    call is compared with float64.
    """
    kernel = KERNELS[name]
    if (why := kernel.refuses(device, dtype, head_dim)) is not None:
        return why
    lower_right = causal and supports_lower_right_causal(kernel)
    wrong = (
        _wrong(kernel, first, device, dtype, head_dim, causal, backward)
        for first in (0, 70)[: 1 + lower_right]
    )
    return next(filter(None, wrong), None)


def _wrong(
    kernel,
    first: int,
    device,
    dtype: torch.dtype,
    head_dim: int,
    causal: bool,
    backward: bool,
) -> str | None:
    """What is wrong with a call of the queries from ``first`` on with all keys, or
    None.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (2, PROBE_ROWS, 2, head_dim)
    drawn = [
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)
    ]
    q, k, v, dout = (
        t.to(device, dtype)[:, skipped:]
        for t, skipped in zip(drawn, (first, 0, 0, first))
    )
    exact_q, exact_k, exact_v, exact_dout = (t.double().cpu() for t in (q, k, v, dout))
    scale, exact = head_dim**-0.5, Eager()
    want_out, want_lse = exact.forward(exact_q, exact_k, exact_v, causal, scale)
    # A backend may fail with any of these exceptions. The message is the reason of the
    # refusal, shown in every report.
    try:
        out, lse = kernel.forward(q, k, v, causal, scale)
        found = {"out": (out, want_out), "lse": (lse, want_lse)}
        if backward:
            grads = kernel.backward(dout, q, k, v, out, lse, causal, scale)
            want = exact.backward(
                exact_dout, exact_q, exact_k, exact_v, want_out, want_lse, causal, scale
            )
            found |= dict(zip(("dq", "dk", "dv"), zip(grads, want)))
    except (
        RuntimeError,
        NotImplementedError,
        ValueError,
        TypeError,
        AttributeError,
        ImportError,
    ) as failure:
        return f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
    for what, (x, ref) in found.items():
        wrong = float((x.double().cpu() - ref).norm() / ref.norm())
        if not wrong <= PROBE_ERROR.get(dtype, 0.05):
            return f"wrong result: {what} is off by {wrong:.1e}{' in causal mode' if causal else ''}"
    return None


def device_of(device: torch.device | str) -> torch.device:
    """``torch.device(device)``. ValueError if it is no device, or a GPU and torch finds
    none.
    """
    found = checks.check_device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {str(found)!r}, but torch finds no GPU here")
    return found


def _with_index(device: torch.device | str) -> torch.device:
    if isinstance(device, torch.device) and (
        device.type != "cuda" or device.index is not None
    ):
        return device  # a tensor's
    device = device_of(device)
    return (
        torch.device("cuda", torch.cuda.current_device())
        if str(device) == "cuda"
        else device
    )


__all__ = [
    "KERNELS",
    "SDPA",
    "Choice",
    "Kernel",
    "PatternKernel",
    "choose",
    "device_of",
    "expected",
    "forget_probes",
    "order",
    "override_kernel",
    "probe",
    "table",
]
