"""What a caller switches on for its own operators, as autocast, FakeTensorMode or FLOP
counters; and what turns it off where this library builds something once and keeps it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch.utils import _python_dispatch as dispatch

# Private to torch. None in a version that has them no more: such modes then stay on.
_modes = getattr(dispatch, "_get_current_dispatch_mode_stack", list)
_without_dispatch_modes = getattr(dispatch, "_disable_current_modes", None)
_without_function_modes = getattr(torch._C, "DisableTorchFunction", None)


@contextmanager
def outside_modes() -> Iterator[None]:
    """Inside, the caller's modes are off: inference mode, autocast, a default device,
    FakeTensorMode, FLOP counters and others. This library's own trackers stay.

    >>> with torch.device("meta"), outside_modes():
    ...     torch.zeros(1).device.type
    'cpu'
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if _without_function_modes is not None:
            stack.enter_context(_without_function_modes())
        modes = _modes()
        own = [mode for mode in modes if getattr(mode, "stays_on", False)]
        if len(own) < len(modes) and _without_dispatch_modes is not None:
            stack.enter_context(_without_dispatch_modes())
            for mode in own:
                dispatch.TorchDispatchMode.__enter__(mode)
                stack.push(partial(dispatch.TorchDispatchMode.__exit__, mode))
        yield


# Private to torch. None in a version that has them no more: autograd's threads then know
# nothing of their callers.
_keep = getattr(torch._C, "_stash_obj_in_tls", None)
_is_kept = getattr(torch._C, "_is_key_in_tls", None)
_kept = getattr(torch._C, "_get_obj_in_tls", None)


def keep(name: str, value: object) -> object:
    """Keep a value for this thread and the threads in which autograd runs its backward
    on GPUs, where no context variable is set; returns what was kept before.
    """
    before = kept(name)
    if _keep is not None:
        _keep(name, value)
    return before


def kept(name: str) -> object:
    """What ``keep`` was given; None for nothing."""
    return _kept(name) if _keep is not None and _is_kept(name) else None


def flop_counters() -> list:
    """torch's FLOP counters at work, which know operators by their formulas."""
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return []
    return [m.counter for m in _modes() if type(m).__module__ == module.__name__]


def is_fake(t: torch.Tensor) -> bool:
    """Whether a tensor has a shape and no data, as under FakeTensorMode."""
    return type(t).__module__ == "torch._subclasses.fake_tensor"


_keys = getattr(
    torch._C, "_TorchDispatchModeKey", None
)  # None: a torch that does not tell
_recorders = [
    mode_of
    for mode_of in (
        getattr(torch._C, "_get_dispatch_mode", None),
        getattr(torch._ops, "_get_dispatch_mode_pre_dispatch", None),
    )
    if mode_of is not None and _keys is not None
]


def refuse_recording(what: str, backend: str) -> None:
    """Raise NotImplementedError where torch.fx records the operators that are called: it
    does not see ``what``, and would leave it out. ``backend`` is one that it sees.
    """
    for mode_of in _recorders:
        if mode_of(_keys.PROXY) is not None:
            why = f"torch.fx cannot record {what}; use torch.export"
            raise NotImplementedError(f"{why}, or backend={backend!r}")
