"""NCCL's contract as a double over gloo: tensors that play CUDA's, and a process group
that refuses, compares and poisons.

``become_gpu()`` gives this process GPUs: tensors that lie on them, by ``Tensor.device``,
and whose bytes lie in CPU memory. CPU tensors stay what they are, and the two do not mix.
``nccl_group()`` is a group of all ranks for such tensors alone, so that torch.distributed
and the library go the ways that they go with NCCL. It raises ``Violation`` for

- CPU, sparse and strided tensors ("Tensors must be CUDA and dense", "Tensors must be
  contiguous": ``check_gpu_single_tensor`` of torch's ProcessGroupNCCL.cpp; a strided one
  sent point to point is only warned of there, and other values arrive), and splits that
  do not add up to the first dimension (``checkSplitSizes``, Utils.hpp). Rows for a rank
  may be none.
- calls that ranks make in another order, or of other sizes or dtypes. NCCL compares
  nothing: what does not match hangs or gives rubbish. Here each call tells the ranks that
  take part what it is, and waits for them, as calls on the stream of a communicator do
  ("Group Calls" and "Point-to-point communication", NCCL's user guide): what would hang
  there ends by the group's timeout. A batch of ``batch_isend_irecv`` is one call, in
  which order counts for one rank and direction only.
- point to point outside of a batch, where a direction waits for the other, and a batch
  that is the first call and leaves out ranks (``batch_isend_irecv``'s documentation).
- two ranks on one GPU ("Duplicate GPU detected", init.cc of NCCL). Objects travel in
  tensors on the current GPU (``all_gather_object``'s documentation).
- memory that is used before ``wait()``: written where it is sent, read or written where
  it is received, which holds NaN or the largest integers until then. ``Work`` holds the
  tensors, as WorkNCCL does (``stashed_for_allocator_safety_``), so memory is not lent to
  others; what is freed all the same is found.
- calls that nobody waited for (``idle()``).

``wait()`` orders a GPU's stream and does not stop the host. Not modelled: several streams,
and copies to the host that nobody waits for.
"""

from __future__ import annotations

import os
import pickle
import threading
import traceback
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "nccl_double"
# What torch's own C++ code, as autograd, takes the GPU for: it knows no other without one.
STAND_IN = "gpu"
aten = torch.ops.aten
MIXES = {  # the GPU's operators that take CPU tensors too
    aten.copy_.default,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}


class Violation(RuntimeError):
    """A call that NCCL would refuse, hang in or answer by rubbish."""


# --------------------------------------------------------------------------------------
# GPUs whose memory is the CPU's


class GpuTensor(Tensor):
    """A tensor on GPU number ``index``; ``held`` has its bytes."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True

    @staticmethod
    def __new__(cls, held: Tensor, index: int):
        memory = held.stride(), held.storage_offset()
        how = {"dtype": held.dtype, "device": torch.device(STAND_IN, 0)}
        made = Tensor._make_wrapper_subclass(cls, held.shape, *memory, **how)
        made.held, made.index = held, index
        return made

    @property
    def device(self):
        return torch.device("cuda", self.index)

    def get_device(self):
        return self.index

    def tolist(self):
        return self.cpu().tolist()

    def untyped_storage(self):
        return self.held.untyped_storage()

    def data_ptr(self):
        return self.held.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return _run(op, args, kwargs or {})


def held(t):
    """A tensor of the CPU with the bytes of one."""
    return t.held if isinstance(t, GpuTensor) else t


class Gpus(TorchDispatchMode):
    """All operators of this process: those that name a GPU have no tensor yet."""

    stays_on = True  # where the library leaves its caller's modes

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        # In this thread, which may be autograd's, torch.tensor asks here too.
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            if op.namespace != "ringlab":
                return _run(op, args, kwargs or {})
            with self:  # Python, of operators of torch
                return OPDEFS[op._schema.name]._init_fn(*args, **(kwargs or {}))
        except Exception:
            if threading.current_thread() is not threading.main_thread():
                traceback.print_exc()  # torch's stand-in for a GPU ends the process
            raise


def _run(op, args, kwargs):
    """An operator, on the CPU."""
    tensors, devices = [], []

    def on_cpu(x):
        if isinstance(x, torch.device):
            devices.append(x)
            return torch.device("cpu")
        if isinstance(x, Tensor):
            tensors.append(x)
        return type(x)(map(on_cpu, x)) if type(x) in (list, tuple) else held(x)

    values = [on_cpu(x) for x in args]
    named = {name: on_cpu(x) for name, x in kwargs.items()}
    here = [t for t in tensors if isinstance(t, GpuTensor)]
    others = {t.index for t in here} | {
        "cpu" for t in tensors if t.dim() and not isinstance(t, GpuTensor)
    }
    if here and len(others) > 1 and op not in MIXES:
        raise RuntimeError(f"{op}: expected all tensors to be on the same device")
    if here and IN_FLIGHT and not op.is_view:
        _check_use(op, args, kwargs)
    index = here[0].index if here else None  # of the GPU where results lie
    if devices:
        index = None if devices[0].type == "cpu" else _index(devices[0])

    def result(t):
        if not isinstance(t, Tensor):
            return type(t)(map(result, t)) if type(t) in (list, tuple) else t
        same = next((x for x in tensors if held(x) is t), None)
        if same is None:
            return t if index is None else GpuTensor(t, index)
        if devices and getattr(same, "index", None) != index:
            return result(t.clone())  # ``to`` another device
        if same.shape != t.shape:  # resize_
            same.data = GpuTensor(t, same.index)
        return same

    return result(op(*values, **named))


def _index(device: torch.device) -> int:
    if device.type == STAND_IN:
        return OWN[0]
    return torch.cuda.current_device() if device.index is None else device.index


OWN = [0]  # the number of the GPU whose stand-in autograd names


def become_gpu(index: int) -> torch.device:
    """From now on this process has GPUs, of which it uses number ``index``, and the
    backend of ``nccl_group``. The current GPU is number 0.
    """
    # torch's flight recorder, since 2.15, knows no groups of Python.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    OWN[0], current, stream = index, [0], SimpleNamespace(synchronize=lambda: None)

    def exchange(index):
        before, current[0] = current[0], current[0] if index < 0 else index
        return before

    constant = {
        "is_available": True,
        "device_count": 8,
        "get_device_capability": (9, 0),
        "is_current_stream_capturing": False,
        "current_stream": stream,
        "_lazy_init": None,
    }
    for name, value in constant.items():
        setattr(torch.cuda, name, lambda *_, value=value: value)
    torch.cuda.current_device = lambda: current[0]
    torch.cuda.set_device = torch.cuda._exchange_device = exchange
    torch.cuda._maybe_exchange_device = exchange
    backend_registration._setup_privateuseone_for_python_backend(STAND_IN)
    dist.Backend.register_backend(NAME, NcclDouble, devices=["cuda"])
    dist.batch_isend_irecv = _batch_isend_irecv
    Gpus().__enter__()
    return torch.device("cuda", index)


# --------------------------------------------------------------------------------------
# calls that are not done


class Work(dist.Work):
    """A call until its ``wait``: what it sends, with the values, and where it receives,
    with those that come.
    """

    def __init__(self, kind: str, sends: list[tuple], receives: list[tuple]):
        super().__init__()
        self.kind, self.sends, self.receives = kind, sends, receives
        for t, _ in receives:
            _poison(t.held)
        IN_FLIGHT.append(self)

    def check_use(self, t: Tensor, writes: bool, op: str) -> None:
        if any(_overlap(mine.held, t) for mine, _ in self.receives):
            raise Violation(f"{op} uses what {self.kind} receives, before its wait")
        if writes and any(_overlap(mine.held, t) for mine, _ in self.sends):
            raise Violation(f"{op} writes what {self.kind} sends, before its wait")

    def wait(self, timeout=None) -> bool:
        if self not in IN_FLIGHT:
            return True
        IN_FLIGHT.remove(self)
        both = *self.sends, *self.receives
        if any(t.untyped_storage().nbytes() < value.nbytes for t, value in both):
            raise Violation(f"memory of {self.kind} was freed before its wait")
        if not all(_same(t.held, value) for t, value in self.sends):
            raise Violation(f"{self.kind} sends what was written before its wait")
        for t, value in self.receives:
            if not _same(t.held, _poison(torch.empty_like(value))):
                raise Violation(f"{self.kind} receives where others wrote before")
            t.held.copy_(value.view(t.shape))
        self.sends = self.receives = []
        return True


IN_FLIGHT: list[Work] = []


def idle() -> None:
    """Raise Violation for calls that nobody waited for."""
    kinds, IN_FLIGHT[:] = [work.kind for work in IN_FLIGHT], []
    if kinds:
        raise Violation(f"nobody waited for {kinds}")


def _check_use(op, args, kwargs) -> None:
    arguments = op._schema.arguments
    named = [*zip(arguments, args)]
    named += [(a, kwargs[a.name]) for a in arguments if a.name in kwargs]
    for argument, value in named:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for t in value if isinstance(value, list | tuple) else [value]:
            for work in IN_FLIGHT if isinstance(t, GpuTensor) else ():
                work.check_use(t.held, writes, str(op))


def _overlap(*tensors: Tensor) -> bool:
    """Whether two tensors have bytes in common, as far as their first and last tell."""
    if not all(t.numel() for t in tensors):
        return False
    spans = []
    for t in tensors:
        last = sum((n - 1) * step for n, step in zip(t.shape, t.stride()))
        spans.append((t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()))
    (a, a_end), (b, b_end) = spans
    return a < b_end and b < a_end


def _poison(t: Tensor) -> Tensor:
    floating = t.dtype.is_floating_point
    return t.fill_(torch.nan if floating else torch.iinfo(t.dtype).max)


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(t.flatten().view(torch.uint8) for t in (a, b)))


# --------------------------------------------------------------------------------------
# the group


class Told(NamedTuple):
    """What a rank tells another of a call: both must tell the same, turned round."""

    kind: str
    gpu: int
    sends: tuple  # (number of elements, dtype) of each
    receives: tuple
    data: list[Tensor]


class NcclDouble(dist.ProcessGroup):
    group_name = ""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.timeout, self.batch, self.first = timeout, None, True

    @property
    def _device_types(self):
        """Where objects travel, by name; a GPU here needs its number."""
        return [SimpleNamespace(type=f"cuda:{torch.cuda.current_device()}")]

    def _set_group_name(self, name):
        self.group_name = name

    def post(self, kind: str, sends: dict, receives: dict) -> Work:
        """Start a call that sends and receives lists of tensors by rank."""
        me, told = self.rank(), {}
        for rank in {**sends, **receives}:
            each = [by.get(rank, ()) for by in (sends, receives)]
            for t in (*each[0], *each[1]):
                _check(t)
                gpu = t.index
            sizes = [tuple((t.numel(), t.dtype) for t in ts) for ts in each]
            told[rank] = Told(kind, gpu, *sizes, [t.held.clone() for t in each[0]])
        if self.first and len(told.keys() - {me}) < self.size() - 1:
            raise Violation(f"{kind} is the first call, and leaves out ranks")
        self.first, came = False, self.swap(told)
        for rank, theirs in came.items():
            mine = told[rank]
            if rank != me and theirs.gpu == mine.gpu:
                raise Violation(f"ranks {me} and {rank} both on GPU {mine.gpu}")
            if (theirs.kind, theirs.receives, theirs.sends) != mine[:1] + mine[2:4]:
                both = f"rank {me} calls {mine[:4]}, rank {rank} {theirs[:4]}"
                raise Violation(f"calls differ: {both}")
        return Work(
            kind,
            [pair for rank, ts in sends.items() for pair in zip(ts, told[rank].data)],
            [
                pair
                for rank, ts in receives.items()
                for pair in zip(ts, came[rank].data)
            ],
        )

    def swap(self, told: dict[int, Told]) -> dict[int, Told]:
        """What ranks tell of a call, of which they are told."""
        peers = [rank for rank in sorted(told) if rank != self.rank()]
        works, came = [], {rank: told[rank] for rank in told if rank not in peers}
        for peer in peers:
            data = bytearray(pickle.dumps(told[peer]))
            for t in (
                torch.tensor([len(data)]),
                torch.frombuffer(data, dtype=torch.uint8),
            ):
                works.append((self.gloo.send([t], peer, 0), t))
        try:
            for peer in peers:
                size = torch.zeros(1, dtype=torch.int64)
                self.gloo.recv([size], peer, 0).wait(self.timeout)
                data = torch.zeros(int(size), dtype=torch.uint8)
                self.gloo.recv([data], peer, 0).wait(self.timeout)
                came[peer] = pickle.loads(data.numpy().tobytes())
            for work, _ in works:
                work.wait(self.timeout)
        except RuntimeError as error:
            raise Violation(f"of ranks {peers} one makes no call: {error}") from None
        return came

    # What torch.distributed calls.

    def all_to_all_single(self, output, input, output_splits, input_splits, opts=None):
        ranks, parts = self.size(), []
        for t, splits in ((input, input_splits), (output, output_splits)):
            splits = splits or [len(t) // ranks] * ranks
            if len(splits) != ranks or sum(splits) != len(t):
                raise Violation(f"splits {splits} of {len(t)} rows")
            _check(t)
            parts.append({rank: [part] for rank, part in enumerate(t.split(splits))})
        return self.post("all_to_all", *parts)

    def allgather(self, outputs, inputs, opts=None):
        receives = {rank: [t] for rank, t in enumerate(outputs[0])}
        return self.post("all_gather", dict.fromkeys(receives, inputs), receives)

    def all_gather_single(self, output, input, opts=None):  # objects, since torch 2.15
        return self.allgather([output.chunk(self.size())], [input])

    def send(self, tensors, peer, tag=0):
        self._add(0, tensors, peer)

    def recv(self, tensors, peer, tag=0):
        self._add(1, tensors, peer)

    def _add(self, way: int, tensors, peer: int) -> None:
        if self.batch is None:
            raise Violation("point to point outside of a batch")
        self.batch[way].setdefault(peer, []).extend(tensors)


def _check(t: Tensor) -> None:
    if not isinstance(t, GpuTensor) or t.layout != torch.strided:
        raise Violation("Tensors must be CUDA and dense")
    if not t.is_contiguous():
        raise Violation("Tensors must be contiguous")


_of_torch = dist.batch_isend_irecv


def _batch_isend_irecv(ops):
    """torch's way for NCCL, which it does not take for a group in Python."""
    group = ops[0].group
    if not isinstance(group, NcclDouble):
        return _of_torch(ops)
    dist.distributed_c10d._check_p2p_op_list(ops)
    group.batch = ({}, {})
    for p2p in ops:
        name = "group_dst" if p2p.op is dist.isend else "group_src"
        p2p.op(p2p.tensor, group=group, tag=p2p.tag, **{name: p2p.group_peer})
    batch, group.batch = group.batch, None
    return [group.post("batch", *batch)]


def nccl_group(**how) -> dist.ProcessGroup:
    """A group of all ranks of gloo's, for GPU tensors alone; a collective call."""
    return dist.new_group(backend=NAME, **how)
