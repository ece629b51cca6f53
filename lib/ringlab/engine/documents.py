"""Packed sequences and padded batches: ``Documents``, each of which is attended as if
it stood alone.

Documents of equal length are one call with as many batch entries. They are read where
they lie if their first rows are evenly spaced, and are copied together if they are
short. Any other document is a call of its own, on a view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..checks import as_int, check_plain, short_repr
from ..kernels.base import accumulation_dtype
from ..torch_private import version_of
from .dilated import even_runs

COPIED = 1024  # documents of at most so many rows are copied together: that costs less than a call for each


@dataclass(frozen=True)
class Alike:
    """Documents of ``length`` rows that one call takes. Their ``first`` rows are
    ``step`` apart; 0: anywhere.
    """

    length: int
    first: tuple[int, ...]
    step: int

    def take(self, t: Tensor) -> Tensor:
        """Rows t (rows, ...) of the documents: (documents, length, ...), a view or a
        copy.
        """
        if not self.step:
            return t[self._index(t.device)]
        row, *others = t.stride()
        shape = (len(self.first), self.length, *t.shape[1:])
        strides = (self.step * row, row, *others)
        return t.as_strided(shape, strides, t.storage_offset() + self.first[0] * row)

    def put(self, t: Tensor, values: Tensor) -> None:
        """Write ``values`` (documents, length, ...) to the rows of t (rows, ...)."""
        if self.step:
            self.take(t).copy_(values)
        else:
            t[self._index(t.device)] = values.to(t.dtype)

    def fills(self, rows: int) -> bool:
        """Whether the documents are all of so many rows, in order."""
        return self.step == self.length and self.length * len(self.first) == rows

    def _index(self, device: torch.device) -> Tensor:
        first = torch.tensor(self.first, device=device)
        return first[:, None] + torch.arange(self.length, device=device)


Integers = Tensor | Sequence[int]


@dataclass(frozen=True, eq=False)
class Documents:
    """Where documents lie in tensors (batch, n, ...): ``spans`` of (batch entry, first
    row, end).

    >>> Documents.packed([0, 4, 8, 11], torch.empty(1, 11, 1, 1)).parts
    [Alike(length=3, first=(8,), step=3), Alike(length=4, first=(0, 4), step=4)]
    """

    spans: tuple[tuple[int, int, int], ...]
    n: int

    @staticmethod
    def packed(cu_seqlens: Integers, q: Tensor, n: int | None = None) -> Documents:
        """The documents between borders that ascend from 0 to at most n (default: all
        rows), of q (1, rows, h, d); rows behind the last one are of none.
        """
        if q.shape[0] != 1:
            raise ValueError(
                f"cu_seqlens needs a batch of 1, got {q.shape[0]}: pack the sequences, or use lengths"
            )
        borders, n = integers("cu_seqlens", cu_seqlens, q), n or q.shape[1]
        if (
            len(borders) < 2
            or borders[0] != 0
            or borders[-1] > n
            or any(a > b for a, b in pairwise(borders))
        ):
            shards = (
                "" if n == q.shape[1] else "; unequal shards need a ringlab.ring.Layout"
            )
            wanted = f"cu_seqlens must ascend from 0 to at most the sequence length {n}"
            raise ValueError(f"{wanted}, got {short_repr(borders)}{shards}")
        # The last is empty: it ends with the rows, by which ``packs`` tells these.
        spans = [*pairwise(borders), (n, n)]
        return _documents(tuple((0, a, b) for a, b in spans), n)

    @staticmethod
    def padded(lengths: Integers, q: Tensor, n: int | None = None) -> Documents:
        """The first ``lengths[i]`` of n positions (default: all rows) of each entry of
        q (b, rows, h, d).
        """
        lengths, b, n = integers("lengths", lengths, q), q.shape[0], n or q.shape[1]
        if len(lengths) != b or not all(0 <= length <= n for length in lengths):
            wanted = (
                f"lengths must be {b} numbers of 0 to {n} rows, one of each batch entry"
            )
            raise ValueError(f"{wanted}, got {short_repr(lengths)}")
        return _documents(tuple((i, 0, length) for i, length in enumerate(lengths)), n)

    def pad_(self, lse: Tensor) -> None:
        """Make lse (b, h, n) -inf in rows of no document."""
        padded = torch.full_like(lse, -torch.inf)
        for entry, start, stop in self.spans:
            padded[entry, :, start:stop] = lse[entry, :, start:stop]
        lse.copy_(padded)

    def packs(self, batch: int) -> bool:
        """Whether these are documents of a single batch entry, one behind the other."""
        return batch == 1 and self.spans[-1][2] == self.n

    @cached_property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """The rows of each document, from, to, counted through the batch."""
        spans = ((entry * self.n, start, stop) for entry, start, stop in self.spans)
        return tuple((at + a, at + b) for at, a, b in spans if a < b)

    @cached_property
    def parts(self) -> list[Alike]:
        """All documents, by their length; rows are counted through the batch."""
        by_length: dict[int, list[tuple[int]]] = {}
        for entry, start, stop in self.spans:
            if start < stop:
                by_length.setdefault(stop - start, []).append((entry * self.n + start,))
        parts = []
        for length, members in sorted(by_length.items()):
            runs = [tuple(start for (start,) in run) for run in even_runs(members)]
            if len(runs) > 1 and length <= COPIED:
                parts.append(Alike(length, tuple(start for (start,) in members), 0))
            else:
                parts += [
                    Alike(length, run, run[1] - run[0] if len(run) > 1 else length)
                    for run in runs
                ]
        return parts

    def forward(self, q, k, v, attend: Callable) -> tuple[Tensor, Tensor]:
        """out (b, n, h, d), lse (b, h, n), by ``attend(q, k, v)`` for documents of one
        length.
        """
        b, n, heads, _ = q.shape
        reads = [t.flatten(0, 1) for t in (q, k, v)]
        if len(self.parts) == 1 and self.parts[0].fills(b * n):
            out, lse = attend(*map(self.parts[0].take, reads))
            return out.reshape(q.shape), lse.transpose(1, 2).reshape(
                b, n, heads
            ).transpose(1, 2)
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.full(
            (b, n, heads),
            -torch.inf,
            dtype=accumulation_dtype(q.dtype),
            device=q.device,
        )
        for part in self.parts:
            o, l = attend(*map(part.take, reads))
            part.put(out.flatten(0, 1), o)
            part.put(lse.flatten(0, 1), l.transpose(1, 2))
            del o, l  # before the next ones are computed
        return out, lse.transpose(1, 2)

    def backward(
        self, dout, dlse, q, k, v, out, lse, gradients: Callable
    ) -> tuple[Tensor, ...]:
        """dq (b, n, h, d), dk, dv (b, n, h_kv, d), by ``gradients`` for documents of
        one length.
        """
        by_rows = [
            t if t is None else t.transpose(1, 2).flatten(0, 1) for t in (dlse, lse)
        ]  # (b * n, h)
        dlse, lse = by_rows
        reads = [t.flatten(0, 1) for t in (dout, q, k, v, out)]
        grads = [
            torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)
        ]
        for part in self.parts:
            dout_, *others = map(part.take, reads)
            dlse_, lse_ = (
                t if t is None else part.take(t).transpose(1, 2) for t in (dlse, lse)
            )
            part_grads = gradients(dout_, dlse_, *others, lse_)
            for grad, part_grad in zip(grads, part_grads):
                part.put(grad.flatten(0, 1), part_grad)
            del part_grads
        return tuple(grads)


_documents = lru_cache(maxsize=64)(Documents)  # so that equal borders are planned once
_values = WeakTensorKeyDictionary()  # of tensors on a GPU


def values_of(t: Tensor) -> list:
    """``t.tolist()``; of a tensor on a GPU, which waits for all work there, once as long
    as nothing writes to it that torch knows of. While a CUDA graph is captured it raises
    torch's error: a replay would not see other values.
    """
    version = None if t.device.type == "cpu" else version_of(t)
    if version is None:
        return t.tolist()
    written = version, t.data_ptr(), t.shape
    kept = _values.get(t)
    capturing = t.is_cuda and torch.cuda.is_current_stream_capturing()
    if kept is None or kept[0] != written or capturing:
        kept = _values[t] = written, t.tolist()
    return kept[1]


def integers(name: str, values: Integers, q: Tensor) -> list[int]:
    """Integers of a list or a 1-D tensor, which is on the CPU or with q; ValueError or
    TypeError for anything else.
    """
    if isinstance(values, Tensor):
        check_plain(name, values)
        if values.dtype not in (torch.int32, torch.int64) or values.dim() != 1:
            wanted = f"{name} must be a 1-D tensor of int32 or int64"
            raise ValueError(
                f"{wanted}, got {values.dtype} of shape {tuple(values.shape)}"
            )
        if values.device.type != "cpu" and values.device != q.device:
            raise ValueError(
                f"{name} must be on the CPU or on {q.device}, got {values.device}"
            )
        return list(values_of(values))
    numbers = (
        [as_int(x) for x in values]
        if isinstance(values, Sequence) and not isinstance(values, str)
        else [None]
    )
    if None in numbers:
        raise TypeError(
            f"{name} must be a 1-D tensor or a list of integers, got {short_repr(values)}"
        )
    return numbers
