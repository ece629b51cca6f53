"""``config="auto"`` of a module: advice for each shape that comes, applied as far as it keeps the function."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache

import torch
from torch import Tensor

from .. import hardware
from ..checks import shown
from ..local import Execution
from ..patterns import Pattern
from ..ring import Layout, Simulated, group_size
from .advice import Advice
from .advising import advise


class Auto:
    """Backend, scheme and execution by advice, where a module was told none; ``advice`` is the last that was taken.

    ``config``: "auto", which asks for each shape once, or an ``Advice``, as one that rests on measured rows: it is then
    taken for every shape. The pattern, the layout and the dtype of tensors stay as they are. A compiler's graph ends
    where it is asked, over a group too.
    Raises ValueError for anything else.

    >>> Auto("fast")
    Traceback (most recent call last):
    ...
    ValueError: config must be None, "auto" or a ringlab.Advice, got 'fast'
    """

    def __init__(self, config: str | Advice):
        given = isinstance(config, Advice)
        if not given and not (isinstance(config, str) and config == "auto"):
            raise ValueError(f'config must be None, "auto" or a ringlab.Advice, got {shown(config)}')
        self.asks, self.advice, self.found = not given, config if given else None, {}

    def __repr__(self) -> str:
        taken = ("backend", "scheme", "execution")
        said = [f"{c.name}: {c.shown}" for c in self.advice.choices if c.name in taken] if self.advice else []
        return f"config=auto ({'; '.join(said) or 'nothing chosen yet'})"

    def fill(self, options: dict, pattern: Pattern, q: Tensor, k: Tensor) -> dict:
        """``options`` of ``attention`` with what was left open; q and k (b, n, h, d) are whole, or shards."""
        group, layout = options.get("group"), options.get("layout", "contiguous")
        ranks = 1 if group is None else group_size(group)
        whole = group is None or isinstance(group, Simulated)
        n = layout.n if isinstance(layout, Layout) else q.shape[1] * (1 if whole else ranks)
        left = tuple(name for name in ("backend", "scheme") if options.get(name) == "auto")
        shape = n, ranks, q.shape[0], q.shape[2], k.shape[2], q.shape[3]
        call = _outside_graphs() if torch.compiler.is_compiling() else _filled
        return options | call(
            self, left, options["execution"], pattern, layout, shape, options["causal"], q.dtype, q.device,
            torch.is_grad_enabled(),
        )  # fmt: skip

    def take(self, pattern, layout, shape, causal: bool, dtype, device, backward: bool) -> Advice:
        """The advice given, or that for a shape."""
        key = pattern, layout, shape, causal, dtype, device, backward
        if self.asks and key not in self.found:
            n, ranks, batch, heads, kv_heads, head_dim = shape
            self.found[key] = advise(
                profile_of(device), n, ranks=ranks, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                causal=causal, passes="fwd+bwd" if backward else "fwd", pattern=pattern, dtype=dtype, layout=layout,
                estimates=False,
            )  # fmt: skip
        self.advice = self.found[key] if self.asks else self.advice
        return self.advice


def _filled(auto: Auto, left: tuple[str, ...], mine: Execution, *asked) -> dict:
    """What advice puts in the place of the names ``left`` open and of the switches that are as they stand."""
    advice, plain = auto.take(*asked), Execution()
    same = [f.name for f in fields(mine) if getattr(mine, f.name) == getattr(plain, f.name)]
    execution = replace(mine, **{name: getattr(advice["execution"], name) for name in same})
    return {"execution": execution} | {name: advice[name] for name in left if name in advice.names}


_opaque = None


def _outside_graphs():
    """``_filled`` as torch.compile calls it but may not trace it; made late, as it loads the compiler."""
    global _opaque
    if _opaque is None:
        _opaque = torch.compiler.disable(_filled)
    return _opaque


@lru_cache(maxsize=16)
def profile_of(device: torch.device) -> hardware.Profile:
    """The profile of a device that is here, with its memory.

    >>> profile_of(torch.device("cpu")).name
    'cpu'
    """
    if device.type == "cpu":
        return hardware.get_profile("cpu")
    found = torch.cuda.get_device_properties(device)
    gpu = hardware.Gpu(found.name, (found.major, found.minor), found.total_memory)
    return hardware.resolve("auto", machine := hardware.Machine(device="cuda", gpus=(gpu,))).on(machine)
