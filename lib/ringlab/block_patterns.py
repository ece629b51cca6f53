"""``BlockSparse``, its parts, and functions that make the usual ones: which blocks of
keys each block of queries sees.

The sequence is cut into blocks of ``block_size`` positions; the last one may be short.
A block sees another one whole; ``causal`` cuts the diagonal block exactly. All heads
see the same blocks. A pattern is a union of parts: local, strided, global, random,
hierarchical or given ones. Patterns are values, as in ``patterns``. Some parts depend
on the sequence length, so every method takes it as ``n``.
"""

from __future__ import annotations

import operator
import warnings
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache, partial, reduce
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.nn import functional as F

from .checks import LARGEST, check_bool, check_int, is_int, is_real, short_repr

__all__ = [
    "BlockSparse",
    "Coarse",
    "Given",
    "Global",
    "PerHead",
    "Random",
    "Segment",
    "Strided",
    "Window",
    "bigbird",
    "from_mask",
    "hierarchical",
    "local_global",
    "sliding_window",
]


Fields = dict[str, Any]  # what a pattern is written as: texts, numbers and lists


def __dir__() -> list[str]:
    return __all__


MANY_BLOCKS = 64  # as many by default are 8,192 tokens either way
AT_ONCE = 128  # blocks of queries whose masks are made together
MAY_BE_0 = ("before", "after", "reach", "seed")


class Part:
    """One part of a block-sparse pattern, over ``count`` blocks.

    ``_seen(rows, cols, count)``: which of the blocks of keys ``cols`` (1, c) each block
    of queries ``rows`` (r, 1) sees, bool (r, c). ``_near(first, last, count)``: outside
    of these blocks, a range (start, stop) that may lie beyond the sequence or their
    numbers, the blocks first .. last see nothing.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" or (
                field.type == "int | None" and value is not None
            ):
                name = f"{type(self).__name__} {field.name}"
                least = int(field.name not in MAY_BE_0)
                object.__setattr__(
                    self, field.name, check_int(name, value, least, LARGEST)
                )

    def _near(self, first: int, last: int, count: int) -> tuple[int, int] | Tensor:
        return 0, count


@dataclass(frozen=True)
class Window(Part):
    """The block itself, ``before`` blocks before it and ``after`` blocks after it
    (None: as many).
    """

    before: int
    after: int | None = None

    @property
    def sides(self) -> tuple[int, int]:
        """The blocks before, and those after."""
        return self.before, self.before if self.after is None else self.after

    def _seen(self, rows: Tensor, cols: Tensor, count: int) -> Tensor:
        before, after = self.sides
        return (rows - cols <= before) & (cols - rows <= after)

    def _near(self, first, last, count):
        before, after = self.sides
        return first - before, last + 1 + after

    def __str__(self) -> str:
        return f"window {self.before}" + (
            "" if self.after in (None, self.before) else f" + {self.after}"
        )


@dataclass(frozen=True)
class Strided(Part):
    """Every ``rate``-th block from the block itself on, both ways, ``steps`` of them
    each way (None: to the ends).
    """

    rate: int
    steps: int | None = None

    def _seen(self, rows, cols, count):
        distance = (rows - cols).abs()
        return (distance % self.rate == 0) & (
            distance // self.rate <= (count if self.steps is None else self.steps)
        )

    def _near(self, first, last, count):
        reach = count if self.steps is None else self.rate * self.steps
        return first - reach, last + 1 + reach

    def __str__(self) -> str:
        return f"stride {self.rate}" + (
            "" if self.steps is None else f" x {self.steps}"
        )


@dataclass(frozen=True)
class Segment(Part):
    """Dilated blocks: in each segment of ``length`` blocks, a block sees itself and
    every ``rate``-th one from it.
    """

    length: int
    rate: int = 1

    def _seen(self, rows, cols, count):
        return (rows // self.length == cols // self.length) & (
            (rows - cols) % self.rate == 0
        )

    def _near(self, first, last, count):
        return first // self.length * self.length, (
            last // self.length + 1
        ) * self.length

    def __str__(self) -> str:
        return f"segments of {self.length}" + (
            "" if self.rate == 1 else f" / {self.rate}"
        )


@dataclass(frozen=True)
class Global(Part):
    """The first ``count`` blocks see all blocks (``rows``) and are seen by all
    (``columns``).
    """

    count: int
    rows: bool = True
    columns: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        flags = self.rows, self.columns
        if not all(isinstance(flag, bool) for flag in flags) or not any(flags):
            raise ValueError(
                f"Global: rows, columns or both must be True, the other False, got {short_repr(flags)}"
            )

    def _seen(self, rows, cols, count):
        return ((rows < self.count) & self.rows) | ((cols < self.count) & self.columns)

    def _near(self, first, last, count):
        return (
            0,
            count if self.rows and first < self.count else self.count * self.columns,
        )

    def __str__(self) -> str:
        return f"{self.count} global" + (
            "" if self.rows and self.columns else " rows" if self.rows else " columns"
        )


@dataclass(frozen=True)
class Random(Part):
    """``count`` different blocks drawn for each block: the same for the same seed and
    number of blocks.
    """

    count: int
    seed: int = 0

    def _seen(self, rows, cols, count):
        drawn = _drawn(self.count, count, self.seed)[
            rows.flatten().cpu()
        ]  # (r, self.count)
        numbers, where = cols.flatten().cpu().unique(return_inverse=True)  # (u,), (c,)
        numbers = F.pad(numbers, (0, 1), value=count)
        at = torch.searchsorted(numbers, drawn)
        at = torch.where(numbers[at] == drawn, at, len(numbers) - 1)
        visible = torch.zeros(len(drawn), len(numbers), dtype=torch.bool).scatter_(
            1, at, True
        )
        return visible[:, where].to(rows.device)

    def _near(self, first, last, count):
        return _drawn(self.count, count, self.seed)[first : last + 1].flatten()

    def __str__(self) -> str:
        return f"{self.count} random" + (f" (seed {self.seed})" if self.seed else "")


@lru_cache(maxsize=8)
def _drawn(number: int, blocks: int, seed: int) -> Tensor:
    """For each of ``blocks`` blocks so many different ones, or all there are: (blocks,
    number), ascending.
    """
    number = min(number, blocks)
    few = min(number, blocks - number)  # of many those are drawn that are left out
    draw = partial(torch.randint, blocks, generator=torch.Generator().manual_seed(seed))
    drawn = draw((blocks, few)).sort(1).values
    while (again := drawn.diff(dim=1) == 0).any():  # all sets stay equally likely
        drawn[:, 1:][again] = draw((int(again.sum()),))
        drawn = drawn.sort(1).values
    if few == number:
        return drawn
    return (
        torch.ones(blocks, blocks, dtype=torch.bool)
        .scatter_(1, drawn, False)
        .nonzero()[:, 1]
        .view(blocks, number)
    )


@dataclass(frozen=True)
class Coarse(Part):
    """Blocks whose number is a multiple of ``stride``, up to ``reach`` blocks away: one
    level of a hierarchy.
    """

    stride: int
    reach: int

    def _seen(self, rows, cols, count):
        return (cols % self.stride == 0) & ((rows - cols).abs() <= self.reach)

    def _near(self, first, last, count):
        return first - self.reach, last + 1 + self.reach

    def __str__(self) -> str:
        return f"every {self.stride} within {self.reach}"


@dataclass(frozen=True)
class Given(Part):
    """A mask of blocks, a hexadecimal bit set for each block of queries; made by
    ``from_mask``.
    """

    rows: tuple[str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.rows, tuple) or not all(
            _is_row(row, len(self.rows)) for row in self.rows
        ):
            raise ValueError(
                "Given: rows must be hexadecimal bit sets, one for each block; see blocks.from_mask"
            )

    def _seen(self, rows, cols, count):
        return _bits(self.rows).to(rows.device)[rows.flatten()][:, cols.flatten()]

    def __str__(
        self,
    ) -> str:  # with a checksum, since ranks compare patterns by their text
        return f"a given mask ({crc32(' '.join(self.rows).encode()):08x})"


def _is_row(row, count: int) -> bool:
    digits = isinstance(row, str) and row != "" and set(row) <= set("0123456789abcdef")
    return digits and int(row, 16).bit_length() <= count


@lru_cache(maxsize=8)
def _bits(rows: tuple[str, ...]) -> Tensor:
    return torch.tensor(
        [[c == "1" for c in f"{int(row, 16):0{len(rows)}b}"] for row in rows]
    )  # (count, count)


PARTS = {
    kind.__name__.lower(): kind
    for kind in (Window, Strided, Segment, Global, Random, Coarse, Given)
}


def part_from_dict(data: dict) -> Part:
    """The part that ``BlockSparse.to_dict`` wrote as a dict; ValueError for anything
    else.
    """
    name = data.get("part") if isinstance(data, dict) else None
    if not isinstance(name, str) or name not in PARTS:
        raise ValueError(
            f"unknown part of a block-sparse pattern: {short_repr(data)}; known: {', '.join(PARTS)}"
        )
    try:
        return PARTS[name](
            **{
                k: tuple(v) if isinstance(v, list) else v
                for k, v in data.items()
                if k != "part"
            }
        )
    except TypeError as error:  # for fields that are missing or unknown
        raise ValueError(
            f"no part of a block-sparse pattern: {short_repr(data)}: {error}"
        ) from None


def block_count(n: int, block_size: int) -> int:
    """The number of blocks of ``n`` positions, the last of which may be short."""
    return -(-check_int("the sequence length", n, most=LARGEST) // block_size)


@dataclass(frozen=True)
class BlockSparse:
    """A union of parts: M is 1 where a part shows the query's block the key's block,
    else 0, for every head.

    ``a | b`` is the union of two patterns of one block size. A sequence may be shorter
    than a block, and have fewer blocks than a part asks for: these are then all of
    them. Raises ValueError for a block size below 1 or no part; and, once n is known,
    for a given mask of another length.

    >>> pattern = BlockSparse([Window(1), Global(1)], block_size=64)
    >>> pattern.blocks(256).int().tolist()
    [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 1]]
    >>> pattern.density(256), pattern.density(256, causal=True)
    (0.875, 0.439453125)
    """

    parts: tuple[Part, ...]
    block_size: int = 128

    def __post_init__(self) -> None:
        if not isinstance(self.parts, list | tuple) or not self.parts:
            raise ValueError(
                f"parts must be a list of parts, as [Window(1)], got {short_repr(self.parts)}"
            )
        for part in self.parts:
            if type(part) not in PARTS.values():
                known = ", ".join(kind.__name__ for kind in PARTS.values())
                raise ValueError(
                    f"a part must be one of {known}, no subclass, got {short_repr(part)}"
                )
        object.__setattr__(self, "parts", tuple(dict.fromkeys(self.parts)))
        object.__setattr__(
            self, "block_size", check_int("block_size", self.block_size, most=LARGEST)
        )

    def __or__(self, other: BlockSparse) -> BlockSparse:
        if not isinstance(other, BlockSparse):
            return NotImplemented
        if self.block_size != other.block_size:
            raise ValueError(
                f"a union needs one block size, got {self.block_size} and {other.block_size}"
            )
        return BlockSparse(self.parts + other.parts, self.block_size)

    def count(self, n: int) -> int:
        """The number of blocks of ``n`` positions; ValueError where a given mask has
        another number.
        """
        count = block_count(n, self.block_size)
        for part in self.parts:
            if isinstance(part, Given) and len(part.rows) != count:
                way = "from_mask(mask, block_size=1) takes a mask of tokens"
                raise ValueError(
                    f"the mask given is of {len(part.rows)} blocks, n = {n} has {count}; {way}"
                )
        return count

    def blocks(
        self, n: int, queries: Tensor | None = None, keys: Tensor | None = None
    ) -> Tensor:
        """Which of the blocks ``keys`` the blocks ``queries`` see, bool (queries,
        keys), without ``causal``.

        Both are numbers of blocks in any order (default: all).
        """
        count = self.count(n)
        rows, cols = (
            torch.arange(count) if numbers is None else numbers
            for numbers in (queries, keys)
        )
        return reduce(
            operator.or_,
            (part._seen(rows[:, None], cols[None, :], count) for part in self.parts),
        )

    def near(self, queries: Tensor, n: int) -> Tensor:
        """Numbers of blocks (c,), ascending, outside of which the blocks ``queries``
        (q,) see nothing.

        The first block of every gap is among them, so two neighbours in this list that
        are both seen are neighbours in the sequence.
        """
        count = self.count(n)
        if not len(queries):
            return queries
        # Of runs of neighbours.
        ends = F.pad(queries.diff() != 1, (1, 1), value=True).nonzero().flatten()
        runs = zip(queries[ends[:-1]].tolist(), queries[ends[1:] - 1].tolist())
        ranges = [
            part._near(first, last, count)
            for first, last in runs
            for part in self.parts
        ]
        ranges = [
            x if isinstance(x, Tensor) else torch.arange(max(0, x[0]), min(count, x[1]))
            for x in ranges
        ]
        near = torch.cat(ranges)
        near = torch.cat([near, near + 1]).unique()
        return near[near < count]

    def chunks(self, n: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield blocks of queries (r,), the blocks of keys near them (c,), and which
        they see, bool (r, c).
        """
        count = self.count(n)
        for rows in torch.arange(count).split(AT_ONCE):
            cols = self.near(rows, n)
            yield rows, cols, self.blocks(n, rows, cols)

    def seen(self, n: int) -> tuple[Tensor, Tensor]:
        """The block of queries and the block of keys, each (pairs,), of every pair that
        is seen, by queries.
        """
        pairs = []
        for rows, cols, seen in self.chunks(n):
            row, col = seen.nonzero(as_tuple=True)
            pairs.append((rows[row], cols[col]))
        return tuple(map(torch.cat, zip(*pairs)))

    def multiplicity(
        self,
        queries: Tensor,
        keys: Tensor,
        *,
        n: int,
        head: int,
        heads: int,
        kv_heads: int | None = None,
    ) -> Tensor:
        """M for global positions ``queries`` (q,) and ``keys`` (k,) of ``n``, as int64
        (q, k).
        """
        (rows, row), (cols, col) = (
            (x // self.block_size).unique(return_inverse=True) for x in (queries, keys)
        )
        return self.blocks(n, rows, cols)[row][:, col].long()

    def reach(self, first: int, last: int, n: int) -> tuple[int, int]:
        """Key positions [start, stop) outside of which the queries first .. last see
        nothing.
        """
        rows = torch.arange(first // self.block_size, last // self.block_size + 1)
        cols = self.near(rows, n)
        seen = cols[self.blocks(n, rows, cols).any(0)]
        if not len(seen):
            return first, first
        return int(seen[0]) * self.block_size, min(
            n, (int(seen[-1]) + 1) * self.block_size
        )

    def fewest_keys(self, n: int, heads: int, kv_heads: int | None = None) -> int:
        """The fewest keys that a query sees, of those queries that see any."""
        counts = torch.cat([seen.sum(1) for *_, seen in self.chunks(n)])
        return (
            min(n, self.block_size * int(counts[counts > 0].min()))
            if counts.any()
            else 1
        )

    def pairs(self, n: int, causal: bool = False) -> int:
        """Visible (query, key) pairs of one head.

        >>> BlockSparse([Window(0)], 4).pairs(10, causal=True)  # blocks of 4, 4 and 2 positions
        23
        """
        check_bool("causal", causal)
        count, n = self.count(n), int(n)
        if (window := window_of_tokens(self, causal)) is not None:
            reached = (min(side, n - 1) for side in window)
            return n + sum(far * n - far * (far + 1) // 2 for far in reached)
        lengths = torch.full((count,), self.block_size)
        lengths[-1] = n - (count - 1) * self.block_size
        total = 0
        missing = self.block_size - int(lengths[-1])
        for rows, cols, seen in self.chunks(n):
            if causal:
                seen = seen & (cols <= rows[:, None])
                own_lengths = lengths[rows][
                    (seen & (cols == rows[:, None])).any(1)
                ]  # of blocks that see themselves
                total -= int((own_lengths * (own_lengths - 1) // 2).sum())
            short = seen[:, cols == count - 1].sum(1)
            total += int(
                (
                    lengths[rows] * (seen.sum(1) * self.block_size - short * missing)
                ).sum()
            )
        return total

    def density(self, n: int, causal: bool = False) -> float:
        """Visible pairs over n^2."""
        return self.pairs(n, causal) / int(n) ** 2

    def with_density(self, density: float, n: int, causal: bool = False) -> BlockSparse:
        """The pattern with its window, or else its random blocks, resized to come
        nearest to ``density``.

        The other parts stay as they are, so the density may not be reached. Raises
        ValueError for a density outside (0, 1] or a pattern that has neither, or
        several of them.

        >>> found = local_global(1, 4, block_size=128).with_density(0.1, 16384)
        >>> found.parts[0], round(found.density(16384), 3)
        (Window(before=2, after=None), 0.099)
        """
        if not is_real(density) or not 0 < density <= 1:
            raise ValueError(f"density must be in (0, 1], got {short_repr(density)}")
        windows, random = (
            [p for p in self.parts if isinstance(p, kind)] for kind in (Window, Random)
        )
        if len(windows or random) != 1:
            raise ValueError(
                f"{self} must have one window, or none and one part of random blocks, to solve for"
            )
        [part] = windows or random
        names = ["count"]
        least = 1
        if windows:  # one on one side stays there
            sides = {"before": part.before > 0 or not part.after, "after": part.after}
            names = [name for name, there in sides.items() if there]
            least = 0

        def sized(size: int) -> BlockSparse:
            grown = replace(part, **dict.fromkeys(names, size))
            return replace(
                self, parts=tuple(grown if p is part else p for p in self.parts)
            )

        sizes = range(self.count(n))
        enough = bisect_left(
            sizes, density, lo=least, key=lambda size: sized(size).density(n, causal)
        )
        near = [sized(size) for size in (enough - 1, enough) if size >= least]
        return min(near, key=lambda p: abs(p.density(n, causal) - density))

    def to_dict(self) -> Fields:
        parts = [{"part": type(p).__name__.lower()} | asdict(p) for p in self.parts]
        parts = [
            {k: list(v) if isinstance(v, tuple) else v for k, v in part.items()}
            for part in parts
        ]
        return {"kind": "block_sparse", "parts": parts, "block_size": self.block_size}

    def __str__(self) -> str:
        return f"blocks of {self.block_size}: {', '.join(map(str, self.parts))}"


def window_of_tokens(pattern: BlockSparse, causal: bool) -> tuple[int, int] | None:
    """Return how many tokens before and after itself a query sees, of a window of tokens;
    None for another pattern.
    """
    part = pattern.parts[0]
    if len(pattern.parts) > 1 or pattern.block_size > 1 or not isinstance(part, Window):
        return None
    before, after = part.sides
    return before, 0 if causal else after


@dataclass(frozen=True)
class PerHead:
    """A block-sparse pattern for each query head, for ``attention`` without a cache;
    made by ``from_mask``.

    Heads of one pattern are computed together.
    """

    patterns: tuple[BlockSparse, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.patterns, tuple) or not all(
            isinstance(p, BlockSparse) for p in self.patterns
        ):
            raise ValueError(
                f"PerHead takes a tuple of block-sparse patterns, got {short_repr(self.patterns)}"
            )

    def multiplicity(
        self,
        queries: Tensor,
        keys: Tensor,
        *,
        n: int,
        head: int,
        heads: int,
        kv_heads: int | None = None,
    ) -> Tensor:
        """M of one head, as int64 (q, k)."""
        return self.patterns[head].multiplicity(
            queries, keys, n=n, head=head, heads=heads
        )

    def heads(self) -> dict[BlockSparse, list[int]]:
        """The query heads of each pattern."""
        heads: dict[BlockSparse, list[int]] = {}
        for head, pattern in enumerate(self.patterns):
            heads.setdefault(pattern, []).append(head)
        return heads

    def __str__(self) -> str:
        return f"by head: {'; '.join(map(str, self.patterns))}"


def sliding_window(
    before: int | None = None,
    *,
    tokens: int | None = None,
    block_size: int | None = None,
) -> BlockSparse:
    """A sliding window of ``before`` blocks either way, or of ``tokens``, exactly.

    By blocks a query sees (2 before + 1) * block_size positions; ``block_size`` is 128
    unless given. By tokens it sees the keys at a distance below ``tokens`` on either
    side; with ``causal`` itself and the tokens - 1 before it, as ``sliding_window`` of
    transformers and ``window_size=(tokens - 1, 0)`` of flash-attn mean it. Blocks of
    128 run faster.

    Raises ValueError unless one of both is given, and for a block size beside tokens.
    Warns where ``before`` is 64 or more and no block size is given, since tokens were
    probably meant.

    >>> print(sliding_window(2), "or", sliding_window(tokens=257))
    blocks of 128: window 2 or blocks of 1: window 256
    """
    if (before is None) == (tokens is None) or (
        before is None and block_size is not None
    ):
        raise ValueError("give before, with a block_size, or tokens, without one")
    if before is None:
        return BlockSparse([Window(check_int("tokens", tokens, most=LARGEST) - 1)], 1)
    if block_size is None and is_int(before, MANY_BLOCKS):
        meant = f"tokens={before} is a window of {before} tokens"
        warnings.warn(
            f"sliding_window({before}) is of {before} blocks of 128 tokens; {meant}",
            stacklevel=2,
        )
    return BlockSparse([Window(before)], 128 if block_size is None else block_size)


def local_global(
    before: int = 2, count: int = 2, *, block_size: int = 128
) -> BlockSparse:
    """A sliding window and global blocks: Longformer (Beltagy et al. 2020, arXiv
    2004.05150) in blocks.
    """
    return BlockSparse([Window(before), Global(count)], block_size)


def bigbird(
    before: int = 2,
    count: int = 2,
    random: int = 3,
    *,
    seed: int = 0,
    block_size: int = 64,
) -> BlockSparse:
    """Window, global and random blocks (Zaheer et al. 2020, arXiv 2007.14062)."""
    return BlockSparse(
        [Window(before), Global(count), Random(random, seed)], block_size
    )


def hierarchical(
    levels: list[tuple[int, int]], *, block_size: int = 128
) -> BlockSparse:
    """Fine near and coarse far: for each (stride, reach) the blocks at multiples of
    stride within reach, and itself.

    >>> hierarchical([(1, 1), (4, 8)], block_size=16).blocks(256)[9].nonzero().flatten().tolist()
    [4, 8, 9, 10, 12]
    """
    if not isinstance(levels, list | tuple) or not all(
        isinstance(x, list | tuple) and len(x) == 2 for x in levels
    ):
        raise ValueError(
            f"levels must be a list of (stride, reach), as [(1, 2), (8, 32)], got {short_repr(levels)}"
        )
    return BlockSparse(
        [Window(0), *(Coarse(stride, reach) for stride, reach in levels)], block_size
    )


def from_mask(
    mask: Tensor, *, block_size: int = 128, causal: bool = False
) -> BlockSparse | PerHead:
    """The pattern of a mask of blocks, queries by keys: bool (blocks, blocks), or
    (heads, blocks, blocks).

    Or of a ``BlockMask`` of FlexAttention, which has its own block size; it is for one
    batch entry. A pattern shows blocks whole, so its ``mask_mod`` is called for the
    blocks that it may cut. Give ``causal=True``, here and to ``attention``, for a mask
    that also hides later keys.

    With ``block_size=1`` it is a mask of tokens. ValueError for anything else, and for
    a block that is cut in another way: use smaller blocks, ``sliding_window(tokens=)``
    for a window, or ``cu_seqlens`` for documents.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> window = create_block_mask(lambda b, h, q, k: (q >= k) & (q // 16 - k // 16 < 2), None, None, 64, 64, "cpu", 16)
    >>> from_mask(window, causal=True).blocks(64).int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    check_bool("causal", causal)
    if hasattr(mask, "mask_mod"):
        mask, block_size = _blocks_of(mask, causal)
    elif causal:
        raise ValueError(
            "a mask of blocks is not causal itself: give causal=True to attention alone"
        )
    got = type(mask).__name__
    # A nested tensor has no shape.
    if plain := isinstance(mask, Tensor) and not mask.is_nested:
        got += f" of {mask.dtype}, shape {tuple(mask.shape)}, {mask.layout} on {mask.device}"
        plain = (
            mask.dtype == torch.bool
            and mask.layout == torch.strided
            and not mask.is_meta
        )
    if (
        not plain
        or mask.dim() not in (2, 3)
        or not mask.shape[-2] == mask.shape[-1] > 0
        or not len(mask)
    ):
        expected = "a square bool tensor (blocks, blocks) of at least one block, neither nested, sparse nor meta"
        raise ValueError(f"a mask of blocks must be {expected}, got {got}")
    each = mask if mask.dim() == 3 else mask[None]
    rows = [
        tuple(f"{int(''.join('01'[x] for x in row), 2):x}" for row in head)
        for head in each.tolist()
    ]
    patterns = tuple(BlockSparse([Given(row)], block_size) for row in rows)
    return patterns[0] if len(set(patterns)) == 1 else PerHead(patterns)


def _blocks_of(mask, causal: bool) -> tuple[Tensor, int]:
    """Which blocks a BlockMask shows, bool (heads, blocks, blocks), and their size."""
    (size, across), (n, keys) = mask.BLOCK_SIZE, mask.seq_lengths
    if size != across or n != keys or len(mask.kv_num_blocks) != 1:
        got = f"blocks of {mask.BLOCK_SIZE}, lengths {mask.seq_lengths}, {len(mask.kv_num_blocks)} entries"
        raise ValueError(
            f"a BlockMask must have square blocks, q and k of one length and one batch entry, got {got}"
        )

    def dense(numbers: Tensor, indices: Tensor) -> Tensor:  # (heads, blocks, blocks)
        blocks = type(mask).from_kv_blocks(numbers, indices, BLOCK_SIZE=size)
        return blocks.to_dense()[0].bool().cpu()

    cut = dense(mask.kv_num_blocks, mask.kv_indices)
    seen = torch.zeros_like(cut)
    if mask.full_kv_num_blocks is not None:
        seen = dense(mask.full_kv_num_blocks, mask.full_kv_indices)
    device = mask.kv_indices.device
    shown_to = torch.vmap(
        torch.vmap(mask.mask_mod, (None,) * 3 + (0,)), (None, None, 0, None)
    )
    for head, row, col in (seen | cut).nonzero().tolist():
        q, k = (
            torch.arange(x * size, min(n, (x + 1) * size), device=device)
            for x in (row, col)
        )
        expected = (k <= q[:, None]) | torch.tensor(not causal, device=device)  # (q, k)
        shown = torch.ones_like(expected)
        if not seen[head, row, col]:
            shown = shown_to(*(torch.tensor(x, device=device) for x in (0, head)), q, k)
        if shown.any() and not torch.equal(shown, expected):
            problem = (
                "neither whole nor cut by causal"
                if causal
                else "not seen whole; is the mask causal?"
            )
            way = "make the mask with a BLOCK_SIZE that divides its edges, or sliding_window(tokens=...)"
            raise ValueError(
                f"head {head}: block {col} of keys is {problem} for block {row} of queries: {way}"
            )
        seen[head, row, col] = shown.any()
    return seen, size
