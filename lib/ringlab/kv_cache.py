"""``KVCache``, for generation: it keeps the K/V rows that later queries still see, on
one device or shared out to ranks. ``cache_bytes`` tells its size beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps

import torch
from torch import Tensor

from . import kernels
from .checks import (
    LARGEST,
    Device,
    as_device,
    as_int,
    check_float_dtype,
    check_int,
    check_plain,
    short_repr,
)
from .engine.autograd import is_followed, positive_scale, without_autocast
from .engine.documents import integers
from .engine.execute import merge
from .engine.live_rows import LiveRows
from .engine.retention import RetentionPolicy, retention_policy
from .engine.selected import call_of, kernels_of, results
from .engine.sinks import add_sinks_
from .engine.ways import LocalCall
from .kernels import device_of, triton
from .kernels.base import accumulation_dtype
from .patterns import Dense, Pattern, as_pattern
from .ring.comm import Steps, all_to_all, drive
from .ring.exchange import Problem
from .ring.group import AnyGroup, Group
from .ring.layout import contiguous
from .selected import Selected


def _on_cpu(call: Callable) -> Callable:
    """``call`` as without a default device: the tables of a cache are on the CPU."""

    @wraps(call)
    def called(*args, **options):
        with nullcontext() if torch.empty(0).is_cpu else torch.device("cpu"):
            return call(*args, **options)

    return called


class KVCache:
    """The K/V rows of ``batch`` sequences that queries after them still see under
    causal attention, and no others.

    ``attention(q, k, v, pattern, causal=True, cache=cache)`` takes q, k and v of new
    positions, one or many, and returns their rows of attention over all positions so
    far, whatever the pieces were. The sequences may differ in length: ``lengths=`` of
    ``attention`` says how many of the new rows of each are not padding.

    A single position runs by the kernel that ``backend`` chooses if this reads rows
    where they lie ("compiled", on a CPU), else as two matrix products; by "auto" or
    "triton" in one or two launches of Triton where this can run. The memory for rows is
    allocated once; ``cache.nbytes``, with tables of their positions, is at most what
    ``cache_bytes`` tells beforehand. Rows that no later query sees leave together, when
    room is needed; ``live_rows`` and ``state_dict`` are without them.

    ``pattern`` may be a name, as "window". A dense pattern keeps all rows, a window
    those within it, a dilated one the selected rows of the
    segments that are open: [2048 * 2^i] / [2^i], i = 0..9, keeps at most 11,263 of
    1,048,576. Patterns with random blocks or a given mask are those of
    ``max_seq_len`` positions. ``max_crop`` more positions can be taken back by
    ``crop``, for instance those of a draft that was refused; their rows are kept as
    long. Over a ``group`` (ProcessGroup, 1-D mesh or ``Simulated``) each rank keeps its
    part of the rows, and every rank passes all new positions.

    ``heads`` and ``kv_heads`` (default: as many) are those of q and of k; ``dtype`` and
    ``device`` those of k and v. Raises ValueError for sizes that do not fit.

    >>> from ringlab import Dilated, attention
    >>> cache = KVCache(Dilated([4, 8], [1, 2]), batch=1, heads=2, head_dim=8, max_seq_len=100)
    >>> q = torch.randn(1, 7, 2, 8)
    >>> parts = [attention(some, some, some, cache.pattern, causal=True, cache=cache) for some in q.split(3, 1)]
    >>> torch.allclose(torch.cat(parts, 1), attention(q, q, q, cache.pattern, causal=True), atol=1e-6)
    True
    >>> cache.lengths, [rows.tolist() for rows in cache.live_rows()]
    ([7], [[4, 5, 6], [1, 3, 4, 5, 6]])
    """

    @_on_cpu
    def __init__(
        self,
        pattern: Pattern | str,
        *,
        batch: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int,
        max_seq_len: int,
        dtype: torch.dtype = torch.float32,
        device: Device = "cpu",
        max_crop: int = 0,
        group: AnyGroup = None,
    ):
        self.group: Group | None = Group.sharing(group)
        here, ranks = (
            ([0], 1) if self.group is None else (self.group.here, self.group.size)
        )
        sizes = pattern, heads, kv_heads, max_seq_len, max_crop
        launches = _launches(device_of(device))
        policies = [_policy(*sizes, rank, ranks, launches) for rank in here]
        check_float_dtype(dtype)
        self.policy: RetentionPolicy = policies[0]
        self.dtype = dtype
        self.device: torch.device = device_of(device)
        self.batch: int = check_int("batch", batch, most=LARGEST)
        self.head_dim: int = check_int("head_dim", head_dim, most=LARGEST)
        if self.device.type == "meta":
            raise ValueError(
                "a cache holds values, which the device 'meta' has not; cache_bytes tells its size"
            )
        made = self.batch, self.head_dim, dtype, self.device
        self._parts = [LiveRows(policy, *made) for policy in policies]

    @property
    def pattern(self) -> Pattern:
        return self.policy.pattern

    @property
    def lengths(self) -> list[int]:
        """How many positions each sequence has."""
        return self._parts[0].length.tolist()

    @property
    def nbytes(self) -> int:
        """The bytes of the memory here: rows of k and v, and tables that say which they
        are.
        """
        return sum(part.nbytes for part in self._parts)

    @_on_cpu
    def live_rows(self, entry: int = 0) -> list[Tensor]:
        """The positions of the rows that are kept here of a sequence, ascending, for
        each K/V head.
        """
        number = as_int(entry)
        if number is None or not 0 <= number < self.batch:
            raise ValueError(
                f"there is no sequence {short_repr(entry)} among {self.batch}"
            )
        return [
            torch.cat(positions).sort().values
            for positions in zip(*(part.rows_of(number) for part in self._parts))
        ]

    @_on_cpu
    def append(self, k: Tensor, v: Tensor) -> None:
        """Keep the rows k and v of new positions without attending from them: of a
        prompt computed elsewhere.
        """
        tensors = isinstance(k, Tensor) and isinstance(v, Tensor)
        if not (tensors and k.dim() == 4 and k.shape == v.shape and k.numel()):
            shapes = [
                tuple(t.shape) if isinstance(t, Tensor) else short_repr(t)
                for t in (k, v)
            ]
            raise ValueError(
                f"append takes k and v (batch, seq, kv_heads, head_dim) of one shape, got {shapes}"
            )
        for name, t in (("k", k), ("v", v)):
            check_plain(name, t)
        if v.dtype != k.dtype or v.device != k.device:
            raise ValueError(
                f"k and v must agree: {k.dtype} on {k.device}, {v.dtype} on {v.device}"
            )
        q = k[:, :1, :1].expand(-1, -1, self.policy.heads, -1)
        self._check(q, k, v, self.pattern, True, [k.shape[1]] * self.batch)
        for part in self._parts:
            part.append(k, v, [k.shape[1]] * self.batch)

    @_on_cpu
    def crop(self, lengths: int | Sequence[int]) -> None:
        """Forget the positions from ``lengths`` on, one number or one for each
        sequence.

        ValueError, and nothing changes, for a number beyond what is there, or where a
        row is needed that was dropped.
        """
        number = as_int(lengths)
        k = self._parts[0].k
        lengths = lengths if number is None else [number] * self.batch
        lengths = integers("lengths", lengths, k)
        if len(lengths) != self.batch:
            raise ValueError(
                f"crop takes one length, or {self.batch} for the sequences, got {len(lengths)}"
            )
        for entry, (length, have, peak) in enumerate(
            zip(lengths, self.lengths, self._parts[0].peak.tolist())
        ):
            if not 0 <= length <= have:
                raise ValueError(
                    f"sequence {entry} has {have} positions and cannot be cropped to {length}"
                )
            if length < have and self.policy.needs_dropped(length, max(have, peak)):
                why = "rows that it saw are dropped; a cache made with max_crop=... keeps them for longer"
                raise ValueError(
                    f"sequence {entry} cannot be cropped to {length}: {why}"
                )
        for part in self._parts:
            part.crop(lengths)

    @_on_cpu
    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Make sequence i a copy of what was sequence ``index[i]``, for beam search."""
        index = integers("index", index, self._parts[0].k)
        if len(index) != self.batch or not all(0 <= i < self.batch for i in index):
            raise ValueError(
                f"reorder takes the numbers of {self.batch} sequences, got {short_repr(index)}"
            )
        for part in self._parts:
            part.reorder(index)

    def reset(self) -> None:
        """Forget all positions."""
        for part in self._parts:
            part.reset()

    @_on_cpu
    def state_dict(self) -> dict:
        """A copy of all that is kept here; ``load_state_dict`` restores it into a cache
        that was made alike.
        """
        return {"made": self._made(), "parts": [part.state() for part in self._parts]}

    @_on_cpu
    def load_state_dict(self, state: dict) -> None:
        """Restore what ``state_dict`` gave.

        ValueError, and nothing changes, for the state of a cache that was made
        otherwise, and where names, dtypes or shapes are not those of a state. The
        values are taken as they are.
        """
        made, parts = (
            state.get(name) if isinstance(state, dict) else None
            for name in ("made", "parts")
        )
        if made != self._made():
            raise ValueError(
                f"the state is of another cache: {short_repr(made)}, this is {self._made()}"
            )
        complete = isinstance(parts, list) and len(parts) == len(self._parts)
        if not complete or not all(
            part.fits(saved) for part, saved in zip(self._parts, parts)
        ):
            raise ValueError(
                "the state is damaged: its parts are not those of state_dict()"
            )
        for part, saved in zip(self._parts, parts):
            part.restore(saved)

    def _made(self) -> str:
        policy = self.policy
        heads = f"{policy.heads} heads, {policy.kv_heads} K/V heads of {self.head_dim}, {self.dtype}"
        made = f"{policy.pattern}, {self.batch} x {policy.n} positions, {heads}, max_crop {policy.max_crop}"
        rank = f", rank {policy.rank} of {policy.ranks}"
        return made + (rank if self.group else "")

    def __repr__(self) -> str:
        return f"KVCache({self._made()}: {self.nbytes:,} bytes)"

    def _check(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pattern: Pattern,
        causal: bool,
        lengths: list[int],
        *learned: Tensor | None,
    ) -> None:
        """Raise ValueError in one line unless q, k, v, new positions of a pattern, fit
        this cache.
        """
        policy = self.policy
        if pattern != policy.pattern:
            raise ValueError(
                f"the cache is of another pattern: {policy.pattern}, not {pattern}"
            )
        if not causal:
            raise ValueError(
                "a cache needs causal=True: what comes later is not there yet"
            )
        if is_followed(q, k, v, *learned):
            raise ValueError(
                "a cache is for generation, without gradients: call it under torch.no_grad()"
            )
        if (len(k), *k.shape[2:], q.shape[2]) != (
            self.batch,
            policy.kv_heads,
            self.head_dim,
            policy.heads,
        ):
            heads = f"{policy.heads} heads, {policy.kv_heads} K/V heads"
            made = f"a batch of {self.batch}, {heads}, head_dim {self.head_dim}"
            raise ValueError(
                f"the cache is for {made}, got q {tuple(q.shape)}, k {tuple(k.shape)}"
            )
        if (k.dtype, k.device) != (self.dtype, self._parts[0].k.device):
            raise ValueError(
                f"the cache is {self.dtype} on {self.device}, k is {k.dtype} on {k.device}"
            )
        for entry, (have, new) in enumerate(zip(self.lengths, lengths)):
            if have + new > policy.n:
                full = f"{have} of {policy.n} positions are taken in sequence {entry}, and {new} are new"
                raise ValueError(f"the cache is full: {full}")

    @_on_cpu
    def attend(
        self, lengths: list[int], q, k, v, sinks: Tensor | None, call: LocalCall
    ) -> tuple[Tensor, Tensor]:
        """Return out (b, c, h, d), lse (b, h, c) of c new positions, of which sequences
        have ``lengths``, for a call that ``attention`` has checked. They see all rows,
        or those of a ``Selected``.
        """
        pattern, causal, scale, backend, execution, softcap, _ = call
        if isinstance(pattern, Selected):
            learned = sinks, pattern.log_weights
            self._check(q, k, v, Dense(), causal, lengths, *learned)
            return self._of_selected(q, k, v, call, lengths, sinks)
        if _capturing(q):
            options = pattern, causal, scale, backend, softcap, lengths, sinks
            return self._record(q, k, v, *options)
        self._check(q, k, v, pattern, causal, lengths, sinks)
        options = {"backend": backend, "softcap": softcap}
        sizes = q.device, q.dtype, q.shape[3]
        kernel = kernels.choose(*sizes, causal=True, **options).kernel
        if self.group is not None:
            policy = self.policy
            layout = contiguous(policy.n, self.group.size)
            problem = Problem(pattern, layout, True, policy.heads, policy.kv_heads)
            chunk = {"positions": q.shape[1], "lengths": tuple(lengths)}
            options |= {"scale": scale, **chunk}
            self.group.agree("generation", problem, q, **options)
        if scale <= 0:
            flip, scale = positive_scale(scale)
            q = flip(q)
        decodes = softcap is None and (backend == "auto" or kernel.name == "triton")
        if decodes and q.is_cuda:  # Triton must work here
            decodes = kernels.probe("triton", *sizes, True, False) is None
        with without_autocast(q):
            step = q, k, v, lengths, scale, kernel, execution, decodes
            if self.group is None:
                out, lse = self._parts[0].attend(*step)
            else:
                parts = [part.attend(*step) for part in self._parts]
                steps = [_joined(out, lse, self.group.size) for out, lse in parts]
                out, lse = drive(steps, self.group)[0]
            if sinks is not None:
                add_sinks_(out, lse, sinks)
                for row, length in zip(lse, lengths):
                    row[:, length:] = -torch.inf  # padding is no query
            return out.to(q.dtype), lse

    def _of_selected(
        self, q, k, v, options: LocalCall, lengths, sinks
    ) -> tuple[Tensor, Tensor]:
        """``attend`` to selected keys of all rows so far."""
        pattern = options.pattern
        if self.group is not None:
            raise NotImplementedError("Selected takes no cache over a group")
        rows = -(-q.shape[1] // pattern.query_block)
        shape = pattern.indices.shape
        if (shape[0], shape[2]) != (self.batch, rows):
            wanted = f"({self.batch}, groups, {rows}, slots) for the new positions"
            raise ValueError(f"indices must be {wanted}, got {tuple(shape)}")
        # What is refused is so before a row is kept.
        calls = []
        part = self._parts[0]
        for entry, (have, new) in enumerate(zip(self.lengths, lengths)):
            one = slice(entry, entry + 1)
            rows = slice(-(-new // pattern.query_block))
            own = options._replace(pattern=pattern.rows(one, rows))
            if not new:
                continue
            call = call_of(own, q[one, :new], k[one], shard=(have, have + new))
            kernels_of(call, q, False)
            rows = None
            if have + new == self.policy.n:  # a cache that is full keeps no row
                before = (t[one, :, :have].transpose(1, 2) for t in (part.k, part.v))
                after = (t[one, :new] for t in (k, v))
                rows = [torch.cat(both, 1) for both in zip(before, after)]
            calls.append((one, call, rows))
        part.append(k, v, lengths)
        out = torch.zeros_like(q)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype))
        lse = lse.transpose(1, 2).contiguous()  # (b, h, c)
        for one, call, rows in calls:
            new = call.rows
            total = int(call.spans[0, 1])
            if rows is None:
                rows = [t[one, :, :total].transpose(1, 2) for t in (part.k, part.v)]
            o, l = results(call, q[one, :new], *rows, sinks, False)
            out[one, :new], lse[one, :, :new] = o, l
        return out, lse

    @_on_cpu
    def prepare_step(self) -> None:
        """Prepare one more position of each sequence for a step in a CUDA graph.

        ``attention(..., cache=cache)`` of one position each can be recorded in a graph
        after this; call it again before each further replay. Everything that a replay
        needs then lies on the GPU, and the host waits for nothing but once in at most 64
        steps. A step that was not prepared gives NaN; calls outside of the graph go on
        after it, and raise RuntimeError if steps were not replayed as often as prepared.

        Raises ValueError for a cache that is full or over a group, and
        NotImplementedError where Triton's kernels do not run.

        Example::

            cache.prepare_step()
            with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
                out = attention(q, k, v, cache.pattern, causal=True, cache=cache)
            graph.replay()
            for new_q, new_k, new_v in rows:
                q.copy_(new_q), k.copy_(new_k), v.copy_(new_v)
                cache.prepare_step()
                graph.replay()  # out is that of the new position
        """
        if self.group is not None:
            raise ValueError("a step in a CUDA graph is of a cache without a group")
        if max(self.lengths) >= self.policy.n:
            raise ValueError(f"the cache is full: {self.policy.n} positions are taken")
        sizes = self.device, self.dtype, self.head_dim, True, False
        if why := kernels.probe("triton", *sizes):
            raise NotImplementedError(f"steps in a CUDA graph run by Triton: {why}")
        self._parts[0].prepare_step()

    def _record(
        self, q, k, v, pattern, causal, scale, backend, softcap, lengths, sinks
    ):
        """``attend`` while a CUDA graph is recorded."""
        self._check(q, k, v, pattern, causal, [0] * self.batch, sinks)
        one = q.shape[1] == 1 and {*lengths} == {1}
        if not one or backend not in ("auto", "triton") or softcap is not None:
            raise NotImplementedError(
                "a CUDA graph records one position of each sequence by Triton's kernels, "
                f"not q {tuple(q.shape)} by {backend!r}, softcap {softcap}"
            )
        flip, scale = positive_scale(scale)
        with without_autocast(q):
            out, lse = self._parts[0].record(flip(q), k, v, scale)
            return add_sinks_(out, lse, sinks)


def _joined(out: Tensor, lse: Tensor, ranks: int) -> Steps:
    """out (b, c, h, d), lse (b, h, c) of all ranks together, from this rank's parts of
    both.
    """
    packed = torch.cat(
        [out.to(lse.dtype), lse.transpose(1, 2).unsqueeze(-1)], -1
    )  # (b, c, h, d + 1)
    ones = [1] * ranks
    parts = yield from all_to_all(
        packed.expand(ranks, *packed.shape).contiguous(), ones, ones
    )
    return merge(list(parts[..., :-1]), list(parts[..., -1].transpose(2, 3)))


def _policy(
    pattern, heads, kv_heads, max_seq_len, max_crop, rank: int, ranks: int, launches
) -> RetentionPolicy:
    """The policy of checked sizes."""
    heads = check_int("heads", heads, most=2**20)
    kv_heads = heads if kv_heads is None else check_int("kv_heads", kv_heads)
    if heads % kv_heads:
        raise ValueError(
            f"query heads must be a multiple of K/V heads: {heads} and {kv_heads}"
        )
    n = check_int("max_seq_len", max_seq_len, most=2**31)
    max_crop = check_int("max_crop", max_crop, 0, 2**31)
    pattern = as_pattern(pattern, Pattern, n, heads)
    sizes = heads, kv_heads, n, max_crop, rank, ranks
    return retention_policy(pattern, *sizes, launches)


def _capturing(q: Tensor) -> bool:
    """Whether a CUDA graph is recorded."""
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


def _launches(device: torch.device) -> bool:
    """Whether a single position may run by the kernels of ``decode``."""
    return device.type == "cuda" or triton.interpreted()


@_on_cpu
def cache_bytes(
    pattern: Pattern | str,
    *,
    max_seq_len: int,
    batch: int = 1,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    max_crop: int = 0,
    ranks: int = 1,
    device: Device = "cpu",
) -> int:
    """The bytes that a ``KVCache`` made with these sizes takes at most, tables
    included: on the rank with most. Patterns of blocks below 63 keep room for more
    rows, so that rows leave together: 62 on a GPU (``device``), elsewhere an eighth, at
    most 62.

    >>> from ringlab import Dense, Dilated
    >>> ladder = Dilated([2048 << i for i in range(10)], [1 << i for i in range(10)])
    >>> [cache_bytes(pattern, max_seq_len=1 << 20) >> 20 for pattern in (Dense(), ladder)]
    [4102, 42]
    """
    sizes = pattern, heads, kv_heads, max_seq_len, max_crop
    ranks = check_int("ranks", ranks, most=2**12)
    launches = _launches(as_device(device))
    policies = [_policy(*sizes, rank, ranks, launches) for rank in range(ranks)]
    policy = max(policies, key=lambda policy: policy.slots)
    check_float_dtype(dtype)
    row = 2 * policy.kv_heads * check_int("head_dim", head_dim) * dtype.itemsize
    table = policy.tables * (4 + policy.mask_dtype.itemsize * policy.viewers)
    return check_int("batch", batch) * policy.slots * (row + table)
