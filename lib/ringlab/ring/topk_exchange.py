"""Blocks chosen by content, across ranks: the means to choose by, requests for what was chosen, and attention to it.

Shards are contiguous, equal, and end where blocks end. ``gather`` gives every rank one vector for each block of all, in
one exchange whose backward sums the gradients at the owners. ``attend`` asks every owner, by a byte for each of its
blocks and K/V heads, for what the queries chose in any batch entry; these blocks come, each once, and their gradients
go home the same way in fp32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..engine import topk
from ..engine.autograd import outside_graphs
from .comm import AllToAll, Exchange, Post, Steps, Wait
from .exchange import Problem
from .group import World
from .layout import contiguous

# ---------------------------------------------------------------------------------------------------------------------
# what to choose by


def gather(world: World, q: Tensor, k: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """For every rank here all blocks' (q (b, h, blocks, d), k (b, h_kv, blocks, d)), given those of its own blocks."""
    return outside_graphs(_gathered)(world, q, k, size)


def _gathered(world: World, q: Tensor, k: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    heads = q.shape[1], k.shape[1]
    layout = contiguous(q.shape[2] // len(world.here) * world.ranks * size, world.ranks)
    same = {"batch": q.shape[0], "head_dim": q.shape[3], "dtype": q.dtype}
    world.agree(Problem(f"means of blocks of {size}", layout, False, *heads), same, q.device)
    found = _Gather.apply(torch.cat([q, k], 1), world)  # (b, h + h_kv, blocks, d) each
    return [tuple(t.contiguous() for t in each.split(heads, 1)) for each in found]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, means, world):
        ctx.world = world
        return tuple(world.run([_everyone(world, r, t) for r, t in zip(world.here, world.shards(means, 2))]))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return torch.cat(ctx.world.run([_home(ctx.world, g) for g in grads]), 2), None


def _everyone(world: World, rank: int, mine: Tensor) -> Steps:
    """The blocks (b, h, c, d) of all ranks as (b, h, blocks, d)."""
    mine = mine.contiguous()
    found = {j: (torch.empty_like(mine),) for j in range(world.ranks) if j != rank}
    yield Wait((yield Post(Exchange(dict.fromkeys(found, (mine,)), found))))
    found[rank] = (mine,)
    return torch.cat([found[j][0] for j in range(world.ranks)], 2)


def _home(world: World, grad: Tensor) -> Steps:
    """The sum of what all ranks have for one's own blocks."""
    send = torch.stack(grad.chunk(world.ranks, 2))  # (p, b, h, c, d)
    received, ones = torch.empty_like(send), [1] * world.ranks
    yield Wait((yield Post(AllToAll(send, ones, received, ones))))
    return received.sum(0)


# ---------------------------------------------------------------------------------------------------------------------
# attention to what was chosen


def attend(world: World, q, k, v, log_m: Tensor | None, picks: Tensor, pattern, causal: bool, scale: float, backend):
    """out (b, n, h, d), lse (b, h, n) of the rows here; picks (b, h, blocks here, top_k) count along the sequence."""
    return outside_graphs(_attend)(world, q, k, v, log_m, picks, pattern, causal, scale, backend)


def _attend(world: World, q, k, v, log_m, picks, pattern, causal, scale, backend):
    layout = contiguous(q.shape[1] // len(world.here) * world.ranks, world.ranks)
    same = {"batch": q.shape[0], "head_dim": q.shape[3], "dtype": q.dtype, "scale": scale, "backend": backend,
            "weighed": log_m is not None}  # fmt: skip
    world.agree(Problem(str(pattern), layout, causal, q.shape[2], k.shape[2]), same, q.device)
    return _Attention.apply(q, k, v, log_m, picks, world, pattern.block_size, causal, scale, backend)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, log_m, picks, world, *rest):
        needs = any(ctx.needs_input_grad)
        shards = zip(*(world.shards(t, dim) for t, dim in ((q, 1), (k, 1), (v, 1), (log_m, 2), (picks, 2))))
        found = world.run([_forward(world, r, *mine, *rest, needs) for r, mine in zip(world.here, shards)])
        outs, lses, rows, ctx.moves = zip(*found)
        out, lse = _joined(outs, 1), _joined(lses, 2)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, log_m, picks, out, lse, *rows)
        ctx.rest = world, *rest
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, log_m, picks, out, lse, *rows = ctx.saved_tensors
        world, *rest = ctx.rest
        # Without a cotangent too: the other ranks go through their backward.
        dout = torch.zeros_like(out) if dout is None else dout
        given = ((dout, 1), (dlse, 2), (q, 1), (k, 1), (v, 1), (out, 1), (lse, 2), (log_m, 2), (picks, 2))
        shards = zip(*(world.shards(t, dim) for t, dim in given))
        each = zip(world.here, ctx.moves, rows, shards)
        found = world.run([_backward(world, r, move, got, *mine, *rest) for r, move, got, mine in each])
        dq, dk, dv, dlog_m = zip(*found)
        grads = [_joined(parts, 1).to(k.dtype) for parts in (dq, dk, dv)]
        return *grads, None if log_m is None else _joined(dlog_m, 2), *[None] * 6


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@dataclass(frozen=True)
class _Moves:
    """The blocks of one K/V head that a rank receives and sends, in the order in which they travel.

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

        m is the most that one head received; what others have less is zero, and nobody picks it.
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


def _ask(world: World, rank: int, picks: Tensor, kv_heads: int, causal: bool) -> Steps:
    """Tell every owner which of its blocks the picks (b, h, c, top_k) name; what moves between all."""
    (c, top_k), p = picks.shape[2:], world.ranks
    own, device = slice(rank * c, (rank + 1) * c), picks.device
    used = torch.ones(c, top_k, dtype=torch.bool, device=device)
    if causal:  # the first rows have fewer blocks before them than slots
        used = used.tril(rank * c)
    used = used.expand(picks.shape)
    wanted = torch.zeros(p * c, kv_heads, dtype=torch.bool, device=device)
    wanted[picks[used], _kv_heads(picks, kv_heads)[used]] = True
    wanted[own] = False
    asked, shares = torch.empty_like(wanted, dtype=torch.uint8), [c] * p
    yield Wait((yield Post(AllToAll(wanted.to(torch.uint8), shares, asked, shares))))
    slots = c - 1 + wanted.cumsum(0)
    slots[own] = torch.arange(c, device=device)[:, None]
    blocks, heads = wanted.nonzero().unbind(1)
    received = wanted.view(p, -1).sum(1).tolist()
    gone = [each.nonzero().unbind(1) for each in asked.chunk(p)]
    return _Moves(slots, (slots[blocks, heads], heads), received, gone)


def _forward(world, rank, q, k, v, log_m, picks, size, causal, scale, backend, needs_backward) -> Steps:
    """out, lse, the rows received (R, 2, b, size, d), and what moved."""
    move = yield from _ask(world, rank, picks, k.shape[2], causal)
    blocks, heads = map(torch.cat, zip(*move.gone))
    send = torch.stack([t.unflatten(1, (-1, size))[:, blocks, :, heads] for t in (k, v)], 1)  # (R', 2, b, size, d)
    rows = send.new_empty(sum(move.received), *send.shape[1:])
    yield Wait((yield Post(AllToAll(send, move.sent, rows, move.received))))
    first, keys = rank * picks.shape[2], move.keys(k, v, rows)
    rest = log_m, move.local(picks), size, causal, scale, backend, needs_backward, first
    return *topk.forward(q, *keys, *rest), rows, move


def _backward(world, rank, move, rows, dout, dlse, q, k, v, out, lse, log_m, picks, size, causal, scale, backend):
    """dq, dk, dv, dlog_m of one rank; dk and dv are not yet rounded."""
    first, keys = rank * picks.shape[2], move.keys(k, v, rows)
    rest = log_m, move.local(picks), size, causal, scale, backend, first, True
    dq, *d_keys, dlog_m = topk.backward(dout, dlse, q, *keys, out, lse, *rest)
    slots, heads = move.came
    d_rows = torch.stack([t.unflatten(1, (-1, size))[:, slots, :, heads] for t in d_keys], 1)  # (R, 2, b, size, d)
    home = d_rows.new_empty(sum(move.sent), *d_rows.shape[1:])
    yield Wait((yield Post(AllToAll(d_rows, move.received, home, move.sent))))
    own = [t[:, : k.shape[1]] for t in d_keys]
    for (blocks, heads), part in zip(move.gone, home.split(move.sent)):  # one rank names a block once: no index twice
        for i, t in enumerate(own):
            t.unflatten(1, (-1, size))[:, blocks, :, heads] += part[:, i]
    return dq, *own, dlog_m
