"""Which rank failed: how ranks ended, how far they are, and the judgement of both."""

from __future__ import annotations

import os
import signal
import struct
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
        return cls(
            begun, "is stopped" if stat(pid)[:1] in (["T"], ["t"]) else DOING[doing]
        )


class Beat:
    """Writes the progress of this rank to a file, a few microseconds at a time."""

    def __init__(self, file):
        self.file = file
        self.now = [-1, 0]
        self.does("computes")

    def begins(self) -> None:
        """An exchange, or a step that all ranks take together."""
        self.now[0] += 1
        os.pwrite(self.file.fileno(), PROGRESS.pack(*self.now), 0)

    def does(self, doing: str) -> None:
        self.now[1] = DOING.index(doing)
        os.pwrite(self.file.fileno(), PROGRESS.pack(*self.now), 0)


def stat(pid: int | None) -> list[str]:
    """The fields of /proc/PID/stat from the state on; [] where there is no such
    process, or no /proc.
    """
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()
    return []


def signal_name(number: int) -> str:
    return (
        signal.Signals(number).name
        if number in set(signal.Signals)
        else f"signal {number}"
    )


def how_ended(code: int) -> str:
    """What an exit code, or minus a signal, says of a process that ended without a
    message.

    >>> how_ended(-9), how_ended(0)
    ('was ended by SIGKILL before it was done', 'left with exit code 0 before it was done')
    """
    return (
        f"was ended by {signal_name(-code)}"
        if code < 0
        else f"left with exit code {code}"
    ) + " before it was done"


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
    died = [rank for rank, end in ends.items() if end.kind == "died"]
    if died:
        return died[0], "died"
    if errors := sorted(rank for rank, end in ends.items() if end.kind == "error"):
        named = ends[errors[0]].culprit
        return errors[0] if named is None else None if named < 0 else named, "error"
    silent = [rank for rank in range(len(progress)) if rank not in ends]
    if not silent and all(end.kind == "ok" for end in ends.values()):
        return None
    if stopped := [rank for rank in silent if progress[rank].doing == "is stopped"]:
        return stopped[0], "stopped"
    idle = [rank for rank in silent if progress[rank].doing == "computes"]
    if len(idle) == 1:
        return idle[0], "silent"
    begun = [rank_progress.begun for rank_progress in progress]
    (usual, times), *_ = Counter(begun).most_common()
    outliers = [rank for rank, count in enumerate(begun) if count != usual]
    if (
        2 * times > len(begun) and len(outliers) == 1
    ):  # one that is ahead of all others differs as much as one behind
        return outliers[0], "silent"
    if idle:
        return min(idle, key=lambda rank: begun[rank]), "silent"
    return None, "differ"


def describe(
    blamed: tuple[int | None, str],
    ends: dict[int, End],
    progress: list[Progress],
    timeout_s: float,
) -> RankFailed:
    """What ``culprit`` found, in a line."""
    rank, kind = blamed
    reports = [
        f"rank {i} {rank_progress.doing} after {rank_progress.begun} exchanges"
        for i, rank_progress in enumerate(progress)
    ]
    if kind == "differ":
        lost = next(
            (f"; {end.value}" for end in ends.values() if end.kind == "network"), ""
        )
        return RankFailed(
            None,
            f"ranks differ, nobody knows which is right: {', '.join(reports[:8])}{lost}",
        )
    if kind == "error":
        end = next(
            end
            for end in (ends.get(rank), *ends.values())
            if end and end.kind == "error"
        )
        who = (
            "ranks differ, nobody knows which is right:"
            if rank is None
            else (f"rank {rank} {'raised' if end.culprit is None else 'differs:'}")
        )
        failure = RankFailed(rank, f"{who} {end.value}")
        if end.trace:
            failure.add_note(end.trace)
        return failure
    if kind == "died":
        return RankFailed(rank, f"rank {rank} {ends[rank].value}")
    most = max(
        rank_progress.begun
        for i, rank_progress in enumerate(progress)
        if i != rank or len(progress) == 1
    )
    state = {"computes": "hangs", "is stopped": "is stopped"}.get(
        progress[rank].doing, "made other calls"
    )
    message = f"{state}: after {timeout_s:g} s it has begun {progress[rank].begun} exchanges, others {most}"
    return RankFailed(rank, f"rank {rank} {message}")
