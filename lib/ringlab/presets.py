"""Patterns by name, as the command line and the explorer know them, and LongNet's ladder."""

from __future__ import annotations

import warnings
from inspect import signature

from .block_patterns import bigbird, local_global, sliding_window
from .checks import LARGEST, check_choice, check_int
from .patterns import Dense, Dilated, Pattern


def ladder(
    seq_len: int, first: int = 2048, heads: int | None = None
) -> Dense | Dilated:
    """LongNet's ladder up to the sequence (Ding et al. 2023, arXiv 2307.02486): segments
    first, 2 first, ... at rates 1, 2, ...; dense, with a warning, where one holds all.

    With ``heads``, no rate is larger than their number: at a rate r head h takes every
    r-th position from h on, so with fewer heads no head would take some of them.

    >>> str(ladder(10000)), str(ladder(2048))
    ('dilated [2048, 4096, 8192, 16384] / [1, 2, 4, 8]', 'dense')
    >>> str(ladder(10000, heads=4))
    'dilated [2048, 4096, 8192, 16384] / [1, 2, 4, 4]'
    """
    seq_len = check_int("seq_len", seq_len, most=LARGEST)
    first = check_int("first", first, most=LARGEST)
    steps = max(0, (-(-seq_len // first) - 1).bit_length())
    if not steps:
        what = f"ladder({seq_len}) is Dense(): one segment of {first} holds all"
        warnings.warn(what, stacklevel=2)
        return Dense()
    most = steps if heads is None else check_int("heads", heads).bit_length() - 1
    segments = [first << i for i in range(steps + 1)]
    return Dilated(segments, [1 << min(i, most) for i in range(steps + 1)])


# Attention layers of models: what differs from 8 heads of 64 that are causal and dense.
SHAPES = {
    "llama3.1 8B": {"heads": 32, "kv_heads": 8, "head_dim": 128},
    "gpt-oss": {"heads": 64, "kv_heads": 8, "pattern": sliding_window(tokens=128)},
    "gemma 3 4B": {
        "kv_heads": 4,
        "head_dim": 256,
        "pattern": sliding_window(tokens=1024),
    },
    "GigaPath": {
        "heads": 16,
        "kv_heads": 16,
        "head_dim": 48,
        "causal": False,
        "pattern": Dilated([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16]),
    },
}

# What makes each named pattern.
NAMED = {
    "dilated": Dilated,
    "dense": Dense,
    "ladder": ladder,
    "window": sliding_window,
    "local_global": local_global,
    "bigbird": bigbird,
}
DEFAULTS = {
    "segment_lengths": (2048, 4096),
    "dilation_rates": (1, 2),
    "before": 2,
    "count": 2,
    "random": 3,
    "block_size": 128,
}


def named(
    name: str, seq_len: int | None = None, heads: int | None = None, **options
) -> Pattern:
    """A pattern by its name in ``NAMED``, with arguments of the function that makes it,
    by default those of ``DEFAULTS``; "ladder" needs ``seq_len`` and takes ``heads``.
    ValueError for an unknown name or an argument that the function does not take.

    >>> print(named("window"), "or", named("ladder", 8192))
    blocks of 128: window 2 or dilated [2048, 4096, 8192] / [1, 2, 4]
    """
    known = arguments(name)
    for option in options:
        if option not in known:
            raise ValueError(f"the pattern {name!r} takes no {option}")
    options = {x: DEFAULTS[x] for x in known if x in DEFAULTS} | options
    if name == "ladder" and seq_len is None:
        raise ValueError("the pattern 'ladder' needs a length: ringlab.ladder(seq_len)")
    return (
        ladder(seq_len, heads=heads, **options)
        if name == "ladder"
        else NAMED[name](**options)
    )


def arguments(name: str) -> list[str]:
    """The arguments that ``named`` takes for a name; ValueError for an unknown one."""
    check_choice("pattern", name, NAMED)
    return [
        x for x in signature(NAMED[name]).parameters if x not in ("seq_len", "heads")
    ]
