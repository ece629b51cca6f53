"""Checks of arguments that many rooms make, each of them one clear line of ValueError or TypeError."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Sequence

import torch

LARGEST = 2**40  # beyond any sequence, and strides still fit 64 bits
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def is_int(value, least: int = 1) -> bool:
    """Whether a value is an integer from ``least`` up; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_real(value) -> bool:
    """Whether a value is a real number, NumPy's too; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def as_int(value):
    """NumPy's integer as Python's, anything else as it is."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value


def check_int(name: str, value, least: int = 1, most: int | None = None) -> int:
    """``value``, where it is an integer from ``least``, 0 or 1, up to ``most``, a power of two; else ValueError."""
    if not is_int(value, least) or (most is not None and value > most):
        wanted = "a positive integer" if least else "an integer of at least 0"
        limit = "" if most is None else f" up to 2**{most.bit_length() - 1}"
        raise ValueError(f"{name} must be {wanted}{limit}, got {short_repr(value)}")
    return value


def check_ints(name: str, values) -> tuple[int, ...]:
    """The integers of a list, NumPy's as Python's; ValueError for none, and for one that is not positive."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise ValueError(f"{name} must be a list of positive integers, got {short_repr(values)}")
    if not values:
        raise ValueError(f"{name} is empty")
    found = []
    for x in values:
        try:
            found.append(0 if isinstance(x, bool) else operator.index(x))  # numpy's integers too
        except TypeError:
            found.append(0)
        if not 1 <= found[-1] <= LARGEST:
            raise ValueError(f"{name} must hold positive integers up to 2**40, got {short_repr(x)}")
    return tuple(found)


def check_bool(name: str, value) -> None:
    """Raise TypeError for a switch that is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {short_repr(value)}")


def check_choice(name: str, value, names: Iterable[str]) -> None:
    """Raise ValueError for a value that is none of the ``names``."""
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"unknown {name} {short_repr(value)}; known: {', '.join(names)}")


def check_float_dtype(value) -> None:
    """Raise ValueError for what is no dtype that attention runs in."""
    if not isinstance(value, torch.dtype) or value not in FLOATS:
        raise ValueError(f"dtype must be float64, float32, bfloat16 or float16, got {short_repr(value)}")


def check_one_device(scheme, layout) -> None:
    """Raise ValueError for a scheme or a layout, which are for several ranks."""
    for given, usual in ((scheme, "auto"), (layout, "contiguous")):
        if not isinstance(given, str) or given != usual:
            raise ValueError("scheme and layout are for several ranks: give a group, or ringlab.Simulated(p)")


def check_backend(value) -> str | tuple[str, ...]:
    """The name of a kernel, or those to try in order; ValueError for what is no name and no tuple or list of them."""
    if not isinstance(value, str | tuple | list) or not value or not all(isinstance(name, str) for name in value):
        raise ValueError(f"backend must be a name or a tuple of names, got {short_repr(value)}")
    return value if isinstance(value, str) else tuple(value)


def tensor_bytes(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Size, torch.device, int]:
    """The shape and device of a tensor to make, as torch's own, and its bytes; ValueError for a negative size."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, as torch.float32, got {short_repr(dtype)}")
    try:
        shape = torch.Size(shape)
    except (TypeError, OverflowError):
        raise TypeError(f"a shape must be a sequence of integers, got {short_repr(shape)}") from None
    if any(size < 0 for size in shape):
        raise ValueError(f"sizes of a tensor must be >= 0, got {tuple(shape)}")
    return shape, check_device(device), math.prod(shape) * dtype.itemsize


def check_device(device: torch.device | str) -> torch.device:
    """``torch.device(device)``; ValueError in one line for what is none."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        wanted = "device must be a torch.device or its name, as 'cpu' or 'cuda:0'"
        raise ValueError(f"{wanted}, got {short_repr(device)}") from None


def short_repr(value) -> str:
    """A value of any kind and size, as a message of one line shows it.

    >>> shown(torch.eye(2)), len(shown(list(range(2000))))
    ('tensor([[1., 0.], [0., 1.]])', 100)
    """
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an integer of thousands of digits
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= 100 else f"{text[:97]}..."
