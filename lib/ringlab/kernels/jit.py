"""Launches of compiled Triton kernels, without what Triton repeats at each call."""

from __future__ import annotations

from torch import Tensor

# Bytes: Triton compiles anew for addresses that are no multiples of these, and tensor
# descriptors require them.
ALIGNED = 16


def launch(
    kernel,
    compiled: dict,
    programs: int,
    arguments: tuple,
    constants: dict,
    **options,
) -> None:
    """Launch ``programs`` programs of a kernel: ``arguments`` (tensors, tuples of them,
    descriptors, numbers) and ``constants`` are all of its signature, in its order;
    ``options`` are those of the compiler.

    The first call of Triton's own ``kernel[grid](...)`` binds and compiles (50 to 100
    us when it is compiled already); what it returns is kept in ``compiled`` and
    launched directly (10 us). Give one ``compiled`` to calls that differ in nothing but
    floats and tensors of the same dtypes; their addresses are looked at here.
    """
    grid = (programs, 1, 1)
    aligned = tuple(
        t.data_ptr() % ALIGNED == 0
        for argument in arguments
        for t in (argument if isinstance(argument, tuple) else (argument,))
        if isinstance(t, Tensor)
    )
    if (binary := compiled.get(aligned)) is not None:
        binary[grid](*arguments, *constants.values())
    else:  # None where Triton interprets
        compiled[aligned] = kernel[grid](*arguments, **constants, **options)
