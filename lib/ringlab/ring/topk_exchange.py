"""Top-k block attention across ranks: block means to choose by, and attention to the blocks that were chosen.

Shards are contiguous, equal, and end where blocks end. ``gather`` gives every rank the block means of all ranks in one
exchange, whose backward sums the gradients at the owners. In ``attend`` every rank asks each owner, by a byte for each
of its blocks and K/V heads, for the blocks that its queries chose in any batch entry. Each of these is sent once, and
its gradients return the same way in fp32 or wider.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..engine import topk
from .comm import AllToAll, Exchange, Steps, Wait
from .exchange import Problem
from .group import Group
from .layout import contiguous

# ---------------------------------------------------------------------------------------------------------------------
# block means


def sequence_length(group: Group, rows: int, size: int) -> int:
    """The length of the sequence; ValueError unless the shards are equal and of whole blocks of ``size``."""
    n = rows * group.size // len(group.here)
    if n % (group.size * size):
        raise ValueError(f"every rank needs equally many whole blocks of {size}, got n = {n} on {group.size} ranks")
    return n


def gather(group: Group, q: Tensor, k: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """For every rank here the means q (b, h, blocks, d), k (b, h_kv, blocks, d) of all blocks, given those here."""
    if torch.compiler.is_compiling():
        return torch.compiler.disable(gather)(group, q, k, size)
    heads = q.shape[1], k.shape[1]
    layout = contiguous(q.shape[2] // len(group.here) * group.size * size, group.size)
    problem = Problem(f"means of blocks of {size}", layout, False, *heads)
    found = _Gather.apply(torch.cat([q, k], 1), group, problem)  # (b, h + h_kv, blocks, d) each
    return [tuple(t.contiguous() for t in each.split(heads, 1)) for each in found]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, means, group, problem):
        ctx.rest = group, problem, group.agree("forward", problem, means)
        return tuple(group.run([_everyone(group, *mine) for mine in zip(group.here, group.split(means, 2))]))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        group, problem, number = ctx.rest
        group.agree("backward", problem, grads[0], number)
        return torch.cat(group.run([_home(group, grad) for grad in grads]), 2), None, None


def _everyone(group: Group, rank: int, mine: Tensor) -> Steps:
    """The blocks (b, h, c, d) of all ranks as (b, h, blocks, d)."""
    mine = mine.contiguous()
    found = {j: (torch.empty_like(mine),) for j in range(group.size) if j != rank}
    yield Wait((yield Exchange(dict.fromkeys(found, (mine,)), found)))
    found[rank] = (mine,)
    return torch.cat([found[j][0] for j in range(group.size)], 2)


def _home(group: Group, grad: Tensor) -> Steps:
    """The sum of all ranks' gradients for a rank's own blocks."""
    send = torch.stack(grad.chunk(group.size, 2))  # (p, b, h, c, d)
    received, ones = torch.empty_like(send), [1] * group.size
    yield Wait((yield AllToAll(send, ones, received, ones)))
    return received.sum(0)


# ---------------------------------------------------------------------------------------------------------------------
# attention to the chosen blocks


def attend(group: Group, q, k, v, log_m: Tensor | None, picks: Tensor, pattern, causal: bool, scale: float, backend):
    """out (b, n, h, d), lse (b, h, n) of the rows here; picks (b, h, blocks here, top_k) count along the sequence."""
    if torch.compiler.is_compiling():
        return torch.compiler.disable(attend)(group, q, k, v, log_m, picks, pattern, causal, scale, backend)
    layout = contiguous(q.shape[1] // len(group.here) * group.size, group.size)
    problem = Problem(str(pattern), layout, causal, q.shape[2], k.shape[2])
    return _Attention.apply(q, k, v, log_m, picks, group, problem, pattern.block_size, causal, scale, backend)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, log_m, picks, group, problem, size, causal, scale, backend):
        options = {"scale": scale, "backend": backend, "weighed": log_m is not None}
        number, needs = group.agree("forward", problem, q, **options), any(ctx.needs_input_grad)
        rest = size, causal, scale, backend
        shards = zip(*(group.split(t, dim) for t, dim in ((q, 1), (k, 1), (v, 1), (log_m, 2), (picks, 2))))
        found = group.run([_forward(group, rank, *mine, *rest, needs) for rank, mine in zip(group.here, shards)])
        outs, lses, rows, moves = zip(*found)
        out, lse = group.join(outs, 1), group.join(lses, 2)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, log_m, picks, out, lse, *rows)
        ctx.rest = group, problem, number, options, moves, rest
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, log_m, picks, out, lse, *rows = ctx.saved_tensors
        group, problem, number, options, moves, rest = ctx.rest
        # Without a cotangent too: the other ranks go through their backward.
        group.agree("backward", problem, q, number, **options)
        dout = torch.zeros_like(out) if dout is None else dout
        given = ((dout, 1), (dlse, 2), (q, 1), (k, 1), (v, 1), (out, 1), (lse, 2), (log_m, 2), (picks, 2))
        shards = zip(*(group.split(t, dim) for t, dim in given))
        each = zip(group.here, moves, rows, shards)
        found = group.run([_backward(group, *got, *mine, *rest) for *got, mine in each])
        dq, dk, dv, dlog_m = zip(*found)
        grads = [group.join(parts, 1).to(k.dtype) for parts in (dq, dk, dv)]
        return *grads, None if log_m is None else group.join(dlog_m, 2), *[None] * 7


@dataclass(frozen=True)
class _Moves:
    """The blocks of one K/V head that a rank receives and sends, in the order in which they are sent.

    ``slots`` (blocks, h_kv): where a block lies among the keys that the rank holds, its own first. ``came``: (slot,
    head) of each that is received, (R,) each; ``gone``: (own block, head) of each that is sent, by destination.
    """

    slots: Tensor
    came: tuple[Tensor, Tensor]
    received: list[int]
    gone: list[tuple[Tensor, Tensor]]

    @property
    def sent(self) -> list[int]:
        return [len(blocks) for blocks, _ in self.gone]

    def local(self, picks: Tensor) -> Tensor:
        """picks (b, h, c, top_k) along the keys that the rank holds."""
        return self.slots[picks, _kv_heads(picks, self.slots.shape[1])]

    def keys(self, k: Tensor, v: Tensor, rows: Tensor) -> list[Tensor]:
        """k and v (b, (c + m) * size, h_kv, d): own ones, then the received rows (R, 2, b, size, d).

        m is the most blocks that one head received. Heads with fewer are padded by zeros, which no query picks.
        """
        size, (slots, heads) = rows.shape[3], self.came
        most = int(slots.max()) + 1 if len(slots) else 0
        found = []
        for i, t in enumerate((k, v)):
            store = t.new_zeros(t.shape[0], max(t.shape[1], most * size), *t.shape[2:])
            store[:, : t.shape[1]] = t
            store.unflatten(1, (-1, size))[:, slots, :, heads] = rows[:, i]
            found.append(store)
        return found


def _kv_heads(picks: Tensor, kv_heads: int) -> Tensor:
    """The K/V head of each pick, (b, h, c, top_k)."""
    heads = torch.arange(kv_heads, device=picks.device).repeat_interleave(picks.shape[1] // kv_heads)
    return heads[:, None, None].expand(picks.shape)


def _ask(group: Group, rank: int, picks: Tensor, kv_heads: int, causal: bool) -> Steps:
    """Ask every owner for the blocks that the picks (b, h, c, top_k) name; returns what moves."""
    (c, top_k), p = picks.shape[2:], group.size
    own, device = slice(rank * c, (rank + 1) * c), picks.device
    used = torch.ones(c, top_k, dtype=torch.bool, device=device)
    if causal:  # the first rows have fewer blocks before them than slots
        used = used.tril(rank * c)
    used = used.expand(picks.shape)
    wanted = torch.zeros(p * c, kv_heads, dtype=torch.bool, device=device)
    wanted[picks[used], _kv_heads(picks, kv_heads)[used]] = True
    wanted[own] = False
    asked, shares = torch.empty_like(wanted, dtype=torch.uint8), [c] * p
    yield Wait((yield AllToAll(wanted.to(torch.uint8), shares, asked, shares)))
    slots = c - 1 + wanted.cumsum(0)
    slots[own] = torch.arange(c, device=device)[:, None]
    blocks, heads = wanted.nonzero().unbind(1)
    received = wanted.view(p, -1).sum(1).tolist()
    gone = [each.nonzero().unbind(1) for each in asked.chunk(p)]
    return _Moves(slots, (slots[blocks, heads], heads), received, gone)


def _forward(group, rank, q, k, v, log_m, picks, size, causal, scale, backend, needs_backward) -> Steps:
    """out, lse, the rows received (R, 2, b, size, d), and what moved."""
    move = yield from _ask(group, rank, picks, k.shape[2], causal)
    blocks, heads = map(torch.cat, zip(*move.gone))
    send = torch.stack([t.unflatten(1, (-1, size))[:, blocks, :, heads] for t in (k, v)], 1)  # (R', 2, b, size, d)
    rows = send.new_empty(sum(move.received), *send.shape[1:])
    yield Wait((yield AllToAll(send, move.sent, rows, move.received)))
    first, keys = rank * picks.shape[2], move.keys(k, v, rows)
    rest = log_m, move.local(picks), size, causal, scale, backend, first, needs_backward
    return *topk.forward(q, *keys, *rest), rows, move


def _backward(group, rank, move, rows, dout, dlse, q, k, v, out, lse, log_m, picks, size, causal, scale, backend):
    """dq, dk, dv, dlog_m of one rank; dk and dv are not yet rounded."""
    first, keys = rank * picks.shape[2], move.keys(k, v, rows)
    tensors = q, *keys, log_m, move.local(picks), out, lse
    dq, *d_keys, dlog_m = topk.backward(dout, dlse, *tensors, size, causal, scale, backend, first, True)
    slots, heads = move.came
    d_rows = torch.stack([t.unflatten(1, (-1, size))[:, slots, :, heads] for t in d_keys], 1)  # (R, 2, b, size, d)
    home = d_rows.new_empty(sum(move.sent), *d_rows.shape[1:])
    yield Wait((yield AllToAll(d_rows, move.received, home, move.sent)))
    own = [t[:, : k.shape[1]] for t in d_keys]
    for (blocks, heads), part in zip(move.gone, home.split(move.sent)):  # one rank names a block once: no index twice
        for i, t in enumerate(own):
            t.unflatten(1, (-1, size))[:, blocks, :, heads] += part[:, i]
    return dq, *own, dlog_m
