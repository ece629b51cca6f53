"""Checks of arguments that several modules share. Each raises ValueError or TypeError
with a message of one line.
"""

from __future__ import annotations

import numbers
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from inspect import signature

import torch

from .torch_private import is_wrapper, is_zero, refuse_tracing

LARGEST = 2**40  # beyond any sequence, and strides still fit 64 bits
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
SHORT = {
    "fp64": "float64",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}
COUNTS = {
    "": 1,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
}
BYTES = {
    f"{name}{unit}": base ** (i + 1)
    for i, name in enumerate("KMGT")
    for unit, base in (("IB", 1024), ("B", 1000))
}

Backend = str | tuple[str, ...]
Device = torch.device | str


def as_int(value) -> int | None:
    """An integer of Python, NumPy or torch as Python's; None for anything else,
    booleans included.
    """
    if isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool:
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def is_int(value, least: int = 1) -> bool:
    """Whether ``value`` is an integer of at least ``least``; booleans are not."""
    number = as_int(value)
    return number is not None and number >= least


def is_real(value) -> bool:
    """Whether ``value`` is a real number of Python or NumPy; booleans are not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_int(name: str, value, least: int = 1, most: int | None = None) -> int:
    """``value`` as a Python integer; ValueError if it is none, or outside [least,
    most].

    ``least`` is 0 or 1, ``most`` a power of two.

    >>> check_int("seed", 0, least=0)
    0
    """
    number = as_int(value)
    if number is None or number < least or (most is not None and number > most):
        expected = "a positive integer" if least else "an integer of at least 0"
        limit = "" if most is None else f" up to 2**{most.bit_length() - 1}"
        raise ValueError(f"{name} must be {expected}{limit}, got {short_repr(value)}")
    return number


def check_ints(name: str, values) -> tuple[int, ...]:
    """A list of positive integers as a tuple of Python's; ValueError if it is empty or
    holds anything else.
    """
    if (
        not isinstance(values, Sequence)
        or isinstance(values, str | bytes)
        or not values
    ):
        raise ValueError(
            f"{name} must be a list of positive integers, got {short_repr(values)}"
        )
    return tuple(check_int(f"each of {name}", value, most=LARGEST) for value in values)


def check_bool(name: str, value) -> None:
    """Raise TypeError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {short_repr(value)}")


def check_arguments(name: str, call: Callable, /, *args, **options) -> None:
    """Raise TypeError unless ``call`` takes these arguments; it lists those it takes."""
    try:
        signature(call).bind(*args, **options)
    except TypeError as error:
        known = ", ".join(signature(call).parameters)
        raise TypeError(f"{name}: {error}; it takes {known}") from None


def check_unknown(
    owner: str,
    arguments: dict,
    reasons: dict[str, str],
    otherwise: str = "unknown argument",
) -> None:
    """Raise TypeError for arguments that ``owner`` does not take, with the reason if
    there is one, or ``otherwise``.

    A dropout of 0 and a known argument that is None are accepted, since they change
    nothing.
    """
    for name, value in arguments.items():
        if not ("dropout" in name and value == 0 or name in reasons and value is None):
            raise TypeError(
                f"{owner} cannot honour {name!r}: {reasons.get(name, otherwise)}"
            )


def check_choice(name: str, value, names: Iterable[str]) -> None:
    """Raise ValueError unless ``value`` is one of the ``names``."""
    if not isinstance(value, str) or value not in names:
        raise ValueError(
            f"unknown {name} {short_repr(value)}; known: {', '.join(names)}"
        )


def check_plain(name: str, t: torch.Tensor) -> None:
    """Raise ValueError in one line unless t is strided and has memory of its own: zero
    tensors of torch and subclasses that wrap others have none. Fake ones count as plain.

    Raises NotImplementedError under ``torch.jit.trace``.
    """
    kind = None
    if t.layout != torch.strided or t.is_nested:
        kind = f"{'nested' if t.is_nested else t.layout} one"
    elif not torch.compiler.is_compiling():
        refuse_tracing()
        if is_zero(t):
            kind = "zero tensor of torch, without memory: take its clone()"
        elif is_wrapper(t):
            local = "its to_local()" if hasattr(t, "to_local") else "what it wraps"
            kind = f"{type(t).__name__}, which wraps another tensor: take {local}"
    if kind is not None:
        raise ValueError(f"{name} must be a plain tensor, got a {kind}")


def check_floats(name: str, t, axes: str, shape: tuple[int, ...], device) -> None:
    """Raise ValueError in one line unless t is a tensor of floats of this shape, whose
    ``axes`` are named, on the device.
    """
    got = type(t).__name__
    if isinstance(t, torch.Tensor):
        check_plain(name, t)
        if t.dtype in FLOATS and (t.shape, t.device) == (shape, device):
            return
        got = f"{tuple(t.shape)}, {t.dtype} on {t.device}"
    wanted = f"{name} must be {axes} = {tuple(shape)}, floats on {device}"
    raise ValueError(f"{wanted}; got {got}")


def check_float_dtype(value) -> None:
    """Raise ValueError unless ``value`` is a dtype that attention supports."""
    if not isinstance(value, torch.dtype) or value not in FLOATS:
        raise ValueError(
            f"dtype must be float64, float32, bfloat16 or float16, got {short_repr(value)}"
        )


def check_backend(value) -> Backend:
    """The name of a kernel, also of a list of one, or a tuple of names to try in order;
    ValueError for anything but a name or a list.
    """
    if (
        not isinstance(value, str | tuple | list)
        or not value
        or not all(isinstance(name, str) for name in value)
    ):
        raise ValueError(
            f"backend must be a name or a tuple of names, got {short_repr(value)}"
        )
    if isinstance(value, str):
        return value
    return value[0] if len(value) == 1 else tuple(value)


def as_device(device: Device) -> torch.device:
    """``torch.device(device)``, whether it is here or not; ValueError in one line for
    what names none.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        expected = "device must be a torch.device or its name, as 'cpu' or 'cuda:0'"
        raise ValueError(f"{expected}, got {short_repr(device)}") from None


def check_device(device: Device) -> torch.device:
    """``torch.device(device)``, which torch can use here; else ValueError in one line."""
    result = as_device(device)
    if result.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device is {str(result)!r}, but torch finds no GPU here")
        if (result.index or 0) >= (count := torch.cuda.device_count()):
            raise ValueError(f"device is {str(result)!r}, but torch finds {count} GPUs")
    elif result.type not in ("cpu", "meta"):
        try:  # whether torch was built for it, and finds one
            torch.empty(0, device=result)
        except (RuntimeError, AssertionError, ImportError):
            raise ValueError(f"torch cannot use {str(result)!r} here") from None
    return result


def short_repr(value) -> str:
    """``repr(value)`` on one line, cut to 100 characters, for error messages.

    >>> short_repr(torch.eye(2)), len(short_repr(list(range(2000))))
    ('tensor([[1., 0.], [0., 1.]])', 100)
    """
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an integer of thousands of digits
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= 100 else f"{text[:97]}..."


def _number(text: str, units: dict[str, int], expected: str) -> int:
    """The whole number in ``text`` times its unit, bytes rounded down; ValueError names
    what is ``wanted``.
    """
    number = r"(\d[\d_]{0,399}(?:\.\d{1,99})?(?:e\d\d?)?)\s*([a-z]*)"
    match = re.fullmatch(number, text.strip(), re.IGNORECASE)
    if not match or match[2].upper() not in units:
        raise ValueError(f"{expected}, got {short_repr(text)}")
    value = Fraction(match[1].replace("_", "")) * units[match[2].upper()]
    if units is COUNTS and value.denominator > 1:
        raise ValueError(f"{expected}, got {short_repr(text)}")
    return int(value)


def parse_count(text: str, name: str = "it") -> int:
    """An integer as people write it; K, M and G are powers of 1024. ValueError for
    anything else.

    >>> [parse_count(text) for text in ("131072", "128K", "1M", "1e6", "8_192")]
    [131072, 131072, 1048576, 1000000, 8192]
    """
    return _number(
        text, COUNTS, f"{name} must be a whole number, as 131072, 128K, 1M or 1e6"
    )


def parse_counts(text: str, name: str = "each") -> list[int]:
    """The integers of a text, separated by commas or spaces; ValueError for none.

    >>> parse_counts("2048, 4K 8_192")
    [2048, 4096, 8192]
    """
    words = text.replace(",", " ").split()
    return [parse_count(word, name) for word in words or [""]]


def parse_bytes(text: str) -> int:
    """Bytes from a number and its unit: KiB, MiB, GiB, TiB, KB, MB, GB or TB.
    ValueError for anything else, also where there is no unit.

    >>> parse_bytes("80GiB"), parse_bytes("1.5 MB")
    (85899345920, 1500000)
    """
    return _number(text, BYTES, "memory is a number with a unit, as 80GiB or 80GB")


def parse_dtype(text: str) -> torch.dtype:
    """A dtype that attention supports by its name, as bfloat16 or bf16; ValueError for
    another one.
    """
    name = SHORT.get(text, text)
    check_choice("dtype", name, DTYPES)
    return DTYPES[name]
