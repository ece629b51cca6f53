"""Packed and padded documents across ranks: those inside a shard, and those that shards
cut.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

import torch
from torch import Tensor

from ..checks import short_repr
from ..engine.autograd import local_attention
from ..engine.documents import Documents
from ..engine.ways import LocalCall
from ..torch_private import outside_modes
from .exchange import Problem, digest
from .group import Group, shared_refusals
from .layout import Layout, layout_named
from .operators import Across, attend, check_exchange_dtype
from .schemes import check_problem, check_scheme


def attend_documents(
    across: Across, q, k, v, sinks: Tensor | None, call: LocalCall
) -> tuple[Tensor, Tensor]:
    """As ``attend`` for packed or padded documents, whose positions are global.

    Documents inside a shard are attended there, and nothing moves. One that borders of
    shards cut is a call of all ranks on its part of the layout.
    """
    pattern = call.pattern
    documents = call.documents
    ranks = Group.of(across.group, dimensions=2)
    checked = check_scheme(across.scheme, ranks.shape)
    layout = layout_named(across.layout, documents.n, ranks.size)
    if layout.kind not in ("contiguous", "zigzag"):
        raise ValueError(
            f"documents across ranks need a contiguous or zigzag layout, not a {layout.kind} one"
        )
    rank = None if ranks.process_group is None else ranks.here[0]
    rows = layout.n if rank is None else layout.size(rank)
    if q.shape[1] != rows:
        raise ValueError(f"the layout has {rows} positions here, q has {q.shape[1]}")
    if ranks.size == 1:
        return local_attention(q, k, v, sinks, call)
    check_exchange_dtype(across.exchange_dtype, q.dtype)
    shape = call.causal, q.shape[2], k.shape[2]
    problem = Problem(pattern, layout, *shape, exchange_dtype=across.exchange_dtype)
    if checked != "auto":  # also where no document is cut, and nothing moves
        check_problem(problem, checked, length=False)
    borders = [(start, stop) for _, start, stop in documents.spans]
    ranks.agree(
        "forward of documents",
        problem,
        q,
        borders=f"{short_repr(borders)} ({digest(documents.spans)})",
    )
    inside, cut, index = documents_on(documents, layout, rank)
    local = call._replace(documents=inside)
    if not cut:
        return local_attention(q, k, v, sinks, local)
    with shared_refusals(ranks):
        out, lse = local_attention(q, k, v, sinks, local)
    index = index.to(q.device)
    parts = [
        t.flatten(0, 1)[index].split([e * r for _, e, r in cut]) for t in (q, k, v)
    ]
    results = []
    for (shards, *size), *tensors in zip(cut, *parts):
        tensors = (t.unflatten(0, size) for t in tensors)
        one = across._replace(layout=shards)
        results.append(attend(one, *tensors, sinks, call._replace(documents=None)))
    outs, lses = zip(
        *((o.flatten(0, 1), l.transpose(1, 2).flatten(0, 1)) for o, l in results)
    )
    shape, lse = out.shape, lse.transpose(1, 2)  # (b, n, h)
    out = out.flatten(0, 1).index_copy(0, index, torch.cat(outs)).view(shape)
    lse = lse.flatten(0, 1).index_copy(0, index, torch.cat(lses)).view(shape[:3])
    return out, lse.transpose(1, 2)


@lru_cache(maxsize=64)
@outside_modes()
def documents_on(
    documents: Documents, layout: Layout, rank: int | None
) -> tuple[Documents, list[tuple[Layout, int, int]], Tensor]:
    """Where documents lie in what a rank holds, or (None) in all rows: those inside a
    shard, and those that are cut.

    Of the second, (layout of the document, batch entries, rows here) for each place in
    the sequence, and the index of all their rows, counted through the batch.
    """
    cuts = layout.cuts
    # In order: the rows here of a document follow each other.
    here = torch.arange(layout.n) if rank is None else layout.positions(rank)
    inside = []
    cut = {}
    for entry, start, stop in documents.spans:
        if start < stop:
            parts = range(bisect_right(cuts, start) - 1, bisect_right(cuts, stop - 1))
            owners = {layout.owners[i] for i in parts}
            if len(owners) > 1:
                cut.setdefault((start, stop), []).append(entry)
            elif rank is None or rank in owners:
                inside.append((entry, *_between(here, start, stop)))
    size = len(here)
    pieces = []
    index = [torch.arange(0)]
    for (start, stop), entries in cut.items():
        shards = Layout(
            layout.kind, tuple(min(max(x, start), stop) - start for x in cuts)
        )
        rows = torch.arange(*_between(here, start, stop))
        pieces.append((shards, len(entries), len(rows)))
        index.append((size * torch.tensor(entries)[:, None] + rows).flatten())
    return Documents(tuple(inside), size), pieces, torch.cat(index)


def _between(ascending: Tensor, start: int, stop: int) -> list[int]:
    """The place of the first of ``ascending`` numbers that is in start .. stop - 1, and
    that behind the last.
    """
    return torch.searchsorted(ascending, torch.tensor([start, stop])).tolist()
