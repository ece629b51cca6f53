"""A small machine that runs the kernels in Gluon on CPU tensors: what Triton's
interpreter cannot.

Gluon's operations are replaced by ones on torch tensors. The partitions of a program
take turns, drawn at random, and what the hardware does meanwhile, copies and products
that were issued, happens as late or as early as the draw has it: many draws try many
orders of events. Found and raised as ``Hazard``: a deadlock, a copy into memory that a
product may still read, a product of memory that no copy has filled, a use of a product
that was not waited for, an address outside of a tensor, and a result that two programs
write. Memory that a copy was issued into holds NaN until it lands.

Not shown here: that the compiler and the GPU order memory as the operations promise.
"""

import math
import random
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from ringlab.kernels import gluon

NAME = gluon.DEVICE_CODE
SOURCE = Path(gluon.__file__).with_name("gluon_kernels.py").read_text(encoding="utf-8")


def running(change=lambda source: source, seed: int = 0):
    """Context manager: the kernels in Gluon run on a machine, with their source
    changed.
    """
    return mock.patch.dict(sys.modules, {NAME: Machine(change(SOURCE), seed)})


class Hazard(AssertionError):
    """What a GPU would answer with a wrong result, or not at all."""


class Pointer:
    """Into a tensor, by elements of its storage from its first one on."""

    def __init__(self, tensor, at=0):
        assert tensor.is_contiguous() and not tensor.storage_offset()
        self.tensor, self.at, self.dtype = (
            tensor,
            at,
            SimpleNamespace(element_ty=tensor.dtype),
        )

    def __add__(self, offset):
        return Pointer(self.tensor, self.at + offset)

    def places(self, mask):
        at = (
            torch.as_tensor(self.at)[mask]
            if mask is not None
            else torch.as_tensor(self.at)
        )
        if at.numel() and not (0 <= at.min() and at.max() < self.tensor.numel()):
            raise Hazard(
                f"an address outside of a tensor of {self.tensor.numel()} elements"
            )
        return at


class Shared:
    """Shared memory: a view of a buffer, and of the slot that it is a part of."""

    def __init__(self, data, slots, slot=None):
        self.data, self.slots, self.slot, self.dtype, self.shape = (
            data,
            slots,
            slot,
            data.dtype,
            data.shape,
        )

    def index(self, i):
        if not 0 <= i < len(self.data):
            raise Hazard(f"slot {i} of {len(self.data)}")
        return Shared(self.data[i], self.slots, self.slots[i])

    def reshape(self, shape):
        return Shared(self.data.view(shape), self.slots, self.slot)

    def permute(self, order):
        return Shared(self.data.permute(order), self.slots, self.slot)


class Slot:
    """Of a ring: whether a copy into it is under way, how many products may read it; of
    a barrier, its phases.
    """

    def __init__(self):
        self.copying, self.filled, self.readers = False, False, 0
        self.count = self.pending = self.bytes = self.phase = 0

    def settle(self):
        if self.pending < 0:
            raise Hazard("more arrive at a barrier than it counts")
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


class Product:
    """Of a warp group, issued; ``value`` once it was waited for."""

    def __init__(self, value):
        self.value, self.done = value, False

    def used(self, *_):
        raise Hazard("a use of a product that was not waited for")

    __sub__ = __getattr__ = used
    __torch_function__ = classmethod(used)


class Machine:
    """Runs programs of a kernel one after the other, each with random turns. Its
    attributes are the kernels.
    """

    def __init__(self, source: str = SOURCE, seed: int = 0):
        self.draw, self.written = random.Random(seed), {}
        self.code = ModuleType(NAME)
        with mock.patch.dict(sys.modules, self._gluon()):
            exec(compile(source, NAME, "exec"), self.code.__dict__)

    def __getattr__(self, kernel):
        return _Kernel(self, getattr(self.code, kernel))

    def run(self, function, programs, arguments, fixed):
        self.written.clear()
        self.programs = programs
        for self.program in range(programs):
            self.events: list[tuple] = []  # (whose, what): copies are nobody's
            function(*arguments, **fixed)

    def warp_specialize(self, functions, warps, registers):
        assert len(functions) == 1 + len(warps) == 1 + len(registers)
        parts = [_Partition(*one) for one in functions]
        while alive := [p for p in parts if not p.ended]:
            ready = [p.turn for p in alive if p.until is None or p.until()]
            ready += [self._happen] * bool(self.events)
            if not ready:
                raise Hazard("a deadlock")
            self.draw.choice(ready)()
            for p in parts:
                if p.error is not None:
                    raise p.error  # the others wait, as daemons, for a turn that they never get
        if self.events:
            raise Hazard("a program ended before its copies and products")

    def _happen(self):
        """One copy that is under way ends, or the first of a group's products."""
        whose, _ = self.draw.choice(self.events)
        same = [i for i, (other, _) in enumerate(self.events) if other is whose]
        self.events.pop(self.draw.choice(same) if whose is None else same[0])[1]()

    def _pause(self, until=None):
        part = threading.current_thread()
        if isinstance(part, _Partition):
            part.pause(until)

    def wait(self, barrier, phase):
        self._pause(lambda: barrier.slot.phase & 1 != phase)

    def init(self, barrier, count):
        barrier.slot.count = barrier.slot.pending = count

    def arrive(self, barrier):
        self._pause()
        barrier.slot.pending -= 1
        barrier.slot.settle()

    def expect(self, barrier, size):
        self._pause()
        barrier.slot.bytes += size
        barrier.slot.pending -= 1

    def copy(self, source, at, barrier, into):
        self._pause()
        slot = into.slot
        if slot.readers or slot.copying:
            raise Hazard("a copy into memory that is in use")
        slot.copying, slot.filled = True, False
        into.data.fill_(torch.nan)

        def land():
            into.data.copy_(source.block(at))
            slot.copying, slot.filled = False, True
            barrier.slot.bytes -= source.block_type.nbytes
            barrier.slot.settle()

        self.events.append((None, land))

    def product(self, a, b, acc, use_acc=True, is_async=False):
        assert is_async and acc.dtype == torch.float32
        read = [x.slot for x in (a, b) if isinstance(x, Shared)]
        if any(slot.copying or not slot.filled for slot in read):
            raise Hazard("a product of memory that no copy has filled")
        for slot in read:
            slot.readers += 1
        x, issued = (
            (a if isinstance(a, torch.Tensor) else a.data),
            Product(torch.full_like(acc, torch.nan)),
        )

        def happen():
            issued.value = x.float() @ b.data.float() + (acc if use_acc else 0)
            issued.done = True
            for slot in read:
                slot.readers -= 1

        self.events.append((threading.current_thread(), happen))
        self._pause()
        return issued

    def finish(self, outstanding, of):
        self._pause()  # what was freed by mistake may be written now, before the products are done
        mine = threading.current_thread()
        while (
            len(own := [i for i, (whose, _) in enumerate(self.events) if whose is mine])
            > outstanding
        ):
            self.events.pop(own[0])[1]()
        self._pause()
        if not all(x.done for x in of):
            raise Hazard("a use of a product that was not waited for")
        values = [x.value for x in of]
        return values[0] if len(values) == 1 else values

    def load(self, at, mask=None, other=0.0):
        if mask is None:
            values = at.tensor.view(-1)[at.places(None)]
            return values.item() if values.ndim == 0 else values
        found = torch.full(mask.shape, other, dtype=at.tensor.dtype)
        found[mask] = at.tensor.view(-1)[at.places(mask)]
        return found

    def store(self, at, values, mask):
        mask = mask.expand(values.shape)
        places = at.places(mask)
        seen = self.written.setdefault((at.tensor.data_ptr(), at.tensor.dtype), set())
        if seen & (new := set(places.tolist())):
            raise Hazard("a result that is written twice")
        seen |= new
        at.tensor.view(-1)[places] = values[mask].to(at.tensor.dtype)

    def _gluon(self) -> dict[str, ModuleType]:
        """What takes the place of Gluon's modules."""
        own = SimpleNamespace
        language = {
            "constexpr": lambda x: x,
            "static_range": range,
            "float32": torch.float32,
            "int64": torch.int64,
            "program_id": lambda axis: self.program,
            "num_programs": lambda axis: self.programs,
            "cast": lambda x, dtype: x.to(dtype) if isinstance(x, torch.Tensor) else x,
            "arange": lambda start, end, layout: torch.arange(start, end),
            "minimum": min,
            "where": lambda c, x, y: (
                torch.where(c, x, y) if isinstance(c, torch.Tensor) else x if c else y
            ),
            "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            "full": lambda shape, value, dtype, layout: torch.full(
                shape, value, dtype=dtype
            ),
            "max": lambda x, axis: x.amax(axis),
            "sum": lambda x, axis: x.sum(axis),
            "maximum": torch.maximum,
            "exp2": torch.exp2,
            "log2": lambda x: torch.log2(
                torch.as_tensor(float(x) if isinstance(x, int) else x)
            ),
            "convert_layout": lambda x, layout: x,
            "load": self.load,
            "store": self.store,
            "allocate_shared_memory": _allocate,
            "warp_specialize": self.warp_specialize,
        }
        language |= dict.fromkeys(
            (
                "SliceLayout",
                "DotOperandLayout",
                "NVMMADistributedLayout",
                "BlockedLayout",
            ),
            lambda *given: given,
        )
        barrier = own(
            wait=self.wait,
            init=self.init,
            arrive=self.arrive,
            expect=self.expect,
            MBarrierLayout=tuple,
        )
        hopper = {
            "mbarrier": barrier,
            "tma": own(async_copy_global_to_shared=self.copy),
        }
        hopper |= {"warpgroup_mma": self.product, "warpgroup_mma_wait": self.finish}
        gluon = {"jit": lambda f=None, **options: f if f is not None else lambda f: f}
        name = "triton.experimental.gluon"
        contents = {
            "triton": {},
            "triton.experimental": {},
            name: gluon,
            f"{name}.language": language,
        }
        contents |= {
            f"{name}.language.nvidia": {},
            f"{name}.language.nvidia.hopper": hopper,
        }
        return {
            module: own(__name__=module, **names) for module, names in contents.items()
        }


class _Kernel:
    def __init__(self, machine, function):
        self.machine, self.function = machine, function

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg, **fixed):
            given = [
                Pointer(x)
                if isinstance(x, torch.Tensor)
                else _Descriptor(x)
                if hasattr(x, "base")
                else x
                for x in arguments
            ]
            self.machine.run(self.function, grid[0], given, fixed)

        return launch


def _allocate(dtype, shape, layout):
    kind = dtype if dtype.is_floating_point else torch.int64
    data = torch.full(shape, torch.nan if kind.is_floating_point else 0, dtype=kind)
    return Shared(data, [Slot() for _ in range(shape[0])])


class _Descriptor:
    def __init__(self, made):
        self.made, self.dtype, self.layout = made, made.base.dtype, made.layout
        size = made.base.element_size() * math.prod(made.block_shape)
        self.block_type = SimpleNamespace(nbytes=size, shape=list(made.block_shape))

    def block(self, at):
        """A block from ``at`` on; zeros past the end of any axis."""
        made = self.made
        view = made.base.as_strided(made.shape, made.strides)
        found = torch.zeros(made.block_shape, dtype=self.dtype)
        if min(at) >= 0 and all(x < n for x, n in zip(at, made.shape)):
            inside = view[
                tuple(slice(x, x + extent) for x, extent in zip(at, made.block_shape))
            ]
            found[tuple(slice(0, extent) for extent in inside.shape)] = inside
        return found


class _Partition(threading.Thread):
    """One of the functions that share a program; it runs only while the machine lets
    it.
    """

    def __init__(self, function, arguments):
        super().__init__(daemon=True)
        self.function, self.arguments = function, arguments
        self.go, self.back = threading.Semaphore(0), threading.Semaphore(0)
        self.until = self.error = None
        self.ended = False
        self.start()

    def run(self):
        self.go.acquire()
        try:
            self.function(*self.arguments)
        except BaseException as error:  # shown by the machine, in its own thread
            self.error = error
        self.ended = True
        self.back.release()

    def turn(self):
        self.go.release()
        self.back.acquire()

    def pause(self, until):
        self.until = until
        self.back.release()
        self.go.acquire()
        self.until = None
