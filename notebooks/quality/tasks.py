"""Tasks for small language models: recall, copying, list operations, bytes of text.

A task draws batches from a seed: the same seed gives the same tokens on every machine.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

HIDDEN = -100  # the target of a position that is not predicted


@dataclass(frozen=True)
class Batch:
    """Sequences of one task, each tensor int64 (batch, seq).

    ``targets`` is the token to predict at each position, or ``HIDDEN``. ``distances``
    says how far back the answer lies, as the end of a range of distances; for text, how
    many bytes were there before; 0 where there is no target.
    """

    tokens: Tensor
    targets: Tensor
    distances: Tensor


@dataclass(frozen=True)
class Task:
    """A task: ``draw(batch, seq, rng, held_out)`` makes a Batch, ``vocabulary`` counts
    its tokens.

    ``measure`` is what a model is judged by: "bits" (of each byte) or "accuracy".
    """

    name: str
    title: str
    vocabulary: int
    measure: str
    draw: Callable[[int, int, random.Random, bool], Batch]

    def batch(self, batch: int, seq: int, seed: str, held_out: bool = False) -> Batch:
        """``batch`` sequences of ``seq`` tokens; held-out ones are of other files, or
        of another seed.
        """
        rng = random.Random(f"{self.name} {held_out} {seed}")
        return self.draw(batch, seq, rng, held_out)


def distances(seq: int, least: int) -> list[int]:
    """The ends D of the ranges (D / 2, D] of distances: powers of 2 from ``least`` up
    to below ``seq``.

    >>> distances(512, 8)
    [8, 16, 32, 64, 128, 256, 508]
    """
    ends = [least]
    while 2 * ends[-1] < seq:
        ends.append(2 * ends[-1])
    return [*ends, seq - 4] if ends[-1] * 1.5 < seq else ends


# --------------------------------------------------------------------------------------
# text: the source files of Python's standard library

HELD_OUT = 8  # every so many files are held out
LARGEST_FILE = 200_000  # bytes; longer files are tables
LEFT_OUT = "test tests idle_test site-packages dist-packages __pycache__ lib2to3"


@cache
def text(held_out: bool) -> tuple[Tensor, str]:
    """(bytes as uint8 (n,), their digest) of the files to train on, or of those held
    out.

    The files differ between versions of Python, so each result names the digest.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        (path.relative_to(root).as_posix(), path)
        for path in root.rglob("*.py")
        if not {*LEFT_OUT.split()} & {*path.relative_to(root).parts}
        and "sysconfigdata" not in path.name
        and path.stat().st_size < LARGEST_FILE
    ]
    chosen = [
        path
        for i, (_, path) in enumerate(sorted(files))
        if (i % HELD_OUT == 0) == held_out
    ]
    joined = b"\0".join(path.read_bytes() for path in chosen)
    digest = hashlib.sha256(joined).hexdigest()[:12]
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8), digest


def draw_text(batch: int, seq: int, rng: random.Random, held_out: bool) -> Batch:
    """Pieces of the files; the next byte is predicted. Ranges of positions end at
    powers of 4.
    """
    source, _ = text(held_out)
    starts = [rng.randrange(len(source) - seq) for _ in range(batch)]
    rows = torch.stack([source[s : s + seq + 1] for s in starts]).long()
    before = [next(4**i for i in range(3, 20) if at < 4**i) for at in range(seq)]
    far = torch.tensor(before).clamp(max=seq).expand(batch, seq)
    return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), far)


# --------------------------------------------------------------------------------------
# recall and copying: what was written far back is asked for again

FILLER = 8  # tokens of noise
KEYS = 96  # tokens that are asked for
VALUES = 32  # recall: values of keys
PAIRS = 8  # recall: pairs of a sequence for each range of distances
SYMBOLS = 128  # copying: symbols
STRINGS = 2  # copying: strings of a sequence for each range of distances
LENGTH = 6  # copying: symbols of a string


def draw_recall(batch: int, seq: int, rng: random.Random, held_out: bool) -> Batch:
    return asked_again(batch, seq, rng, distances(seq, 8), VALUES, 1, PAIRS)


def draw_copy(batch: int, seq: int, rng: random.Random, held_out: bool) -> Batch:
    return asked_again(batch, seq, rng, distances(seq, 16), SYMBOLS, LENGTH, STRINGS)


def asked_again(
    batch: int,
    seq: int,
    rng: random.Random,
    ends: list[int],
    symbols: int,
    length: int,
    count: int,
) -> Batch:
    """Keys, each followed by ``length`` of the ``symbols``, which are asked for again
    later: ``count`` of them in each range of distances, the longest first; noise
    between them.
    """
    first = FILLER + KEYS  # the first symbol
    rows = []
    for _ in range(batch):
        tokens = [rng.randrange(FILLER) for _ in range(seq)]
        targets, far, free = [HIDDEN] * seq, [0] * seq, [True] * seq
        keys = rng.sample(range(FILLER, first), count * len(ends))
        # The strings of a sequence share no symbol, so that each symbol says which one
        # follows it.
        draw = rng.sample if length > 1 else rng.choices
        drawn = draw(range(first, first + symbols), k=length * len(keys))
        wanted = [end for end in reversed(ends) for _ in range(count)]
        for i, (key, end) in enumerate(zip(keys, wanted)):
            low = end // 2 if end > ends[0] else 1
            places = two_places(rng, free, length + 1, low, end)
            if places is None:
                continue
            string = drawn[i * length : (i + 1) * length]
            for at in places:
                tokens[at : at + 1 + length] = key, *string
            targets[at : at + length] = string  # at: where it is asked for
            far[at : at + length] = [end] * length
        rows.append((tokens, targets, far))
    return Batch(*map(torch.tensor, zip(*rows)))


def two_places(
    rng: random.Random, free: list[bool], size: int, low: int, high: int
) -> tuple[int, int] | None:
    """Two free stretches of ``size`` positions, low < distance <= high, which are
    taken; None where none was found.
    """
    least, most = max(low + 1, size), min(high, len(free) - size)
    for _ in range(50 if least <= most else 0):
        apart = int(least + rng.random() * (most - least + 1))
        at = int(rng.random() * (len(free) - apart - size + 1))
        if all(free[at : at + size]) and all(free[at + apart : at + apart + size]):
            free[at : at + size] = free[at + apart : at + apart + size] = [False] * size
            return at, at + apart
    return None


# --------------------------------------------------------------------------------------
# list operations: nested expressions, as in Long Range Arena

DIGITS = 10  # tokens 0 to 9
OPERATIONS = ("max", "min", "median")  # tokens 10 to 12
CLOSE = 13  # "]"
REST = 14  # nothing
NESTED = 0.05  # how often an argument is a list
DEEPEST = 2  # lists inside a list
SHORTEST = 5  # tokens of a list


def draw_lists(batch: int, seq: int, rng: random.Random, held_out: bool) -> Batch:
    """Sequences full of lists of every range of lengths; the distance of an answer is
    how far back its list begins.
    """
    ends, rows = distances(seq, 16), []
    for _ in range(batch):
        row: list[tuple[int, int, int]] = []
        while (left := seq - len(row)) >= SHORTEST:
            room = min(left, rng.randint(SHORTEST, rng.choice(ends)))
            append_list(rng, room, DEEPEST, row)
        row = (row + [(REST, HIDDEN, 0)] * SHORTEST)[:seq]
        ranges = [
            span and next(e for e in (*ends, seq) if span <= e) for *_, span in row
        ]
        rows.append([(t, target, e) for (t, target, _), e in zip(row, ranges)])
    return Batch(*torch.tensor(rows).unbind(2))


def append_list(
    rng: random.Random, room: int, depth: int, out: list[tuple[int, int, int]]
) -> int:
    """Append a list of about ``room`` tokens to ``out`` as (token, target, span);
    returns its value.

    Each argument predicts the value of its list so far. A list ends with "]" and its
    value, which is an argument of the list around it. Of a maximum or minimum one
    argument alone, anywhere, is as large or small as the value: a part of the list does
    not tell it.
    """
    start, operation = len(out), rng.randrange(len(OPERATIONS))
    name = OPERATIONS[operation]
    low, high = sorted(rng.sample(range(DIGITS), 2))
    least = low + 1 if name == "min" else low
    most = high - 1 if name == "max" else high
    rare = room  # where the one argument comes
    if name != "median":
        rare = int(rng.random() * (room - 3)) + 1
    ordered: list[int] = []

    def so_far() -> int:
        return ordered[{"max": -1, "min": 0, "median": (len(ordered) - 1) // 2}[name]]

    out.append((DIGITS + operation, HIDDEN, 0))
    while (used := len(out) - start) < room - 2:
        fits = depth and used < rare and room - used > 2 * SHORTEST
        if fits and rng.random() < NESTED:
            inside = rng.randint(SHORTEST, (room - used) // 2)
            value = append_list(rng, inside, depth - 1, out)
            out.pop()  # the value, which follows as an argument
        else:
            value = least + int(rng.random() * (most - least + 1))
        if used >= rare:
            value, rare = (high if name == "max" else low), room
        insort(ordered, value)
        out.append((value, so_far(), len(out) - start))
    value = so_far()
    out += [(CLOSE, value, len(out) - start), (value, HIDDEN, 0)]
    return value


TASKS = {
    "recall": Task(
        name="recall",
        title="Associative recall",
        vocabulary=FILLER + KEYS + VALUES,
        measure="accuracy",
        draw=draw_recall,
    ),
    "copy": Task(
        name="copy",
        title="Copying strings",
        vocabulary=FILLER + KEYS + SYMBOLS,
        measure="accuracy",
        draw=draw_copy,
    ),
    "lists": Task(
        name="lists",
        title="List operations",
        vocabulary=REST + 1,
        measure="accuracy",
        draw=draw_lists,
    ),
    "text": Task(
        name="text",
        title="Bytes of text",
        vocabulary=256,
        measure="bits",
        draw=draw_text,
    ),
}
