"""``Point``, one call to measure; ``Group``, points that are measured together;
``Result``, what a point gave. Ids are digests, equal in every run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

import torch

from .. import cost, patterns
from ..call import CallSpec


def digest(value, length: int = 16) -> str:
    """The first hex digits of the sha256 of a JSON value in canonical form.

    >>> digest({"b": 1, "a": [2]}) == digest({"a": [2], "b": 1})
    True
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]


@dataclass(frozen=True)
class Point:
    """One call to measure: a system on tensors (batch, seq_len, heads, head_dim).

    ``system``: a name in ``systems.SYSTEMS`` or an entry ``"module:function"``;
    ``pattern``: a ringlab pattern or its dictionary; ``dtype``: a name such as
    "float32"; ``passes``: "fwd" or "fwd+bwd"; ``options``: those of the system. Raises
    ValueError for invalid fields.

    >>> p = Point("ringlab", patterns.Dilated([2, 4], [1, 2]), seq_len=64, options={"gather": True})
    >>> p.label()
    'ringlab gather=True, dilated [2, 4] / [1, 2], n=64 float32 fwd'
    >>> len(p.id), p == Point.from_dict(p.to_dict())
    (16, True)
    """

    system: str
    pattern: patterns.Pattern | dict
    batch: int = 1
    seq_len: int = 8192
    heads: int = 8
    kv_heads: int | None = None
    head_dim: int = 64
    dtype: str = "float32"
    causal: bool = False
    passes: str = "fwd"
    world_size: int = 1
    options: tuple = ()

    def __post_init__(self):
        pattern = self.pattern
        set_ = object.__setattr__
        set_(
            self,
            "pattern",
            (
                patterns.from_dict(pattern) if isinstance(pattern, Mapping) else pattern
            ).to_dict(),
        )
        set_(
            self, "options", tuple(sorted(dict(self.options).items()))
        )  # of a mapping or pairs
        set_(self, "kv_heads", self.heads if self.kv_heads is None else self.kv_heads)
        set_(self, "dtype", str(self.dtype).removeprefix("torch."))
        self.call()  # raises what is wrong

    def __hash__(self):
        return hash(self.id)

    @cached_property
    def id(self) -> str:
        return digest(self.to_dict())

    @property
    def shape(self) -> dict:
        """The fields of its call besides the pattern, the dtype and the ranks."""
        return {name: getattr(self, name) for name in cost.ARGUMENTS if name != "dtype"}

    def call(self) -> CallSpec:
        """The call that is measured, with the usual settings: those of the system are in
        ``options``.
        """
        return CallSpec(
            pattern_of(self),
            dtype=getattr(torch, self.dtype, self.dtype),
            ranks=self.world_size,
            **self.shape,
        )

    @property
    def without_control(self) -> Point:
        """The point without the marks of an A/A control or an anchor."""
        marks = ("twin", ANCHOR)
        return self.but(
            options={key: value for key, value in self.options if key not in marks}
        )

    def to_dict(self) -> dict:
        return asdict(self) | {"options": dict(self.options)}

    @classmethod
    def from_dict(cls, data: dict) -> Point:
        return cls(**data)

    def but(self, **changes) -> Point:
        """The same point with some fields changed."""
        return replace(self, **changes)

    def label(self) -> str:
        """One line for a terminal or a legend."""
        options = "".join(f" {k}={v}" for k, v in self.options)
        tail = f"{self.dtype}{' causal' if self.causal else ''} {self.passes}"
        shape = f"b={self.batch} " if self.batch > 1 else ""
        shape += f"p={self.world_size} " if self.world_size > 1 else ""
        return f"{self.system}{options}, {pattern_of(self)}, {shape}n={self.seq_len} {tail}"


def pattern_of(point: Point) -> patterns.Pattern:
    """The pattern of a point, which holds it as a dictionary."""
    return patterns.from_dict(point.pattern)


# Work of torch alone, which every timed group takes beside its own points: a compute-bound
# call, one of few microseconds, one that is bound by memory. What they differ by between
# two runs is of the machine.
ANCHOR = "anchor"
ANCHORS, ANCHORS_ON_GPU = (
    tuple(
        Point(
            "dense_sdpa",
            patterns.Dense(),
            batch=batch,
            seq_len=seq_len,
            options={ANCHOR: True},
        )
        for batch, seq_len in ((1, 1024), (1, 64), bound_by_memory)
    )
    # A GPU takes seconds to check 4,096 entries one by one.
    for bound_by_memory in ((4096, 1), (64, 64))
)


@dataclass(frozen=True)
class Group:
    """Points that are measured together, each in its own process; interleaved, they
    take turns sample by sample.

    Ratios within an interleaved group are paired round by round. ``timed=False``
    measures memory and errors only. ``rounds``: the least number of rounds, for long
    calls, as far as the time limit allows.
    """

    name: str
    points: tuple[Point, ...]
    interleave: bool = True
    timed: bool = True
    rounds: int = 0

    def __post_init__(self):
        object.__setattr__(self, "points", tuple(self.points))
        if not self.points:
            raise ValueError(f"group {self.name!r} has no points")
        if len({point.id for point in self.points}) < len(self.points):
            raise ValueError(f"group {self.name!r} holds a point twice")

    @property
    def id(self) -> str:
        """A digest of the points and of how they are measured."""
        return self._digest([p.id for p in self.points], self.interleave)

    def composition(self, point: Point) -> str:
        """A digest of what the point's samples depend on: all points of its group if
        interleaved, else itself.
        """
        members = [p.id for p in self.points] if self.interleave else [point.id]
        return self._digest(members, *([self.ranks] if self.ranks > 1 else []))

    @property
    def keys(self) -> list[tuple[str, str, str]]:
        """(name, composition, id) of each point."""
        return [(self.name, self.composition(point), point.id) for point in self.points]

    def _digest(self, members: list[str], *how) -> str:
        rounds = [f"{self.rounds} rounds"] if self.rounds else []
        return digest([members, self.timed, *how, *rounds], 12)

    @property
    def ranks(self) -> int:
        """The largest number of ranks of a point; every rank of every point gets the
        machine's cores over this.
        """
        return max(point.world_size for point in self.points)


@dataclass(frozen=True)
class Result:
    """The result of one point after a run; times in seconds, memory in bytes.

    ``status``: "ok", "incorrect", "oom", "unsupported", "timeout", "crashed", "suspect"
    for what cannot be true, or "computed" for a row of a device that is not here.
    ``seconds`` has one time per sample and ``rounds`` their numbers (by default 0, 1,
    ...); results of one ``run`` and an interleaved group are paired by round.
    ``ranks``, in a group with points on
    several: ``threads`` of each, ``oversubscribed`` (more ranks than cores: no time is
    taken), the ``scheme`` and, by rank, ``bytes_sent`` in a call, ``planned`` bytes,
    ``messages`` and ``tracked_peak_bytes``. Times are those of the slowest rank,
    ``memory`` that of the rank with the highest peak. ``host_seconds``, on a GPU: the
    median time in which the host issues a call. ``duration``: all that the point took.
    """

    point: Point
    group: str
    status: str
    reason: str = ""
    seconds: tuple[float, ...] = ()
    median: float | None = None
    ci: tuple[float, float] | None = None
    unstable: bool = False
    loops: int = 1
    warmups: int = 0
    errors: dict = field(default_factory=dict)
    tolerance: dict = field(default_factory=dict)
    memory: dict = field(default_factory=dict)
    cost: dict = field(default_factory=dict)
    bound_seconds: float | None = None
    host_seconds: float | None = None
    provenance: dict = field(default_factory=dict)
    run: str = ""
    composition: str = ""
    interleaved: bool = False
    rounds: tuple[int, ...] = ()
    ranks: dict = field(default_factory=dict)
    duration: float = 0.0

    def __post_init__(self):
        if len(self.rounds) != len(self.seconds):
            object.__setattr__(self, "rounds", tuple(range(len(self.seconds))))

    @property
    def tokens_per_s(self) -> float | None:
        return (
            self.point.batch * self.point.seq_len / self.median if self.median else None
        )

    def option(self, name: str, default=None):
        return dict(self.point.options).get(name, default)

    @property
    def id(self) -> tuple[str, str]:
        """What it is a result of: its group and the id of its point."""
        return self.group, self.point.id

    @property
    def key(self) -> tuple[str, str, str]:
        """One of ``Group.keys``: a result of the same point beside the same others."""
        return self.group, self.composition, self.point.id
