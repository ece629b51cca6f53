"""Time of a call across ranks before it runs: what two ranks need to exchange bytes and to compute, measured in five
seconds, and the steps of each scheme, by the engine itself on tensors without data.

A transfer of so many bytes takes the time of a line through measured sizes: its latency first, then bytes over the
rate. A step of a scheme is work, or a transfer that runs while the rank works on until it waits for it.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from .attention import attention
from .engine import execute
from .meta_run import MetaCall, MetaRun
from .patterns import Dense
from .ring import Problem, choose
from .ring.comm import Steps, Wait, all_to_all, drive
from .ring.layout import layout_named

INSIDE, BETWEEN = "inside", "between"  # ranks of one machine, and of two
SIZES = (24, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # bytes that a rank sends
MEASURE_S = 5.0
CONTROL_BYTES = 24  # by which ranks agree before each pass
BACKWARD = 10  # FLOPs of a pair and element in a backward; 4 in a forward
PROBES = (128, 1024)  # tokens of dense attention, 8 heads of 64, whose times give the rates of work


@dataclass(frozen=True)
class Line:
    """Seconds for an amount, by straight lines between measured amounts; beyond the last one the line goes on.

    >>> Line((0, 100), (1.0, 2.0))(50), Line((0, 100), (1.0, 2.0))(300)
    (1.5, 4.0)
    """

    amounts: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, amount: float) -> float:
        i = next((i for i, more in enumerate(self.amounts[1:-1]) if amount <= more), len(self.amounts) - 2)
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


@dataclass(frozen=True)
class Network:
    """What was measured: the machine of each rank, by number; seconds for bytes each way by class of link; seconds for
    FLOPs of attention of one rank, forward and backward."""

    hosts: tuple[int, ...]
    lines: dict[str, Line]
    forward: Line
    backward: Line

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def read(cls, path: Path) -> Network:
        """What ``python -m ringlab network`` wrote. Raises ValueError for another file."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            made = {name: Line(*map(tuple, found[name].values())) for name in ("forward", "backward")}
            lines = {name: Line(*map(tuple, line.values())) for name, line in found["lines"].items()}
            return cls(tuple(found["hosts"]), lines, **made)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no file of python -m ringlab network: {error!r}") from None

    def transfer_s(self, sent: dict[tuple[int, int], int]) -> float:
        """Seconds of one round, of bytes by (from, to): ranks of a machine share its link to others, each way."""
        loads: dict[tuple, int] = {}
        for (a, b), size in sent.items():
            hosts = self.hosts[a], self.hosts[b]
            for end in ((BETWEEN, "out", hosts[0]), (BETWEEN, "in", hosts[1])) if hosts[0] != hosts[1] else (
                (INSIDE, "out", a), (INSIDE, "in", b)):  # fmt: skip
                loads[end] = loads.get(end, 0) + size
        return max((self.lines[end[0]](size) for end, size in loads.items()), default=0.0)


# ---------------------------------------------------------------------------------------------------------------------
# measuring


def measure(seconds: float = MEASURE_S, dtype: torch.dtype = torch.float32) -> Network:
    """Measure the default group, whose ranks call this together, in about so many seconds for each class of link.

    The hosts are told apart by their names. One pair of ranks stands for each class.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    names = [None] * ranks
    dist.all_gather_object(names, socket.gethostname())
    hosts = tuple(sorted(set(names)).index(name) for name in names)
    pairs: dict[str, tuple[int, int]] = {}
    for b in range(1, ranks):
        pairs.setdefault(INSIDE if hosts[0] == hosts[b] else BETWEEN, (0, b))
    lines = {}
    for name, pair in pairs.items():
        group = dist.new_group(pair)
        lines[name] = [_line(group, 0.8 * seconds / len(pairs)) if rank in pair else None]
        dist.broadcast_object_list(lines[name])
    work = [_work(dtype)] * ranks
    dist.all_gather_object(work, work[0])
    slowest = [Line(work[0][i].amounts, tuple(map(max, zip(*(each[i].seconds for each in work))))) for i in range(2)]
    return Network(hosts, {name: line for name, (line,) in lines.items()}, *slowest)


def _line(group: dist.ProcessGroup, seconds: float) -> Line:
    """Seconds of an exchange of both ranks by the bytes that each sends; sizes end where the next would take too long."""
    found: dict[int, float] = {}
    begin = time.monotonic()
    for size in SIZES:
        data, rows = torch.zeros(1, size, dtype=torch.uint8), [int(i != dist.get_rank(group)) for i in range(2)]
        times: list[float] = []
        while True:
            dist.barrier(group)
            start = time.monotonic()
            drive([all_to_all(data, rows, rows)], group)
            times.append(time.monotonic() - start)
            spent = torch.tensor([time.monotonic() - begin, times[-1]], dtype=torch.float64)
            dist.all_reduce(spent, dist.ReduceOp.MAX, group)
            times[-1] = float(spent[1])
            if len(times) >= 6 or len(times) >= 3 and float(spent[0]) > seconds * (SIZES.index(size) + 1) / len(SIZES):
                break
        found[size] = median(times[1:])  # the first one opens TCP's window
        if len(found) > 2 and float(spent[0]) + 3 * 4 * found[size] > seconds:
            break
    return Line(tuple(found), tuple(found.values()))


def _work(dtype: torch.dtype) -> tuple[Line, Line]:
    """Seconds for FLOPs of dense attention, forward and backward, as all ranks compute at once."""
    found: list[list[float]] = [[], []]
    for n in PROBES:
        q, k, v, dout = (torch.randn(1, n, 8, 64, dtype=dtype) for _ in range(4))
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        times: list[tuple[float, float]] = []
        for _ in range(6):
            dist.barrier()
            start = time.monotonic()
            out = attention(q, k, v, Dense())
            middle = time.monotonic()
            torch.autograd.grad(out, (q, k, v), dout)
            times.append((middle - start, time.monotonic() - middle))
        for line, each in zip(found, zip(*times[1:])):
            line.append(median(each))
    flops = [4 * 64 * 8 * n * n for n in PROBES]
    return Line(tuple(flops), tuple(found[0])), Line(tuple(x * BACKWARD // 4 for x in flops), tuple(found[1]))


# ---------------------------------------------------------------------------------------------------------------------
# steps of a call, and their time


@dataclass(frozen=True)
class Prediction:
    """Seconds of one call: ``seconds`` in all; ``compute_s`` and ``exchange_s`` as if each were alone."""

    scheme: str
    seconds: float
    compute_s: float
    exchange_s: float


class _Timeline(MetaRun):
    """A run without data of one rank that notes its steps: ("agree",), ("work", pass 1 or 2, FLOPs), ("send", bytes by
    rank), ("wait", number of the request)."""

    def __init__(self):
        super().__init__()
        self.steps: list[tuple] = []

    @contextmanager
    def on(self, kernel, device_type: str = "cpu"):
        with super().on(kernel, device_type):
            execute.on_plan = self._work
            try:
                yield
            finally:
                execute.on_plan = None

    def _work(self, plan: execute.Plan, which: int, q, causal: bool) -> None:
        pairs = sum(
            c.nodes * c.heads * (c.q.rows * c.k.rows - (causal and c.causal) * c.q.rows * (c.q.rows - 1) // 2)
            for _, *passes in plan.blocks for c in passes[which - 1]
        )  # fmt: skip
        self.steps.append(("work", which, (4, BACKWARD)[which - 1] * pairs * q.shape[0] * q.shape[3]))

    def drive(self, steps: Steps, rank: int):
        self.steps.append(("agree",))
        return super().drive(self._noted(steps, rank), rank)

    def _noted(self, steps: Steps, rank: int) -> Iterator:
        answer, tickets = None, []
        first = sum(step[0] == "send" for step in self.steps)
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                return end.value
            if isinstance(step, Wait):
                self.steps.append(("wait", first + next(i for i, x in enumerate(tickets) if x is step.ticket)))
                answer = yield step
                continue
            sent = {to: sum(t.nbytes for t in tensors) for to, tensors in step.by_rank()[0].items() if to != rank}
            self.steps.append(("send", sent))
            tickets.append(step)
            answer = yield step


def predict(call: MetaCall, seq_len: int, network: Network, scheme: str = "auto") -> Prediction:
    """The Prediction of a call on the ranks of a measured network. Raises ValueError for other ranks than it has."""
    if call.ranks != len(network.hosts):
        raise ValueError(f"the network was measured with {len(network.hosts)} ranks, the call has {call.ranks}")
    problem = Problem(call.pattern, layout_named(call.layout, seq_len, call.ranks), call.causal, call.heads, call.kv_heads)
    scheme = choose(problem).scheme if scheme == "auto" else scheme
    problem.check(scheme)
    runs = [call.on_rank(problem, scheme, rank, _Timeline()).steps for rank in range(call.ranks)]
    alone = replace(network, lines={name: Line((0, 1), (0.0, 0.0)) for name in network.lines})
    nothing = Line((0, 1), (0.0, 0.0))
    return Prediction(
        scheme, _seconds(runs, network), _seconds(runs, alone),
        _seconds(runs, replace(network, forward=nothing, backward=nothing)),
    )  # fmt: skip


def _seconds(runs: list[list[tuple]], network: Network) -> float:
    """The time at which the last rank has done its steps. A round begins when all ranks have come to it, and takes its
    bytes' time on the line after those that travel already; what it waits for besides, its latency, runs beside these."""
    ranks = range(len(runs))
    clock, at = [0.0] * len(runs), [0] * len(runs)
    asked: list[dict[int, tuple[float, dict]]] = []  # by request: rank -> (when, bytes by rank)
    done: dict[int, float] = {}
    posted = [0] * len(runs)
    control = {(a, b): CONTROL_BYTES for a in ranks for b in ranks if a != b}
    agree_s, line_free, agreed = network.transfer_s(control), 0.0, [[] for _ in ranks]
    while any(at[r] < len(runs[r]) for r in ranks):
        moved = False
        for r in ranks:
            while at[r] < len(runs[r]):
                kind, *rest = runs[r][at[r]]
                if kind == "work":
                    clock[r] += (network.forward, network.backward)[rest[0] - 1](rest[1])
                elif kind == "send":
                    if posted[r] == len(asked):
                        asked.append({})
                    asked[posted[r]][r] = clock[r], rest[0]
                    posted[r] += 1
                elif kind == "agree":
                    if len(agreed[r]) == sum(x[0] == "agree" for x in runs[r][: at[r]]):
                        agreed[r].append(clock[r])
                    number = len(agreed[r]) - 1
                    if any(len(each) <= number for each in agreed):
                        break
                    clock[r] = max(each[number] for each in agreed) + agree_s
                elif rest[0] not in done:
                    number = rest[0]
                    if len(asked[number]) < len(runs):
                        break
                    sent = {(a, b): size for a, (_, by) in asked[number].items() for b, size in by.items() if size}
                    start = max(when for when, _ in asked[number].values())
                    whole = network.transfer_s(sent)
                    latency = min(whole, network.transfer_s(dict.fromkeys(sent, CONTROL_BYTES)))
                    line_free = max(start, line_free) + whole - latency
                    done[number] = line_free + latency if sent else start
                    continue
                else:
                    clock[r] = max(clock[r], done[rest[0]])
                at[r] += 1
                moved = True
        if not moved:
            raise RuntimeError("the ranks do not agree on what comes next")
    return max(clock)
