"""``KERNELS`` by name, and ``choose``, which takes the first of them that runs: in the
order of the hardware, each asked by its ``refuses`` and probed by tiny calls against
float64. ``table`` lists every kernel with the reason why it cannot run.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from .. import checks
from ..checks import (
    LARGEST,
    Backend,
    Device,
    check_bool,
    check_choice,
    check_int,
    short_repr,
)
from ..checks import check_device as device_of
from ..patterns import Dense
from ..torch_private import outside_modes
from ..tracking import is_out_of_memory
from .base import (
    PRETENDED,
    DeviceSpec,
    Kernel,
    accumulation_dtype,
    capability,
    pretend,
)
from .compiled import Compiled
from .external import (
    NOT_INSTALLED,
    FlashAttn2,
    FlashAttn3,
    FlashAttn4,
    FlashAttn4Blocks,
    Xformers,
)
from .rules import KINDS, Rule, kind_of, rule_for
from .torch_kernels import CpuFlash, CuDNN, Eager, Efficient, Flash
from .triton import TritonKernel

KERNELS: dict[str, Kernel] = {
    k.name: k()
    for k in (
        Compiled,
        CpuFlash,
        FlashAttn4,
        FlashAttn4Blocks,
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
HOPPER = ("flash_attn_4", "flash_attn_3")  # and the first of them on newer ones
# The kernels of torch's scaled_dot_product_attention.
SDPA = ("cpu_flash", "cudnn", "flash", "efficient")
LISTS = "triton"  # runs whole patterns
# Far above rounding, far below a wrong function.
PROBE_ERROR = {torch.float64: 1e-10, torch.float32: 1e-4}
PROBE_ROWS = (160, 37, 1)
LOG = logging.getLogger("ringlab")


@dataclass(frozen=True)
class Choice:
    """The kernel that will run, and for each kernel that was tried before it the reason
    why it cannot.

    ``rule``: the line of ``rules.RULES`` that decided, for "auto" on a GPU.
    """

    kernel: Kernel
    refusals: dict[str, str]
    rule: Rule | None = None

    @property
    def name(self) -> str:
        return self.kernel.name


def choose(
    device: Device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    causal: bool = False,
    backward: bool = False,
    backend: Backend = "auto",
    pattern_kind: str = "dense",
    for_gradients: bool = False,
    softcap: float | None = None,
) -> Choice:
    """Pick the kernel for (device, dtype, head_dim), the fastest known for the hardware
    first.

    ``backward``: the backward pass must run, too. ``backend`` is "auto", "sdpa" (any of
    torch's own kernels), one name of ``KERNELS``, or a tuple of names to try in that
    order. "auto" on a GPU depends on ``pattern_kind``, one of ``rules.KINDS``, and on
    the pass: the backward if ``for_gradients``. With a ``softcap`` the kernel must cap
    scores. Raises ValueError for an unknown name and NotImplementedError, with every
    reason, if no kernel that was asked for can run.

    >>> choose("cpu", torch.float64, 64).name
    'cpu_flash'
    """
    if (pretended := PRETENDED.get()) is not None:
        device, forced = pretended
        if forced is not None:
            return Choice(forced, {})
    call = causal, backward, backend, pattern_kind, for_gradients, softcap
    call = _with_index(device), dtype, head_dim, *call
    try:
        return _kept_choice(*call)
    except TypeError:  # a list of names, or another argument without a hash
        return _choose(*call)


def until_forgotten(function):
    """``function``, whose results are remembered until ``forget_probes``; what it
    raises is not.
    """
    remembered = lru_cache(maxsize=1024, typed=True)(function)  # 1 is not True
    _REMEMBERED.append(remembered)
    return remembered


_REMEMBERED = []


def _choose(
    device: torch.device | DeviceSpec,
    dtype,
    head_dim,
    causal,
    backward,
    backend,
    pattern_kind,
    for_gradients,
    softcap,
) -> Choice:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"dtype must be a torch.dtype, as torch.float32, got {short_repr(dtype)}"
        )
    head_dim = check_int("head_dim", head_dim, most=LARGEST)
    check_bool("causal", causal)
    check_bool("backward", backward)
    check_choice("pattern_kind", pattern_kind, KINDS)
    if isinstance(device, torch.device):
        device_of(device)
    backend, tried, rule = checks.check_backend(backend), {}, None
    sizes = (device, dtype, head_dim)
    refusals = {}

    def runs(name: str) -> bool:
        why = probe(name, *sizes, causal, backward, softcap)
        if why is not None:
            refusals[name] = why
        return why is None

    for name in (backend,) if isinstance(backend, str) else backend:
        check_choice("backend", name, ("auto", "sdpa", *KERNELS))
        if name != "auto":
            tried |= {
                x: None for x in (SDPA if name == "sdpa" else (name,)) if x not in tried
            }
            continue
        if device.type == "cuda":
            call = dtype, head_dim, pattern_kind, causal, for_gradients
            rule = rule_for(capability(device), *call, runs)
        tried |= {x: rule for x in _by_rule(rule, order(device)) if x not in tried}
    for name, rule in tried.items():
        if runs(name):
            return Choice(_with_softcap(name, softcap), refusals, rule)
        if backend == "auto" and not _refusal(name, *sizes, softcap):
            why = refusals[name]
            _warn_once(f"attention on {device.type} in {dtype} without {name}: {why}")
    reasons = "; ".join(f"{name}: {why}" for name, why in refusals.items())
    raise NotImplementedError(
        f"backend {backend!r} cannot run on {device.type} in {dtype}: {reasons}"
    )


_kept_choice = until_forgotten(_choose)


def _with_softcap(name: str, softcap: float | None) -> Kernel:
    kernel = KERNELS[name]
    return kernel if softcap is None else kernel.with_softcap(softcap)


def _refusal(name: str, device, dtype, head_dim, softcap: float | None) -> str | None:
    """Why the rules of a kernel refuse a call, or None."""
    kernel = KERNELS[name]
    if softcap is not None and not kernel.takes_softcap:
        return "takes no softcap"
    return kernel.refuses(device, dtype, head_dim)


def _by_rule(rule: Rule | None, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names with the kernel that the rule takes first."""
    if rule is None:
        return names
    lists = (LISTS,) if rule.way == "lists" else ()
    first = (rule.kernel,) if rule.kernel else ()
    return tuple(dict.fromkeys((*first, *lists, *names)))


@lru_cache(maxsize=256)
def _warn_once(text: str) -> None:
    LOG.warning(text)


def forget_probes() -> None:
    """Probe again at the next choice."""
    for remembered in (*_REMEMBERED, _warn_once):
        remembered.cache_clear()


def expected(
    kind: str,
    having: tuple[int, int] | None,
    dtype: torch.dtype,
    head_dim: int,
    *,
    causal: bool = False,
    pattern_kind: str = "dense",
    for_gradients: bool = False,
) -> Choice:
    """The kernel that "auto" should choose on a device that this machine may not have;
    none is called.

    ``kind`` is "cpu" or "cuda", ``having`` its compute capability; the others are as in
    ``choose``. Kernels of other packages may come before, where they are installed.
    Raises NotImplementedError for a GPU of unknown capability.

    >>> expected("cuda", (6, 1), torch.float32, 64).name
    'efficient'
    """
    if kind == "cuda" and having is None:
        raise NotImplementedError(
            "which kernel runs depends on the compute capability, and that is not known"
        )
    device = DeviceSpec(kind, having)
    rule = None
    # Of torch and of this library.
    names = tuple(x for x in order(device) if x in (*CPU, *SDPA, "eager"))
    if kind == "cuda":
        call = dtype, head_dim, pattern_kind, causal, for_gradients
        rule = rule_for(having, *call, names.__contains__)
        names = _by_rule(rule, names)
    refusals = {}
    for name in names:
        why = KERNELS[name].refuses(device, dtype, head_dim)
        if why is None or NOT_INSTALLED in why:  # there it may be installed
            break  # at the latest for eager, which refuses nothing
        refusals[name] = why
    return Choice(KERNELS[name], refusals, rule)


def order(device: torch.device | DeviceSpec) -> tuple[str, ...]:
    """The names of all kernels, the fastest expected for dense calls on ``device``
    first.
    """
    if device.type != "cuda":
        first = (*CPU, *HOPPER, "cudnn", "flash_attn_2", "flash")
    elif capability(device) >= (9, 0):
        # H200, bf16, head_dim 128, TFLOP/s forward and with backward: FlashAttention-4
        # 670 and 626, cuDNN 611 and 558.
        first = (*HOPPER, "cudnn", "flash_attn_2", "flash")
    else:
        first = ("flash_attn_2", "flash", "cudnn")
    # xformers calls the same kernel as "efficient".
    names = (*first, "efficient", "xformers", "eager", *HOPPER, *CPU)
    return tuple(dict.fromkeys((*names, FlashAttn4Blocks.name, LISTS)))


def table(
    device: Device,
    dtype: torch.dtype,
    head_dim: int = 64,
    *,
    causal: bool = False,
    backward: bool = True,
    pattern_kind: str = "dense",
) -> list[tuple[str, bool, str | None, bool]]:
    """Every kernel as (name, runs, reason for a refusal, chosen by "auto"), in the
    order of preference.
    """
    device, how = _with_index(device), {"causal": causal, "backward": backward}
    chosen = choose(device, dtype, head_dim, pattern_kind=pattern_kind, **how).name
    reasons = {
        name: probe(name, device, dtype, head_dim, causal, backward)
        for name in order(device)
    }
    return [(name, why is None, why, name == chosen) for name, why in reasons.items()]


@until_forgotten
def probe(
    name: str,
    device: torch.device | DeviceSpec,
    dtype: torch.dtype,
    head_dim: int,
    causal: bool,
    backward: bool,
    softcap: float | None = None,
) -> str | None:
    """Why the kernel ``name`` cannot run with these arguments, or None. Tiny calls, as
    the engine makes them, are compared with float64, outside of the caller's modes.

    Raises what says that memory ran out: that may pass, and is not kept.
    """
    if (why := _refusal(name, device, dtype, head_dim, softcap)) is not None:
        return why
    kernel = _with_softcap(name, softcap)
    calls = [(rows, rows) for rows in PROBE_ROWS]
    with outside_modes(), torch.no_grad():
        wrong = (
            _wrong(kernel, *rows, device, dtype, head_dim, causal, backward, softcap)
            for rows in calls
        )
        return next(filter(None, wrong), None)


def _wrong(
    kernel,
    rows: int,
    keys: int,
    device,
    dtype: torch.dtype,
    head_dim: int,
    causal: bool,
    backward: bool,
    softcap: float | None,
) -> str | None:
    """What is wrong with a call of the last ``rows`` queries by ``keys`` keys, or None.

    Rows are every other one of a longer tensor, two heads share their keys. The
    backward is given what the engine gives it: the (out, lse) of a softmax over twice
    as many keys, out in fp32 or wider, lse with heads last.
    """
    generator = torch.Generator().manual_seed(0)
    place = "cpu" if isinstance(device, DeviceSpec) else device
    wide = accumulation_dtype(dtype)

    def draw(rows: int, heads: int, dtype=dtype):
        shape = (2, 2 * rows, heads, head_dim)
        t = torch.randn(shape, generator=generator, dtype=torch.float64)
        return t.to(place, dtype)[:, ::2]

    q = draw(rows, 2)
    k = draw(keys, 1)
    v = draw(keys, 1)
    dout = draw(rows, 2)
    whole = kernel.whole_patterns and rows == keys  # takes fewer heads of keys
    shared = [t.expand(-1, -1, 2, -1) for t in (k, v)]  # (2, keys, 2, d)
    exact_q, exact_k, exact_v, exact_dout = (
        t.double().cpu() for t in (q, *shared, dout)
    )
    scale = head_dim**-0.5
    exact = Eager(softcap=softcap)
    # Far beyond a soft cap all derivatives are 0, which says nothing.
    within = scale * min(1.0, softcap or 1.0)
    results_of = partial(exact.forward, exact_q, exact_k, exact_v, causal)
    expected = results_of(scale)
    expected_out, expected_lse = results_of(within)
    # As if as many keys more, of the same weight, had other values.
    other = draw(rows, 2, wide)
    out = (expected_out.to(place, wide) + other) / 2
    lse = (expected_lse.transpose(1, 2) + math.log(2)).to(place, wide).contiguous()
    lse = lse.transpose(1, 2)  # (2, 2, rows), heads last in memory
    # A kernel may fail with any exception: Triton's derive from Exception alone, and
    # its compilers raise what subprocess does. The message is the reason of the refusal.
    try:
        if whole:
            results = kernel.attend(q, k, v, Dense(), causal, scale)
        else:
            results = kernel.forward(q, *shared, causal, scale)
        pairs = dict(zip(("out", "lse"), zip(results, expected)))
        if backward:
            expected = exact.backward(
                exact_dout,
                exact_q,
                exact_k,
                exact_v,
                out.double().cpu(),
                lse.double().cpu(),
                causal,
                within,
            )
            if whole:
                reads = dout, None, q, k, v, out, lse
                grads = kernel.gradients(*reads, Dense(), causal, within)
                expected = expected[0], *(t.sum(2, keepdim=True) for t in expected[1:])
            else:
                grads = kernel.backward(dout, q, *shared, out, lse, causal, within)
            pairs |= dict(zip(("dq", "dk", "dv"), zip(grads, expected)))
    except Exception as failure:
        if is_out_of_memory(failure):
            raise
        return f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
    for what, (x, ref) in pairs.items():
        wrong = float((x.double().cpu() - ref).norm() / ref.norm())
        if not wrong <= PROBE_ERROR.get(dtype, 0.05):
            mode = " in causal mode" if causal else ""
            return f"wrong result: {what} is off by {wrong:.1e}{mode}"
    return None


def _with_index(device: Device | DeviceSpec) -> torch.device | DeviceSpec:
    if isinstance(device, DeviceSpec) or (
        isinstance(device, torch.device)
        and (device.type != "cuda" or device.index is not None)
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
    "DeviceSpec",
    "Kernel",
    "choose",
    "device_of",
    "expected",
    "forget_probes",
    "order",
    "kind_of",
    "pretend",
    "probe",
    "table",
]
