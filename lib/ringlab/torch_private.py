"""What the library uses of torch without a public name, each behind a name of its own,
and what switches off a caller's modes where something is built once and kept.

Checked with torch 2.11, 2.12, 2.13, 2.14 and 2.15. Where a torch has one of these no
more, values stay right: each says what happens then. torch's attention operators are in
``kernels.torch_kernels``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

# --------------------------------------------------------------------------------------
# modes: what a caller switches on for its own operators

# The dispatch modes at work, the innermost last; none where torch does not tell.
dispatch_modes = getattr(_python_dispatch, "_get_current_dispatch_mode_stack", list)
# Contexts without dispatch modes and without function modes; where torch cannot suspend
# them, they stay.
without_dispatch_modes = getattr(
    _python_dispatch, "_disable_current_modes", nullcontext
)
without_function_modes = getattr(torch._C, "DisableTorchFunction", nullcontext)


class OwnMode(_python_dispatch.TorchDispatchMode):
    """A dispatch mode of this library: ``outside_modes`` leaves it on."""

    stays_on = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Or its first operator would import the compiler: a second, and 70 MB that are
        # not the caller's. A torch that does not ask imports it.
        return False


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
        stack.enter_context(without_function_modes())
        modes = dispatch_modes()
        own = [mode for mode in modes if getattr(mode, "stays_on", False)]
        if len(own) < len(modes) and without_dispatch_modes is not nullcontext:
            stack.enter_context(without_dispatch_modes())
            for mode in own:
                OwnMode.__base__.__enter__(mode)
                stack.push(partial(OwnMode.__base__.__exit__, mode))
        yield


def flop_counters() -> list:
    """torch's FLOP counters at work, which know operators by their formulas; none where
    torch does not tell, and they count torch's operators alone.
    """
    module = "torch.utils.flop_counter"
    if module not in sys.modules:
        return []
    return [m.counter for m in dispatch_modes() if type(m).__module__ == module]


def is_fake(t: Tensor) -> bool:
    """Whether a tensor has a shape and no data, as under FakeTensorMode. Where torch
    names the class otherwise, it goes through the engine's operators one by one.
    """
    return type(t).__module__ == "torch._subclasses.fake_tensor"


def refuse_recording(what: str, backend: str) -> None:
    """Raise NotImplementedError where torch.fx records the operators that are called: it
    does not see ``what``, and would leave it out. ``backend`` is one that it sees.

    Not where torch has its tracer in another module.
    """
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if tracer is not None and tracer.get_proxy_mode() is not None:
        why = f"torch.fx cannot record {what}; use torch.export"
        raise NotImplementedError(f"{why}, or backend={backend!r}")


def refuse_tracing() -> None:
    """Raise NotImplementedError under ``torch.jit.trace``, on which torch's older ONNX
    exporter is built: sizes become tensors there, and it sees no kernel of this library.
    """
    if torch.jit.is_tracing():
        what = "torch.jit.trace, and ONNX export by it, cannot record attention"
        raise NotImplementedError(f"{what}; use torch.export")


def is_traced() -> bool:
    """Whether new tensors have no data, under FakeTensorMode, or belong to a graph of
    torch.fx; True where torch does not tell: then no memory is lent.
    """
    try:
        keys = torch._C._TorchDispatchModeKey
        return any(map(torch._C._get_dispatch_mode, (keys.FAKE, keys.PROXY)))
    except AttributeError:
        return True


# --------------------------------------------------------------------------------------
# derivatives, graphs and threads


def _unknown() -> bool:
    return True


# Whether a transform of torch.func is active; True where torch does not tell: torch's
# own, slower call of an autograd function does the same.
in_functorch = getattr(torch._C, "_are_functorch_transforms_active", _unknown)


def is_transformed(*tensors: Tensor) -> bool:
    """Whether a transform of torch.func or a forward-mode derivative is active.

    Where torch does not tell, whether one of ``tensors`` has a tangent; without tensors
    True, and calls go through autograd.
    """
    level = getattr(forward_ad, "_current_level", None)  # -1 outside of all
    if level is None or in_functorch is _unknown:
        return not tensors or any(
            forward_ad.unpack_dual(t).tangent is not None for t in tensors
        )
    return in_functorch() or level >= 0


# Dynamo before 2.13 takes no frozen dataclass where a call is a constant to it. There,
# and with a torch that was not checked, attention is called between the graphs.
IN_GRAPHS = (2, 13) <= torch.__version__ < (2, 16)


def constant_in_graphs(function: Callable) -> Callable:
    """Mark a function whose result is a constant of the compiled graph: the compiler
    calls it and does not trace it.

    This is ``assume_constant_result`` of torch.compiler, without its import of the
    compiler.
    """
    if IN_GRAPHS:
        function._dynamo_marked_constant = True
    return function


COMPILER = "torch._dynamo"  # a custom operator imports it at its first call, which takes seconds

# torch before 2.13 lets go of what it keeps: it takes no reference to it.
_is_kept = torch.__version__ >= (2, 13) and getattr(torch._C, "_is_key_in_tls", None)


def keep(name: str, value: object) -> object:
    """Keep a value for this thread and the threads in which autograd runs its backward
    on GPUs, where no context variable is set; returns what was kept before.

    Where torch keeps none, those threads know nothing of their callers.
    """
    before = kept(name)
    if _is_kept:
        torch._C._stash_obj_in_tls(name, value)
    return before


def kept(name: str) -> object:
    """What ``keep`` was given; None for nothing."""
    return torch._C._get_obj_in_tls(name) if _is_kept and _is_kept(name) else None


_groups = WeakValueDictionary()  # by name


def keep_name(group: torch.distributed.ProcessGroup) -> None:
    """Let ``group_named`` find a process group."""
    _groups[group.group_name] = group


def group_named(name: str) -> torch.distributed.ProcessGroup | None:
    """The process group of a name, also one that was made anew under it since a graph
    was compiled. Where torch does not tell, the last that ``keep_name`` was given.
    """
    return getattr(
        torch.distributed.distributed_c10d, "_resolve_process_group", _groups.get
    )(name)


# --------------------------------------------------------------------------------------
# tensors and modules


def is_zero(t: Tensor) -> bool:
    """Whether t is one of torch's zero tensors, which have no memory. Where torch does
    not tell, they are passed on: the kernel "compiled" refuses them.
    """
    return getattr(t, "_is_zerotensor", bool)()


def is_wrapper(t: Tensor) -> bool:
    """Whether t is of a subclass whose values lie in other tensors, as a DTensor. False
    for those by which torch itself traces.
    """
    kind = type(t)
    if kind in (Tensor, torch.nn.Parameter) or "torch._subclasses" in kind.__module__:
        return False
    if hasattr(kind, "__tensor_flatten__"):
        return True
    # Transforms of torch.func hide memory, and are told of later.
    return not (in_functorch() or t.numel() == 0 or t.data_ptr())


def storage_id(storage: torch.UntypedStorage) -> int:
    """A number that no other storage has while this one lives. Nothing stands in for
    it.
    """
    return storage._cdata


def storage_references(storage: torch.UntypedStorage) -> int:
    """References to a storage from C++: tensors, views, saved tensors, DLPack. Where
    torch does not count them (AttributeError), no memory is lent.
    """
    return torch._C._storage_Use_Count(storage_id(storage))


def coo_parts(t: Tensor) -> tuple[Tensor, Tensor]:
    """The indices and the values of a sparse tensor in coordinates; torch's public
    methods take a coalesced one alone. Nothing stands in for them.
    """
    return t._indices(), t._values()


def version_of(t: Tensor) -> int | None:
    """How many writes to a tensor torch knows of; None of one in inference mode, and
    where torch does not tell: its values are read anew.
    """
    return None if t.is_inference() else getattr(t, "_version", None)


def has_pre_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks are called before a module, as those of tensor parallel layers;
    True where torch does not tell, and the module is called to see.
    """
    return bool(getattr(module, "_forward_pre_hooks", True))


class NotTorchsAttention:
    """A layer in whose place torch's encoder does not run its own kernel, by what the
    encoder asks first. A torch that asks otherwise sees that weights are of a subclass.
    """

    _qkv_same_embed_dim = False
