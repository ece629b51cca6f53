"""Which rank failed: how ranks ended, how far they are, and the judgement of both."""

from __future__ import annotations

import signal
import struct
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from statistics import mode

GRACE_S = 0.4  # for the others to report what they saw, once one rank has failed
PROGRESS = struct.Struct("=qq")  # exchanges begun, and an index of DOING
DOING = (
    "computes",
    "waits",
    "is done",
    "is stopped",
)  # "waits": for an exchange; "is stopped": by a signal


class RankFailed(RuntimeError):
    """A rank failed: ``rank`` is the culprit, not the one that noticed; None where
    nobody can know.
    """

    def __init__(self, rank: int | None, message: str):
        super().__init__(message)
        self.rank = rank


@dataclass
class End:
    """How a rank ended: "ok" with its value, "error", "network" or "died" with a text.

    "network": the error only shows that another rank has gone. ``culprit``: another
    rank that the error itself names, -1 if the error says that ranks differ, and not
    which.
    """

    kind: str
    value: object = None
    trace: str = ""
    culprit: int | None = None


@dataclass(frozen=True)
class Progress:
    """The exchanges that a rank has begun (-1 while it joins, -2 before it started),
    and one of ``DOING``.
    """

    begun: int
    doing: str = "computes"

    @classmethod
    def read(cls, file: Path, pid: int | None) -> Progress:
        """From the file that the rank with process id ``pid`` writes."""
        data = b""
        with suppress(OSError):
            data = file.read_bytes()
        begun, doing = PROGRESS.unpack(data) if data else (-2, 0)
        state = ""
        with suppress(OSError):  # no such process, or no /proc
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
        return cls(begun, "is stopped" if state[:1] in ("T", "t") else DOING[doing])


class Beat:
    """Writes the progress of this rank to a file: to memory that it shares with it."""

    def __init__(self, file: Path):
        file.write_bytes(PROGRESS.pack(-1, 0))
        with open(file, "r+b") as opened:
            self.now = memoryview(mmap(opened.fileno(), 0)).cast("q")

    def begins(self) -> None:
        """An exchange, or a step that all ranks take together."""
        self.now[0] += 1

    def does(self, doing: str) -> None:
        self.now[1] = DOING.index(doing)


def signal_name(number: int) -> str:
    return (
        signal.Signals(number).name
        if number in set(signal.Signals)
        else f"signal {number}"
    )


def culprit(
    ends: dict[int, End], progress: list[Progress]
) -> tuple[int | None, str] | None:
    """(rank, kind) of the rank to blame, None where all are well; the rank is None
    where nobody can know.

    ``ends`` in the order in which they came. Kinds: those of ``End``, "stopped",
    "silent" (it neither ended nor goes on), and "differ": ranks made different numbers
    of calls.

    >>> waits, hangs = Progress(4, "waits"), Progress(4)
    >>> culprit({0: End("network"), 2: End("network")}, [waits, hangs, waits])
    (1, 'silent')
    >>> culprit({}, [waits, Progress(5, "waits"), waits]), culprit({}, [waits, Progress(3, "is done")])
    ((1, 'silent'), (None, 'differ'))
    """
    for rank, end in ends.items():
        if end.kind == "died":
            return rank, "died"
    if errors := [rank for rank, end in ends.items() if end.kind == "error"]:
        named = ends[min(errors)].culprit
        return min(errors) if named is None else None if named < 0 else named, "error"
    silent = [rank for rank in range(len(progress)) if rank not in ends]
    if not silent and all(end.kind == "ok" for end in ends.values()):
        return None
    for rank in silent:
        if progress[rank].doing == "is stopped":
            return rank, "stopped"
    begun = [each.begun for each in progress]
    if idle := [rank for rank in silent if progress[rank].doing == "computes"]:
        return min(idle, key=lambda rank: begun[rank]), "silent"
    outliers = [rank for rank, count in enumerate(begun) if count != mode(begun)]
    # One that is ahead of all others differs as much as one behind.
    if len(outliers) == 1 and len(begun) > 2:
        return outliers[0], "silent"
    return None, "differ"


def describe(
    blamed: tuple[int | None, str],
    ends: dict[int, End],
    progress: list[Progress],
    timeout_s: float,
) -> RankFailed:
    """What ``culprit`` found, in a line."""
    rank, kind = blamed
    if kind == "died":
        return RankFailed(rank, f"rank {rank} {ends[rank].value}")
    texts = {end.kind: end.value for end in reversed(ends.values())}
    unknown = "ranks differ, nobody knows which is right:"
    if kind == "differ":
        reports = [
            f"rank {i} {each.doing} after {each.begun} exchanges"
            for i, each in enumerate(progress[:8])
        ]
        lost = f"; {texts['network']}" if "network" in texts else ""
        return RankFailed(None, f"{unknown} {', '.join(reports)}{lost}")
    if kind == "error":
        errors = {i: end for i, end in ends.items() if end.kind == "error"}
        end = errors.get(rank) or next(iter(errors.values()))
        verb = "raised" if end.culprit is None else "differs:"
        who = unknown if rank is None else f"rank {rank} {verb}"
        failure = RankFailed(rank, f"{who} {end.value}")
        failure.add_note(end.trace)
        return failure
    others = [each.begun for i, each in enumerate(progress) if i != rank]
    state = {"computes": "hangs", "is stopped": "is stopped"}.get(
        progress[rank].doing, "made other calls"
    )
    begun = progress[rank].begun
    counts = f"it has begun {begun} exchanges, others {max(others, default=begun)}"
    return RankFailed(rank, f"rank {rank} {state}: after {timeout_s:g} s {counts}")
