"""``MetaRun``: runs of the engine without data, on tensors of the meta device, under
the tracker that measurements use.

Such tensors have shapes, strides and storages but no bytes. So the peak memory of a
call is known for any length, and for hardware that is not here. Index tensors of plans
have data: they are small, and the engine reads them. ``MetaRun`` is the tracker,
``run`` runs one call of attention: on one device, or on several ranks one after
another.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import cache as caches
from . import kernels, memory
from .call import CallSpec
from .checks import check_backend, check_choice, check_int, short_repr
from .engine import Execution, autograd
from .engine.ways import LocalCall
from .kernels.base import HALF, DeviceSpec
from .kernels.external import NOT_INSTALLED
from .ring import Problem
from .ring.comm import Steps, Wait
from .ring.exchange import rows_moved
from .ring.rank import rank_of
from .ring.schemes import algorithms
from .torch_private import storage_id
from .tracking import LiveStorageTracker, storages

CPU = DeviceSpec("cpu")
PARTS = ("q", "k", "v", "out", "lse", "gradients", "received", "workspace")
_ATEN = torch.ops.aten
_TAKE_INDICES = {_ATEN.index, _ATEN.index_select}
# torch's own rules for these without data are in Python, slow, and import the compiler.
_ELEMENTWISE = {
    getattr(_ATEN, name)
    for name in "add div exp floor_divide log logaddexp mul sigmoid sub".split()
}


def _like(args) -> Tensor | None:
    """A tensor like the one that an elementwise operator returns; None where torch must
    tell.
    """
    tensors = [x for x in args if isinstance(x, Tensor)]
    same = len({(x.shape, x.dtype) for x in tensors}) == 1 and all(
        x.is_meta for x in tensors
    )
    return (
        tensors[0]
        if same and (tensors[0].is_floating_point() or isinstance(args[-1], int))
        else None
    )


@cache
def _only_writes(func) -> bool:
    """Whether an operator changes nothing but the data of its first argument."""
    return (
        func.overloadpacket.__name__.endswith("_")
        and torch.Tag.inplace_view not in func.tags
    )


def _without_data(value):
    """Arguments of one operator, with index tensors on the device of the others."""
    if isinstance(value, list | tuple):
        return type(value)(map(_without_data, value))
    return (
        torch.empty_like(value, device="meta")
        if isinstance(value, Tensor) and not value.is_meta
        else value
    )


class MetaRun(LiveStorageTracker):
    """Track one call without data: ``tensor`` makes its inputs, ``name`` says what
    storages are for.

    ``peak_bytes`` and ``parts`` are what the call would hold.

    >>> run = MetaRun()
    >>> with run.on(kernels.KERNELS["eager"]):
    ...     q = run.tensor("q", (1, 1 << 20, 8, 64), torch.float32)
    ...     run.name("out", q * 2)
    >>> run.peak_bytes >> 30, run.parts()["out"] >> 30
    (4, 2)
    """

    _meta = True

    def __init__(self):
        super().__init__()
        self.scheme: str | None = None  # of several ranks
        # Whether tensors asked for on the meta device are made with data.
        self.real = False
        self._top: dict[int, tuple[StorageWeakRef, int]] = {}
        self._names: dict[int, tuple[StorageWeakRef, str]] = {}

    @contextmanager
    def on(self, kernel, device: DeviceSpec = CPU) -> Iterator[None]:
        """Inside, operators on the run's tensors only count, and every choice takes
        ``kernel`` on ``device``.
        """
        with kernels.pretend(device, kernel), self:
            yield

    def tensor(self, part: str, shape, dtype: torch.dtype) -> Tensor:
        """Make an input of the call, or a tensor that stands for what the call would
        hold.
        """
        made = torch.empty(shape, dtype=dtype, device="meta")
        self.register(made)
        self.name(part, made)
        return made

    def name(self, part: str, *tensors) -> None:
        """Say what the storages of these tensors, or dicts of them, are for, one of
        ``PARTS``; the first name stays.
        """
        for storage in storages(tensors, True):
            self._names.setdefault(storage_id(storage), (StorageWeakRef(storage), part))

    def parts(self) -> dict[str, int]:
        """Bytes at the peak by part; they sum to ``peak_bytes``."""
        sizes = dict.fromkeys(PARTS, 0)
        for key, (_, size) in self._top.items():
            sizes[self._names[key][1] if key in self._names else "workspace"] += size
        return sizes

    def drive(self, steps: Steps):
        """Run one rank's algorithm alone: what others send arrives uninitialised."""
        answer = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                return end.value
            answer = None
            if not isinstance(step, Wait):
                self.name("received", step.receive)
                # A request is its own ticket: like those of a group it holds what is on
                # its way.
                answer = step
            step = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.is_view and not self.real:  # most operators
            return super().__torch_dispatch__(func, types, args, kwargs)
        device = (kwargs or {}).get("device")
        if device is not None and device.type == "meta":
            if func is _ATEN._to_copy.default and not args[0].is_meta:
                # An index tensor goes where it is used: there it is already.
                return args[0]
            if self.real:
                kwargs = kwargs | {"device": torch.device("cpu")}
        if _only_writes(func) and args[0].is_meta:
            return args[0]
        if func.overloadpacket in _ELEMENTWISE and (like := _like(args)) is not None:
            func = _ATEN.empty_like.default
            args = (like,)
            kwargs = {}
        if func.overloadpacket in _TAKE_INDICES:
            args = _without_data(args) if args[0].is_meta else args
        if self.real:  # torch.tensor(...) makes its result out of sight
            self._count(storages((args, kwargs), True))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _count(self, made) -> None:
        before = self.peak_bytes
        super()._count(made)
        if self.peak_bytes > before:
            # Its weak references keep addresses from being given away.
            self._top = dict(self._live)


@dataclass(frozen=True)
class ColdExecution(Execution):
    """An execution as at a first call: its cache and pools are empty. Index tensors are
    built with data.
    """

    run: MetaRun | None = None

    @classmethod
    def of(cls, execution: Execution, run: MetaRun) -> ColdExecution:
        """The same switches with an empty cache and empty pools of the same bounds."""
        options = {f.name: getattr(execution, f.name) for f in fields(Execution)}
        for name, usual in (
            ("cache", caches.GLOBAL),
            ("pool", memory.GLOBAL_POOL),
            ("results", memory.RESULTS),
        ):
            own = usual if options[name] is True else options[name]
            if own is not False:
                empty = (
                    copy.copy(own)
                    if name == "cache"
                    else MetaPool(own.max_bytes, own.threshold_bytes, own.waste)
                )
                options[name] = empty
        return cls(**options, run=run)

    def cached(self, key, build):
        def built():
            before = self.run.real  # a build may use the cache, too
            self.run.real = True
            try:
                return build()
            finally:
                self.run.real = before

        return super().cached(key, built)


class MetaPool(memory.MemoryPool):
    """A pool that lends buffers without data, and reuses them by the rules of a real
    one.
    """

    def _place(self, device: torch.device, nbytes: int) -> tuple | None:
        return ("meta", 0, 0) if nbytes and nbytes >= self.threshold_bytes else None


def _empty(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor of the shape of another one."""
    return torch.empty(like.shape, dtype=dtype or like.dtype, device=like.device)


class FusedMeta(kernels.Kernel):
    """The memory of a fused GPU kernel, without arithmetic: out and lse; in a backward
    dq, dk, dv, rowsum(dO * O).

    Half precision also has dq in fp32, as FlashAttention-2 allocates it (Dao 2023,
    arXiv 2307.08691). The log-sum-exp is padded to 32 rows, as CUTLASS's is. What else
    a library holds inside is not counted. Nothing is refused: ``kernel_of`` knows which
    dtypes such a kernel serves.
    """

    name = "fused"

    def forward(self, q, k, v, causal, scale):
        """out (b, m, h, d) in q's dtype and lse (b, h, m), uninitialised."""
        lse = q.new_empty(
            q.shape[0], q.shape[2], -(-q.shape[1] // 32) * 32, dtype=torch.float32
        )
        return _empty(q), lse[..., : q.shape[1]]

    def backward(self, dout, q, k, v, out, lse, causal, scale):
        """dq, dk, dv (b, m, h, d), uninitialised."""
        held = [_empty(lse)]
        if q.dtype in HALF:
            held.append(_empty(q, torch.float32))
        return tuple(map(_empty, (q, k, v)))


class ListsMeta(FusedMeta):
    """The memory of the list kernels, likewise: out and lse; in a backward the row sums,
    dq, dk, dv. Of ``several`` launches results are summed in fp32.
    """

    name = kernels.LISTS
    whole_patterns = True

    def __init__(self, several: bool):
        self.several = several

    def _results(self, *like: Tensor) -> tuple[Tensor, ...]:
        summed = [_empty(t, torch.float32) for t in like if self.several]
        results = tuple(map(_empty, like))
        del summed  # rounded into the results
        return results

    def attend(self, q, k, v, pattern, causal, scale, cached):
        """out (b, n, h, d) in q's dtype and lse (b, h, n), uninitialised."""
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        return *self._results(q), lse

    def gradients(self, dout, dlse, q, k, v, out, lse, pattern, causal, scale, cached):
        """dq, dk, dv (b, n, h, d), uninitialised."""
        sums = torch.empty_like(lse)  # of each row, held for both passes
        grads = *self._results(q), *self._results(k, v)
        del sums
        return grads


def ranks_to_run(problem: Problem) -> set[int]:
    """The ranks to run: all; of more than ``FEW_RANKS`` with equal shards the ends and
    those that move most rows.

    One of these holds most, to within the few rows by which shards and messages differ.
    """
    sizes = problem.layout.sizes
    moved = rows_moved(problem)
    if len(sizes) <= FEW_RANKS or max(sizes) - min(sizes) > 1:
        return set(range(len(sizes)))
    received = list(map(sum, moved))
    sent = list(map(sum, zip(*moved)))
    both = list(map(sum, zip(received, sent)))
    # The last but one of a causal ring holds messages to pass on, the last one none.
    return {
        0,
        len(sizes) - 2,
        len(sizes) - 1,
        *(each.index(max(each)) for each in (sizes, received, sent, both)),
    }


MOST_ELEMENTS = {
    "cpu": 2**35,
    "cuda": 2**40,
}  # beyond, a run takes minutes: the engine cuts it into small pieces
FEW_RANKS = 16
MOST_RANKS = 128  # of dense attention a run has a few calls for each pair of ranks


def run(call: CallSpec) -> MetaRun:
    """Run a call without data: of several ranks the one that holds most.

    Raises ValueError for what would take minutes, and as ``kernel_of`` does.
    """
    check_size(call)
    if call.ranks > 1:
        problem, scheme = call.problem()
        most = max(
            (run_rank(call, problem, scheme, rank) for rank in ranks_to_run(problem)),
            key=lambda run: run.peak_bytes,
        )
        most.scheme = scheme
        return most
    run = MetaRun()
    execution = ColdExecution.of(call.execution, run)
    scale = call.head_dim**-0.5
    local = LocalCall(call.pattern, call.causal, scale, "auto", execution)
    with torch.no_grad():
        with run.on(_stand_in(call, False), call.device):
            q, k, v, dout = _inputs(call, run, call.seq_len)
            out, lse = autograd.forward(q, k, v, None, local)
            run.name("out", out)
            run.name("lse", lse)
        if dout is not None:
            with run.on(_stand_in(call, True), call.device):
                tensors = dout, None, q, k, v, out, lse
                run.name("gradients", *autograd.backward(*tensors, local))
    return run


def run_rank(call: CallSpec, problem: Problem, scheme: str, number: int) -> MetaRun:
    """Run one rank of several, alone."""
    run = MetaRun()
    kernel = kernel_of(call)
    execution = ColdExecution.of(call.execution, run)
    forward, backward = algorithms(scheme)
    with torch.no_grad(), run.on(kernel, call.device):
        q, k, v, dout = _inputs(call, run, problem.layout.size(number))
        rank = rank_of(problem, number, kernel, call.head_dim**-0.5, execution)
        held = run.drive(forward(rank, q, k, v))
        for part, t in zip(("out", "lse", *["received"] * len(held)), held):
            run.name(part, t)
        out = held[0].contiguous()
        lse = held[1].contiguous()
        saved = held[2:]
        del held, t  # what was copied is freed here
        run.name("out", out)
        run.name("lse", lse)
        if dout is not None:
            grads = run.drive(backward(rank, dout, None, q, k, v, out, lse, *saved))
            run.name("gradients", *(g.to(q.dtype).contiguous() for g in grads))
    return run


def check_size(call: CallSpec) -> None:
    """Raise ValueError for what takes minutes to run without data."""
    if call.ranks > MOST_RANKS:
        raise ValueError(
            f"estimates are for at most {MOST_RANKS} ranks, got {short_repr(call.ranks)}"
        )
    elements = call.batch * call.seq_len * call.heads * call.head_dim
    most = MOST_ELEMENTS[call.device.type]
    check_int("batch * seq_len * heads * head_dim", elements, most=most)


def kernel_of(call: CallSpec):
    """The kernel that a call runs: on a CPU the one that runs here; for a GPU, which may
    be absent, by rule.

    ``FusedMeta`` stands for every fused kernel, where torch has one for the dtype and
    head_dim (``kernels.expected``); all else is eager. Raises as ``kernels.choose``
    does, for a GPU ValueError for an unknown name alone.
    """
    device = call.device
    dtype = call.dtype
    head_dim = call.head_dim
    if device.type == "cpu":
        options = call.options("causal", "backward", "backend")
        return kernels.choose("cpu", dtype, head_dim, **options).kernel
    backend = check_backend(call.backend)
    names = (backend,) if isinstance(backend, str) else backend
    refusals = []
    for name in names:
        check_choice("backend", name, ("auto", "sdpa", *kernels.KERNELS))
        if name in kernels.KERNELS:
            reason = kernels.KERNELS[name].refuses(device, dtype, head_dim)
            # What is not installed here may be where that hardware is.
            if reason and NOT_INSTALLED not in reason:
                refusals.append(f"{name}: {reason}")
    if len(refusals) == len(names):
        raise NotImplementedError(
            f"backend {backend!r} cannot run on this hardware in {dtype}: {'; '.join(refusals)}"
        )
    expected = kernels.expected("cuda", device.capability, dtype, head_dim).name
    if expected != "eager" and {*names} - {"eager", "cpu_flash"}:
        return FusedMeta()
    return kernels.KERNELS["eager"]


def _stand_in(call: CallSpec, for_gradients: bool):
    """The kernel that stands for a pass without data."""
    kernel = kernel_of(call)
    by_name = call.backend == kernels.LISTS
    known = call.device.type == "cuda" and call.profile.capability is not None
    if known and call.execution.tile is None and (by_name or call.backend == "auto"):
        if by_name or call.kernel_choice(for_gradients).name == kernels.LISTS:
            shape = call.seq_len, call.heads, call.kv_heads
            return ListsMeta(kernels.kind_of(call.pattern, *shape) == "ladder")
    return kernel


def _inputs(call: CallSpec, run: MetaRun, rows: int):
    """q, k, v, and dout for a backward, else None."""
    shapes = [
        (call.batch, rows, h, call.head_dim)
        for h in (call.heads, call.kv_heads, call.kv_heads)
    ]
    qkv = [run.tensor(part, shape, call.dtype) for part, shape in zip("qkv", shapes)]
    dout = run.tensor("gradients", shapes[0], call.dtype) if call.backward else None
    return *qkv, dout
