"""What the explorer's controls say, and what it means: a pattern, a call, and one line where it means nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from ... import block_patterns, cost, patterns, ring

DTYPES = ("float32", "bfloat16", "float16", "float64")
PASSES = tuple(cost.PASSES)
SCHEMES = ("auto", *ring.SCHEMES)
LAYOUTS = ("contiguous", "zigzag", "striped")
# Presets of ``ringlab.blocks`` by name: the function, and the controls that are its arguments.
PRESETS = {
    "sliding window": ("sliding_window", ("window",)),
    "local and global": ("local_global", ("window", "global_blocks")),
    "BigBird": ("bigbird", ("window", "global_blocks", "random_blocks")),
    "hierarchical": ("hierarchical", ("levels",)),
}
# Each pattern with the controls that it has of its own.
KINDS = {"dilated": ("lengths", "rates", "mixing", "offsets"), "dense": ()}
KINDS |= {name: ("block_size", *arguments) for name, (_, arguments) in PRESETS.items()}
# What is counted and drawn while one waits.
MOST_POSITIONS, MOST_RANKS, MOST_HEADS, MOST_BRANCHES = 2**30, 64, 1024, 10
MOST_BLOCKS = 1024
SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Choice:
    """The controls by name, text as it was typed; ``pattern`` and ``call`` raise ValueError for what cannot be.

    >>> Choice(lengths="2K 4K", rates="1, 2", seq_len="128K").pattern
    Dilated(segment_lengths=(2048, 4096), dilation_rates=(1, 2), mixing='lse', offsets='head')
    """

    kind: str = "dilated"
    lengths: str = "2048, 4096, 8192"
    rates: str = "1, 2, 4"
    mixing: str = "lse"
    offsets: str = "head"
    block_size: int = 128
    window: int = 2
    global_blocks: int = 1
    random_blocks: int = 2
    levels: str = "1 x 2, 8 x 32"
    seq_len: str = "8192"
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    causal: bool = False
    passes: str = "fwd"
    ranks: int = 1
    scheme: str = "auto"
    layout: str = "contiguous"
    profile: str = "cpu"
    head: int = 0  # the one that is drawn
    at: str = "0"  # from where on it is drawn position by position

    @property
    def n(self) -> int:
        """The sequence length, whose text may end in K, M or G (of 1024)."""
        n = one("sequence length", self.seq_len)
        if not 1 <= n <= MOST_POSITIONS:
            raise ValueError(f"sequence length must be in 1 .. {MOST_POSITIONS:,} (1G), got {n:,}")
        return n

    @property
    def start(self) -> int:
        """The first position that is drawn by itself."""
        return one("position", self.at)

    @property
    def pattern(self) -> patterns.Pattern:
        """The pattern alone, whatever the length."""
        if self.kind not in KINDS:
            raise ValueError(f"unknown pattern {self.kind!r}; known: {', '.join(KINDS)}")
        if self.kind == "dense":
            return patterns.Dense()
        if self.kind == "dilated":
            lengths, rates = counts("segment lengths", self.lengths), counts("dilation rates", self.rates)
            return patterns.Dilated(lengths, rates, self.mixing, self.offsets)
        function, arguments = self.preset
        return getattr(block_patterns, function)(*arguments, block_size=self.block_size)

    @property
    def preset(self) -> tuple[str, list]:
        """The function of ``ringlab.blocks`` that makes a block-sparse pattern, and its arguments."""
        function, names = PRESETS[self.kind]
        return function, [pairs("levels", self.levels) if x == "levels" else getattr(self, x) for x in names]

    @property
    def call(self) -> dict:
        """Everything that ``ringlab.estimate`` takes besides the pattern and the profile, checked."""
        for name in ("batch", "heads", "kv_heads", "head_dim", "ranks"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, got {getattr(self, name)!r}")
        for name, most in (("ranks", MOST_RANKS), ("heads", MOST_HEADS)):
            if getattr(self, name) > most:
                raise ValueError(f"{getattr(self, name)} {name} are too many to draw; up to {most} are")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of K/V heads, got {self.heads} and {self.kv_heads}")
        n, shared = self.n, ("batch", "heads", "kv_heads", "head_dim", "causal", "passes")
        if self.ranks > n:
            raise ValueError(f"{self.ranks} ranks are more than the sequence's {n} positions")
        check_countable(self.pattern, n)
        across = {"ranks": self.ranks, "scheme": self.scheme, "layout": self.layout} if self.ranks > 1 else {}
        found = {name: getattr(self, name) for name in shared} | across
        return found | {"seq_len": n, "dtype": getattr(torch, self.dtype)}


def counts(name: str, text: str) -> list[int]:
    """The integers of a text, apart by commas, spaces or both; K, M and G are powers of 1024.

    >>> counts("segment lengths", "2048, 4K 8_192")
    [2048, 4096, 8192]
    """
    words = text.replace(",", " ").strip("[]() ").split()
    found = [re.fullmatch(r"(\d+(?:_\d+)*)([KMG]?)", word, re.IGNORECASE) for word in words]
    if not words or None in found:
        wrong = f"not {words[found.index(None)]!r}" if words else "and there is none"
        raise ValueError(f"{name} must be positive integers, as 2048, 4096 or 2K 4K, {wrong}")
    return [int(m[1]) * SIZES[m[2].upper()] for m in found]


def one(name: str, text: str) -> int:
    """The only integer of a text."""
    found = counts(name, text)
    if len(found) != 1:
        raise ValueError(f"{name} must be one number, as 8192 or 128K, got {text!r}")
    return found[0]


def pairs(name: str, text: str) -> list[tuple[int, int]]:
    """The pairs of a text, as (stride, reach) in blocks.

    >>> pairs("levels", "1 x 2, 8 x 32")
    [(1, 2), (8, 32)]
    """
    found = [re.fullmatch(r"(\d+)\s*[x:×]\s*(\d+)", word.strip()) for word in text.split(",")]
    if None in found:
        raise ValueError(f"{name} must be stride x reach in blocks, as 1 x 2, 8 x 32; got {text!r}")
    return [(int(m[1]), int(m[2])) for m in found]


def check_countable(pattern: patterns.Pattern, n: int) -> None:
    """Raise ValueError in one line for a pattern whose pairs over ``n`` positions take long to count or to draw."""
    if isinstance(pattern, patterns.BlockSparse):
        if pattern.count(n) > MOST_BLOCKS:
            least = -(-n // MOST_BLOCKS)
            raise ValueError(
                f"{n:,} positions are {pattern.count(n):,} blocks of {pattern.block_size}, too many to count here: "
                f"take blocks of at least {least}, or a shorter sequence"
            )
        return
    if isinstance(pattern, patterns.Dilated) and pattern.mixing == "head_groups":
        return  # a head runs one branch
    branches = pattern.branches(n, 1)
    if len(branches) > MOST_BRANCHES:
        raise ValueError(f"{len(branches)} branches are too many to draw; up to {MOST_BRANCHES} are")
    cost.check_countable(pattern, n)
