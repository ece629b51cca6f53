"""``Kernel``, the base class of the kernels, and helpers that they share, such as rules
for ``refuses``.

All tensors are (b, m, h, d) with the same number of heads in q, k and v and a
contiguous last dimension; other strides are free. lse is (b, h, m), natural log, fp32
(fp64 for fp64). ``scale`` is positive. k and v may have another number of rows than q,
except in causal calls: there the mask is square.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Cost:
    """What a dense kernel was measured to take on a CPU at head_dim 64 in fp32, by
    which planners choose between calls.

    In (query, key) pairs of a long call: ``work(rows, keys)`` of attention of ``rows``
    queries by so many keys for one head, a number or (calls,); ``call``, each call;
    ``merge``, a row of a result that is merged. ``copied`` times the work where keys
    are scattered.
    """

    work: Callable[[int, Tensor | float], Tensor | float]
    call: float
    merge: float
    copied: float


def _torch_work(rows: int, keys: Tensor | float) -> Tensor | float:
    """torch's CPU kernel takes fewer queries at a time in calls of fewer rows, and few
    keys cost it more.
    """
    slower = next(
        factor
        for least, factor in (
            (768, 1.0),
            (192, 1.06),
            (128, 1.17),
            (64, 1.24),
            (0, 1.4),
        )
        if rows >= least
    )
    return rows * (keys * slower + 25 + 50 * (keys < 192))


# On a GPU the order is the same and the differences are smaller.
TORCH = Cost(_torch_work, call=1 << 15, merge=60, copied=1.25)


class Kernel:
    """One attention kernel, which defines ``forward`` and ``backward``. Instances hold
    no state of a call.

    What more it does is declared by these names:

    ``takes_bias``: ``forward`` and ``backward`` take a last argument ``bias`` (b, m or
    1, h, m_k), which is added to the scores.
    ``takes_softcap``: ``with_softcap(softcap)`` gives the kernel that makes
    ``softcap * tanh(s / softcap)`` of a score s.
    ``whole_patterns``: ``attend(q, k, v, pattern, causal, scale, cached)`` gives out (b,
    n, h, d) in q's dtype and lse (b, h, n); a query that sees nothing has out 0 and lse
    -inf. ``gradients(dout, dlse, q, k, v, out, lse, pattern, causal, scale, cached)``
    gives dq, dk, dv in q's dtype for cotangents of out and, if not None, of lse. k and v
    may have fewer heads; ``cached(key, build)`` caches plans.
    """

    name = "any"
    cost = TORCH
    softcap: float | None = None
    takes_bias = takes_softcap = whole_patterns = False

    def refuses(
        self, device: torch.device | DeviceSpec, dtype: torch.dtype, head_dim: int
    ) -> str | None:
        """Return why this kernel cannot run on the device, dtype or head_dim, as far as
        its rules say, or None.
        """
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return out (b, m, h, d) in q's dtype or a wider one, and lse (b, h, m)."""
        raise NotImplementedError

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> Sequence[Tensor]:
        """Return dq, dk, dv (b, m, h, d) of ``P = exp(scale * q k^T - lse)``, ``dS = P *
        (dout v^T - rowsum(dout * out))``.

        (out, lse) may be those of a softmax over more keys. The gradients are then
        exact for that softmax. ``out`` may be in a wider dtype than q, lse have any
        strides.
        """
        raise NotImplementedError

    def not_offered(self, *call: Any, **options: Any) -> Any:
        """Raise NotImplementedError, in place of what the kernel does not declare."""
        raise NotImplementedError(f"the kernel {self.name} does not offer this")

    with_softcap = not_offered
    attend = not_offered
    gradients = not_offered


PLAIN = Kernel()  # declares nothing: any kernel runs a plan for it


@dataclass(frozen=True)
class DeviceSpec:
    """What the rules of a kernel ask about a device, for a device that this machine may
    not have.
    """

    type: str
    capability: tuple[int, int] | None = None


PRETENDED: ContextVar[tuple[DeviceSpec, Kernel | None] | None] = ContextVar(
    "pretended device, and the kernel that runs there", default=None
)


@contextmanager
def pretend(device: DeviceSpec, kernel: Kernel | None = None) -> Iterator[None]:
    """Take tensors to be on ``device``, wherever they are. With a ``kernel``, every
    choice is this one and nothing is probed: for runs without data.

    >>> from ringlab import kernels
    >>> with pretend(DeviceSpec("cuda", (6, 1)), kernels.KERNELS["eager"]):
    ...     kernels.choose("cpu", torch.float32, 64).name, device_type_of(torch.zeros(1))
    ('eager', 'cuda')
    """
    token = PRETENDED.set((device, kernel))
    try:
        yield
    finally:
        PRETENDED.reset(token)


def device_type_of(t: Tensor) -> str:
    """The type of a tensor's device, "cpu" or "cuda", or of the one that ``pretend``
    names.
    """
    pretended = PRETENDED.get()
    return t.device.type if pretended is None else pretended[0].type


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of log-sum-exps and accumulators for tensors of ``dtype``: float32, or
    float64 for float64.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def capability(device: torch.device | DeviceSpec) -> tuple[int, int]:
    """The CUDA compute capability of a device."""
    return (
        device.capability
        if isinstance(device, DeviceSpec)
        else torch.cuda.get_device_capability(device)
    )


def needs_cuda(
    device: torch.device | DeviceSpec, least: tuple[int, int], alone: bool = False
) -> str | None:
    """Why a CUDA kernel for the capability ``least`` and, unless ``alone``, newer ones
    cannot run, or None.
    """
    if device.type != "cuda":
        return f"needs a CUDA device, this is {device.type}"
    have = capability(device)
    if have < least or (alone and have > least):
        newer = "" if alone else " or newer"
        return f"needs compute capability {least[0]}.{least[1]}{newer}, this is {have[0]}.{have[1]}"
    return None


def needs_head_dim(head_dim: int, most: int) -> str | None:
    """Why a kernel for head_dims up to ``most``, in steps of 8, cannot take
    ``head_dim``, or None.
    """
    if head_dim > most or head_dim % 8:
        return f"needs a head_dim that is a multiple of 8 and at most {most}, not {head_dim}"
    return None


def needs_bf16(device: torch.device | DeviceSpec, dtype: torch.dtype) -> str | None:
    """Why bfloat16 cannot be used on a CUDA device, or None."""
    if dtype == torch.bfloat16 and capability(device) < (8, 0):
        return "takes bfloat16 from compute capability 8.0"
    return None


def wants_dtype(dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> str | None:
    """Why a kernel for the ``allowed`` dtypes cannot take ``dtype``, or None."""
    if dtype not in allowed:
        names = [str(d).removeprefix("torch.") for d in (*allowed, dtype)]
        return f"takes {', '.join(names[:-1])}, not {names[-1]}"
    return None


def to_bhmd(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(b, m, h, d) views as the (b, h, m, d) that torch's kernels take, and back."""
    return tuple(t.transpose(1, 2) for t in tensors)
