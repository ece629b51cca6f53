"""The specification of the engine as data: a case is one call; what it gives is judged
by the float64 reference.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field, replace

import ringlab
import torch
from random_cases import TIMES
from ringlab import (
    Adaptive,
    BlockSparse,
    Dense,
    Dilated,
    Execution,
    KVCache,
    Simulated,
    attention,
    baselines,
    kernels,
    reference,
)
from ringlab import blocks as presets
from ringlab.blocks import Coarse, Global, Random, Segment, Strided, Window
from ringlab.memory import MemoryPool
from ringlab.patterns import MIXINGS, OFFSETS
from ringlab.ring import SCHEMES, Layout, contiguous, hilbert, striped, uneven, zigzag

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
HALF = (BF16, F16)
NAMES = ("out", "lse", "dq", "dk", "dv")
MEMORY = (
    "contiguous",
    "heads first",
    "packed",
    "every other",
)  # how q, k, v and the cotangent of out are strided
BLOCK = 8
LADDER = Dilated([12, 36], [1, 2])
DILATED = [
    LADDER,
    Dilated([40, 64], [3, 5], offsets="block"),  # rows that see nothing
    Dilated([16, 48, 50], [1, 4, 7], offsets="kv_head"),
    Dilated([20, 30, 70], [1, 2, 3], "head_groups", "branch"),
    Dilated([64], [2], "head_groups"),
]
MASK = torch.rand(13, 13, generator=torch.Generator().manual_seed(0)) < 0.3
MASK[5] = False  # a block of queries that see nothing
BLOCK_SPARSE = [
    presets.local_global(1, 1, block_size=BLOCK),
    presets.bigbird(1, 1, 2, block_size=BLOCK),
    presets.sliding_window(3, block_size=BLOCK),
    presets.hierarchical([(1, 1), (4, 8)], block_size=BLOCK),
    presets.sliding_window(1, block_size=BLOCK) | BlockSparse([Random(1)], BLOCK),
    BlockSparse([Window(2, 0)], BLOCK),
    BlockSparse([Window(0), Strided(4, 2)], BLOCK),
    BlockSparse([Strided(3)], BLOCK),
    BlockSparse([Segment(4), Segment(8, 2)], BLOCK),
    BlockSparse([Random(2, seed=1)], BLOCK),
    BlockSparse([Coarse(2, 5)], BLOCK),
    BlockSparse([Global(2, rows=False)], BLOCK),
    BlockSparse([Global(2, columns=False)], BLOCK),
    presets.from_mask(MASK, block_size=BLOCK),
]
PATTERNS = [Dense(), *DILATED, *BLOCK_SPARSE]


class Stained(MemoryPool):
    """Results of any size in memory that holds NaN, as memory that was used before may."""

    def __init__(self):
        super().__init__(threshold_bytes=0)

    def __repr__(self) -> str:
        return "STAINED"

    def lend(self, *args, **kwargs):
        return super().lend(*args, **kwargs).fill_(torch.nan)


STAINED = Stained()


@dataclass(frozen=True)
class Case:
    """One call and its gradients. ``layout`` None: on one device, else over as many
    simulated ranks.
    """

    pattern: object
    n: int
    dtype: torch.dtype = F64
    causal: bool = False
    batch: int = 1
    heads: int = 4
    kv_heads: int = 2
    d: int = 16
    scale: float | None = None
    weighted: bool = False  # an adaptive pattern whose logits are given
    sinks: bool = False
    softcap: float | None = None
    lse_cotangent: bool = True
    memory: str = "contiguous"  # one of MEMORY
    seed: int = 0
    execution: Execution = Execution()
    way: str | None = None  # of ``baselines``, which take no more than causal and scale
    backend: str = "auto"
    layout: Layout | None = None
    scheme: str | tuple[str, str] = "auto"
    mesh: tuple[int, int] | None = None  # of the ranks, for a scheme of two dimensions
    documents: dict = field(default_factory=dict, hash=False)  # cu_seqlens or lengths

    def call(self, q, k, v, z=None, group=None):
        """out, lse. ``group``: instead of the simulated one; the tensors are then
        shards.
        """
        how = {"causal": self.causal, "scale": self.scale, "backend": self.backend}
        if self.way is not None:
            how["execution"] = self.execution
            return baselines.attend(q, k, v, self.pattern, self.way, **how)
        how["return_lse"] = True
        how |= self.documents | ({"sinks": z} if self.sinks else {})
        how |= {"softcap": self.softcap} if self.softcap else {}
        if self.layout is not None:
            how["group"] = group or Simulated(self.mesh or self.layout.ranks)
        if isinstance(self.pattern, Adaptive):
            return ringlab.adaptive_attention(q, k, v, self.pattern, z, **how)
        if self.layout is not None:
            how |= {"scheme": self.scheme, "layout": self.layout}
        return attention(q, k, v, self.pattern, execution=self.execution, **how)

    def run(self, inputs, dout, dlse, group=None) -> dict[str, torch.Tensor]:
        """Results and gradients by name. The cotangent of lse is NaN where a query sees
        nothing: no one may read it.
        """
        inputs = [t.detach().requires_grad_() for t in inputs]
        out, lse = self.call(*inputs, group=group)
        return differentiated(
            out, lse, inputs, dout, dlse if self.lse_cotangent else None
        )

    def shards(self, rank: int, device="cpu"):
        """As ``drawn``, of one rank."""
        inputs, dout, dlse = drawn(self)
        rows = (*inputs[:3], dout)
        *rows, dout = (self.layout.shard(t, rank).to(device) for t in rows)
        return rows + inputs[3:], dout, self.layout.shard(dlse, rank, 2).to(device)

    def joined(self, shards) -> dict[str, torch.Tensor]:
        """The results of all ranks, each of its shard, as those of the whole."""
        found = {name: [shard[name] for shard in shards] for name in shards[0]}
        whole = {"dz": sum(found.pop("dz"))} if self.sinks else {}
        return whole | {
            name: self.layout.unshard(parts, 2 if name == "lse" else 1)
            for name, parts in found.items()
        }


def differentiated(out, lse, inputs, dout, dlse) -> dict[str, torch.Tensor]:
    results, cotangents = [out], [dout.to(out.dtype)]
    if dlse is not None:
        results, cotangents = (
            [out, lse],
            [*cotangents, dlse.to(lse.dtype).masked_fill(lse == -torch.inf, torch.nan)],
        )
    grads = torch.autograd.grad(results, inputs, cotangents)
    return dict(zip((*NAMES, "dz"), (t.detach() for t in (out, lse, *grads))))


def errors(got: dict, want: dict, q, k, dout, scale=None) -> dict[str, float]:
    """The error of each result that is there, as the design defines it."""
    floor = reference.gradient_floor(q, k, dout, scale)
    return {
        n: reference.error(got[n], want[n], 1.0 if n in ("out", "lse") else floor)
        for n in want
    }


def apart(found, want) -> float:
    """The worst relative error of tensors, of which some may be 0 but for rounding, as
    the gradient of a bias of k.
    """
    floor = 0.01 * max(float(b.norm()) for b in want)
    return max(
        float((a - b).norm() / b.norm().clamp_min(floor))
        for a, b in zip(found, want, strict=True)
    )


def drawn(case: Case):
    """(q, k, v and z, logits of blocks or sinks, where it is given; a cotangent of out (b, n, h, d), one of lse (b,
    h, n)).
    """
    generator = torch.Generator().manual_seed(case.seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=F64)

    def rows(heads):
        t = draw(case.batch, case.n, heads, case.d).to(case.dtype)
        if case.memory == "heads first":
            return t.transpose(1, 2).contiguous().transpose(1, 2)
        if case.memory == "packed":
            return torch.cat([t, t], 3)[..., : case.d]
        return (
            t.repeat_interleave(2, 3)[..., ::2] if case.memory == "every other" else t
        )

    inputs, dout = (
        [rows(h) for h in (case.heads, case.kv_heads, case.kv_heads)],
        rows(case.heads),
    )
    accumulated = F32 if case.dtype in HALF else case.dtype
    dlse = draw(case.batch, case.heads, case.n).to(accumulated)
    if case.weighted:
        count = case.pattern.count(case.n)
        inputs.append(draw(case.batch, case.heads, count, count).to(accumulated))
    if case.sinks:  # of all, some and none of the weight
        inputs.append(4 * draw(case.heads).to(accumulated))
    return inputs, dout, dlse


def cache_for(pattern, q, k, max_seq_len: int, **how) -> KVCache:
    """A cache for rows as those of q and k."""
    batch, _, heads, head_dim = q.shape
    own = {"batch": batch, "heads": heads, "kv_heads": k.shape[2]}
    own |= {"head_dim": head_dim, "max_seq_len": max_seq_len, "dtype": q.dtype}
    return KVCache(pattern, **own, **how)


@functools.lru_cache(maxsize=64)
def _judged(case: Case):
    """Inputs, cotangents, what the reference gives, and the error that each result may
    have.
    """
    inputs, dout, dlse = drawn(case)
    order = torch.arange(case.n)
    if case.layout is not None:  # a Hilbert layout: the pattern runs along the curve
        order = torch.cat([case.layout.positions(r) for r in range(case.layout.ranks)])
    exact = [*(t[:, order] for t in inputs[:3]), *inputs[3:]]
    exact = [t.double().requires_grad_() for t in exact]
    if isinstance(case.pattern, Adaptive):
        out, lse = adaptive_reference(case, *exact)
        fewest = (
            presets.sliding_window(0, block_size=case.pattern.block_size)
            if case.weighted
            else None
        )
    else:
        how = {"causal": case.causal, "scale": case.scale}
        how |= {"sinks": exact[3]} if case.sinks else {}
        how["softcap"] = case.softcap
        out, lse = reference.attention(*exact[:3], case.pattern, **how)
        fewest = case.pattern
    want = differentiated(
        out,
        lse,
        exact,
        dout[:, order],
        dlse[:, :, order] if case.lse_cotangent else None,
    )
    back = order.argsort()
    want = {
        name: t if name == "dz" else t[:, :, back] if name == "lse" else t[:, back]
        for name, t in want.items()
    }
    bounds = reference.tolerance(
        *inputs[:3], dout, pattern=fewest, causal=case.causal, scale=case.scale
    )
    bounds["dz"] = max(bounds["dq"], bounds["dk"])
    return inputs, dout, dlse, want, bounds


def judged(case: Case):
    """As ``_judged``, once for all the ways to run a case: only a Hilbert layout
    changes what is right.
    """
    layout = (
        case.layout
        if case.layout is not None and case.layout.grid is not None
        else None
    )
    return _judged(
        replace(
            case,
            execution=Execution(),
            way=None,
            backend="auto",
            scheme="auto",
            layout=layout,
            mesh=None,
        )
    )


def wrong(case: Case, device="cpu", lay=lambda t: t) -> dict[str, tuple[float, float]]:
    """Run a case on a device, on tensors that ``lay`` lays out: (error, bound) of each
    result that misses its bound, {} where all is right.
    """
    inputs, dout, dlse, want, bounds = judged(case)
    q, k, *_ = inputs
    *rows, there = (lay(t.to(device)) for t in (*inputs[:3], dout))
    more = [t.to(device) for t in inputs[3:]]
    found = case.run(rows + more, there, dlse.to(device))
    found = {name: t.cpu() for name, t in found.items()}
    apart = errors(found, want, q, k, dout, case.scale)
    missed = {
        name: (e, bounds[name]) for name, e in apart.items() if not e <= bounds[name]
    }
    dtypes = {
        name: dlse.dtype if name in ("lse", "dz") else case.dtype for name in found
    }
    if (
        found["dk"].shape != k.shape
        or {name: t.dtype for name, t in found.items()} != dtypes
    ):
        missed["dtype or shape"] = {
            name: (t.dtype, t.shape) for name, t in found.items()
        }
    return missed


def all_wrong(cases) -> dict[str, dict]:
    """``wrong`` by case, of those that have any."""
    return {str(case): missed for case in cases if (missed := wrong(case))}


# --------------------------------------------------------------------------------------
# how a pattern may be run


def paths(case: Case) -> list[Case]:
    """The case by every path of its pattern on one device that serves its dtype; in
    `make test` by one of them, drawn for each case.
    """
    how = every_path(case)
    return how if TIMES > 1 else [random.Random(str(case)).choice(how)]


def every_path(case: Case) -> list[Case]:
    names = [
        name
        for name, runs, _, _ in kernels.table(
            "cpu", case.dtype, case.d, causal=case.causal
        )
        if runs
    ]
    how = [replace(case, backend=name) for name in names]
    if isinstance(case.pattern, Adaptive):
        return how
    return how + [
        replace(case, execution=Execution(cache=False, pool=True, results=STAINED)),
        replace(case, execution=Execution(tile=33), backend="eager"),
        replace(case, execution=Execution(tile=40)),
    ]


def fits(pattern, layout: Layout, causal: bool, scheme: str) -> bool:
    """Whether a scheme serves this."""
    if layout.grid is not None and causal:
        return False
    if isinstance(pattern, BlockSparse):
        given = (
            pattern.block_size > layout.n
            or pattern == PATTERNS[-1]
            and -(-layout.n // BLOCK) != len(MASK)
        )
        if given or scheme in ("ring", "all_gather"):
            return False
    sharing = scheme == "ulysses" or (scheme == "auto" and layout.ranks > 1)
    return isinstance(pattern, Dense) or layout.kind != "striped" or sharing


def layouts(n: int, ranks: int) -> list[Layout]:
    """Borders inside blocks and segments, chunks shorter than both, a rank without
    rows.
    """
    sizes = [[n], [n // 3, n - n // 3], [0, n // 2, n - n // 2], [3, 2, n - 25, 20]][
        ranks - 1
    ]
    return [f(n, ranks) for f in (contiguous, zigzag, striped)] + [
        uneven(sizes),
        hilbert(1, n, ranks),
    ]


# --------------------------------------------------------------------------------------
# random cases


def any_layout(rng: random.Random, ranks: int, n: int) -> Layout:
    kind = rng.choice([contiguous, zigzag, striped, uneven, hilbert])
    if kind is uneven:
        sizes = [rng.randint(0, 20) for _ in range(ranks)]
        sizes[rng.randrange(ranks)] += 1
        return uneven(sizes)
    return (
        hilbert(rng.randint(1, 8), rng.randint(1, 8), ranks)
        if kind is hilbert
        else kind(n, ranks)
    )


def any_dilated(rng: random.Random, longest: int = 80) -> Dilated:
    lengths = [rng.randint(1, longest) for _ in range(rng.randint(1, 3))]
    rates = [min(w, rng.choice([1, 1, 2, 3, 4, 9, rng.randint(1, w)])) for w in lengths]
    return Dilated(lengths, rates, rng.choice(MIXINGS), rng.choice([*OFFSETS]))


def any_case(rng: random.Random) -> Case:
    """Every axis at random, as far as they go together."""
    some = rng.choice
    kinds = (
        any_dilated(rng, some([80, 400])),
        Dense(),
        replace(some(BLOCK_SPARSE[:-1]), block_size=some([2, 5, 8])),
    )
    pattern = rng.choices(kinds, [7, 1, 2])[0]
    execution = Execution(
        cache=some([False, True]),
        pool=some([False, True]),
        tile=some([None] * 4 + [16, 33, 100]),
        results=some([True, STAINED]),
    )
    kv_heads = rng.randint(1, 4)
    case = Case(
        pattern,
        n=max(
            some([rng.randint(1, 80), rng.randint(100, 200)]),
            40 * isinstance(pattern, BlockSparse),
        ),
        dtype=some([F64, F32, F32, BF16, F16]),
        causal=some([False, True]),
        batch=some([1, 1, 2, 3]),
        heads=kv_heads * some([1, 1, 2, 3]),
        kv_heads=kv_heads,
        d=some([8, 16, 32]),
        scale=some([None, None, 0.3, -0.2, 0.0]),
        lse_cotangent=some([False, True]),
        memory=some(MEMORY),
        seed=rng.randrange(1000),
        execution=execution,
        backend=some(["auto", "eager"]),
    )
    if some([False, True]):
        return case
    layout, scheme = (
        any_layout(rng, some([1, 2, 3, 4]), rng.randint(40, 80)),
        some([*SCHEMES, "auto"]),
    )
    heads = case.heads * (layout.ranks if scheme in ("ulysses", "auto") else 1)
    case = replace(case, n=layout.n, layout=layout, scheme=scheme, heads=heads)
    return (
        case
        if fits(pattern, layout, case.causal, scheme)
        else replace(case, pattern=Dense(), causal=False)
    )


# --------------------------------------------------------------------------------------
# blocks chosen by content


def chosen(z, top_k: int, causal: bool):
    """S as a bool mask (b, h, blocks, blocks), row by row."""
    found = torch.zeros(z.shape, dtype=torch.bool)
    for *at, i in torch.cartesian_prod(*map(torch.arange, z.shape[:3])).tolist():
        row = z[(*at, i)].detach()
        best = row[:i] if causal else row
        found[(*at, i)][best.argsort(descending=True)[: top_k - causal]] = True
        if causal:
            found[(*at, i, i)] = True
    return found


def means(t, size: int):
    """Of the rows of each block, the last one maybe short: (b, h, blocks, d)."""
    return torch.stack(
        [t[:, i : i + size].mean(1) for i in range(0, t.shape[1], size)], 2
    )


def logits_of_means(q, k, size: int, causal: bool, scale: float):
    q, k = (
        means(q.detach(), size),
        means(k.detach().repeat_interleave(q.shape[2] // k.shape[2], 2), size),
    )
    return (
        scale * (q.roll(1, 2) if causal else q) @ k.mT
    )  # causal: row 0 sees itself alone


def adaptive_reference(case: Case, q, k, v, z=None):
    """Dense float64 out, lse with M expanded to (b, h, n, n)."""
    size, scale = (
        case.pattern.block_size,
        case.d**-0.5 if case.scale is None else case.scale,
    )
    seen = chosen(
        logits_of_means(q, k, size, case.causal, scale) if z is None else z,
        case.pattern.top_k,
        case.causal,
    )
    m = seen.double()
    if z is not None:
        m = seen.sum(-1, keepdim=True) * z.masked_fill(~seen, -torch.inf).softmax(-1)
    at = torch.arange(q.shape[1]) // size
    m = m[:, :, at][..., at]  # (b, h, n, n)
    m = m.tril() if case.causal else m
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    scores = scores + m.clamp(min=1e-300).log().masked_fill(m == 0, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)
