"""``CallSpec``: one call of attention as data, from which points that are measured,
estimates, advice, costs and problems across ranks are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import cost, hardware, kernels
from .checks import (
    LARGEST,
    Backend,
    check_bool,
    check_choice,
    check_float_dtype,
    check_int,
    is_int,
    parse_count,
    short_repr,
)
from .engine import DEFAULT, Execution
from .kernels.base import DeviceSpec
from .patterns import Pattern, as_pattern
from .ring import Layout, Problem, choose
from .ring.exchange import on_hosts
from .ring.layout import layout_named
from .ring.operators import check_exchange_dtype, check_one_device
from .ring.schemes import check_scheme
from .ring.volume import sent_to

NEWEST_GPU = (9, 0)  # assumed of a GPU of unknown capability: more is held on it


@dataclass(frozen=True)
class CallSpec:
    """One call of ``ringlab.attention``: a pattern on tensors (batch, seq_len, heads,
    head_dim), how it is run, and on what.

    Points that are measured, estimates, advice, costs and problems across ranks are
    made from it. ``kv_heads`` None: as many as heads. ``passes``: "fwd" or "fwd+bwd".
    ``scheme``, ``layout``, ``backend``, ``execution`` and ``exchange_dtype`` are those
    of ``attention``, ``seq_len`` and ``pattern`` also texts of the command line, as
    "128K" and "ladder"; ``ranks`` share the sequence, and ``hosts`` has a number for
    the host of each, () for one host. ``profile``: a hardware profile or its name; None:
    this CPU.

    Raises ValueError or TypeError, in one line, for what no call can have.

    >>> from ringlab.patterns import Dense
    >>> call = CallSpec(Dense(), 8, heads=2, head_dim=4, ranks=2)
    >>> call.cost().flops, call.problem()[1], call.sent()
    (2048, 'ring', {(0, 1): 256, (1, 0): 256})
    """

    pattern: Pattern
    seq_len: int
    batch: int = 1
    heads: int = 8
    kv_heads: int | None = None
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    causal: bool = False
    passes: str = "fwd"
    ranks: int = 1
    scheme: str = "auto"
    layout: str | Layout = "contiguous"
    backend: Backend = "auto"
    execution: Execution = DEFAULT
    hosts: tuple[int, ...] = ()
    exchange_dtype: torch.dtype | None = None
    profile: hardware.Profile | str | None = None

    def __post_init__(self) -> None:
        def set_field(name: str, value) -> None:
            object.__setattr__(self, name, value)

        if self.kv_heads is None:
            set_field("kv_heads", self.heads)
        for name in ("batch", "heads", "kv_heads", "head_dim", "ranks"):
            set_field(name, check_int(name, getattr(self, name)))
        if isinstance(self.seq_len, str):
            set_field("seq_len", parse_count(self.seq_len, "seq_len"))
        set_field("seq_len", check_int("seq_len", self.seq_len, most=LARGEST))
        sizes = self.seq_len, self.heads
        set_field("pattern", as_pattern(self.pattern, Pattern, *sizes))
        if isinstance(self.profile, str):
            set_field("profile", hardware.resolve(self.profile))
        if self.heads % self.kv_heads:
            raise ValueError(
                f"query heads must be a multiple of K/V heads: {self.heads} and {self.kv_heads}"
            )
        check_float_dtype(self.dtype)
        for name, kind, expected in (
            ("execution", Execution, "a ringlab.Execution"),
            ("profile", hardware.Profile | None, "a hardware profile or its name"),
        ):
            if not isinstance(value := getattr(self, name), kind):
                raise TypeError(f"{name} must be {expected}, got {short_repr(value)}")
        hosts = self.hosts
        if (
            not isinstance(hosts, tuple)
            or len(hosts) not in (0, self.ranks)
            or not all(is_int(i, 0) for i in hosts)
        ):
            raise ValueError(
                f"hosts must be a tuple of {self.ranks} numbers or of none, got {short_repr(hosts)}"
            )
        check_choice("passes", self.passes, cost.PASSES)
        check_bool("causal", self.causal)
        if self.ranks == 1:
            check_one_device(self.scheme, self.layout, self.exchange_dtype)
        check_exchange_dtype(self.exchange_dtype, self.dtype)

    def options(self, *names: str) -> dict[str, Any]:
        """Some fields by name, as keyword arguments of another function."""
        return {name: getattr(self, name) for name in names}

    def cost(self) -> cost.Cost:
        """Pairs, FLOPs and bytes, of all ranks together."""
        return cost.count(self.pattern, **self.options(*cost.ARGUMENTS))

    @property
    def shape(self) -> tuple[int, int, int, int, bool]:
        """(batch, heads, kv_heads, head_dim, causal)."""
        return self.batch, self.heads, self.kv_heads, self.head_dim, self.causal

    @property
    def backward(self) -> bool:
        return self.passes == "fwd+bwd"

    @property
    def device(self) -> DeviceSpec:
        if self.profile is None or self.profile.kind == "cpu":
            return DeviceSpec("cpu")
        return DeviceSpec("cuda", self.profile.capability or NEWEST_GPU)

    def kernel_choice(self, for_gradients: bool = False) -> kernels.Choice:
        """What "auto" should choose for a pass, on several ranks for their dense calls.
        Raises NotImplementedError where there is no kernel.
        """
        kind = "dense"
        if self.ranks == 1 and self.execution.tile is None:
            kind = kernels.kind_of(
                self.pattern, self.seq_len, self.heads, self.kv_heads
            )
        return kernels.expected(
            self.device.type,
            self.profile.capability if self.profile else None,
            self.dtype,
            self.head_dim,
            causal=self.causal,
            pattern_kind=kind,
            for_gradients=for_gradients,
        )

    # ----------------------------------------------------------------------------------
    # across ranks

    def problem(self) -> tuple[Problem, str]:
        """The problem across ranks and its scheme, checked."""
        layout = layout_named(self.layout, self.seq_len, self.ranks)
        problem = Problem(
            self.pattern,
            layout,
            **self.options("causal", "heads", "kv_heads", "exchange_dtype"),
        )
        check_scheme(self.scheme)
        scheme = self.scheme
        if scheme == "auto":
            scheme = choose(problem, **self.options("head_dim", "dtype", "passes"))
        problem.check(scheme)
        return on_hosts(problem, scheme, self.hosts), scheme

    def sent(self) -> dict[tuple[int, int], int]:
        """Bytes of one call by (from rank, to rank)."""
        if self.ranks == 1:
            return {}
        problem, scheme = self.problem()
        options = self.options("batch", "head_dim", "dtype", "passes")
        return {
            (rank, to): size
            for rank in range(self.ranks)
            for to, size in sent_to(problem, rank, scheme, **options).items()
        }
