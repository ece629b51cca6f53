"""Tasks on which small language models are trained, made here: bytes of text, recall,
copying, list operations.

A task draws batches from a seed: the same seed gives the same tokens on every machine.
``Batch.targets`` is the token to predict at each position, -100 where none is.
``Batch.distances`` says how far back the answer lies, as the end of a range, so that
scores can be split by distance; for text, how many bytes were there before; 0 where
there is no target.
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
from torch.nn import functional as F

HIDDEN = -100  # of a target that is not predicted
HELD_OUT = 8  # every so many files of the text are held out
LARGEST_FILE = 200_000  # bytes; longer ones are tables


@dataclass(frozen=True)
class Batch:
    """``tokens``, ``targets`` and ``distances``, each int64 (batch, seq)."""

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
        return self.draw(
            batch, seq, random.Random(f"{self.name} {held_out} {seed}"), held_out
        )


# --------------------------------------------------------------------------------------
# text: the source files of Python's standard library


@cache
def text(held_out: bool) -> tuple[Tensor, str]:
    """(bytes as uint8 (n,), their digest) of the files to train on, or of those held
    out: every eighth.

    Files are those of the standard library in the order of their paths, without tests,
    ``site-packages`` and very long ones. They differ between versions of Python, so
    results say the digest.
    """
    root = Path(sysconfig.get_path("stdlib"))
    out = {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "lib2to3",
    }
    paths = (
        p
        for p in root.rglob("*.py")
        if not out & {*p.relative_to(root).parts} and "sysconfigdata" not in p.name
    )
    files = [
        p
        for p in sorted(paths, key=lambda p: p.relative_to(root).as_posix())
        if p.stat().st_size < LARGEST_FILE
    ]
    chosen = [p for i, p in enumerate(files) if (i % HELD_OUT == 0) == held_out]
    found = b"\0".join(p.read_bytes() for p in chosen)  # a zero byte parts files
    return torch.frombuffer(bytearray(found), dtype=torch.uint8), hashlib.sha256(
        found
    ).hexdigest()[:12]


def _text(batch: int, seq: int, rng: random.Random, held_out: bool) -> Batch:
    source, _ = text(held_out)
    starts = [rng.randrange(len(source) - seq) for _ in range(batch)]
    rows = torch.stack(
        [source[s : s + seq + 1] for s in starts]
    ).long()  # (batch, seq + 1)
    before = torch.tensor(
        [next(4**i for i in range(3, 20) if at < 4**i) for at in range(seq)]
    )  # a range of positions
    return Batch(
        rows[:, :-1].contiguous(),
        rows[:, 1:].contiguous(),
        before.clamp(max=seq).expand(batch, seq),
    )


# --------------------------------------------------------------------------------------
# recall and copying: what was written far back is asked for again

KEYS, FILLER = 96, 8  # tokens that are asked for; tokens of noise
VALUES, PAIRS = (
    32,
    8,
)  # recall: values of keys; pairs of a sequence for each range of distances
SYMBOLS, STRINGS, LENGTH = (
    128,
    2,
    6,
)  # copying: symbols; strings of a sequence for each range; symbols of a string


def distances(seq: int, least: int) -> list[int]:
    """The ends D of the ranges (D / 2, D] of distances: powers of 2 from ``least`` up
    to below ``seq``.

    >>> distances(512, 8)
    [8, 16, 32, 64, 128, 256, 508]
    """
    found = [least]
    while 2 * found[-1] < seq:
        found.append(2 * found[-1])
    return [*found, seq - 4] if found[-1] * 1.5 < seq else found


def _place(
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


def _asked(
    batch: int,
    seq: int,
    rng: random.Random,
    least: int,
    symbols: int,
    length: int,
    count: int,
) -> Batch:
    """Keys, each followed by ``length`` symbols, and asked for again ``distance``
    later; noise between them.
    """
    ends, rows = distances(seq, least), []
    for _ in range(batch):
        tokens, targets, far = (
            [rng.randrange(FILLER) for _ in range(seq)],
            [HIDDEN] * seq,
            [0] * seq,
        )
        free, keys = (
            [True] * seq,
            rng.sample(range(FILLER, FILLER + KEYS), count * len(ends)),
        )
        # The strings of a sequence share no symbol, so that each symbol says which one
        # follows it.
        draw = rng.sample if length > 1 else rng.choices
        drawn = draw(
            range(FILLER + KEYS, FILLER + KEYS + symbols), k=length * len(keys)
        )
        for number, end in enumerate(
            end for end in reversed(ends) for _ in range(count)
        ):
            if (
                found := _place(
                    rng, free, length + 1, end // 2 if end > ends[0] else 1, end
                )
            ) is None:
                continue
            string = drawn[number * length : (number + 1) * length]
            for at in found:
                tokens[at : at + 1 + length] = keys[number], *string
            targets[at : at + length], far[at : at + length] = (
                string,
                [end] * length,
            )  # at: where it is asked for
        rows.append((tokens, targets, far))
    return Batch(*map(torch.tensor, zip(*rows)))


def _recall(batch: int, seq: int, rng: random.Random, held_out: bool) -> Batch:
    return _asked(batch, seq, rng, 8, VALUES, 1, PAIRS)


def _copy(batch: int, seq: int, rng: random.Random, held_out: bool) -> Batch:
    return _asked(batch, seq, rng, 16, SYMBOLS, LENGTH, STRINGS)


# --------------------------------------------------------------------------------------
# list operations: nested expressions, as in Long Range Arena

DIGITS, OPERATIONS, CLOSE, REST = (
    10,
    ("max", "min", "median"),
    13,
    14,
)  # tokens: digits, operations, "]", nothing
NESTED, LEAST_LIST = (
    0.05,
    5,
)  # how often an argument is a list; tokens of the shortest list


def _list(
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
    name, (low, high), ordered = (
        OPERATIONS[operation],
        sorted(rng.sample(range(DIGITS), 2)),
        [],
    )
    inner = {"max": (low, high - 1), "min": (low + 1, high), "median": (low, high)}[
        name
    ]
    rare = (
        int(rng.random() * (room - 3)) + 1 if name != "median" else room
    )  # where that argument comes

    def so_far() -> int:
        return ordered[{"max": -1, "min": 0, "median": (len(ordered) - 1) // 2}[name]]

    out.append((DIGITS + operation, HIDDEN, 0))
    while (used := len(out) - start) < room - 2:
        if (
            depth
            and used < rare
            and room - used > 2 * LEAST_LIST
            and rng.random() < NESTED
        ):
            value = _list(
                rng, rng.randint(LEAST_LIST, (room - used) // 2), depth - 1, out
            )
            out.pop()  # the value, which follows as an argument
        else:
            value = inner[0] + int(rng.random() * (inner[1] - inner[0] + 1))
        if used >= rare:
            value, rare = (high if name == "max" else low), room
        insort(ordered, value)
        out.append((value, so_far(), len(out) - start))
    value = so_far()
    out += [(CLOSE, value, len(out) - start), (value, HIDDEN, 0)]
    return value


def _lists(batch: int, seq: int, rng: random.Random, held_out: bool) -> Batch:
    """Sequences full of lists of every range of lengths; the distance of an answer is
    how far back its list begins.
    """
    ends, rows = distances(seq, 16), []
    for _ in range(batch):
        row: list[tuple[int, int, int]] = []
        while (left := seq - len(row)) >= LEAST_LIST:
            _list(rng, min(left, rng.randint(LEAST_LIST, rng.choice(ends))), 2, row)
        row = (row + [(REST, HIDDEN, 0)] * LEAST_LIST)[:seq]
        rows.append(
            [
                (t, target, span and next(e for e in (*ends, seq) if span <= e))
                for t, target, span in row
            ]
        )
    return Batch(*torch.tensor(rows).unbind(2))


TASKS = {
    "recall": Task(
        "recall", "Associative recall", FILLER + KEYS + VALUES, "accuracy", _recall
    ),
    "copy": Task("copy", "Copying strings", FILLER + KEYS + SYMBOLS, "accuracy", _copy),
    "lists": Task("lists", "List operations", REST + 1, "accuracy", _lists),
    "text": Task("text", "Bytes of text", 256, "bits", _text),
}


def pairs(tokens: Tensor) -> Tensor:
    """Each token and the one before it: (batch, seq) to (batch, seq, 2); 0 before the
    first.
    """
    return torch.stack([tokens, F.pad(tokens, (1, 0))[:, :-1]], 2)
