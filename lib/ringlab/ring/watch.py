"""Which rank failed: how ranks ended, how far they are, and the judgement of both.

As a script this is the monitor of one rank: a small process, without torch, beside the
rank. The monitors of a job tell rank 0's how their ranks are; that one judges, and each
monitor ends its own rank if another has failed. ``launch.joined`` starts them.
"""

from __future__ import annotations

import json
import math
import os
import select
import selectors
import signal
import socket
import struct
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from hmac import compare_digest

GRACE_S = 0.4  # for the others to report what they saw, once one rank has failed
EXIT_CODE = 49  # its place in ``stat``
PROGRESS = struct.Struct("=qq")  # exchanges begun, and an index of DOING
DOING = (
    "computes",
    "waits",
    "is done",
    "is stopped",
)  # "waits": for an exchange; "is stopped": by a signal
LINE_BYTES = (
    1 << 20
)  # more than a line has: a traceback of 20,000 characters takes 12 bytes for each at most
STRANGERS = 32  # connections that are kept while they have not said the token


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
    def read(cls, file: str | os.PathLike | int, pid: int | None) -> Progress:
        """From the file, by path or descriptor, that the rank with process id ``pid``
        writes.
        """
        data = b""
        with (
            suppress(OSError),
            open(file, "rb", closefd=not isinstance(file, int)) as opened,
        ):
            data = os.pread(opened.fileno(), PROGRESS.size, 0)
        begun, doing = PROGRESS.unpack(data) if data else (-2, 0)
        return cls(
            begun, "is stopped" if stat(pid)[:1] in (["T"], ["t"]) else DOING[doing]
        )


class Beat:
    """Writes the progress of this rank to a file, a few microseconds at a time."""

    def __init__(self, file):
        self.file, self.now = file, [-1, 0]
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
    if died:  # launchers end the other ranks by SIGTERM
        return min(died, key=lambda rank: "SIGTERM" in str(ends[rank].value)), "died"
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
    begun = [each.begun for each in progress]
    (usual, times), *_ = Counter(begun).most_common()
    odd = [rank for rank, count in enumerate(begun) if count != usual]
    if (
        2 * times > len(begun) and len(odd) == 1
    ):  # one that is ahead of all others differs as much as one behind
        return odd[0], "silent"
    if idle:
        return min(idle, key=lambda rank: begun[rank]), "silent"
    return None, "differ"


def describe(
    found: tuple[int | None, str],
    ends: dict[int, End],
    progress: list[Progress],
    timeout_s: float,
    hosts=(),
) -> RankFailed:
    """What ``culprit`` found, in a line; ``hosts``: the name of each rank's, if there
    are several.
    """
    rank, kind = found
    name = [
        f"rank {i} on {hosts[i]}" if hosts else f"rank {i}"
        for i in range(len(progress))
    ]
    told = [
        f"{name[i]} {each.doing} after {each.begun} exchanges"
        for i, each in enumerate(progress)
    ]
    if kind == "differ":
        lost = next(
            (f"; {end.value}" for end in ends.values() if end.kind == "network"), ""
        )
        return RankFailed(
            None,
            f"ranks differ, nobody knows which is right: {', '.join(told[:8])}{lost}",
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
            else (f"{name[rank]} {'raised' if end.culprit is None else 'differs:'}")
        )
        failure = RankFailed(rank, f"{who} {end.value}")
        if end.trace:
            failure.add_note(end.trace)
        return failure
    if kind == "died":
        return RankFailed(rank, f"{name[rank]} {ends[rank].value}")
    most = max(
        each.begun for i, each in enumerate(progress) if i != rank or len(progress) == 1
    )
    how = {"computes": "hangs", "is stopped": "is stopped"}.get(
        progress[rank].doing, "made other calls"
    )
    what = f"{how}: after {timeout_s:g} s it has begun {progress[rank].begun} exchanges, others {most}"
    return RankFailed(rank, f"{name[rank]} {what}")


class Lines:
    """Lines over a socket that never blocks. ``known``: the other end has said the
    token; ``rank``: whose monitor.
    """

    def __init__(self, opened: socket.socket, known: bool, rank: int | None = None):
        self.socket, self.known, self.rank, self.came, self.goes = (
            opened,
            known,
            rank,
            b"",
            b"",
        )
        self.fileno = opened.fileno
        opened.setblocking(False)

    def hear(self) -> list[bytes]:
        """The lines that are whole by now; raises OSError where no more can come."""
        data = self.socket.recv(1 << 16)
        *lines, self.came = (self.came + data).split(b"\n")
        if not data or len(self.came) > (LINE_BYTES if self.known else 100):
            raise ConnectionError("it has gone, or says what no monitor would")
        return lines

    def say(self, line: bytes) -> None:
        """Send what is not sent yet and this line, as far as the other end takes it."""
        self.goes += line if len(self.goes) < LINE_BYTES else b""
        with suppress(OSError):  # it has gone, or takes nothing: its silence is judged
            self.goes = self.goes[self.socket.send(self.goes) :]


class Monitor:
    """The monitor of one rank. Rank 0's judges: the others tell it how their ranks are,
    and it answers.

    ``rank``, ``pid``: of the rank; ``hosts``: the name of each rank's; ``token``: what
    a connection says first, so that nobody else is heard; ``port``: of rank 0's
    monitor; ``channel``, ``progress``, ``listener``: descriptors of a socket to the
    rank, of the file of its progress, and of the socket where rank 0's monitor is
    reached; ``launcher``: the process id of torchrun, None without.
    """

    def __init__(
        self,
        rank,
        hosts,
        pid,
        timeout_s,
        token,
        port,
        channel,
        progress,
        listener,
        launcher,
    ):
        self.rank, self.hosts, self.pid, self.timeout_s, self.token = (
            rank,
            hosts,
            pid,
            timeout_s,
            token.encode(),
        )
        self.progress, self.launcher = progress, launcher
        self.found, self.failed_at, self.told, self.tells_at = None, None, None, 0.0
        self.interval = min(max(timeout_s / 20, 0.05), 1.0)
        self.ends: dict[int, End] = {}
        self.states = [Progress(-2)] * len(hosts)
        self.heard = dict.fromkeys(
            range(1, len(hosts)) if rank == 0 else [0], time.monotonic()
        )
        self.channel, self.peers = Lines(socket.socket(fileno=channel), known=True), []
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.channel, selectors.EVENT_READ, self.hear_rank)
        if listener is not None:
            self.selector.register(
                socket.socket(fileno=listener), selectors.EVENT_READ, self.accept
            )
        else:
            with suppress(OSError):
                opened = socket.create_connection(
                    (os.environ["MASTER_ADDR"], port), timeout_s
                )
                self.add(Lines(opened, known=True, rank=0)).say(self.token + b"\n")

    def run(self) -> None:
        wanted = range(len(self.hosts)) if self.rank == 0 else [self.rank]
        while not self.found and [
            r for r in wanted if r not in self.ends or self.ends[r].kind != "ok"
        ]:
            self.step()
            self.look()
            self.judge()
            self.tell()
        if self.found:
            self.end_rank()
        last = os.environ.get("TORCHELASTIC_RESTART_COUNT") == os.environ.get(
            "TORCHELASTIC_MAX_RESTARTS"
        )
        if self.launcher and (last or not self.found):  # it starts no other ranks
            self.end_launcher()

    def step(self) -> None:
        """Hear what there is to hear, or wait for it until it is time to tell."""
        for key, _ in self.selector.select(max(0.0, self.tells_at - time.monotonic())):
            key.data(key.fileobj)

    def look(self) -> None:
        """See whether the rank and its launcher live, and how far the rank is."""
        state, parent = (stat(self.pid) + [None] * 2)[:2]
        if (
            state in (None, "Z")
            and stat("self")
            and self.channel
            and not select.select([self.channel], [], [], 0)[0]
        ):
            self.died()  # a process that it has forked holds the channel
        elif self.launcher and parent not in (None, str(self.launcher)):
            self.ends.setdefault(
                self.rank, End("died", "lost its launcher, which has ended")
            )
        self.states[self.rank] = Progress.read(self.progress, self.pid)

    def died(self) -> None:
        fields, how = stat(self.pid), "has gone before it was done"
        if len(fields) > EXIT_CODE:
            how = how_ended(os.waitstatus_to_exitcode(int(fields[EXIT_CODE])))
        self.ends.setdefault(self.rank, End("died", how))

    def hear_rank(self, channel: Lines) -> None:
        """The rank says how it ended, or its channel closes as it ends."""
        try:
            for line in channel.hear():
                self.ends.setdefault(self.rank, End(**json.loads(line)))
        except OSError:
            self.selector.unregister(channel)
            self.channel = None
            self.died()

    def add(self, peer: Lines) -> Lines:
        self.peers.append(peer)
        self.selector.register(peer, selectors.EVENT_READ, self.hear)
        return peer

    def drop(self, peer: Lines) -> None:
        if peer not in self.peers:
            return
        self.peers.remove(peer)
        self.selector.unregister(peer)
        peer.socket.close()
        if peer.rank is not None:
            self.heard[peer.rank] = -math.inf

    def accept(self, listener: socket.socket) -> None:
        """Another monitor, or a stranger: the latest few of these are kept."""
        with suppress(OSError):
            self.add(Lines(listener.accept()[0], known=False))
        for stranger in [peer for peer in self.peers if not peer.known][:-STRANGERS]:
            self.drop(stranger)

    def hear(self, peer: Lines) -> None:
        """What another monitor says; one that says what no monitor would has gone too."""
        try:
            for line in peer.hear():
                if peer.known:
                    self.note(peer, *json.loads(line))
                elif not compare_digest(line, self.token):
                    raise ValueError("a stranger")
                peer.known = True
        except (OSError, TypeError, ValueError):
            self.drop(peer)

    def note(
        self,
        peer: Lines,
        rank: int,
        progress: list,
        end: dict | None,
        found: list | None,
    ) -> None:
        """Another monitor said this of its rank."""
        state, end = Progress(*progress), end and End(**end)
        if rank not in self.heard:
            raise ValueError(f"there is no rank {rank}")
        peer.rank, self.heard[rank], self.states[rank] = rank, time.monotonic(), state
        self.found = self.found or found
        if end:
            self.ends.setdefault(rank, end)

    def silent(self, limit_s: float) -> list[int]:
        """The ranks that were not heard for so long."""
        return [
            rank for rank, at in self.heard.items() if time.monotonic() - at > limit_s
        ]

    def judge(self) -> None:
        """Find which rank failed, or which host is silent, if that is known by now."""
        now = time.monotonic()
        if self.failed_at is None and any(
            end.kind != "ok" for end in self.ends.values()
        ):
            self.failed_at, self.tells_at, self.interval = (
                now,
                now,
                min(self.interval, GRACE_S / 2),
            )
        late = self.failed_at is not None and now - self.failed_at > GRACE_S
        limit_s = self.timeout_s / (2 if late else 1)
        if not self.found and any(
            rank not in self.ends for rank in self.silent(limit_s)
        ):
            away = [
                rank for rank in self.silent(limit_s / 2) if rank not in self.ends
            ]  # the others of that host too
            names, ranks = (
                sorted({self.hosts[rank] for rank in away}),
                ", ".join(f"rank {rank}" for rank in away),
            )
            what = f"{' and '.join(names)} ({ranks}) does not answer {self.hosts[self.rank]}"
            self.found = [
                None,
                f"{what}: a host, its monitor or the link between has failed",
                "",
            ]
        elif late and self.rank == 0 and not self.found:
            found = culprit(self.ends, self.states)
            failure = describe(
                found, self.ends, self.states, self.timeout_s, self.hosts
            )
            self.found = [
                failure.rank,
                str(failure),
                "".join(getattr(failure, "__notes__", [])),
            ]

    def tell(self) -> None:
        """Tell the other monitors about this rank and what was found: once an interval,
        and at once what is new.
        """
        news, now = (self.ends.get(self.rank), self.found), time.monotonic()
        if now < self.tells_at and news == self.told:
            return
        self.told, self.tells_at = news, now + self.interval
        end, progress = news[0], self.states[self.rank]
        about = [
            self.rank,
            [progress.begun, progress.doing],
            end and vars(end),
            self.found,
        ]
        for peer in self.peers:
            if peer.known:
                peer.say(json.dumps(about).encode() + b"\n")

    def end_rank(self) -> None:
        """Tell the rank what was found if it asks within a grace, else end it."""
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"ringlab: {self.found[1]}", file=sys.stderr, flush=True)
        numbers = [0, signal.SIGTERM, signal.SIGKILL]
        if (
            self.found[0] == self.rank
        ):  # it will not ask; a process that is stopped takes SIGKILL alone
            del numbers[: 2 if self.states[self.rank].doing == "is stopped" else 1]
        for number in numbers:
            if self.channel is None:
                return
            if self.rank in self.ends and self.ends[self.rank].kind != "died":
                self.channel.socket.settimeout(self.timeout_s)
                with suppress(OSError):
                    self.channel.socket.sendall(json.dumps(self.found).encode() + b"\n")
                return
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
            self.ends.pop(self.rank, None)
            while (
                self.channel
                and self.rank not in self.ends
                and select.select([self.channel], [], [], GRACE_S)[0]
            ):
                self.hear_rank(self.channel)

    def end_launcher(self) -> None:
        """End torchrun where it has no ranks any more, and waits for that of another
        host, which has gone.

        It would wait 300 s. Where all is well, it ends by itself.
        """
        since, wait_s = None, 1.0 if self.found else min(self.timeout_s / 2, 5.0)
        while stat(self.launcher)[:1] not in ([], ["Z"]):
            self.step()
            self.tell()
            lost = self.found or self.silent(self.timeout_s)
            with open(f"/proc/{self.launcher}/task/{self.launcher}/children") as file:
                since = (
                    (since or time.monotonic())
                    if lost and not file.read().strip()
                    else None
                )
            if since and (late := time.monotonic() - since - wait_s) > 0:
                os.kill(self.launcher, signal.SIGTERM if late < 1 else signal.SIGKILL)


if __name__ == "__main__":
    with suppress(ProcessLookupError, FileNotFoundError):  # the launcher has ended
        Monitor(**json.load(sys.stdin)).run()
