"""``Dense`` and ``Dilated``, with the rules of its offsets (``OFFSETS``): which key each
query sees, as a multiplicity M for every (query, key, head).

``out = softmax(scale * q k^T + log M) v``; ``M = 0`` hides a key, ``M = 2`` counts it
twice. Patterns are values: frozen, hashable and comparable. They do not depend on the
contents of tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from .block_patterns import BlockSparse, Fields, PerHead, part_from_dict
from .checks import (
    LARGEST,
    check_bool,
    check_choice,
    check_int,
    check_ints,
    short_repr,
)
from .selected import Selected

MIXINGS = ("lse", "head_groups")
OFFSETS = {  # the first selected row of each segment; `group`: query heads of a K/V head
    "head": lambda branch, head, rate, heads, group: head % rate,
    "block": lambda branch, head, rate, heads, group: head // -(-heads // rate),
    "branch": lambda branch, head, rate, heads, group: branch % rate,
    "kv_head": lambda branch, head, rate, heads, group: head // group % rate,
}
SHADES = " ░▒▓█"  # for none to all of a cell
CELL = 24  # positions of a cell that are sampled


@dataclass(frozen=True)
class Branch:
    """One dilated branch as the engine runs it: every ``rate``-th row of segments of
    ``length`` rows.

    ``heads[i]`` selects position x iff ``(x mod length) mod rate == offsets[i]``.
    """

    length: int
    rate: int
    heads: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Dense:
    """Every query sees every key, ``M = 1``."""

    def branches(
        self, n: int, heads: int, kv_heads: int | None = None
    ) -> tuple[Branch, ...]:
        """The pattern as dilated branches over a sequence of ``n`` positions: one
        segment, rate 1.
        """
        return (Branch(n, 1, tuple(range(heads)), (0,) * heads),)

    def multiplicity(
        self,
        queries: Tensor,
        keys: Tensor,
        *,
        head: int,
        heads: int,
        kv_heads: int | None = None,
        n: int | None = None,
    ) -> Tensor:
        """M for global positions ``queries`` (q,) and ``keys`` (k,) of one head, as
        int64 (q, k).
        """
        return torch.ones(
            len(queries), len(keys), dtype=torch.int64, device=queries.device
        )

    def reach(self, first: int, last: int, n: int) -> tuple[int, int]:
        """Key positions [start, stop), outside of which the queries first .. last see
        nothing.
        """
        return 0, n

    def fewest_keys(self, n: int, heads: int, kv_heads: int | None = None) -> int:
        """The fewest keys that one kernel call usually sees."""
        return n

    def to_dict(self) -> Fields:
        return {"kind": "dense"}

    def __str__(self) -> str:
        return "dense"


@dataclass(frozen=True)
class Dilated:
    """LongNet's dilated attention (Ding et al. 2023, arXiv 2307.02486), by segment
    lengths and dilation rates.

    Branch i cuts the sequence into segments of w_i = ``segment_lengths[i]`` positions.
    Head h selects the positions x with ``(x mod w_i) mod r_i == offset(h, i)``, as
    queries and as keys, and attends within each segment. The last segment may be short;
    nothing is padded.

    ``mixing="lse"`` (LongNet): every head runs every branch; M sums over branches.
    ``mixing="head_groups"``: contiguous groups of heads run one branch each; the first
    groups take the remainder. ``offsets``: ``"head"`` h mod r (the paper), ``"block"``
    floor(h / ceil(H / r)) (torchscale), ``"branch"`` i mod r, ``"kv_head"`` (index of
    the head's K/V head) mod r.

    Raises ValueError for lists that are empty, of unequal length or not positive, a
    rate above its segment length, or an unknown ``mixing`` or ``offsets``.

    >>> Dilated([2, 4], [1, 2]).multiplicity(torch.arange(4), torch.arange(4), head=0, heads=1).tolist()
    [[2, 1, 1, 0], [1, 1, 0, 0], [1, 0, 2, 1], [0, 0, 1, 1]]
    """

    segment_lengths: Sequence[int]
    dilation_rates: Sequence[int]
    mixing: str = "lse"
    offsets: str = "head"

    def __post_init__(self) -> None:
        for name in ("segment_lengths", "dilation_rates"):
            object.__setattr__(self, name, check_ints(name, getattr(self, name)))
        w = self.segment_lengths
        r = self.dilation_rates
        if len(w) != len(r):
            raise ValueError(
                f"segment_lengths and dilation_rates differ in length: {len(w)} and {len(r)}"
            )
        for length, rate in zip(w, r):
            if rate > length:
                raise ValueError(
                    f"dilation rate {rate} exceeds its segment length {length}"
                )
        check_choice("mixing", self.mixing, MIXINGS)
        check_choice("offsets", self.offsets, OFFSETS)

    def offset(
        self, branch: int, head: int, heads: int, kv_heads: int | None = None
    ) -> int:
        """First selected row of a segment for ``head`` in ``branch``, in [0, rate)."""
        return OFFSETS[self.offsets](
            branch,
            head,
            self.dilation_rates[branch],
            heads,
            heads // (kv_heads or heads),
        )

    def heads_of(self, branch: int, heads: int) -> range:
        """The heads that run ``branch``: all of them, or the branch's group."""
        if self.mixing == "lse":
            return range(heads)
        size, extra = divmod(heads, len(self.segment_lengths))
        start = branch * size + min(branch, extra)
        return range(start, start + size + (branch < extra))

    def branches(
        self, n: int, heads: int, kv_heads: int | None = None
    ) -> tuple[Branch, ...]:
        """The branches that have heads, in order; segments are at most ``n`` long."""
        branches = []
        for i, (length, rate) in enumerate(
            zip(self.segment_lengths, self.dilation_rates)
        ):
            members = tuple(self.heads_of(i, heads))
            if members:
                offsets = tuple(self.offset(i, h, heads, kv_heads) for h in members)
                branches.append(Branch(min(length, n), rate, members, offsets))
        return tuple(branches)

    def multiplicity(
        self,
        queries: Tensor,
        keys: Tensor,
        *,
        head: int,
        heads: int,
        kv_heads: int | None = None,
        n: int | None = None,
    ) -> Tensor:
        """M for global positions ``queries`` (q,) and ``keys`` (k,) of one head, as
        int64 (q, k), whatever n.
        """
        total = torch.zeros(
            len(queries), len(keys), dtype=torch.int64, device=queries.device
        )
        for i, (length, rate) in enumerate(
            zip(self.segment_lengths, self.dilation_rates)
        ):
            if head not in self.heads_of(i, heads):
                continue
            o = self.offset(i, head, heads, kv_heads)
            q_on, k_on = (x % length % rate == o for x in (queries, keys))  # (q,), (k,)
            same = (queries // length)[:, None] == (keys // length)[None, :]  # (q, k)
            total += (same & q_on[:, None] & k_on[None, :]).long()
        return total

    def reach(self, first: int, last: int, n: int) -> tuple[int, int]:
        """Key positions [start, stop), outside of which the queries first .. last see
        nothing.
        """
        starts = [first // w * w for w in self.segment_lengths]
        return min(starts), min(
            n, max((last // w + 1) * w for w in self.segment_lengths)
        )

    def fewest_keys(self, n: int, heads: int, kv_heads: int | None = None) -> int:
        """The fewest keys that one kernel call usually sees: the rows selected in the
        shortest segment.
        """
        return min(
            max(2, b.length // b.rate) for b in self.branches(n, heads, kv_heads)
        )

    def to_dict(self) -> Fields:
        return {"kind": "dilated"} | {
            k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()
        }

    def __str__(self) -> str:
        short = {"lse": "", "head_groups": " head groups"}[self.mixing]
        offsets = "" if self.offsets == "head" else f" offsets by {self.offsets}"
        return f"dilated {list(self.segment_lengths)} / {list(self.dilation_rates)}{short}{offsets}"


Pattern = Dense | Dilated | BlockSparse
AnyPattern = Pattern | PerHead | Selected  # all that have multiplicities


def as_pattern(
    pattern, kinds=Pattern, seq_len: int | None = None, heads: int | None = None
):
    """Return the pattern, which is of ``kinds`` (TypeError for anything else), or the
    one that a text names (ValueError for an unknown name), as ``presets.named`` makes it.

    >>> as_pattern("dense"), as_pattern("ladder", seq_len=4096)
    (Dense(), Dilated(segment_lengths=(2048, 4096), dilation_rates=(1, 2), mixing='lse', offsets='head'))
    """
    if isinstance(pattern, str):
        if pattern == "dense":  # which a graph takes whole
            return Dense()
        from .presets import named  # it is made of this module

        return named(pattern, seq_len, heads)
    if not isinstance(pattern, kinds):
        known = "ringlab.Dense(), ringlab.Dilated(...) or one of ringlab.blocks"
        if type(pattern).__name__ == "Adaptive":
            known += "; ringlab.adaptive_attention(q, k, v, pattern) takes an Adaptive"
        if isinstance(pattern, Selected):
            alone = "Selected is for attention alone, with a cache of Dense()"
            raise TypeError(f"pattern must be {known}: {alone}")
        raise TypeError(f"pattern must be {known}, got {short_repr(pattern)}")
    return pattern


def warn_of_idle(pattern, heads: int) -> None:
    """Warn where a branch of groups of heads has no head to run it."""
    grouped = isinstance(pattern, Dilated) and pattern.mixing == "head_groups"
    if grouped and heads < (branches := len(pattern.segment_lengths)):
        warnings.warn(
            f"mixing='head_groups' has {branches} branches for {heads} heads: the last run nowhere",
            stacklevel=4,
        )


def from_dict(data: dict) -> Pattern:
    """The pattern that ``pattern.to_dict()`` wrote; ValueError for an unknown kind, an
    unknown or missing field.

    >>> from_dict({"kind": "dilated", "segment_lengths": [4], "dilation_rates": [2]})
    Dilated(segment_lengths=(4,), dilation_rates=(2,), mixing='lse', offsets='head')
    """
    kinds = {"dense": Dense, "dilated": Dilated, "block_sparse": BlockSparse}
    if not isinstance(data, Mapping):
        raise ValueError(
            f"a pattern is restored from a dict, got {type(data).__name__}"
        )
    arguments = dict(data)
    kind = arguments.pop("kind", None)
    check_choice("pattern kind", kind, kinds)
    if kind == "block_sparse" and isinstance(arguments.get("parts"), list | tuple):
        arguments["parts"] = [part_from_dict(part) for part in arguments["parts"]]
    try:
        return kinds[kind](**arguments)
    except TypeError as error:  # for fields that are missing or unknown
        raise ValueError(f"no pattern {kind!r}: {error}") from None


def show(
    pattern: Pattern,
    n: int,
    *,
    width: int = 64,
    causal: bool = False,
    head: int = 0,
    heads: int = 1,
) -> str:
    """Draw what one head of ``heads`` sees of ``n`` positions: queries down, keys
    across, darker where it sees more.

    At most ``width`` cells each way; cells of many positions are sampled.

    >>> print(show(Dilated([2, 4], [1, 2]), 4))
    ███
    ██
    █ ██
      ██
    """
    n, width = check_int("n", n, most=LARGEST), check_int("width", width, most=LARGEST)
    head, heads = check_int("head", head, 0), check_int("heads", heads)
    if head >= heads:
        raise ValueError(f"head must be below heads, {heads}, got {head}")
    check_bool("causal", causal)
    pattern = as_pattern(pattern, Pattern | PerHead, n, heads)
    cells = min(n, width)
    generator = torch.Generator().manual_seed(0)
    edges = torch.linspace(0, n, cells + 1).long()
    picked = [
        torch.arange(a, b)
        if b - a <= CELL
        else a + torch.randperm(b - a, generator=generator)[:CELL].sort().values
        for a, b in zip(edges[:-1].tolist(), edges[1:].tolist())
    ]
    keys = torch.cat(picked)
    sizes = [len(p) for p in picked]
    lines = []
    for queries in picked:
        seen = (
            pattern.multiplicity(queries, keys, n=n, head=head, heads=heads) > 0
        )  # (q, k)
        if causal:
            seen &= keys[None, :] <= queries[:, None]
        shares = [float(part.double().mean()) for part in seen.split(sizes, 1)]
        lines.append("".join(SHADES[-int(-share * 4 // 1)] for share in shares))
    return "\n".join(lines)
