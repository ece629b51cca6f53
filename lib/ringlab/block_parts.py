"""The parts that block-sparse patterns are unions of; each says which blocks of keys a block of queries sees.

``seen(rows, cols, count)``: for numbers of blocks ``rows`` (r, 1) and ``cols`` (1, c) of ``count``, a bool (r, c).
``near(first, last, count)``: (start, stop), outside of which the blocks first .. last see nothing; may pass the ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from zlib import crc32

import torch
from torch import Tensor

from .checks import LARGEST, positive, shown


@dataclass(frozen=True)
class Window:
    """The block itself, ``before`` blocks before it and ``after`` behind it (None: as many)."""

    before: int
    after: int | None = None

    def seen(self, rows: Tensor, cols: Tensor, count: int) -> Tensor:
        after = self.before if self.after is None else self.after
        return (rows - cols <= self.before) & (cols - rows <= after)

    def near(self, first: int, last: int, count: int) -> tuple[int, int]:
        return first - self.before, last + 1 + (self.before if self.after is None else self.after)


@dataclass(frozen=True)
class Strided:
    """Every ``rate``-th block from the block itself on, both ways, ``steps`` of them each way (None: to the ends)."""

    rate: int
    steps: int | None = None

    def seen(self, rows, cols, count):
        apart = (rows - cols).abs()
        return (apart % self.rate == 0) & (apart // self.rate <= (count if self.steps is None else self.steps))

    def near(self, first, last, count):
        reach = count if self.steps is None else self.rate * self.steps
        return first - reach, last + 1 + reach


@dataclass(frozen=True)
class Segment:
    """Segments of ``length`` blocks, in each of which a block sees every ``rate``-th from itself on: dilated blocks."""

    length: int
    rate: int = 1

    def seen(self, rows, cols, count):
        return (rows // self.length == cols // self.length) & ((rows - cols) % self.rate == 0)

    def near(self, first, last, count):
        return first // self.length * self.length, (last // self.length + 1) * self.length


@dataclass(frozen=True)
class Global:
    """The first ``count`` blocks see all blocks (``rows``) and are seen by all (``columns``)."""

    count: int
    rows: bool = True
    columns: bool = True

    def __post_init__(self):
        flags = self.rows, self.columns
        if not all(isinstance(flag, bool) for flag in flags) or not any(flags):
            raise ValueError(f"Global: rows, columns or both must be True, the other False, got {shown(flags)}")

    def seen(self, rows, cols, count):
        return ((rows < self.count) & self.rows) | ((cols < self.count) & self.columns)

    def near(self, first, last, count):
        return 0, count if self.rows and first < self.count else self.count * self.columns


@dataclass(frozen=True)
class Random:
    """``count`` different blocks drawn for each block; the same ones for the same seed and number of blocks."""

    count: int
    seed: int = 0

    def __post_init__(self):
        positive("Random seed", self.seed, 0, LARGEST)

    def seen(self, rows, cols, count):
        drawn = _drawn(self.count, count, self.seed)[rows.flatten().cpu()]  # (r, drawn)
        found = torch.zeros(len(drawn), count, dtype=torch.bool).scatter_(1, drawn, True)
        return found[:, cols.flatten().cpu()].to(rows.device)

    def near(self, first, last, count):
        return 0, count


@lru_cache(maxsize=8)
def _drawn(some: int, of: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(of, generator=generator)[:some] for _ in range(of)])  # (of, some)


@dataclass(frozen=True)
class Coarse:
    """Blocks whose number is a multiple of ``stride``, up to ``reach`` blocks away: one level of a hierarchy."""

    stride: int
    reach: int

    def seen(self, rows, cols, count):
        return (cols % self.stride == 0) & ((rows - cols).abs() <= self.reach)

    def near(self, first, last, count):
        return first - self.reach, last + 1 + self.reach


@dataclass(frozen=True)
class Given:
    """A mask of blocks, a hexadecimal bit set per block of queries; made by ``from_mask``."""

    rows: tuple[str, ...]

    def __post_init__(self):
        if not isinstance(self.rows, tuple) or not all(_is_row(row, len(self.rows)) for row in self.rows):
            raise ValueError("Given: rows must be hexadecimal bit sets, one for each block; see blocks.from_mask")

    def seen(self, rows, cols, count):
        return _bits(self.rows).to(rows.device)[rows.flatten()][:, cols.flatten()]

    def near(self, first, last, count):
        return 0, count


def _is_row(row, count: int) -> bool:
    digits = isinstance(row, str) and row != "" and set(row) <= set("0123456789abcdef")
    return digits and int(row, 16).bit_length() <= count


@lru_cache(maxsize=8)
def _bits(rows: tuple[str, ...]) -> Tensor:
    return torch.tensor([[c == "1" for c in f"{int(row, 16):0{len(rows)}b}"] for row in rows])  # (count, count)


Part = Window | Strided | Segment | Global | Random | Coarse | Given
PARTS = {kind.__name__.lower(): kind for kind in (Window, Strided, Segment, Global, Random, Coarse, Given)}
NONE = ("before", "after", "reach")  # may be 0
OPEN = ("after", "steps")  # may be None
OWN = ("seed", "rows", "columns")  # no counts: their parts check them


def described(part: Part) -> str:
    """A part in a few words."""
    match part:
        case Window(before, after):
            return f"window {before}" + ("" if after in (None, before) else f" + {after}")
        case Strided(rate, steps):
            return f"stride {rate}" + ("" if steps is None else f" x {steps}")
        case Segment(length, rate):
            return f"segments of {length}" + ("" if rate == 1 else f" / {rate}")
        case Global(count, rows, columns):
            return f"{count} global" + ("" if rows and columns else " rows" if rows else " columns")
        case Random(count, seed):
            return f"{count} random" + (f" (seed {seed})" if seed else "")
        case Coarse(stride, reach):
            return f"every {stride} within {reach}"
        case Given(rows):  # two masks must not read alike: ranks compare patterns by what they say
            return f"a given mask ({crc32(' '.join(rows).encode()):08x})"


def check(parts: list[Part] | tuple[Part, ...]) -> None:
    """Raise ValueError for no part, one that is none of ours (no dict restores a subclass) or has no proper counts."""
    if not isinstance(parts, list | tuple):
        raise ValueError(f"parts must be a list of parts, as [Window(1)], got {shown(parts)}")
    if not parts:
        raise ValueError("a block-sparse pattern needs at least one part, as Window(1)")
    for part in parts:
        if type(part) not in PARTS.values():
            known = ", ".join(kind.__name__ for kind in PARTS.values())
            raise ValueError(f"a part must be one of {known}, no subclass, got {shown(part)}")
        for name, value in vars(part).items():
            if name not in OWN and not (value is None and name in OPEN):
                positive(f"{type(part).__name__} {name}", value, int(name not in NONE), LARGEST)


def restored(given: dict) -> Part:
    """The part that one of the dicts in a pattern's ``to_dict`` describes."""
    name = given.get("part") if isinstance(given, dict) else None
    if not isinstance(name, str) or name not in PARTS:
        raise ValueError(f"unknown part of a block-sparse pattern: {shown(given)}; known: {', '.join(PARTS)}")
    try:
        return PARTS[name](**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if k != "part"})
    except TypeError as error:  # for fields that are missing or unknown
        raise ValueError(f"no part of a block-sparse pattern: {shown(given)}: {error}") from None


def of_mask(mask: Tensor) -> Given:
    """The part of a bool mask of blocks (blocks, blocks); ValueError for what has no such values to read."""
    got, fits = type(mask).__name__, False
    if isinstance(mask, Tensor) and not mask.is_nested:  # one that is nested has no shape to tell
        got += f" of {mask.dtype}, shape {tuple(mask.shape)}, {mask.layout} on {mask.device}"
        square = mask.dim() == 2 and mask.shape[0] == mask.shape[1] > 0
        fits = square and mask.dtype == torch.bool and mask.layout == torch.strided and not mask.is_meta
    if not fits:
        wanted = "a square bool tensor (blocks, blocks) of at least one block, neither nested, sparse nor meta"
        raise ValueError(f"a mask of blocks must be {wanted}, got {got}")
    return Given(tuple(f"{int(''.join('01'[x] for x in row), 2):x}" for row in mask.tolist()))
