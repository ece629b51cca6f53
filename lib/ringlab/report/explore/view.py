"""What the explorer shows of a choice, as numbers: who sees whom, near and from afar, and the facts in words."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import hardware
from ...block_patterns import BlockSparse
from ...cost import format_seconds
from ...patterns import Pattern
from ..tables import Cell, Table, number, size
from .choice import PRESETS, Choice

TIMES = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
BYTES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
CELLS = 128  # of a sequence seen from afar, either way
NEAR, NEAR_BLOCKS = 64, 6  # positions seen one by one, or those of some blocks


def span(pattern: Pattern, n: int, at: int) -> range:
    """The positions that are seen one by one, from ``at`` on, or the last ones; ValueError for one that is not there.

    >>> from ringlab.patterns import Dense
    >>> span(Dense(), 100, 8), span(Dense(), 100, 99)
    (range(8, 72), range(36, 100))
    """
    if not 0 <= at < n:
        raise ValueError(f"position {at:,} is not in the sequence, which has {n:,}")
    size = max(NEAR, min(1024, NEAR_BLOCKS * pattern.block_size)) if isinstance(pattern, BlockSparse) else NEAR
    start = max(0, min(at, n - size))
    return range(start, min(n, start + size))


def near(pattern: Pattern, n: int, at: range, *, head: int, heads: int, kv_heads: int, causal: bool) -> Tensor:
    """M of neighbouring positions, (q, k) int64: ``pattern.multiplicity``, and 0 where causal hides.

    >>> from ringlab.patterns import Dilated
    >>> near(Dilated([2, 4], [1, 2]), 4, range(4), head=0, heads=1, kv_heads=1, causal=True).tolist()
    [[2, 0, 0, 0], [1, 1, 0, 0], [1, 0, 2, 0], [0, 0, 1, 1]]
    """
    x = torch.arange(at.start, at.stop)
    seen = pattern.multiplicity(x, x, n=n, head=head, heads=heads, kv_heads=kv_heads)  # (q, k)
    return seen.tril() if causal else seen


def afar(pattern: Pattern, n: int, *, head: int, heads: int, kv_heads: int, causal: bool, cells: int = CELLS) -> Tensor:
    """The mean of M over each of cells x cells equal parts of the whole, exact, float64 (cells, cells); fewer if n is.

    >>> from ringlab.patterns import Dense
    >>> afar(Dense(), 2**30, head=0, heads=1, kv_heads=1, causal=True, cells=2).mul(2**30).long().tolist()
    [[536870913, 0], [1073741824, 536870913]]
    """
    edges = torch.arange(min(cells, n) + 1) * n // min(cells, n)
    if isinstance(pattern, BlockSparse):
        total = _of_blocks(pattern, edges, causal)
    else:
        mine = [(b.length, b.rate, b.offsets[b.heads.index(head)])
                for b in pattern.branches(n, heads, kv_heads) if head in b.heads]  # fmt: skip
        total = torch.stack([_of_branch(edges, *branch, causal) for branch in mine]).sum(0)
    sizes = edges.diff().double()
    return total.double() / (sizes[:, None] * sizes)


def _of_branch(edges: Tensor, length: int, rate: int, offset: int, causal: bool) -> Tensor:
    """Pairs (query cell, key cell) of a branch: cells meet in one segment, a cell and itself in all that it holds."""
    most = -(-(length - offset) // rate)  # selected rows of a whole segment

    def below(x: Tensor) -> Tensor:
        """How many positions before x are selected."""
        return x // length * most + ((x % length - offset + rate - 1) // rate).clamp(min=0)

    def among(m):
        return m * (m + 1) // 2 if causal else m * m

    start, stop = edges[:-1], edges[1:]
    first, last = start // length, (stop - 1) // length  # segments
    head = below(torch.minimum(stop, (first + 1) * length)) - below(start)  # of a cell, in its first segment
    tail = below(stop) - below(torch.maximum(start, last * length))
    ahead = (tail[:, None] * head * (last[:, None] == first)).triu(1)  # (earlier cell, later cell)
    between = (last - first - 1).clamp(min=0) * among(most)
    own = torch.where(first == last, among(head), among(head) + among(tail) + between)
    return ahead.T + own.diag() + (0 if causal else ahead)


def _of_blocks(pattern: BlockSparse, edges: Tensor, causal: bool) -> Tensor:
    """The same for blocks, by how many positions of each block lie in each cell."""
    n = int(edges[-1])
    count, block = pattern.count(n), pattern.block_size
    start = torch.arange(count) * block
    stop = (start + block).clamp(max=n)
    share = (torch.minimum(edges[1:, None], stop) - torch.maximum(edges[:-1, None], start)).clamp(min=0).double()
    seen = pattern.blocks(n)  # (blocks, blocks)
    if not causal:
        return share @ seen.double() @ share.T
    diagonal = share * seen.diagonal()  # (cells, blocks)
    own = (diagonal * (share + 1) / 2).sum(1)
    return share @ seen.tril(-1).double() @ share.T + (diagonal @ share.T).tril(-1) + own.diag()


def matrix(estimate) -> list[list[int]]:
    """Bytes by sending rank (rows) and receiving rank (columns)."""
    return [[estimate.sent.get((a, b), 0) for b in range(estimate.ranks)] for a in range(estimate.ranks)]


def facts(choice: Choice, estimate, profile: hardware.Profile, longest: int | str) -> Table:
    """What a call costs, and what this hardware says to it; ``longest``: the length that fits, or why there is none."""
    n, heads, cost = choice.n, choice.heads, estimate.cost
    folded = "" if cost.folded_flops == cost.flops else f"{number(cost.folded_flops / 1e9)} with shared pairs once"
    lines = [
        ["Pairs of n² that a head sees", Cell(f"{100 * cost.distinct_pairs / (choice.batch * heads * n * n):.3g} %")],
        ["Work", Cell(f"{number(cost.flops / 1e9)} GFLOP", folded)],
        ["Peak memory of a rank", Cell(size(estimate.peak_bytes), _of(estimate.peak_bytes, profile.memory_bytes))],
        ["Longest sequence that fits", Cell(f"{longest:,}" if isinstance(longest, int) else longest)],
        ["Lower bound of the time", bound(estimate, profile)],
    ]
    if rate := profile.peak(choice.dtype):
        lines.append(["Compute rate", Cell(f"{number(rate / 1e12)} TFLOP/s", profile.peak_reason(choice.dtype))])
    if choice.ranks > 1:
        lines += [
            ["Scheme", estimate.scheme],
            ["Sent in all", Cell(size(sum(estimate.sent.values())), _busiest(estimate))],
        ]
    return Table(f"Estimate for {profile.title}", ["One call", ""], lines)


def bound(estimate, profile: hardware.Profile) -> Cell:
    """The time that no call can beat, and what binds it."""
    if not estimate.bounds:
        return Cell("none", f"no rate is known of {profile.name}")
    return Cell(format_seconds(estimate.bound_s), f"{estimate.binds} binds")


def code(choice: Choice) -> str:
    """The call as Python that runs: this pattern, these shapes, on simulated ranks where there are several."""
    c, more = choice.call, ", causal=True" if choice.causal else ""
    if choice.kind in PRESETS:
        function, arguments = choice.preset
        given = ", ".join([*map(repr, arguments), f"block_size={choice.block_size}"])
        pattern = f"ringlab.blocks.{function}({given})"
    else:
        pattern = f"ringlab.{choice.pattern!r}"
    if choice.ranks > 1:
        more += f", group=ringlab.Simulated({choice.ranks}), scheme={choice.scheme!r}, layout={choice.layout!r}"
    shape = f"{c['seq_len']}, {{}}, {c['head_dim']}, dtype={c['dtype']}"
    shape += ", requires_grad=True" if choice.passes == "fwd+bwd" else ""
    lines = [
        "import torch", "import ringlab", "", f"pattern = {pattern}",
        f"q = torch.randn({c['batch']}, {shape.format(c['heads'])})",
        f"k, v = (torch.randn({c['batch']}, {shape.format(c['kv_heads'])}) for _ in range(2))",
        f"out = ringlab.attention(q, k, v, pattern{more})",
    ]  # fmt: skip
    return "\n".join(lines + (["out.sum().backward()"] if choice.passes == "fwd+bwd" else [])) + "\n"


def scaled(value: float, units: dict[str, float]) -> tuple[str, float]:
    """The first unit that a value reaches, and its factor; else the last one.

    >>> scaled(0.004, TIMES), scaled(5 << 20, BYTES)
    (('ms', 0.001), ('MiB', 1048576))
    """
    return next(((name, factor) for name, factor in units.items() if value >= factor), list(units.items())[-1])


def _of(peak: int, memory: int | None) -> str:
    if not memory:
        return "the profile names no memory"
    share = f"{100 * peak / memory:.3g} % of {size(memory)}"
    return share if peak <= memory else f"{share}: it does not fit"


def _busiest(estimate) -> str:
    most = max((sum(row) for row in matrix(estimate)), default=0)
    return f"the busiest rank {size(most)}" if most else ""
