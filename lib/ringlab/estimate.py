"""What a call costs before it is run: FLOPs, bytes, peak memory by part, bytes between
ranks and its roofline time; and the longest sequence for a memory budget.

Memory comes from the engine itself, run without data (``meta_run``), so it is that of
the code that would run, for any length: the live tensors of a first call, as
``LiveStorageTracker`` measures them. Bytes between ranks are counted by
``ring.volume``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from . import cost, hardware, meta_run
from .block_patterns import BlockSparse, Given
from .call import CallSpec
from .checks import check_arguments, check_int, parse_bytes
from .hardware import Rates
from .kv_cache import cache_bytes
from .patterns import Pattern, as_pattern

ROWS = 128  # the longest sequence is a multiple of so many positions a rank
MOST_BYTES = 2**50  # of a rank's memory: beyond any machine
# Options of a call that the command line and the explorer have.
SHAPE = (
    "batch",
    "heads",
    "kv_heads",
    "head_dim",
    "causal",
    "passes",
    "ranks",
)
FEW_BLOCKS = 1024  # longer block-sparse calls are extrapolated, as planning random parts takes quadratic time


@dataclass(frozen=True)
class Estimate:
    """What one call costs. ``cost`` is of all ranks together.

    ``parts`` (bytes, see ``meta_run.PARTS``) and ``peak_bytes`` are of the rank that
    holds most, at its peak; the part ``gradients`` holds those of out, q, k and v.
    ``sent``: bytes of one call by (from rank, to rank). ``bounds``: lower bounds in
    seconds by resource, "compute", "memory", "network", where a rate is known.
    ``cache_bytes``: what a ``KVCache`` for as many positions takes on the rank with
    most; None where the call is not causal.
    """

    cost: cost.Cost
    ranks: int
    scheme: str | None
    parts: dict[str, int]
    peak_bytes: int
    sent: dict[tuple[int, int], int]
    bounds: dict[str, float] = field(default_factory=dict)
    cache_bytes: int | None = None

    @property
    def bound_s(self) -> float:
        """The largest of the lower bounds in seconds; 0.0 where no rate is known."""
        return max(self.bounds.values(), default=0.0)

    @property
    def binds(self) -> str | None:
        """The resource of the largest bound."""
        return max(self.bounds, key=self.bounds.get, default=None)

    @property
    def sent_by_rank(self) -> list[int]:
        """The bytes that each rank sends in one call."""
        sent = self.sent.items()
        return [sum(n for (a, _), n in sent if a == each) for each in range(self.ranks)]

    def bounded(self, rates: Rates) -> Estimate:
        """This estimate with the bounds that these rates of one rank give.

        Work is taken as shared evenly, which bounds it from below. A link carries what
        the busiest rank sends.
        """
        work = {
            "compute": (self.cost.folded_flops / self.ranks, rates.flops_per_s),
            "memory": (self.cost.floor_bytes / self.ranks, rates.bytes_per_s),
            "network": (max(self.sent_by_rank), rates.link_bytes_per_s),
        }
        return replace(
            self,
            bounds={
                name: size / rate
                for name, (size, rate) in work.items()
                if rate and size
            },
        )


def estimate(pattern: Pattern | str, *, seq_len: int | str, **call: Any) -> Estimate:
    """The Estimate of ``ringlab.attention`` on (batch, seq_len, heads, head_dim)
    tensors, sharded where ``ranks`` > 1.

    Keywords: ``heads=8``, ``head_dim=64``, ``batch=1``, ``kv_heads`` (as many as
    heads), ``dtype=torch.float32``, ``passes="fwd"`` or "fwd+bwd", ``ranks=1``,
    ``hosts``, ``profile``; and ``causal``, ``scheme``, ``layout``, ``exchange_dtype``,
    ``backend`` and ``execution`` of ``ringlab.attention``.

    ``profile``: whose rates bound the time and, for a GPU, whose kernels hold memory
    (by rule, as the GPU need not be here: ``meta_run.kernel_of``). None: this CPU's
    kernels, no bounds. Attention itself is never computed; with the profile "cpu" this
    CPU's rates are measured, which takes about a second a dtype, once per process.
    ``hosts``: a number for the host of each rank, e.g. (0, 0, 1, 1); by default one
    host.

    Raises ValueError (NotImplementedError for a kernel that cannot run) in one line for
    what attention would refuse, for an unknown profile, and for sizes whose run without
    data would take minutes.

    >>> from ringlab.patterns import Dilated
    >>> e = estimate(Dilated([2048, 4096], [1, 2]), seq_len=131072, ranks=2, profile="gtx1080")
    >>> e.scheme, e.peak_bytes >> 20, e.sent, e.binds
    ('plan', 547, {}, 'compute')
    """
    return estimate_call(_checked("estimate", pattern, seq_len, call))


def _checked(
    name: str, pattern: Pattern | str, seq_len: int | str, options: dict
) -> CallSpec:
    """The call that a function ``name`` is asked about."""
    make = partial(CallSpec, pattern, seq_len)
    check_arguments(name, make, **options)
    return make(**options)


def estimate_call(call: CallSpec) -> Estimate:
    """The Estimate of a call."""
    run = meta_run.run(call)
    work = call.cost()
    cached = None
    if call.causal:
        names = "batch", "heads", "kv_heads", "head_dim", "dtype", "ranks"
        cached = cache_bytes(
            call.pattern,
            max_seq_len=call.seq_len,
            device=call.device.type,
            **call.options(*names),
        )
    estimated = Estimate(
        work,
        call.ranks,
        run.scheme,
        run.parts(),
        run.peak_bytes,
        call.sent(),
        cache_bytes=cached,
    )
    return estimated.bounded(rates_of(call, work)) if call.profile else estimated


def rates_of(call: CallSpec, work: cost.Cost) -> Rates:
    """The rates of one rank of the call's profile, for tensors of its part of the
    ``work``.

    A GPU's are its profile's; a CPU's are measured here unless its profile has some,
    and it has no link.
    """
    working_set = work.floor_bytes // call.ranks
    if call.profile.kind == "cpu" and not call.profile.flops:
        return hardware.measured_rates(
            map(_probed, {"float32", str(call.dtype).removeprefix("torch.")}),
            working_set,
        )
    return call.profile.rates(call.dtype, working_set, hardware.detect())


@lru_cache(maxsize=8)
def _probed(dtype: str) -> hardware.Peaks:
    return hardware.measure_cpu_peaks(dtype)


def longest(pattern: Pattern | str, memory_bytes: int | str, **call: Any) -> int:
    """The longest sequence whose peak on every rank fits ``memory_bytes``, a number or
    a text as "8GiB"; keywords are those of ``estimate``.

    A multiple of 128 positions (of blocks, where they are larger) a rank. Of a
    block-sparse pattern over more than 1,024 blocks the peak is taken from the line
    through shorter ones, and a hundredth more. Raises ValueError where not even the
    shortest fits, and as ``estimate`` does.

    >>> from ringlab.patterns import Dilated
    >>> longest(Dilated([2048, 4096], [1, 2]), "8GiB", profile="gtx1080")
    1010304
    """
    if isinstance(memory_bytes, str):
        memory_bytes = parse_bytes(memory_bytes)
    call = _checked("longest", as_pattern(pattern), ROWS, call)
    memory_bytes = check_int(
        "the memory budget in bytes", memory_bytes, most=MOST_BYTES
    )
    return longest_call(call, memory_bytes, lambda one: meta_run.run(one).peak_bytes)


def longest_call(
    call: CallSpec, memory_bytes: int, need: Callable[[CallSpec], int]
) -> int:
    """The longest sequence of calls like this one that ``need`` at most so many bytes a
    rank, as ``longest`` finds it.
    """
    pattern = call.pattern
    only = False
    unit = low = ROWS * call.ranks
    peak = lru_cache(maxsize=64)(lambda n: need(replace(call, seq_len=n)))
    if isinstance(pattern, BlockSparse):
        size = pattern.block_size
        unit = max(ROWS, size) * call.ranks
        most = max(getattr(part, "count", 1) for part in pattern.parts)
        low = -(-most * size // unit) * unit
        if masks := [part for part in pattern.parts if isinstance(part, Given)]:
            low, only = len(masks[0].rows) * size, True  # a mask is of one length
        else:
            far = max(FEW_BLOCKS * size, 2 * unit) // unit * unit
            peak = partial(_extrapolated, peak, far, unit)
    at_low = peak(low)
    if at_low > memory_bytes:
        raise ValueError(
            f"{low:,} positions need {at_low:,} bytes a rank, more than the {memory_bytes:,} there are"
        )
    high = None
    guess = 2 * low
    while not only and (high is None or high - low > unit):
        at_guess = peak(guess)
        if at_guess > memory_bytes:
            high = guess
            other = guess
            at_other = at_guess
        else:
            if high is None:
                other = low
                at_other = at_low
            low = guess
            at_low = at_guess
        # The peak is nearly linear in the length.
        slope = (at_other - at_low) / (other - low)
        ahead = (memory_bytes - at_low) / slope if slope > 0 else low
        guess = low + max(unit, int(min(ahead, 64 * low)) // unit * unit)
        if high is not None:
            guess = min(guess, high - unit)
    return low


def _extrapolated(peak: Callable[[int], int], far: int, unit: int, n: int) -> int:
    """The peak at ``n``; beyond ``far`` the one on the line through two shorter
    lengths, and a hundredth more.
    """
    if n <= far:
        return peak(n)
    half = far // 2 // unit * unit
    slope = (peak(far) - peak(half)) / (far - half)
    return int(1.01 * (peak(far) + slope * (n - far)))
