"""``View``, ``Call`` and ``Plan``: dense calls on views of q, k and v; and the one
executor that runs them and merges their results.

A planner (``dilated``, ``blocks``, ``ring.rank``) turns a pattern into a ``Plan``: a
list of ``Call``s. Each call is dense attention of some query rows by some key rows,
read through strided views or gathered copies. ``forward`` and ``backward`` run a plan.
Results for the same rows are merged by log-sum-exp.

A partial result is (out, lse) over some keys. The union over disjoint multisets of keys
is ``lse = log sum exp lse_i``, ``out = sum exp(lse_i - lse) out_i``; a partial result
without keys has lse -inf and weight 0.

No memory of the size of the sequence is allocated except for the results. Kernels
return new tensors, so a call is cut into pieces along the batch and the heads.
Half-precision results to which several calls add are accumulated in fp32, for a tile of
positions and heads at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.base import HALF, Kernel, accumulation_dtype, device_type_of
from ..memory import MemoryPool


def altered(value, **fields):
    """``dataclasses.replace`` of a View or a Call, which check nothing, in a fifth of
    its time.
    """
    new = object.__new__(type(value))
    vars(new).update(vars(value), **fields)
    return new


@dataclass(frozen=True)
class View:
    """The rows of a tensor (b, n, heads, d) that one side of a call reads, for each
    repeat and head of the call.

    Row j of repeat i for head h is row ``first + i * repeat_step + j * step + h * shift``
    of the tensor, in its head ``head + i * repeat_head + h * head_step``. With ``index``
    the rows are gathered instead: (repeats, rows) for all heads alike, (repeats, 1) for
    neighbouring rows from there on, or (repeats, rows, heads) for heads that are all rows
    of one.
    """

    rows: int
    first: int = 0
    step: int = 1
    repeat_step: int = 0
    head: int = 0
    head_step: int = 1
    shift: int = 0
    repeat_head: int = 0
    index: Tensor | None = None

    @property
    def shared(self) -> bool:
        """Whether all repeats have the same rows."""
        return not (self.repeat_step or self.repeat_head) and self.index is None

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

    def strided(self, t: Tensor, heads: int) -> Tensor:
        """These rows of a tensor (b, n, h, d), for ``heads`` heads of one node, without
        an index: a view (b, rows, heads, d).
        """
        s_b, s_n, s_h, s_d = t.stride()
        return t.as_strided(
            (t.shape[0], self.rows, heads, t.shape[3]),
            (s_b, self.step * s_n, self.head_step * s_h + self.shift * s_n, s_d),
            t.storage_offset() + self.first * s_n + self.head * s_h,
        )

    def from_head(self, start: int, stop: int) -> View:
        """The same rows for heads start .. stop - 1 of the call."""
        index = (
            self.index
            if self.index is None or self.index.dim() == 2
            else self.index[..., start:stop]
        )
        first = self.first + start * self.shift
        head = self.head + start * self.head_step
        return altered(self, first=first, head=head, index=index)


WHOLE = (0, 0)  # the first (row, head) of a tensor that holds all of them


class Operand(NamedTuple):
    """Tensors of which a call reads or writes the same rows; ``origin``: the (row, head)
    that is their first.
    """

    view: View
    tensors: tuple[Tensor, ...]
    origin: tuple[int, int] = WHOLE


class Tile(NamedTuple):
    """A result of a pass, or a part of it that begins at a (row, head)."""

    tensor: Tensor
    origin: tuple[int, int] = WHOLE


@dataclass(frozen=True)
class Call:
    """Dense attention of the rows ``q`` by the rows ``k``, for ``heads`` heads and
    ``repeats`` such sets of rows.

    ``causal``: the causal mask applies if the attention is causal. The last query of a
    repeat then sees all its keys, each query before it one fewer. ``first``: no earlier
    call wrote these query rows, and no two repeats share them. Where all repeats have the
    same queries, their results are merged.
    """

    q: View
    k: View
    repeats: int = 1
    heads: int = 1
    causal: bool = False
    first: bool = False

    @property
    def shares_kv(self) -> bool:
        """Whether all heads read the same K/V rows, so that their gradients must be
        summed.
        """
        return self.k.head_step == 0 and self.k.shift == 0 and self.k.index is None

    def within(self, start: int, stop: int) -> range:
        """The repeats whose queries lie in rows [start, stop), which must not cut a repeat."""
        if not self.q.repeat_step:
            return range(self.repeats if start <= self.q.first < stop else 0)
        begin = max(0, -((self.q.first - start) // self.q.repeat_step))
        end = min(self.repeats, -((self.q.first - stop) // self.q.repeat_step))
        return range(begin, max(begin, end))

    def views(self, tensors, kv: tuple[int, ...]) -> list[list[Tensor]]:
        """Views of all repeats of tensors, the ones in ``kv`` of key rows; one list if
        repeats fold with the batch.
        """
        operands = [
            Operand(self.k if i in kv else self.q, (t,)) for i, t in enumerate(tensors)
        ]
        return list(views_of(operands, range(self.repeats), self.heads))

    def by_heads(self) -> Iterator[Call]:
        """The same without repeats that have other heads: a call for each of these."""
        if not self.q.repeat_head:
            yield self
            return
        for i in range(self.repeats):
            q, k = (
                altered(
                    v,
                    first=v.first + i * v.repeat_step,
                    head=v.head + i * v.repeat_head,
                    repeat_step=0,
                    repeat_head=0,
                )
                for v in (self.q, self.k)
            )
            yield altered(self, q=q, k=k, repeats=1)

    def part(self, start: int, stop: int) -> Call | None:
        """The call for those of its query heads that are among heads start .. stop - 1;
        None if there are none.
        """
        members = [
            i
            for i in range(self.heads)
            if start <= self.q.head + i * self.q.head_step < stop
        ]
        if len(members) == self.heads:
            return self
        if not members:
            return None
        first = members[0]
        end = members[-1] + 1
        return altered(
            self,
            heads=len(members),
            q=self.q.from_head(first, end),
            k=self.k.from_head(first, end),
        )


class HeadBlock(NamedTuple):
    """The calls of some query heads."""

    heads: range
    calls: tuple[Call, ...]

    def part(self, heads: range) -> HeadBlock:
        """The same for some of the heads."""
        parts = (
            one.part(heads.start, heads.stop)
            for call in self.calls
            for one in call.by_heads()
        )
        return HeadBlock(heads, tuple(call for call in parts if call is not None))


@dataclass(frozen=True)
class Plan:
    """The calls of a pattern, in the order in which they run.

    ``blocks`` run one after the other. ``uncovered``: (start, stop) of query rows that no call writes first.
    ``merges``: several calls write the same query rows. ``same_rows``: each call's keys
    are at its queries' positions. ``rows``: the positions of the queries; ``period``: a
    number of positions after which no repeat is cut.
    """

    blocks: tuple[HeadBlock, ...]
    uncovered: tuple[tuple[int, int], ...]
    merges: bool
    same_rows: bool
    rows: range
    period: int

    @cached_property
    def calls(self) -> list[Call]:
        """All calls, by sets of heads."""
        return [
            one
            for block in self.blocks
            for call in block.calls
            for one in call.by_heads()
        ]

    @staticmethod
    def added(heads: range, calls: Iterable[Call], n: int) -> Plan:
        """Calls of ``n`` queries that are merged into results over other keys."""
        block = HeadBlock(heads, tuple(calls))
        return Plan((block,), (), True, False, range(n), n)

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Rows [start, stop) that cut no repeat except for those that the ends of
        ``rows`` cut, in order.
        """
        start = self.rows.start
        while start < self.rows.stop:
            stop = min(self.rows.stop, (start // self.period + 1) * self.period)
            yield start - self.rows.start, stop - self.rows.start
            start = stop

    def covering_call(self, n: int, heads: int) -> Call | None:
        """The first call, if it alone writes every row of every head, in memory order."""
        # A chunk may be so short that no head selects a row of it.
        if len(self.blocks) != 1 or not self.blocks[0].calls:
            return None
        call = self.blocks[0].calls[0]
        rows = call.q
        in_order = (
            rows.step == 1
            and rows.index is None
            and call.k.index is None
            and (call.repeats == 1 or rows.repeat_step == rows.rows)
        )
        covers = call.first and call.heads == heads and call.repeats * rows.rows == n
        return call if in_order and covers else None

    def needs_fp32_accumulator(
        self, dtype: torch.dtype, group: int, backward: bool
    ) -> bool:
        """Whether results in ``dtype`` are accumulated in fp32; ``group``: query heads
        for one K/V head.
        """
        return dtype in HALF and (
            self.merges or backward and (group > 1 or not self.same_rows)
        )

    def in_head_blocks(self, step: int) -> Plan:
        """The same calls for ``step`` query heads at a time."""

        return replace(
            self,
            blocks=tuple(
                block.part(block.heads[start : start + step])
                for block in self.blocks
                for start in range(0, len(block.heads), step)
            ),
        )


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
    covering = None
    if into is not None:
        out, lse = into[0], into[1].transpose(1, 2)  # (b, n, h)
        narrow = out.dtype in HALF
    else:
        narrow = plan.needs_fp32_accumulator(
            q.dtype, heads // k.shape[2], backward=False
        )
        if results is None and not narrow:
            covering, views = _covering_views(plan, q, k, v)
        if covering is not None:  # its result becomes the output
            mask = causal and covering.causal
            out, lse = kernel.forward(*views, mask, scale)  # (b', m, h, d), (b', h, m)
            if len(out) > b:
                out, lse = (
                    out.reshape(q.shape),
                    lse.transpose(1, 2).reshape(b, n, heads).transpose(1, 2),
                )
            if len(plan.blocks[0].calls) == 1:
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
    limit = piece_limit(q)
    load = into is not None or bool(plan.uncovered)
    steps = _steps(plan, q, (out,), 1, narrow, pool, load, covering is not None)
    for call, repeats, (target,) in steps:
        rows = call.q
        keys = call.k
        queries = Operand(rows, (q, lse))
        result = Operand(rows, (target.tensor,), target.origin)
        if rows.index is not None:
            queries = _copies(queries, call.heads, repeats)
            result = _copies(result, call.heads, repeats)
        read = Operand(keys, (k, v))
        if keys.index is not None:
            read = _copies(read, call.heads, repeats)
        operands = [queries, result, read]
        head_bytes = rows.rows * q.shape[3] * target.tensor.element_size()
        fresh = call.first and into is None  # nothing was written there yet
        shared = len(repeats) > 1 and rows.shared  # several results for the same rows
        mask = causal and call.causal
        for q_, lse_, out_, k_, v_ in views_of(
            operands, repeats, call.heads, head_bytes, limit
        ):
            # (b', m, h, d), (b', h, m)
            o, l = kernel.forward(q_, k_, v_, mask, scale)
            if fresh:
                out_.copy_(o)
                lse_.copy_(l)
            elif shared:
                for i in range(len(o)):
                    merge_(*(t[i : i + 1] for t in (out_, lse_, o, l)))
            else:
                merge_(out_, lse_, o, l)
            del o, l  # before the next piece is computed
        if rows.index is not None:
            index = _flat_index(rows, repeats, q.device)
            copies = queries.tensors[1], result.tensors[0]
            for tile, copy in zip((Tile(lse), target), copies):
                _heads_of(*tile, rows, call.heads)[:, index] = copy
            del copies, copy
        # Gathered copies go before the next ones are made.
        del queries, result, read, operands, q_, lse_, out_, k_, v_
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
    group = heads // k.shape[2]
    covering = None
    narrow = into is None and plan.needs_fp32_accumulator(q.dtype, group, backward=True)
    reads = (dout, q, k, v, out, lse.transpose(1, 2))  # lse (b, n, h)
    if into is not None:
        grads = into
    else:
        if plan.same_rows and not narrow:
            tensors = *reads[1:4], dout, *reads[4:]
            covering, views = _covering_views(plan, *tensors)
        if covering is not None:  # its results become the gradients
            q_, k_, v_, dout_, out_, lse_ = views
            grads = kernel.backward(
                dout_, q_, k_, v_, out_, lse_, causal and covering.causal, scale
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
    for call, repeats, targets in _steps(
        plan, q, grads, group, narrow, pool, None, covering is not None
    ):
        # Of calls on the same rows, the first one writes these rows of k and v too.
        first = call.first and not narrow and into is None
        alone = first, first and plan.same_rows and group == 1
        _call_backward(
            call, repeats, reads, targets, limit, alone, causal, scale, kernel
        )
    return grads


def _steps(
    plan: Plan,
    q: Tensor,
    results,
    group: int,
    narrow: bool,
    pool,
    load: bool | None,
    skip: bool,
) -> Iterator[tuple[Call, range, list[Tile]]]:
    """The calls of a pass, some repeats at a time; ``skip``: without the first call.

    Each comes with what to add to: the results or, if ``narrow``, fp32 tiles of them,
    which are rounded after their last call.
    ``load``: tiles begin as the results, or uninitialised; as zeros if None. All tiles
    use the same memory, which ``pool`` lends. ``group``: query heads for one K/V head.
    Few repeats come at a time where keys are gathered, as these are copied.
    """
    n = q.shape[1]
    targets = []
    memory = []
    for t in results:
        targets.append(Tile(t))
    for block in plan.blocks:
        for start, stop in plan.tiles() if narrow else ((0, n),):
            parts = []
            for i, t in enumerate(results if narrow else ()):
                heads = block.heads
                if i:
                    heads = range(heads.start // group, -(-heads.stop // group))
                parts.append(part := t[:, start:stop, heads.start : heads.stop])
                if len(memory) == i:  # no other tile is larger, no block has more heads
                    size = t.shape[0] * min(n, plan.period) * len(heads) * t.shape[3]
                    make = pool.lend if pool else torch.empty
                    memory.append(make((size,), dtype=torch.float32, device=t.device))
                tile = memory[i][: part.numel()].view(part.shape)
                targets[i] = Tile(tile, (start, heads.start))
                if load is None:
                    tile.zero_()
                elif load:
                    tile.copy_(part)
            for call in block.calls[skip:]:
                repeats = range(call.repeats)
                if stop - start < n:
                    repeats = call.within(start, stop)
                if repeats:
                    for subset in _repeat_parts(call, repeats, q):
                        yield call, subset, targets
            for part, (tile, _) in zip(parts, targets):
                part.copy_(tile)


def _call_backward(
    call: Call, repeats: range, reads, targets, limit: int, alone, causal, scale, kernel
) -> None:
    """The backward of some repeats of a call, added to the tiles of dq, dk, dv.

    ``reads``: dout, q, k, v, out, lse (b, n, h). ``alone``: whether nothing was written
    there yet, for dq and for dk and dv.
    """
    dout, q, k, v, out, lse = reads
    queries = call.q
    keys = call.k
    # Neighbouring repeats may read the same keys: their gradients are added slice by
    # slice, none of which overlap.
    rows = keys.rows
    width = rows if keys.index is not None else min(keys.repeat_step, rows) or rows
    # Gradients of shared K/V rows are summed over the heads of a piece: its size is
    # part of the result.
    head_bytes = (
        (rows if call.shares_kv else max(rows, queries.rows))
        * q.shape[3]
        * targets[2].tensor.element_size()
    )
    read = Operand(queries, (dout, q, out, lse))
    key_read = Operand(keys, (k, v))
    to_q, to_k, to_v = targets
    into = Operand(queries, (to_q.tensor,), to_q.origin)
    key_into = Operand(keys, (to_k.tensor, to_v.tensor), to_k.origin)
    if queries.index is not None:
        read = _copies(read, call.heads, repeats)
        into = _zeros(into, call.heads, repeats)
    if keys.index is not None:
        key_read = _copies(key_read, call.heads, repeats)
        key_into = _zeros(key_into, call.heads, repeats)
    operands = [read, key_read, into]
    if width == rows:
        parts = (slice(None),)
        operands.append(key_into)
    else:
        parts = [slice(at, min(at + width, rows)) for at in range(0, rows, width)]
        for part in parts:
            first = keys.first + part.start
            count = part.stop - part.start
            view = altered(keys, first=first, rows=count)
            operands.append(key_into._replace(view=view))
    several = len(repeats) > 1
    q_axis = 0 if several and queries.shared else None
    k_axis = 0 if several and keys.shared else 2 if call.shares_kv else None
    mask = causal and call.causal
    for dout_, q_, out_, lse_, k_, v_, dq_, *others in views_of(
        operands, repeats, call.heads, head_bytes, limit
    ):  # (b', m, h, d)
        inputs = dout_, q_, k_, v_, out_, lse_, mask, scale
        dq, dk, dv = kernel.backward(*inputs)
        _add(dq_, dq, alone[0], q_axis)
        for part, dk_, dv_ in zip(parts, others[::2], others[1::2]):
            _add(dk_, dk[:, part], alone[1], k_axis)
            _add(dv_, dv[:, part], alone[1], k_axis)
        del dq, dk, dv  # before the next piece is computed
    copies = *into.tensors, *key_into.tensors
    for target, copy, view in zip(targets, copies, (queries, keys, keys)):
        if view.index is not None:
            index = _flat_index(view, repeats, q.device)
            if view.index.dim() == 3:
                copy = copy.flatten(1, 2)
            _heads_of(*target, view, call.heads).index_add_(1, index, copy)


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


def _covering_views(plan: Plan, q, k, v, *more):
    """(the first call, its views of q, k, v and more tensors of query rows) if its
    results may become the outputs, as no piece of it is converted; (None, None)
    otherwise.
    """
    b, n, heads, _ = q.shape
    converted = q.dtype in HALF and device_type_of(q) == "cpu"
    if heads != k.shape[2] or not q.is_contiguous() or converted:
        return None, None
    call = plan.covering_call(n, heads)
    if call is None:
        return None, None
    rows = call.q
    repeats = range(call.repeats)
    if call.repeats == 1 and call.k.rows == k.shape[1]:  # all rows, as they are
        views = [q, k, v]
        for t in more:
            views.append(t if t.dim() == 4 else t.transpose(1, 2))
        return call, views
    if call.repeats > 1 and call.k.shared:  # keys of all repeats fold into no batch
        rows, repeats = altered(rows, rows=n), range(1)
    operands = Operand(rows, (q,)), Operand(call.k, (k, v)), Operand(rows, more)
    views = list(views_of(operands, repeats, heads))
    # Without data, equal pieces come once.
    one = len(views) == 1 and len(views[0][0]) == b * len(repeats)
    return (call, views[0]) if one else (None, None)


def views_of(
    operands: Sequence[Operand | None],
    repeats: range,
    heads: int,
    head_bytes: int = 0,
    limit: int = 0,
) -> Iterator[list[Tensor | None]]:
    """Views (b', rows, heads, d) of operands for some repeats of a call, piece by piece;
    None for None.

    Batch and repeats fold into b' where the strides of all tensors allow it, else each
    batch entry comes by itself. Pieces are cut along b', then along the heads, to at
    most ``limit`` bytes of ``head_bytes`` each. Tensors of three dimensions,
    log-sum-exps (b, n, heads), come as (b', heads, rows). Without data, one piece of
    each size comes.
    """
    count = len(repeats)
    if not count:
        return
    first = operands[0].tensors[0]
    batch = first.shape[0]
    apart = False
    places = []
    for operand in operands:
        if operand is None:
            places.append(None)
            continue
        view, tensors, (row, head) = operand
        row, head = view.first - row, view.head - head
        known = None
        for t in tensors:
            if (strides := t.stride()) != known:  # most are those of the one before
                known = strides
                s_b, s_n, s_h, *s_d = strides
                along = view.repeat_step * s_n + view.repeat_head * s_h
                at = row * s_n + head * s_h + repeats.start * along
                s_row = view.step * s_n
                s_head = view.head_step * s_h + view.shift * s_n
                if count == 1:
                    along = s_b
                elif batch > 1 and s_b != count * along:
                    apart = True
                if s_d:
                    shape = view.rows, heads, t.shape[3]
                    by = along, s_row, s_head, *s_d
                else:
                    shape = (heads, view.rows)
                    by = (along, s_head, s_row)
            places.append((t, shape, by, t.storage_offset() + at, s_b))
    size = step = count if apart else batch * count
    head_step = heads
    if head_bytes * heads * size > limit:
        threads = (
            torch.get_num_threads()
        )  # a CPU kernel shares out (batch, head) pairs: never fewer than threads
        step = max(1, limit // (head_bytes * heads), -(-threads // heads))
        head_step = heads if step > 1 else max(threads, limit // head_bytes)
    for entry in range(batch if apart and not first.is_meta else 1):
        views = []
        for place in places:
            if place is not None:
                t, shape, by, at, s_b = place
                place = t.as_strided((size, *shape), by, at + entry * s_b)
            views.append(place)
        if step >= size and head_step >= heads:
            yield views
            continue
        shapes = set()
        for i, j in product(range(0, size, step), range(0, heads, head_step)):
            rows = slice(i, i + step)
            columns = slice(j, j + head_step)
            by_dim = {3: (rows, columns), 4: (rows, slice(None), columns)}
            piece = [t if t is None else t[by_dim[t.dim()]] for t in views]
            if not first.is_meta or piece[0].shape not in shapes:
                shapes.add(piece[0].shape)
                yield piece


def _repeat_parts(call: Call, repeats: range, q: Tensor) -> Iterator[range]:
    """All repeats at a time, or so few that gathered copies of their keys stay small."""
    if call.k.index is None or len(repeats) < 2:
        return (repeats,)
    row_bytes = q.shape[0] * q.shape[2] * q.shape[3] * q.element_size()
    step = max(1, piece_limit(q) // 2 // (row_bytes * call.k.rows))
    return (repeats[i : i + step] for i in range(0, len(repeats), step))


def _copies(operand: Operand, heads: int, repeats: range) -> Operand:
    """Copies of gathered rows in place of the tensors."""
    view, tensors, origin = operand
    index = _flat_index(view, repeats, tensors[0].device)
    copies = [_heads_of(t, origin, view, heads)[:, index] for t in tensors]
    if view.index.dim() == 3:
        copies = [copy.unflatten(1, (-1, heads)) for copy in copies]
    return Operand(_dense(view, repeats), tuple(copies))


def _zeros(operand: Operand, heads: int, repeats: range) -> Operand:
    """As ``_copies``, but zeros, to which gradients are added."""
    view, tensors, _ = operand
    rows = len(repeats) * view.rows
    zeros = (t.new_zeros(len(t), rows, heads, t.shape[3]) for t in tensors)
    return Operand(_dense(view, repeats), tuple(zeros))


def _dense(view: View, repeats: range) -> View:
    """The rows of a view in copies that hold those of some repeats alone."""
    return View(view.rows, -repeats.start * view.rows, repeat_step=view.rows)


def _flat_index(view: View, repeats: range, device: torch.device) -> Tensor:
    """The gathered rows of some repeats, one after the other."""
    index = view.index[repeats.start : repeats.stop]
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


@dataclass(frozen=True)
class Planner:
    """``build()`` makes the plan of a key, ``cut(plan, heads)`` the same in blocks of
    heads, where results in the dtype of the tensors need accumulators; None: never.
    ``cached(key, build)`` remembers plans.
    """

    key: tuple
    build: Callable[[], Plan]
    cut: Callable[[Plan, int], Plan] | None = Plan.in_head_blocks

    def whole(self, cached: Callable) -> Plan:
        """The plan of all heads at once."""
        return cached(self.key, self.build)

    def plan(self, q: Tensor, kv_heads: int, cached: Callable, backward: bool) -> Plan:
        """The plan for tensors like q."""
        plan = cached(self.key, self.build)
        if q.dtype in HALF and self.cut is not None:
            if plan.needs_fp32_accumulator(q.dtype, q.shape[2] // kv_heads, backward):
                block = head_block(q, kv_heads, min(plan.period, q.shape[1]))
                if block < q.shape[2]:
                    return cached((*self.key, block), lambda: self.cut(plan, block))
        return plan
