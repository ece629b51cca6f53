"""Blocks chosen by content, on one rank or several: importable by name, so that other
processes find it.
"""

import torch
import torch.distributed as dist
from ringlab import Adaptive, AdaptiveBlockSparse, adaptive, adaptive_attention
from ringlab.ring import counting

SIZE, TOP_K, D = 4, 3, 8


def tensors(shape, kind, dtype=torch.float64):
    """q, k, v, z or the scorer's weights, and cotangents of out and lse; shape: (b, h,
    h_kv, all blocks).
    """
    (b, h, kv, blocks), generator = shape, torch.Generator().manual_seed(0)
    n = blocks * SIZE
    more = {"means": [], "z": [(b, h, blocks, blocks)], "scorer": [(D, D), (D, D)]}[
        kind
    ]
    sizes = [(b, n, h, D), (b, n, kv, D), (b, n, kv, D), *more, (b, n, h, D), (b, h, n)]
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes]
    if kind == "scorer":
        made[3:5] = [torch.eye(D, dtype=torch.float64) + 0.5 * t for t in made[3:5]]
    return [t.to(dtype) for t in made]


def shard_of(given, rank, ranks):
    """What one rank passes: rows of every tensor but the scorer's weights."""
    dims = [1, 1, 1, *({6: [2], 7: [None, None]}.get(len(given), [])), 1, 2]
    return [
        t if dim is None else t.chunk(ranks, dim)[rank] for t, dim in zip(given, dims)
    ]


def chosen(given, kind, causal):
    """S (b, h, blocks, top_k) for whole tensors."""
    q, k, _, *more = given[:-2]
    z = (
        more[0]
        if kind == "z"
        else adaptive.logits(q, k, Adaptive(SIZE, TOP_K), None, causal, None, more)
    )
    return adaptive.choose_blocks(z, Adaptive(SIZE, TOP_K), causal, None)


def forward(leaves, kind, causal, group, backend="auto"):
    """[out] of the module or [out, lse] of the function, for q, k, v and z or the
    scorer's weights.
    """
    q, k, v, *more = leaves
    if kind == "scorer":
        how = {"group": group, "dtype": q.dtype, "backend": backend}
        layer = AdaptiveBlockSparse(D, SIZE, TOP_K, **how)
        return [
            torch.func.functional_call(
                layer, dict(zip(("q_score", "k_score"), more)), (q, k, v, causal)
            )
        ]
    return list(
        adaptive_attention(
            q,
            k,
            v,
            Adaptive(SIZE, TOP_K),
            *more,
            causal=causal,
            group=group,
            backend=backend,
            return_lse=True,
        )
    )


def step(given, kind, causal, group, backend="auto"):
    """What ``forward`` gives, then the gradients of all leaves."""
    *leaves, dout, dlse = given
    leaves = [t.clone().requires_grad_() for t in leaves]
    found = forward(leaves, kind, causal, group, backend)
    grads = torch.autograd.grad(
        found, leaves, [g.to(t.dtype) for t, g in zip(found, (dout, dlse))]
    )
    return [t.detach() for t in (*found, *grads)]


def content(cases):
    """Blocks chosen by content: each case's results on this rank, and the bytes that it
    sent.
    """
    rank, ranks, found = dist.get_rank(), dist.get_world_size(), []
    for shape, kind, causal, dtype in cases:
        shards = shard_of(tensors(shape, kind, dtype), rank, ranks)
        with counting() as traffic:
            found.append((step(shards, kind, causal, dist.group.WORLD), traffic))
    return [(results, traffic.total) for results, traffic in found]
