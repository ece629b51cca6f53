"""Time of a call across ranks before it runs: what two ranks need to exchange bytes and
to compute, measured in five seconds, and the steps of each scheme, by the engine itself
on tensors without data.

A transfer of so many bytes takes the time of a line through measured sizes: its latency
first, then bytes over the rate. A step of a scheme is work, or a transfer that runs
while the rank works on until it waits for it.
"""

from __future__ import annotations

import json
import socket
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from .attention import attention
from .engine import execute
from .meta_run import MetaCall, MetaRun
from .patterns import Dense
from .ring.comm import AllToAll, Exchange, Steps, Wait, all_to_all, drive

INSIDE, BETWEEN = "inside", "between"
TITLES = {INSIDE: "ranks of one host", BETWEEN: "ranks of two hosts"}
SIZES = (24, 1 << 17, 1 << 20, 1 << 22, 1 << 24)  # bytes that a rank sends
SURE = 1 << 20  # sizes up to this are measured in any case
LEAST, MOST = 3, 6  # exchanges of each size
MEASURE_S = 5.0
DTYPES = "float32", "bfloat16", "float16"
CONTROL_BYTES = 24  # by which ranks agree before each pass
BACKWARD = 10  # FLOPs of a pair and element in a backward; 4 in a forward
PROBES = (
    128,
    1024,
)  # tokens of dense attention, 8 heads of 64, whose times give the rates of work


@dataclass(frozen=True)
class Line:
    """Seconds for an amount, by straight lines between measured amounts; beyond the
    last one the line goes on.

    >>> Line((0, 100), (1.0, 2.0))(50), Line((0, 100), (1.0, 2.0))(300)
    (1.5, 4.0)
    """

    amounts: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, amount: float) -> float:
        i = next(
            (i for i, more in enumerate(self.amounts[1:-1]) if amount <= more),
            len(self.amounts) - 2,
        )
        (a, b), (x, y) = self.amounts[i : i + 2], self.seconds[i : i + 2]
        return max(0.0, x + (y - x) * (amount - a) / (b - a))

    @property
    def latency_s(self) -> float:
        """Seconds for the smallest amount."""
        return self.seconds[0]

    @property
    def per_s(self) -> float:
        """The rate that large amounts come to."""
        (a, b), (x, y) = self.amounts[-2:], self.seconds[-2:]
        return (b - a) / (y - x) if y > x else float("inf")


NOTHING = Line((0, 1), (0.0, 0.0))


@dataclass(frozen=True)
class Network:
    """What was measured: the host of each rank, by number; seconds for bytes each way
    by class of link; by dtype seconds for FLOPs of attention of one rank, forward and
    backward.
    """

    hosts: tuple[int, ...]
    lines: dict[str, Line]
    work: dict[str, tuple[Line, Line]]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def of(cls, found: dict) -> Network:
        """The network of what ``dataclasses.asdict`` made of it."""
        lines = {name: _line_of(line) for name, line in found["lines"].items()}
        return cls(
            tuple(found["hosts"]),
            lines,
            {x: tuple(map(_line_of, two)) for x, two in found["work"].items()},
        )

    @classmethod
    def read(cls, path: Path) -> Network:
        """What ``python -m ringlab network`` wrote. Raises ValueError for another file."""
        try:
            return cls.of(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is no file of python -m ringlab network: {error!r}"
            ) from None

    def transfer_s(self, sent: dict[tuple[int, int], int]) -> float:
        """Seconds of one round, of bytes by (from, to): ranks of a host share its link
        to others, each way.
        """
        loads: dict[tuple, int] = {}
        for (a, b), size in sent.items():
            hosts = self.hosts[a], self.hosts[b]
            for end in (
                ((BETWEEN, "out", hosts[0]), (BETWEEN, "in", hosts[1]))
                if hosts[0] != hosts[1]
                else ((INSIDE, "out", a), (INSIDE, "in", b))
            ):
                loads[end] = loads.get(end, 0) + size
        return max(
            (self.lines[end[0]](size) for end, size in loads.items()), default=0.0
        )


def _line_of(found: dict) -> Line:
    return Line(tuple(found["amounts"]), tuple(found["seconds"]))


# --------------------------------------------------------------------------------------
# measuring


def measure(seconds: float = MEASURE_S, dtypes: tuple[str, ...] = DTYPES) -> Network:
    """Measure the default group, whose ranks call this together, in about so many
    seconds.

    The hosts are told apart by their names. One pair of ranks stands for each class.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    names = [None] * ranks
    dist.all_gather_object(names, socket.gethostname())
    hosts = tuple(sorted(set(names)).index(name) for name in names)
    pairs: dict[str, tuple[int, int]] = {}
    for a, b in combinations(range(ranks), 2):
        pairs.setdefault(INSIDE if hosts[a] == hosts[b] else BETWEEN, (a, b))
    lines = {}
    for name, pair in pairs.items():
        group = dist.new_group(pair)
        lines[name] = [
            _line(group, 0.8 * seconds / len(pairs)) if rank in pair else None
        ]
        dist.broadcast_object_list(lines[name], pair[0])
    work, everyone = {}, [None] * ranks
    for name in dtypes:
        dist.all_gather_object(everyone, _work(getattr(torch, name)))
        each = ([line.seconds for line in lines] for lines in zip(*everyone))
        slowest = (tuple(map(max, zip(*seconds))) for seconds in each)
        work[name] = tuple(
            Line(line.amounts, seconds) for line, seconds in zip(everyone[0], slowest)
        )
    return Network(hosts, {name: line for name, (line,) in lines.items()}, work)


def _line(group: dist.ProcessGroup, seconds: float) -> Line:
    """Seconds of an exchange by the bytes that each rank sends; sizes end where the
    next would take too long.
    """
    found: dict[int, float] = {}
    begin, rank = time.monotonic(), dist.get_rank(group)
    dist.barrier(group)
    for i, size in enumerate(SIZES):
        data, rows = (
            torch.zeros(1, size, dtype=torch.uint8),
            [int(i != rank) for i in range(2)],
        )
        times, spent = [], 0.0
        while (
            len(times) < LEAST or len(times) < MOST and spent < seconds * i / len(SIZES)
        ):
            start = time.monotonic()
            drive([all_to_all(data, rows, rows)], group)
            now = time.monotonic()
            slowest = torch.tensor([now - start, now - begin], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group)  # both go on together
            last, spent = slowest.tolist()
            times.append(last)
        found[size] = median(times[1:])  # the first one opens TCP's window
        if size >= SURE and i + 1 < len(SIZES):
            per_byte = (found[size] - found[SIZES[i - 1]]) / (size - SIZES[i - 1])
            if (
                spent + LEAST * (found[size] + per_byte * (SIZES[i + 1] - size))
                > seconds
            ):
                break
    return Line(tuple(found), tuple(found.values()))


def _work(dtype: torch.dtype) -> tuple[Line, Line]:
    """Seconds for FLOPs of dense attention, forward and backward, as all ranks compute
    at once.
    """
    found: list[list[float]] = [[], []]
    for n in PROBES:
        q, k, v, dout = (torch.randn(1, n, 8, 64, dtype=dtype) for _ in range(4))
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        times: list[tuple[float, float]] = []
        for _ in range(5):
            dist.barrier()
            start = time.monotonic()
            out = attention(q, k, v, Dense())
            middle = time.monotonic()
            torch.autograd.grad(out, (q, k, v), dout)
            times.append((middle - start, time.monotonic() - middle))
        for line, each in zip(found, zip(*times[1:])):
            line.append(median(each))
    flops = [4 * 64 * 8 * n * n for n in PROBES]
    return Line(tuple(flops), tuple(found[0])), Line(
        tuple(x * BACKWARD // 4 for x in flops), tuple(found[1])
    )


# --------------------------------------------------------------------------------------
# steps of a call, and their time


@dataclass(frozen=True)
class Prediction:
    """Seconds of one call: ``seconds`` in all; ``compute_s`` and ``exchange_s`` as if
    each were alone.
    """

    scheme: str
    seconds: float
    compute_s: float
    exchange_s: float


class _Timeline(MetaRun):
    """A run without data of one of several ``ranks`` that notes its steps: ("work",
    pass 1 or 2, FLOPs), ("send", number of the request, bytes by rank), ("wait", number
    of the request).
    """

    def __init__(self, ranks: int):
        super().__init__()
        self.ranks = ranks
        self.steps: list[tuple] = []
        self.requests: list[
            AllToAll | Exchange | None
        ] = []  # None: to compare what the ranks are about to do

    @contextmanager
    def on(self, kernel, device_type: str = "cpu"):
        with super().on(kernel, device_type):
            execute.on_plan = self._work
            try:
                yield
            finally:
                execute.on_plan = None

    def _work(self, plan: execute.Plan, which: int, q, causal: bool) -> None:
        flops = (
            (4, BACKWARD)[which - 1]
            * plan.pairs(causal, which)
            * q.shape[0]
            * q.shape[3]
        )
        self.steps.append(("work", which, flops))

    def drive(self, steps: Steps, rank: int):
        everyone = {to: CONTROL_BYTES for to in range(self.ranks) if to != rank}
        number = len(self.requests)
        self.steps += [
            ("send", number, everyone),
            ("wait", number),
        ]  # the ranks agree first
        self.requests.append(None)
        return super().drive(steps, rank)

    def on_step(self, step: AllToAll | Exchange | Wait, rank: int) -> None:
        if isinstance(step, Wait):
            self.steps.append(
                (
                    "wait",
                    next(i for i, x in enumerate(self.requests) if x is step.ticket),
                )
            )
        else:
            sent = {
                to: sum(t.nbytes for t in tensors)
                for to, tensors in step.by_rank()[0].items()
                if to != rank
            }
            self.steps.append(("send", len(self.requests), sent))
            self.requests.append(step)
        super().on_step(step, rank)


def on_network(call: MetaCall, network: Network) -> MetaCall:
    """The call on the hosts of a measured network.

    Raises ValueError for another number of ranks or dtype than it has, and for a GPU.
    """
    if call.ranks != len(network.hosts):
        raise ValueError(
            f"the network was measured with {len(network.hosts)} ranks, the call has {call.ranks}"
        )
    if call.device_type != "cpu":
        raise ValueError(
            f"networks are measured between CPUs, and {call.profile.name} is a GPU"
        )
    if (dtype := str(call.dtype).removeprefix("torch.")) not in network.work:
        raise ValueError(
            f"the network was measured in {', '.join(network.work)}, not in {dtype}"
        )
    return replace(call, hosts=network.hosts)


def predict(call: MetaCall, seq_len: int, network: Network) -> Prediction:
    """The Prediction of a call on the ranks of a measured network. Raises as
    ``on_network`` does.
    """
    problem, scheme = (call := on_network(call, network)).problem(seq_len)
    runs = [
        call.on_rank(problem, scheme, rank, _Timeline(call.ranks)).steps
        for rank in range(call.ranks)
    ]
    work = network.work[str(call.dtype).removeprefix("torch.")]
    at_once = replace(network, lines=dict.fromkeys(network.lines, NOTHING))
    times = (
        _seconds(runs, network, work),
        _seconds(runs, at_once, work),
        _seconds(runs, network, (NOTHING, NOTHING)),
    )
    return Prediction(scheme, *times)


def _seconds(
    runs: list[list[tuple]], network: Network, work: tuple[Line, Line]
) -> float:
    """The time at which the last rank has done its steps.

    A round begins when all ranks have come to it. Its bytes travel after those of
    earlier rounds, its latency beside.
    """
    ranks = range(len(runs))
    clock, at = [0.0] * len(runs), [0] * len(runs)
    asked: dict[int, dict[int, tuple[float, dict]]] = defaultdict(
        dict
    )  # by request: rank -> (when, bytes by rank)
    done, line_free = {}, 0.0  # by request: when
    while any(at[r] < len(runs[r]) for r in ranks):
        moved = False
        for r in ranks:
            while at[r] < len(runs[r]):
                kind, number, *rest = runs[r][at[r]]
                if kind == "work":
                    clock[r] += work[number - 1](*rest)
                elif kind == "send":
                    asked[number][r] = clock[r], *rest
                elif number not in done:
                    if len(asked[number]) < len(runs):
                        break
                    sent = {
                        (a, b): size
                        for a, (_, by) in asked[number].items()
                        for b, size in by.items()
                        if size
                    }
                    start = max(when for when, _ in asked[number].values())
                    whole = network.transfer_s(sent)
                    latency = min(
                        whole, network.transfer_s(dict.fromkeys(sent, CONTROL_BYTES))
                    )
                    line_free = max(start, line_free) + whole - latency
                    done[number] = line_free + latency if sent else start
                    continue
                else:
                    clock[r] = max(clock[r], done[number])
                at[r] += 1
                moved = True
        if not moved:
            raise RuntimeError("the ranks do not agree on what comes next")
    return max(clock)
