"""Random calls of ``Selected``, and what the reference gives for them."""

import random
from dataclasses import replace

import torch
import torch.distributed as dist
from document_cases import spans_of
from ringlab import Selected, attention, reference
from ringlab.ring import contiguous


def borders(choose: random.Random, n: int) -> list[int]:
    places = [*range(n + 1), *[n] * n]  # half of them the end of the rows
    return [0, *sorted(choose.choices(places, k=choose.randint(1, 4)))]


def random_call(seed: int, dtype=torch.float64) -> tuple:
    """q, k, v, a pattern and the options of a call: duplicates, empty slots and rows,
    keys after the query, documents.
    """
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    n, kv_heads = choose.choice([1, 7, 33, 64, 100, 130]), choose.choice([1, 2, 3, 4])
    heads, batch = kv_heads * choose.choice([1, 2, 4]), choose.choice([1, 2])
    groups = [
        groups
        for groups in range(1, heads + 1)
        if heads % groups == 0 and (groups % kv_heads == 0 or kv_heads % groups == 0)
    ]
    shape = {"granularity": choose.choice([1, 4, 16, 64])}
    shape |= {"query_block": choose.choice([1, 1, 8, 64])}
    shape |= {"window": choose.choice([0, 0, 1, 9, 40])}
    shape |= {"first": choose.choice([0, 0, 1, 3, 70])}
    options = {"causal": choose.random() < 0.6}
    options |= {"scale": choose.choice([None, 0.3, -0.4, 0.0])}
    options |= {"backend": choose.choice(["auto", "eager"])}
    kind = choose.choice([None, None, "cu_seqlens", "lengths"])
    if kind == "cu_seqlens":
        batch, options[kind] = 1, borders(choose, n)
    if kind == "lengths":
        options[kind] = choose.choices(range(n + 1), k=batch)
    lengths = [stop - start for _, start, stop in spans(batch, n, options)]
    block = shape["query_block"]
    rows = -(-n // block)
    if kind == "cu_seqlens":
        rows = sum(-(-length // block) for length in lengths)
    groups, slots = choose.choice(groups), choose.choice([0, 1, 3, 8])
    indices = torch.empty(batch, groups, rows, slots, dtype=torch.int64)
    at = 0
    for i, length in enumerate(lengths):
        entry, own = (i, slice(None)) if kind != "cu_seqlens" else (0, None)
        if own is None:
            own = slice(at, at := at - (-length // block))
        most = -(-length // shape["granularity"])
        drawn = torch.rand(indices[entry, :, own].shape, generator=generator)
        indices[entry, :, own] = (drawn * (most + 1)).long() - 1
    counts = None
    if choose.random() < 0.5:
        counts = torch.randint(0, slots + 1, indices.shape[:3], generator=generator)
    tensors = [
        torch.randn(batch, n, h, 8, dtype=dtype, generator=generator)
        for h in (heads, kv_heads, kv_heads)
    ]
    return tensors, Selected(indices, counts=counts, **shape), options


def weighed_call(seed: int, dtype=torch.float64) -> tuple:
    """The same with a weight for each slot, some of them none, and no block twice."""
    tensors, pattern, options = random_call(seed, dtype)
    generator = torch.Generator().manual_seed(seed)
    indices = pattern.indices.clone()
    for slot in range(indices.shape[3]):
        again = (indices[..., :slot] == indices[..., slot : slot + 1]).any(3)
        indices[..., slot].masked_fill_(again, -1)
    weights = torch.randn(indices.shape, dtype=dtype, generator=generator)
    none = torch.rand(indices.shape, generator=generator) < 0.1
    weights = weights.masked_fill(none, -torch.inf)
    fields = {"window": 0, "first": 0, "log_weights": weights}
    return tensors, replace(pattern, indices=indices, **fields), options


def spans(batch: int, n: int, options: dict) -> list[tuple[int, int, int]]:
    return spans_of({"lengths": [n] * batch} | options)


def reference_of(q, k, v, pattern: Selected, options: dict):
    """out and lse, document by document."""
    out = 0.0 * q
    lse = torch.full_like(q[..., 0], -torch.inf, dtype=torch.float64).transpose(1, 2)
    row = 0
    for entry, start, stop in spans(*q.shape[:2], options):
        count = -(-(stop - start) // pattern.query_block)
        one = pattern.rows(slice(entry, entry + 1), slice(row, row + count))
        if "cu_seqlens" in options:
            row += count
        if start == stop:
            continue
        own = slice(start, stop)
        document = [t[entry : entry + 1, own] for t in (q, k, v)]
        names = "causal", "scale", "sinks", "softcap"
        call = {name: options[name] for name in names if name in options}
        o, l = reference.attention(*document, one, **call)
        out[entry, own], lse[entry, :, own] = o[0], l[0]
    return out, lse


def errors(tensors, pattern, options, **more) -> dict[str, float]:
    """Of out, lse and the gradients, those of weights and sinks included."""
    given = [t.clone().requires_grad_() for t in tensors]
    exact = [t.double().clone().requires_grad_() for t in tensors]
    patterns, hows, learned = [pattern] * 2, [options] * 2, {}
    if pattern.log_weights is not None:
        learned["dweights"] = twice(pattern.log_weights)
        patterns = [replace(pattern, log_weights=w) for w in learned["dweights"]]
    if "sinks" in options:
        learned["dsinks"] = twice(options["sinks"])
        hows = [options | {"sinks": each} for each in learned["dsinks"]]
    out, lse = attention(*given, patterns[0], return_lse=True, **hows[0], **more)
    right, right_lse = reference_of(*exact, patterns[1], hows[1])
    found = {"out": reference.error(out, right, 1.0)}
    found["lse"] = reference.error(lse, right_lse, 1.0)
    generator = torch.Generator().manual_seed(0)
    dout, dlse = (
        torch.randn(t.shape, dtype=torch.float64, generator=generator)
        for t in (right, right_lse)
    )
    dead = right_lse == -torch.inf
    for o, l in ((out, lse), (right, right_lse)):
        ((o * dout).sum() + (l.masked_fill(dead, 0) * dlse).sum()).backward()
    floor = reference.gradient_floor(*tensors[:2], dout, options["scale"])
    for name, t, e in zip("qkv", given, exact):
        e.grad = torch.zeros_like(e) if e.grad is None else e.grad
        found[f"d{name}"] = reference.error(t.grad, e.grad, floor)
    for name, leaves in learned.items():
        got, want = (torch.zeros_like(w) if w.grad is None else w.grad for w in leaves)
        found[name] = reference.error(got, want, 1.0)
    return found


def twice(t) -> list[torch.Tensor]:
    return [t.clone().requires_grad_() for _ in range(2)]


def stained(tensors, pattern, options, bad: float, **more) -> list[torch.Tensor]:
    """out, lse and the gradients where padding, and queries that see nothing, hold
    ``bad``: in q, k, v and the incoming gradients.
    """
    _, lse = reference_of(*tensors, pattern, options)
    dead = (lse == -torch.inf).transpose(1, 2)  # (b, n, h)
    padding = torch.ones(dead.shape[:2], dtype=torch.bool)
    for entry, start, stop in spans(*dead.shape[:2], options):
        padding[entry, start:stop] = False
    shapes = tensors[0].shape, lse.transpose(1, 2).shape
    generator = torch.Generator().manual_seed(0)
    douts = [torch.randn(s, generator=generator) for s in shapes]
    q, *kv = (t.clone() for t in tensors)
    for t in (q, *douts):
        t[dead] = bad
    for t in kv:
        t[padding] = bad
    leaves = [t.requires_grad_() for t in (q, *kv)]
    if pattern.log_weights is not None:
        weights = pattern.log_weights.masked_fill(pattern.listed() < 0, bad)
        # A weight of -inf says that the slot is empty.
        weights[pattern.log_weights == -torch.inf] = -torch.inf
        leaves.append(weights.to(q).requires_grad_())
        pattern = replace(pattern, log_weights=leaves[3])
    results = attention(*leaves[:3], pattern, return_lse=True, **options, **more)
    dout, dlse = douts
    cotangents = [dout.to(q), dlse.transpose(1, 2).to(results[1])]
    grads = torch.autograd.grad(results, leaves, cotangents)
    return [*(t.detach() for t in results), *grads]


def rank_call(seed: int, ranks: int, weighed: bool = False):
    """A call that ``ranks`` ranks can share, and its layout; None where they cannot."""
    tensors, pattern, options = (weighed_call if weighed else random_call)(seed)
    batch, n = tensors[0].shape[:2]
    layout = contiguous(n, ranks)
    if 0 in layout.sizes:
        return None
    for start in (layout.ranges(rank)[0].start for rank in range(ranks)):
        packed = "cu_seqlens" in options
        for _, first, stop in spans(batch, n, options) if packed else [(0, 0, n)]:
            if first < start < stop and (start - first) % pattern.query_block:
                return None
    return tensors, pattern, options, layout


def lists_of(rows: range, pattern: Selected, options: dict) -> slice:
    """The rows of lists that are of the queries ``rows``."""
    step = pattern.query_block
    if "cu_seqlens" not in options:
        return slice(rows.start // step, -(-rows.stop // step))
    here, before = [], 0
    for _, first, stop in spans(1, 0, options):
        for row in range(-(-(stop - first) // step)):
            if first + row * step in rows:
                here.append(before + row)
        before += -(-(stop - first) // step)
    return slice(here[0], here[-1] + 1) if here else slice(0, 0)


def of_this_rank(seed: int, weighed: bool):
    """out, lse and the gradients of this rank's shards in a process group."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensors, pattern, options, layout = rank_call(seed, ranks, weighed)
    rows = layout.ranges(rank)[0]
    part = pattern.rows(slice(None), lists_of(rows, pattern, options))
    shards = [t[:, rows.start : rows.stop].clone().requires_grad_() for t in tensors]
    group = {"group": dist.group.WORLD, "layout": layout}
    out, lse = attention(*shards, part, return_lse=True, **group, **options)
    (out * weights_of(out, rows.start)).sum().backward()
    return [t.detach() for t in (out, lse)] + [t.grad for t in shards]


def refused_on_one_rank(_):
    """What a rank is told where the list of rank 1 is wrong, where its lists are of two
    groups, then the next result.
    """
    rank = dist.get_rank()
    q = torch.ones(1, 4, 2, 8)
    own = torch.full((1, 1, 4, 1), 9 * rank)
    right = Selected(torch.zeros_like(own))
    said = []
    for wrong in (own, right.indices.expand(1, 1 + rank, 4, 1)):
        try:
            attention(q, q, q, Selected(wrong), group=dist.group.WORLD)
        except (ValueError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said, attention(q, q, q, right, group=dist.group.WORLD)


def weights_of(out, start: int = 0):
    """A cotangent (b, n, h, d) that depends on positions alone."""
    rows = torch.arange(start, start + out.shape[1], dtype=out.dtype)
    columns = torch.arange(out[0, 0].numel(), dtype=out.dtype).view(out.shape[2:])
    return torch.sin(rows[:, None, None] * 1.7 + columns).expand(out.shape)
