"""Top-k block attention across ranks: block means to choose by, and attention to the
blocks that were chosen.

Shards are contiguous, equal, and end where blocks end. ``gather`` gives every rank the
block means of all ranks in one exchange, whose backward sums the gradients at the
owners. In ``attend`` every rank asks each owner, by a byte for each of its blocks and
K/V heads, for the blocks that its queries chose in any batch entry. Each of these is
sent once, and its gradients return the same way in fp32 or wider.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..engine import topk
from .comm import Steps, all_to_all, drive
from .exchange import Problem
from .group import Group
from .layout import contiguous


def _problem(group: Group, what: str, rows: int, causal: bool, *heads: int) -> Problem:
    return Problem(
        what,
        contiguous(rows // len(group.here) * group.size, group.size),
        causal,
        *heads,
    )


def gather(
    group: Group, parts: list[list[Tensor]], size: int
) -> list[tuple[Tensor, Tensor]]:
    """For every rank here, given its means, those of all blocks: q's (b, h, blocks, d)
    and k's (b, h_kv, blocks, d).
    """
    heads = [t.shape[1] for t in parts[0]]
    problem = _problem(
        group,
        f"means of blocks of {size}",
        parts[0][0].shape[2] * size * len(parts),
        False,
        *heads,
    )
    found = _Gather.apply(
        group, problem, *(torch.cat(pair, 1) for pair in parts)
    )  # (b, h + h_kv, blocks, d) each
    return [tuple(t.contiguous() for t in each.split(heads, 1)) for each in found]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, problem, *means):
        ctx.rest = group, problem, group.agree("forward", problem, means[0])
        return tuple(
            drive(
                [_everyone(group.size, tensors) for tensors in means],
                group.process_group,
            )
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        group, problem, number = ctx.rest
        group.agree("backward", problem, grads[0], number)
        return (
            None,
            None,
            *drive([_home(group.size, grad) for grad in grads], group.process_group),
        )


def _everyone(ranks: int, part: Tensor) -> Steps:
    """The blocks (b, h, c, d) of all ranks as (b, h, blocks, d)."""
    parts = yield from all_to_all(torch.stack([part] * ranks), [1] * ranks, [1] * ranks)
    return torch.cat(parts.unbind(), 2)


def _home(ranks: int, grad: Tensor) -> Steps:
    """The sum of all ranks' gradients for a rank's own blocks."""
    sums = yield from all_to_all(
        torch.stack(grad.chunk(ranks, 2)), [1] * ranks, [1] * ranks
    )  # (p, b, h, c, d)
    return sums.sum(0)


def attend(
    group: Group,
    q,
    k,
    v,
    log_m: Tensor | None,
    picks: Tensor,
    size: int,
    causal,
    scale,
    backend,
    pattern: str,
):
    """out (b, n, h, d), lse (b, h, n) of the rows here; picks (b, h, blocks here,
    top_k) count along the sequence.
    """
    problem = _problem(group, pattern, q.shape[1], causal, q.shape[2], k.shape[2])
    return _Attention.apply(
        q, k, v, log_m, picks, group, problem, size, causal, scale, backend
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, log_m, picks, group, problem, *rest):
        _, _, scale, backend = rest
        options = {"scale": scale, "backend": backend, "weighed": log_m is not None}
        number = group.agree("forward", problem, q, **options)
        needs = any(ctx.needs_input_grad)
        shards = zip(
            *(
                group.split(t, dim)
                for t, dim in ((q, 1), (k, 1), (v, 1), (log_m, 2), (picks, 2))
            )
        )
        steps = [
            _forward(group.size, rank, *tensors, *rest, needs)
            for rank, tensors in zip(group.here, shards)
        ]
        found = drive(steps, group.process_group)
        outs, lses, rows, moves = zip(*found)
        out = group.join(outs, 1)
        lse = group.join(lses, 2)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, log_m, out, lse, *rows)
        ctx.rest = group, problem, number, options, moves, rest
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, log_m, out, lse, *rows = ctx.saved_tensors
        group, problem, number, options, moves, rest = ctx.rest
        # Without a cotangent too: the other ranks go through their backward.
        group.agree("backward", problem, q, number, **options)
        dout = torch.zeros_like(out) if dout is None else dout
        inputs = (
            (dout, 1),
            (dlse, 2),
            (q, 1),
            (k, 1),
            (v, 1),
            (log_m, 2),
            (out, 1),
            (lse, 2),
        )
        shards = zip(*(group.split(t, dim) for t, dim in inputs))
        each = zip(group.here, moves, rows, shards)
        steps = [_backward(*got, *tensors, *rest) for *got, tensors in each]
        dq, dk, dv, dlog_m = zip(*drive(steps, group.process_group))
        grads = [group.join(parts, 1).to(k.dtype) for parts in (dq, dk, dv)]
        return *grads, None if log_m is None else group.join(dlog_m, 2), *[None] * 7


@dataclass(frozen=True)
class _Moves:
    """The blocks of one K/V head that a rank holds, receives and sends.

    It holds ``count`` blocks of each head, its own first; ``picks`` (b, h, c, top_k)
    count along these. ``came``: the (block held, head) of each that is received, in the
    order of sending; ``asked`` (ranks, own blocks, h_kv): which are sent. ``received``
    and ``sent``: how many, by rank.
    """

    picks: Tensor
    count: int
    came: tuple[Tensor, Tensor]
    received: list[int]
    asked: Tensor
    sent: list[int]

    def held(self, tensors: tuple[Tensor, Tensor], rows: Tensor) -> Iterator[Tensor]:
        """k and v (b, n, h_kv, d) with the rows received (R, 2, b, size, d): (b, count
        * size, h_kv, d) each.

        Heads that received fewer blocks than another are padded by zeros, which no
        query picks.
        """
        for t, received in zip(tensors, rows.unbind(1)):
            size = rows.shape[3]
            held = t.new_zeros(t.shape[0], self.count * size, *t.shape[2:])
            held[:, : t.shape[1]] = t
            _blocks(held, size)[self.came] = received
            yield held


def _blocks(t: Tensor, size: int) -> Tensor:
    """A view of t (b, n, h_kv, d) as (blocks, h_kv, b, size, d)."""
    return t.unflatten(1, (-1, size)).permute(1, 3, 0, 2, 4)


def _ask(ranks: int, rank: int, picks: Tensor, kv_heads: int, causal: bool) -> Steps:
    """Ask every owner for the blocks that the picks (b, h, c, top_k) name; returns what
    moves.
    """
    heads, c, top_k = picks.shape[1:]
    kv_head = torch.arange(kv_heads, device=picks.device).repeat_interleave(
        heads // kv_heads
    )[:, None, None]
    own = slice(rank * c, (rank + 1) * c)
    used = torch.ones(c, top_k, dtype=torch.bool, device=picks.device)
    if causal:  # the first rows have fewer blocks before them than slots
        used = used.tril(rank * c)
    used, wanted = used.expand(picks.shape), used.new_zeros(ranks * c, kv_heads)
    wanted[picks[used], kv_head.expand(picks.shape)[used]] = True
    wanted[own] = False
    asked = yield from all_to_all(wanted.to(torch.uint8), [c] * ranks, [c] * ranks)
    asked, block = asked.unflatten(0, (ranks, c)).bool(), c - 1 + wanted.cumsum(0)
    block[own] = torch.arange(c, device=picks.device)[:, None]
    received, sent = (t.view(ranks, -1).sum(1).tolist() for t in (wanted, asked))
    came = block[wanted], wanted.nonzero()[:, 1]
    return _Moves(
        block[picks, kv_head], int(block.max()) + 1, came, received, asked, sent
    )


def _forward(
    ranks, rank, q, k, v, log_m, picks, size, causal, scale, backend, needs_backward
) -> Steps:
    """out, lse, the rows received (R, 2, b, size, d), and what moved."""
    moves = yield from _ask(ranks, rank, picks, k.shape[2], causal)
    _, *asked = moves.asked.nonzero().unbind(1)
    send = torch.stack(
        [_blocks(t, size)[tuple(asked)] for t in (k, v)], 1
    )  # (R', 2, b, size, d)
    rows = yield from all_to_all(send, moves.sent, moves.received)
    rest = (
        log_m,
        moves.picks,
        size,
        causal,
        scale,
        backend,
        rank * picks.shape[2],
        needs_backward,
    )
    return *topk.forward(q, *moves.held((k, v), rows), *rest), rows, moves


def _backward(
    rank,
    moves,
    rows,
    dout,
    dlse,
    q,
    k,
    v,
    log_m,
    out,
    lse,
    size,
    causal,
    scale,
    backend,
) -> Steps:
    """dq, dk, dv, dlog_m of one rank; dk and dv are not yet rounded."""
    rest = (
        log_m,
        moves.picks,
        out,
        lse,
        size,
        causal,
        scale,
        backend,
        rank * moves.picks.shape[2],
        True,
    )
    dq, *d_held, dlog_m = topk.backward(dout, dlse, q, *moves.held((k, v), rows), *rest)
    send = torch.stack(
        [_blocks(t, size)[moves.came] for t in d_held], 1
    )  # (R, 2, b, size, d)
    home = yield from all_to_all(send, moves.received, moves.sent)
    for asked, part in zip(moves.asked, home.split(moves.sent)):
        for i, t in enumerate(d_held):
            _blocks(t[:, : k.shape[1]], size)[asked] += part[:, i]
    return dq, *(t[:, : k.shape[1]] for t in d_held), dlog_m
