"""Dense calls on views of q, k and v, and the one executor that runs them and merges
their results.

A planner (``dilated``, ``blocks``, ``ring.rank``) turns a pattern into a ``Plan``: a
list of ``Call``s. Each call is dense attention of some query rows by some key rows,
read through strided views or gathered copies. ``forward`` and ``backward`` run a plan.
Results for the same rows are merged by log-sum-exp.

A partial result is (out, lse) over some keys. The union over disjoint multisets of keys is
``lse = log sum exp lse_i``, ``out = sum exp(lse_i - lse) out_i``; a partial result without keys has lse -inf and
weight 0.

No memory of the size of the sequence is allocated except for the results. Kernels
return new tensors, so a call is cut into pieces along the batch and the heads.
Half-precision results to which several calls add are accumulated in fp32, for a tile of
positions and heads at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..kernels.base import HALF, Kernel, accumulation_dtype, device_type_of, gathers
from ..memory import MemoryPool


def altered(value, **fields):
    """``dataclasses.replace`` of a View or a Call, which check nothing, in a fifth of
    its time.
    """
    new = object.__new__(type(value))
    vars(new).update(vars(value), **fields)
    return new


def anew(key, build):
    """What ``build`` makes, in place of a cache's."""
    return build()


@dataclass(frozen=True)
class View:
    """The rows of a tensor (b, n, heads, d) that one side of a call reads, for each
    node and head of the call.

    Row j of node i for head h is row ``first + i * node_step + j * step + h * shift``
    of the tensor, in its head ``head + i * node_head + h * head_step``. With ``index``
    the rows are gathered instead: (nodes, rows) for all heads alike, (nodes, 1) for
    neighbouring rows from there on, or (nodes, rows, heads) for heads that are all rows
    of one.
    """

    rows: int
    first: int = 0
    step: int = 1
    node_step: int = 0
    head: int = 0
    head_step: int = 1
    shift: int = 0
    node_head: int = 0
    index: Tensor | None = None

    @property
    def shared(self) -> bool:
        """Whether all nodes have the same rows."""
        return not (self.node_step or self.node_head) and self.index is None

    @staticmethod
    def of(index: Tensor) -> View:
        """Rows ``index`` (rows, heads), all of one head of the tensor: strided where
        they can be, else gathered.
        """
        (rows, heads), first = index.shape, int(index[0, 0])
        step, shift = (
            int(t[min(1, len(t) - 1)]) - first for t in (index[:, 0], index[0])
        )
        regular = (
            first + step * torch.arange(rows)[:, None] + shift * torch.arange(heads)
        )
        # Gradients are added to the rows: no row may come twice.
        if (
            min(step, shift) >= 0
            and index.equal(regular)
            and len(index.unique()) == index.numel()
        ):
            return View(rows, first, step, head_step=0, shift=shift)
        return View(rows, head_step=0, index=index[None])

    def from_head(self, start: int, stop: int) -> View:
        """The same rows for heads start .. stop - 1 of the call."""
        index = (
            self.index
            if self.index is None or self.index.dim() == 2
            else self.index[..., start:stop]
        )
        first, head = (
            self.first + start * self.shift,
            self.head + start * self.head_step,
        )
        return altered(self, first=first, head=head, index=index)

    def ends_by(self, n: int, nodes: int) -> bool:
        """Whether the rows of all nodes are among the first ``n`` of the tensor.

        They are neighbours, or gathered: each, or ``rows`` neighbours from the one that
        is told.
        """
        if self.index is None:
            return self.first + (nodes - 1) * self.node_step + self.rows <= n
        return int(self.index.max()) + self.rows - self.index.shape[1] < n

    def left(self, n: int, nodes: int) -> Tensor:
        """How many rows of each node (nodes,) are among the first ``n`` of the tensor;
        gathered ones ascend.
        """
        if self.index is not None and self.index.shape[1] == self.rows:
            return (self.index < n).sum(1)
        starts = (
            self.first + self.node_step * torch.arange(nodes)
            if self.index is None
            else self.index[:, 0]
        )
        return (n - starts).clamp(0, self.rows)

    def of_nodes(self, start: int, stop: int, rows: int) -> View:
        """The first ``rows`` rows of nodes start .. stop - 1."""
        index = self.index if self.index is None else self.index[start:stop, :rows]
        return altered(
            self, first=self.first + start * self.node_step, rows=rows, index=index
        )


@dataclass(frozen=True)
class Call:
    """Dense attention of the rows ``q`` by the rows ``k``, for ``heads`` heads and
    ``nodes`` such sets of rows.

    ``causal``: the causal mask applies if the attention is causal. The last query of a
    node then sees all its keys, each query before it one fewer. ``first``: no earlier
    call wrote these query rows, and no two nodes share them. Where all nodes have the
    same queries, their results are merged. ``bias`` (query rows or 1, heads, key rows)
    is added to the scores, if the kernel takes one.
    """

    q: View
    k: View
    nodes: int = 1
    heads: int = 1
    causal: bool = False
    first: bool = False
    bias: Tensor | None = None

    @property
    def shares_kv(self) -> bool:
        """Whether all heads read the same K/V rows, so that their gradients must be
        summed.
        """
        return self.k.head_step == 0 and self.k.shift == 0 and self.k.index is None

    def within(self, start: int, stop: int) -> range:
        """The nodes whose queries lie in rows [start, stop), which must not cut a node."""
        if not self.q.node_step:
            return range(self.nodes if start <= self.q.first < stop else 0)
        begin = max(0, -((self.q.first - start) // self.q.node_step))
        end = min(self.nodes, -((self.q.first - stop) // self.q.node_step))
        return range(begin, max(begin, end))

    def views(self, tensors, kv: tuple[int, ...]) -> list[list[Tensor]]:
        """Views of all nodes of tensors, the ones in ``kv`` of key rows; one list if
        nodes fold with the batch.
        """
        entries = [
            (t, WHOLE, self.k if i in kv else self.q) for i, t in enumerate(tensors)
        ]
        return list(views_of(entries, range(self.nodes), self.heads))

    def each_node(self) -> Iterator[Call]:
        """Each node as a call of its own."""
        for i in range(self.nodes):
            q, k = (
                altered(
                    v,
                    first=v.first + i * v.node_step,
                    head=v.head + i * v.node_head,
                    node_step=0,
                    node_head=0,
                )
                for v in (self.q, self.k)
            )
            yield altered(self, q=q, k=k, nodes=1)

    def by_heads(self) -> Iterable[Call]:
        """The same without nodes that have other heads: a call for each of these."""
        return self.each_node() if self.q.node_head else (self,)

    def part(self, start: int, stop: int) -> Call | None:
        """The call for those of its query heads that are among heads start .. stop - 1;
        None if there are none.
        """
        mine = [
            i
            for i in range(self.heads)
            if start <= self.q.head + i * self.q.head_step < stop
        ]
        if len(mine) == self.heads:
            return self
        if not mine:
            return None
        first, end = mine[0], mine[-1] + 1
        bias = None if self.bias is None else self.bias[:, first:end]
        return altered(
            self,
            heads=len(mine),
            q=self.q.from_head(first, end),
            k=self.k.from_head(first, end),
            bias=bias,
        )

    def before(self, n: int) -> Iterator[Call]:
        """The call, without a bias, for its rows among the first ``n``: nodes that lose
        as many stay together.
        """
        if all(view.ends_by(n, self.nodes) for view in (self.q, self.k)):
            yield self
            return
        left = torch.stack(
            [view.left(n, self.nodes) for view in (self.q, self.k)], 1
        )  # (nodes, 2)
        start = 0
        for (rows, keys), count in zip(
            *(t.tolist() for t in left.unique_consecutive(dim=0, return_counts=True))
        ):
            if rows and keys:
                q, k = (
                    self.q.of_nodes(start, start + count, rows),
                    self.k.of_nodes(start, start + count, keys),
                )
                yield altered(self, q=q, k=k, nodes=count)
            start += count

    def biases(self, q: Tensor) -> list[tuple[Tensor, tuple[int, int], View]]:
        """The bias, if there is one, as an entry of ``views_of``: (b', query rows or 1,
        heads, key rows).
        """
        if self.bias is None:
            return []
        bias, rows = self.bias.to(q.device), View(len(self.bias))
        return [(bias.expand(len(q), -1, -1, -1), WHOLE, rows)]


@dataclass(frozen=True)
class Plan:
    """The calls of a pattern, in the order in which they run.

    ``blocks``: (query heads, calls of the forward, calls of the backward), one after
    the other. ``uncovered``: (start, stop) of query rows that no call writes first.
    ``merges``: several calls write the same query rows. ``same_rows``: each call's keys
    are at its queries' positions. ``rows``: the positions of the queries; ``period``: a
    number of positions after which no node is cut.
    """

    blocks: tuple[tuple[range, tuple[Call, ...], tuple[Call, ...]], ...]
    uncovered: tuple[tuple[int, int], ...]
    merges: bool
    same_rows: bool
    rows: range
    period: int

    def pairs(self, causal: bool = False) -> int:
        """(query, key, head) products of a forward pass per batch entry, without what
        ``causal`` hides.
        """
        each = ((c, causal and c.causal) for _, calls, _ in self.blocks for c in calls)
        return sum(
            c.nodes
            * c.heads
            * (c.q.rows * c.k.rows - cut * c.q.rows * (c.q.rows - 1) // 2)
            for c, cut in each
        )

    @cached_property
    def calls(self) -> list[Call]:
        """All calls of the backward, by sets of heads."""
        return [
            one
            for _, _, calls in self.blocks
            for call in calls
            for one in call.by_heads()
        ]

    def before(self, n: int) -> Plan:
        """The plan of the first ``n`` positions alone.

        For calls without a bias, of rows that are neighbours or gathered, each of which
        keeps some of its keys.
        """

        parts: dict[int, list[Call]] = {}  # most calls are of the forward and backward

        def cut(calls: tuple[Call, ...]) -> tuple[Call, ...]:
            for call in calls:
                if id(call) not in parts:
                    parts[id(call)] = [*call.before(n)]
            return tuple(part for call in calls for part in parts[id(call)])

        blocks = tuple((heads, *map(cut, passes)) for heads, *passes in self.blocks)
        uncovered = tuple(
            (start, min(stop, n)) for start, stop in self.uncovered if start < n
        )
        return replace(
            self, blocks=blocks, uncovered=uncovered, rows=range(n), period=n
        )

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Rows [start, stop) that cut no node except for those that the ends of
        ``rows`` cut, in order.
        """
        start = self.rows.start
        while start < self.rows.stop:
            stop = min(self.rows.stop, (start // self.period + 1) * self.period)
            yield start - self.rows.start, stop - self.rows.start
            start = stop

    def whole(self, n: int, heads: int, which: int = 1) -> Call | None:
        """The first call, if it alone writes every row of every head, in memory order;
        ``which``: of the forward, 1, or of the backward, 2.
        """
        calls = self.blocks[0][which] if len(self.blocks) == 1 else ()
        if not calls:  # a chunk so short that no head selects a row of it
            return None
        call, rows = calls[0], calls[0].q
        in_order = (
            rows.step == 1
            and rows.index is None
            and call.k.index is None
            and call.bias is None
            and (call.nodes == 1 or rows.node_step == rows.rows)
        )
        return (
            call
            if in_order
            and call.first
            and call.heads == heads
            and call.nodes * rows.rows == n
            else None
        )

    def narrow(self, dtype: torch.dtype, group: int, backward: bool) -> bool:
        """Whether results in ``dtype`` are accumulated in fp32; ``group``: query heads
        for one K/V head.
        """
        return dtype in HALF and (
            self.merges or backward and (group > 1 or not self.same_rows)
        )

    def in_head_blocks(self, step: int) -> Plan:
        """The same calls for ``step`` query heads at a time."""
        blocks = []
        for heads, *passes in self.blocks:
            for start in range(heads.start, heads.stop, step):
                some = range(start, min(start + step, heads.stop))
                each = (
                    (one for call in calls for one in call.by_heads())
                    for calls in passes
                )
                parts = [
                    tuple(filter(None, (c.part(some.start, some.stop) for c in calls)))
                    for calls in each
                ]
                blocks.append((some, *parts))
        return replace(self, blocks=tuple(blocks))


def merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Join partial results out (b, n, h, d), lse (b, h, n) into one; max-shifted, exact
    for lse -inf.

    >>> out, lse = merge([torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)], [torch.zeros(1, 1, 1)] * 2)
    >>> out.flatten().tolist(), round(float(lse), 4)
    ([0.5, 0.5], 0.6931)
    """
    stacked = torch.stack(lses)  # (p, b, h, n)
    top = stacked.amax(0)  # (b, h, n)
    shift = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    weights = (stacked - shift).exp()  # (p, b, h, n)
    total = weights.sum(0)  # (b, h, n)
    dead = total == 0
    weights = weights / total.masked_fill(dead, 1.0)
    out = sum(
        o.to(w.dtype) * w.transpose(1, 2).unsqueeze(-1) for o, w in zip(outs, weights)
    )  # (b, n, h, d)
    lse = (shift + total.masked_fill(dead, 1.0).log()).masked_fill(dead, -torch.inf)
    return out, lse


def merge_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Join a partial result into (out, lse) in place; all may be strided views, out in
    fp32 or wider.

    Shapes as in :func:`merge`: out (b, n, h, d), lse (b, h, n).

    >>> out, lse = torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -torch.inf)
    >>> merge_(out, lse, torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)); out.flatten().tolist(), float(lse)
    ([1.0, 1.0], 0.0)
    """
    # sigmoid(b - a) is exp(b - logaddexp(a, b)): 1 for a = -inf, 0 for b = -inf, nan
    # only where neither saw a key.
    weight = torch.sigmoid(other_lse - lse).nan_to_num_(0.0)  # (b, h, n)
    lse.copy_(torch.logaddexp(lse, other_lse))
    out.lerp_(other_out.to(out.dtype), weight.transpose(1, 2).unsqueeze(-1))


def forward(
    q,
    k,
    v,
    plan: Plan,
    causal: bool,
    scale: float,
    kernel: Kernel,
    *,
    into=None,
    pool: MemoryPool | None = None,
    results: MemoryPool | None = None,
) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) in q's dtype and lse (b, h, n) of all calls; q (b, n, h, d), k
    and v (b, m, h_kv, d).

    ``into``: (out, lse) over other keys, into which the calls are merged in place.
    ``pool`` lends the accumulators, ``results`` the output.
    """
    b, n, heads, _ = q.shape
    whole = None
    if into is not None:
        out, lse = into[0], into[1].transpose(1, 2)  # (b, n, h)
        narrow = out.dtype in HALF
    else:
        narrow = plan.narrow(q.dtype, heads // k.shape[2], backward=False)
        if results is None and not narrow:
            whole, views = _whole_call(plan, 1, q, k, v)
        if (
            whole is not None
        ):  # one call writes every row: its result becomes the output
            out, lse = kernel.forward(
                *views, causal and whole.causal, scale
            )  # (b', m, h, d), (b', h, m)
            if len(out) > b:
                out, lse = (
                    out.reshape(q.shape),
                    lse.transpose(1, 2).reshape(b, n, heads).transpose(1, 2),
                )
            if len(plan.blocks[0][1]) == 1:
                return out.to(q.dtype), lse
            out, lse = out.to(q.dtype), lse.transpose(1, 2)
        else:
            make = torch.empty if results is None else results.lend
            out = make(q.shape, dtype=q.dtype, device=q.device)
            lse = torch.empty(
                b, n, heads, dtype=accumulation_dtype(q.dtype), device=q.device
            )
            for start, stop in plan.uncovered:
                out[:, start:stop] = 0.0
                lse[:, start:stop] = -torch.inf
    limit, load = piece_limit(q), into is not None or bool(plan.uncovered)
    steps = _steps(
        plan,
        1,
        q,
        (out,),
        1,
        narrow,
        pool,
        load,
        whole is not None,
        copies=not gathers(kernel),
    )
    for call, nodes, (target,) in steps:
        mine = _side(call.q, call.heads, nodes, (q, WHOLE), (lse, WHOLE), target)
        bias, view, index = call.biases(q), call.k, []
        if view.index is not None and gathers(kernel):
            index = [_index_entry(view, call.heads, nodes, len(q))]
            view = View(k.shape[1], head=view.head, head_step=view.head_step)
        keys = _side(view, call.heads, nodes, (k, WHOLE), (v, WHOLE))
        head_bytes = call.q.rows * q.shape[3] * target[0].element_size()
        entries = mine + keys + bias + index
        fresh = call.first and into is None  # nothing was written there yet
        shared = len(nodes) > 1 and call.q.shared  # several results for the same rows
        fits = target[0].dtype == torch.float32 or fresh and target[0].dtype == q.dtype
        if in_place := hasattr(kernel, "forward_into") and fits and not shared:
            head_bytes = 0  # no result to be kept small
        for q_, lse_, out_, k_, v_, *more in views_of(
            entries, nodes, call.heads, head_bytes, limit
        ):
            more = [None, *more] if index and not bias else more
            if in_place:
                kernel.forward_into(
                    out_,
                    lse_,
                    q_,
                    k_,
                    v_,
                    causal and call.causal,
                    scale,
                    *more,
                    merge=not fresh,
                )
                continue
            o, l = kernel.forward(
                q_, k_, v_, causal and call.causal, scale, *more
            )  # (b', m, h, d), (b', h, m)
            if fresh:
                out_.copy_(o)
                lse_.copy_(l)
            elif shared:
                for i in range(len(o)):
                    merge_(*(t[i : i + 1] for t in (out_, lse_, o, l)))
            else:
                merge_(out_, lse_, o, l)
            del o, l  # before the next piece is computed
        if call.q.index is not None:
            index = _flat_index(call.q, nodes, q.device)
            for to, (copy, *_) in zip(((lse, WHOLE), target), mine[1:]):
                _heads_of(*to, call.q, call.heads)[:, index] = copy
            del copy
        # Gathered copies go before the next ones are made.
        del mine, keys, entries, q_, lse_, out_, k_, v_
    return out, lse.transpose(1, 2)


def backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    plan: Plan,
    causal: bool,
    scale: float,
    kernel: Kernel,
    *,
    into=None,
    pool: MemoryPool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (b, n, h, d), dk, dv (b, m, h_kv, d): each call's backward with the final out
    and lse (b, h, n).

    ``into``: dq, dk, dv in fp32 or wider, to which the gradients are added. ``pool``
    lends the accumulators.
    """
    n, heads = q.shape[1:3]
    group, whole = heads // k.shape[2], None
    narrow = into is None and plan.narrow(q.dtype, group, backward=True)
    reads = (dout, q, k, v, out, lse.transpose(1, 2))  # lse (b, n, h)
    if into is not None:
        grads = into
    else:
        if plan.same_rows and not narrow:
            whole, views = _whole_call(plan, 2, *reads[1:4], dout, out, reads[5])
        if (
            whole is not None
        ):  # one call writes every row: its results become the gradients
            q_, k_, v_, dout_, out_, lse_ = views
            grads = kernel.backward(
                dout_, q_, k_, v_, out_, lse_, causal and whole.causal, scale
            )
            grads = tuple(g.reshape(q.shape).to(q.dtype) for g in grads)
        else:
            written = narrow or not plan.uncovered
            make_q = torch.empty if written else torch.zeros
            make_kv = (
                torch.empty
                if narrow or (written and plan.same_rows and group == 1)
                else torch.zeros
            )
            makes = zip((q, k, v), (make_q, make_kv, make_kv))
            grads = tuple(
                make(t.shape, dtype=t.dtype, device=t.device) for t, make in makes
            )
    limit = piece_limit(q)
    for call, nodes, targets in _steps(
        plan, 2, q, grads, group, narrow, pool, None, whole is not None
    ):
        # Of calls on the same rows, the first one writes these rows of k and v too.
        first = call.first and not narrow and into is None
        alone = first, first and plan.same_rows and group == 1
        _call_backward(call, nodes, reads, targets, limit, alone, causal, scale, kernel)
    return grads


def _steps(
    plan: Plan,
    which: int,
    q: Tensor,
    results,
    group: int,
    narrow: bool,
    pool,
    load: bool | None,
    skip: bool,
    copies: bool = True,
) -> Iterator[tuple[Call, range, list]]:
    """The calls of a pass, ``which`` as in ``Plan.whole``, some nodes at a time;
    ``skip``: without the first call.

    Each comes with the tensors to add to and their first (row, head): the results or,
    if ``narrow``, fp32 tiles of them, which are rounded after their last call.
    ``load``: tiles begin as the results, or uninitialised; as zeros if None. All tiles
    use the same memory, which ``pool`` lends. ``group``: query heads for one K/V head.
    ``copies``: few nodes at a time where keys are gathered, as these are copied.
    """
    n, targets, memory = q.shape[1], [(t, WHOLE) for t in results], []
    for inside, *passes in plan.blocks:
        for start, stop in plan.tiles() if narrow else ((0, n),):
            parts = []
            for i, t in enumerate(results if narrow else ()):
                heads = (
                    range(inside.start // group, -(-inside.stop // group))
                    if i
                    else inside
                )
                parts.append(part := t[:, start:stop, heads.start : heads.stop])
                if (
                    len(memory) == i
                ):  # no other tile is larger, and no block has more heads
                    size = (t.shape[0] * min(n, plan.period) * len(heads) * t.shape[3],)
                    memory.append(
                        (pool.lend if pool else torch.empty)(
                            size, dtype=torch.float32, device=t.device
                        )
                    )
                tile = memory[i][: part.numel()].view(part.shape)
                targets[i] = tile, (start, heads.start)
                if load is None:
                    tile.zero_()
                elif load:
                    tile.copy_(part)
            for call in passes[which - 1][skip:]:
                nodes = (
                    call.within(start, stop) if stop - start < n else range(call.nodes)
                )
                for some in (
                    (_node_parts(call, nodes, q) if copies else (nodes,))
                    if nodes
                    else ()
                ):
                    yield call, some, targets
            for part, (tile, _) in zip(parts, targets):
                part.copy_(tile)


def _call_backward(
    call: Call, nodes: range, reads, targets, limit: int, alone, causal, scale, kernel
) -> None:
    """The backward of some nodes of a call, added to dq, dk, dv, each a tensor with its
    first (row, head).

    ``reads``: dout, q, k, v, out, lse (b, n, h). ``alone``: whether nothing was written
    there yet, for dq and for dk and dv.
    """
    dout, q, k, v, out, lse = reads
    # Neighbouring nodes may read the same keys: their gradients are added slice by
    # slice, none of which overlap.
    rows = call.k.rows
    width = rows if call.k.index is not None else min(call.k.node_step, rows) or rows
    slices = [(at, min(width, rows - at)) for at in range(0, rows, width)]
    # Gradients of shared K/V rows are summed over the heads of a piece: its size is
    # part of the result.
    head_bytes = (
        (rows if call.shares_kv else max(rows, call.q.rows))
        * q.shape[3]
        * targets[2][0].element_size()
    )
    reads = _side(call.q, call.heads, nodes, *((t, WHOLE) for t in (dout, q, out, lse)))
    reads += _side(call.k, call.heads, nodes, (k, WHOLE), (v, WHOLE))
    grads = _zeros_if_gathered(call.q, call.heads, nodes, targets[:1])
    grads += _zeros_if_gathered(call.k, call.heads, nodes, targets[1:])
    into = grads
    if len(slices) > 1:
        cut = [
            altered(call.k, first=call.k.first + at, rows=count) for at, count in slices
        ]
        into = grads[:1] + [
            (t, origin, view) for t, origin, _ in grads[1:] for view in cut
        ]
    several = len(nodes) > 1
    q_axis = 0 if several and call.q.shared else None
    k_axis = 0 if several and call.k.shared else 2 if call.shares_kv else None
    biases = call.biases(q)
    for piece in views_of(
        reads + biases + into, nodes, call.heads, head_bytes, limit
    ):  # (b', m, h, d)
        (dout_, q_, out_, lse_, k_, v_), bias, (dq_, *keys) = (
            piece[:6],
            piece[6 : 6 + len(biases)],
            piece[6 + len(biases) :],
        )
        dq, *found = kernel.backward(
            dout_, q_, k_, v_, out_, lse_, causal and call.causal, scale, *bias
        )
        _add(dq_, dq, alone[0], q_axis)
        for i, target in enumerate(keys):
            at, count = slices[i % len(slices)]
            grad = found[i // len(slices)]
            _add(
                target,
                grad if len(slices) == 1 else grad[:, at : at + count],
                alone[1],
                k_axis,
            )
        del dq, found, grad  # before the next piece is computed
    for view, target, (copy, *_) in zip((call.q, call.k, call.k), targets, grads):
        if view.index is not None:
            t, index = (
                _heads_of(*target, view, call.heads),
                _flat_index(view, nodes, q.device),
            )
            t.index_add_(
                1, index, copy if view.index.dim() == 2 else copy.flatten(1, 2)
            )


def _add(target: Tensor, grad: Tensor, alone: bool, axis: int | None) -> None:
    """Add a gradient; ``axis``: along it all of ``target`` is the same memory.
    ``alone``: write it.
    """
    if alone:
        target.copy_(grad)
    elif axis is None:
        target.add_(grad)
    else:
        target.narrow(axis, 0, 1).add_(grad.to(target.dtype).sum(axis, keepdim=True))


WHOLE = (0, 0)  # the first (row, head) of a tensor that holds all of them


def _whole_call(plan: Plan, which: int, q, k, v, *more):
    """(the first call, its views of q, k, v and more tensors of query rows) if its
    results may become the outputs.

    No piece of it may be converted, as half precision is on a CPU. ``which``: as in
    ``Plan.whole``. (None, None) otherwise.
    """
    b, n, heads, _ = q.shape
    on_cpu = device_type_of(q) == "cpu"
    if heads != k.shape[2] or not q.is_contiguous() or (q.dtype in HALF and on_cpu):
        return None, None
    call = plan.whole(n, heads, which)
    if call is None:
        return None, None
    rows, nodes = call.q, range(call.nodes)
    if call.nodes == 1 and call.k == View(
        k.shape[1], node_step=call.k.node_step
    ):  # k as it is
        return call, [
            q,
            k,
            v,
            *(t if t.dim() == 4 else t.transpose(1, 2) for t in more),
        ]
    # Node by node, so that a CPU thread writes pages of its own; but keys of all nodes
    # fold into no larger batch.
    if call.nodes > 1 and call.k.shared and (b > 1 or not on_cpu):
        rows, nodes = altered(rows, rows=n), range(1)
    entries = [
        (q, WHOLE, rows),
        (k, WHOLE, call.k),
        (v, WHOLE, call.k),
        *((t, WHOLE, rows) for t in more),
    ]
    views = list(views_of(entries, nodes, heads))
    whole = len(views) == 1 and len(views[0][0]) == b * len(
        nodes
    )  # without data, equal pieces come once
    return (call, views[0]) if whole else (None, None)


def views_of(
    entries, nodes: range, heads: int, head_bytes: int = 0, limit: int = 0
) -> Iterator[list[Tensor]]:
    """Views (b', rows, heads, d) of (tensor, its first (row, head), View) for some
    nodes of a call, piece by piece.

    Batch and nodes fold into b' where the strides of all tensors allow it, else each
    batch entry comes by itself. Pieces are cut along b', then along the heads, to at
    most ``limit`` bytes of ``head_bytes`` each. Tensors of three dimensions,
    log-sum-exps (b, n, heads), come as (b', heads, rows). Without data, one piece of
    each size comes.
    """
    count, batch, apart, laid = len(nodes), entries[0][0].shape[0], False, []
    if not count:
        return
    for t, (row, head), view in entries:
        s_b, s_n, s_h, *s_d = t.stride()
        along = view.node_step * s_n + view.node_head * s_h
        apart |= batch > 1 and count > 1 and s_b != count * along
        at = (
            t.storage_offset()
            + (view.first - row) * s_n
            + (view.head - head) * s_h
            + nodes.start * along
        )
        along = s_b if count == 1 else along
        laid.append(
            (
                t,
                view.rows,
                at,
                s_b,
                along,
                view.step * s_n,
                view.head_step * s_h + view.shift * s_n,
                s_d,
            )
        )
    size = count if apart else batch * count
    step, head_step = size, heads
    if head_bytes * heads * size > limit:
        threads = (
            torch.get_num_threads()
        )  # a CPU kernel shares out (batch, head) pairs: never fewer than threads
        step = max(1, limit // (head_bytes * heads), -(-threads // heads))
        head_step = heads if step > 1 else max(threads, limit // head_bytes)
    sizes = set() if entries[0][0].is_meta else None
    for entry in range(batch if apart and sizes is None else 1):
        for i in range(0, size, step):
            b = min(step, size - i)
            for j in range(0, heads, head_step):
                h, views = min(head_step, heads - j), []
                if sizes is not None:
                    if (b, h) in sizes:
                        continue
                    sizes.add((b, h))
                for t, rows, at, s_b, along, s_row, s_head, s_d in laid:
                    at += entry * s_b + i * along + j * s_head
                    if s_d:
                        views.append(
                            t.as_strided(
                                (b, rows, h, t.shape[3]),
                                (along, s_row, s_head, *s_d),
                                at,
                            )
                        )
                    else:
                        views.append(
                            t.as_strided((b, h, rows), (along, s_head, s_row), at)
                        )
                yield views


def _node_parts(call: Call, nodes: range, q: Tensor) -> Iterator[range]:
    """All nodes at a time, or so few that gathered copies of their keys stay small."""
    if call.k.index is None or len(nodes) < 2:
        return (nodes,)
    row_bytes = q.shape[0] * q.shape[2] * q.shape[3] * q.element_size()
    step = max(1, piece_limit(q) // 2 // (row_bytes * call.k.rows))
    return (nodes[i : i + step] for i in range(0, len(nodes), step))


def _side(view: View, heads: int, nodes: range, *tensors) -> list[tuple]:
    """(tensor, its first (row, head), View) for each (tensor, first (row, head));
    copies of the rows if gathered.
    """
    if view.index is None:
        return [(t, origin, view) for t, origin in tensors]
    dense = View(view.rows, -nodes.start * view.rows, node_step=view.rows)
    index = _flat_index(view, nodes, tensors[0][0].device)
    copies = [_heads_of(t, origin, view, heads)[:, index] for t, origin in tensors]
    return [
        (c if view.index.dim() == 2 else c.unflatten(1, (-1, heads)), WHOLE, dense)
        for c in copies
    ]


def _index_entry(view: View, heads: int, nodes: range, batch: int) -> tuple:
    """The gathered rows as an entry of ``views_of``, (b', heads, rows), for a kernel
    that reads such rows itself.
    """
    index = _flat_index(view, nodes, "cpu").view(1, len(nodes) * view.rows, -1)
    each = View(
        view.rows,
        -nodes.start * view.rows,
        node_step=view.rows,
        head_step=int(index.shape[2] > 1),
    )
    return index.expand(batch, -1, -1), WHOLE, each


def _zeros_if_gathered(view: View, heads: int, nodes: range, targets) -> list[tuple]:
    """As ``_side``, but with zeros in place of copies."""
    if view.index is None:
        return [(t, origin, view) for t, origin in targets]
    dense = View(view.rows, -nodes.start * view.rows, node_step=view.rows)
    shapes = [
        (t.shape[0], len(nodes) * view.rows, heads, t.shape[3]) for t, _ in targets
    ]
    return [
        (torch.zeros(s, dtype=t.dtype, device=t.device), WHOLE, dense)
        for s, (t, _) in zip(shapes, targets)
    ]


def _flat_index(view: View, nodes: range, device: torch.device) -> Tensor:
    """The gathered rows of some nodes, one after the other."""
    index = view.index[nodes.start : nodes.stop]
    if index.shape[1] < view.rows:
        index = index + torch.arange(view.rows, device=index.device)
    return index.flatten().to(device)


def _heads_of(t: Tensor, origin: tuple[int, int], view: View, heads: int) -> Tensor:
    """The heads of t (b, n, heads, d) that gathered rows are of; without their
    dimension if that is one for all.
    """
    first = view.head - origin[1]
    if view.index.dim() == 3:
        return t[:, :, first]
    return t[:, :, first : first + (heads - 1) * view.head_step + 1 : view.head_step]


# Bytes of a kernel's result at most (or one head per thread): on a CPU small enough for
# the allocator to reuse it, on a GPU large enough to fill it.
PIECE_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
SHARE = (
    4  # and about this part of the whole result, so that small problems stay small too
)
HALF_SHARE = 32  # a piece of half precision is converted, with its inputs, to fp32


def piece_limit(t: Tensor) -> int:
    """Bytes of a piece for results like ``t``."""
    most = PIECE_BYTES.get(device_type_of(t), 8 << 20)
    share = HALF_SHARE if t.dtype in HALF else SHARE
    return min(most, max(most // 8, t.numel() * t.element_size() // share))


def head_block(q: Tensor, kv_heads: int, period: int) -> int:
    """How many heads to take at a time so that fp32 accumulators stay within an eighth
    of a result.
    """
    b, _, heads, d = q.shape
    if q.dtype not in HALF:
        return heads
    group = heads // kv_heads
    budget = q.numel() * q.element_size() // 8
    return min(heads, group * max(1, budget // (4 * b * period * d * group)))


def in_head_blocks(
    key: tuple,
    build: Callable[[], Plan],
    q,
    kv_heads: int,
    backward: bool,
    cached,
    cut=None,
) -> Plan:
    """The plan of a key, from the cache or built; in blocks of heads where results in
    q's dtype need accumulators.

    ``cut(plan, heads)`` makes these; ``Plan.in_head_blocks`` by default.
    """
    plan = cached(key, build)
    if plan.narrow(q.dtype, q.shape[2] // kv_heads, backward):
        block = head_block(q, kv_heads, min(plan.period, q.shape[1]))
        if block < q.shape[2]:
            return cached(
                (*key, block), lambda: (cut or Plan.in_head_blocks)(plan, block)
            )
    return plan
