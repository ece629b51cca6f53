"""Claims that need code: each function returns the ``Finding`` on the claims of
``published/*.toml`` that name it.

The functions are in the order of the documents. Each takes (study, claim) and compares
in the unit of the claim. ``judged`` gives the verdict on every claim of a document.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from .. import compat, cost, hardware, patterns
from ..cache import PatternCache
from ..measure import Ratio
from ..measure import suites as suite
from ..measure.suites import ROBUST, V2_COLLECTIVE
from ..measure.validity import objection
from . import rows as r
from .cells import floor_bytes, peak_bytes, sent_bytes, shown, timed
from .claims import (
    COLUMNS,
    NO_PAIR,
    Finding,
    Verdict,
    by_rows,
    cells,
    compared,
    counted,
    in_words,
    judge,
    printed,
    select,
)
from .published import MB, SIZES, published
from .study import Study, best
from .tables import Table, number, size


class Entry(NamedTuple):
    """One claim of one document with its verdict."""

    document: str
    claim: dict
    verdict: Verdict


def judged(study: Study, document: str) -> list[Entry]:
    """Each claim of a document with its verdict by the rows of ``study``, in the
    document's order.

    Raises KeyError for a claim that names a function which does not exist.
    """
    return [
        Entry(document, claim, verdict(study, document, claim))
        for claim in published(document)["claims"]
    ]


def ledger(study: Study, document: str) -> Table:
    """Every claim of a document, drawn closed under a count of the verdicts."""
    found = judged(study, document)
    return Table(
        counted((e.verdict for e in found), "claim"),
        COLUMNS,
        [cells(e.claim, e.verdict) for e in found],
        note="The tolerance follows from what is printed, not from these rows. The page of claims explains the words.",
        folded=True,
        cards=True,
    )


def verdict(study: Study, document: str, claim: dict) -> Verdict:
    """The verdict on one claim by the rows of its document's suite."""
    if "code" in claim:
        found = FINDERS[claim["code"]](study, claim)
    else:
        found = (
            by_rows(study, claim)
            if "rows" in claim
            else Finding(holds="by" in claim or None)
        )
    if "contradiction" in claim:
        entry = next(
            x for x in compared() if x.key == f"{document} {claim['contradiction']}"
        )
        if entry.contradict:
            text = f"{entry.text[0].lower()}{entry.text[1:]}: {entry.said}"
            found = replace(
                found, contradiction=text, apart=entry.apart if entry.factor else 1.0
            )
    return judge(study, claim, found)


# --------------------------------------------------------------------------------------
# document 000: optimizations


def _document_row(study: Study, test: Callable, dtype: str):
    """The document's call in a dtype: the fastest of the rows that pass a test."""
    return best([x for x in r.document_rows(study, dtype=dtype) if test(x)])


def _effects(study: Study) -> dict[str, Ratio]:
    """What fp32 gains over fp16 without optimizations, and what all optimizations gain
    in fp32, where measured.
    """
    half, plain = (
        _document_row(study, r.is_plain, dtype) for dtype in ("float16", "float32")
    )
    optimised = _document_row(study, r.is_optimised, "float32")
    both = {
        "by fp32 alone": study.ratio(half, plain),
        "by optimizations alone": study.ratio(plain, optimised),
    }
    return {name: x for name, x in both.items() if x}


def confounded(study: Study, claim: dict) -> Finding:
    """A factor between two printed rows that differ in dtype and in every optimization."""
    (first, second), values = r.published()["rows"][:2], _effects(study)
    if first["dtype"] == second["dtype"] or first["optimised"] == second["optimised"]:
        return Finding(
            {k: x for k, x in values.items() if "fp32" in k}, "gain", timed=True
        )
    why = f"{first['ms']} / {second['ms']} ms = {first['ms'] / second['ms']:.2f}"
    return Finding(
        values, "gain", contradiction=f"{why} changes dtype and optimizations at once"
    )


def dtype_first(study: Study, claim: dict) -> Finding:
    """What fp32 alone gains, beside what all optimizations together gain in fp32."""
    effects = _effects(study)
    if len(effects) < 2:
        return Finding(missing=f"{NO_PAIR}, for either effect alone")
    return Finding(
        {"": quotient(*effects.values())},
        ours=in_words(effects, what="gain"),
        timed=True,
    )


def quotient(a: Ratio, b: Ratio) -> Ratio:
    """One ratio over another; below 1 at all ends where their intervals lie apart and
    the first is the smaller.
    """
    return replace(
        a,
        value=a.value / b.value,
        low=a.low / b.high,
        high=a.high / b.low if b.low else math.inf,
    )


def _building(study: Study) -> float | None:
    """The largest part of a call of the document's pattern that building its plan
    takes.
    """
    names, shares = ("seq_len", "pattern", "heads", "head_dim", "batch"), []
    built = {"pattern": r.pattern().to_dict(), "options": {"warm": False}}
    for cold in study.rows(system="plan_build", **built):
        wanted = {"gather": bool(cold.option("gather")), "backend": "auto"}
        wanted |= {"cache": True}
        alike = {name: getattr(cold.point, name) for name in names}
        calls = study.rows(system="ringlab", passes="fwd", world_size=1, **alike)
        call = best(
            [
                x
                for x in calls
                if timed(x)
                and not x.point.causal
                and wanted.items() <= r.switches(x.point).items()
            ]
        )
        if call and timed(cold):
            shares.append(cold.median / call.median)
    return max(shares, default=None)


def _pool_rows(study: Study) -> list[tuple]:
    """(row with a pool, how much longer the call takes without) of each length and
    threshold, the least first.
    """
    ours = study.rows(system="ringlab", world_size=1)
    swept = [x for x in ours if x.option("pool_threshold_mb") and x.point.batch > 1]
    swept.sort(key=lambda x: x.option("pool_threshold_mb"))
    found = []
    for on in swept:
        off = best([x for x in ours if x.point == on.point.but(options=())])
        if ratio := study.ratio(off, on):
            found.append((on, ratio))
    return found


def cache_gain(study: Study, claim: dict) -> Finding:
    """The pattern cache on and off; it saves at most the part of a call that building
    the plan takes.
    """
    found, share = by_rows(study, claim), _building(study)
    if share is None or 100 * (1 / (1 - share) - 1) >= claim["low"]:
        return found
    return replace(
        found,
        holds=False,
        why=f"building takes at most {number(100 * share, 2)} % of a call, so that no "
        "cache can save more",
    )


def best_threshold(study: Study, claim: dict) -> Finding:
    """The published threshold against the others, at the longest length that has them."""
    swept = [on for on, _ in _pool_rows(study)]
    longest = max((on.point.seq_len for on in swept), default=0)
    by_size = {
        on.option("pool_threshold_mb"): on
        for on in swept
        if on.point.seq_len == longest
    }
    mine = by_size.pop(claim["threshold_mb"], None)
    gains = {
        f"with {mb:g} MB": x
        for mb, row in sorted(by_size.items())
        if (x := study.ratio(row, mine))
    }
    missing = "" if gains else "it and another threshold in one call"
    return Finding(gains, "time over that with 16 MB", missing=missing, timed=True)


def pool_by_length(study: Study, claim: dict) -> Finding:
    """The pool with the lowest threshold, which lends most, against none, at two
    lengths.
    """
    found: dict[int, Ratio] = {}
    for on, ratio in _pool_rows(study):
        found.setdefault(on.point.seq_len, ratio)
    ours = in_words(
        {f"at {n:,} tokens": found[n] for n in sorted(found)}, what="gain by the pool"
    )
    if len(found) < 2:
        return Finding(ours=ours, missing="calls with a pool, at two lengths")
    return Finding(
        {"": quotient(found[max(found)], found[min(found)])}, ours=ours, timed=True
    )


def flash_from_turing(study: Study, claim: dict) -> Finding:
    asked = [
        x
        for x in study.results
        if "flash" in (name := str(r.switches(x.point)["backend"]))
        and name[:3] != "cpu"
    ]
    passed = [r.label(x) for x in asked if not objection(x)]
    why = "flash kernels ask for compute capability 8.0 or newer"
    if passed or asked and {x.status for x in asked} == {"unsupported"}:
        return Finding(
            ours=passed[0] if passed else None,
            holds=bool(passed),
            why="" if passed else why,
        )
    return Finding(missing="a flash kernel that passed, or refused the GPU", why=why)


def flash_dtype(study: Study, claim: dict) -> Finding:
    """The dtype that our class of that name chooses, beside the policy for this
    hardware.
    """
    p = r.pattern()
    device = (
        "cuda" if study.device_type == "cuda" and torch.cuda.is_available() else "cpu"
    )
    module = compat.RingDilatedAttentionV2Flash(
        list(p.segment_lengths), list(p.dilation_rates), device=device
    )
    policy = hardware.default_dtype(
        None if device == "cpu" else study.profile.capability
    )
    holds = module.dtype == torch.float16 != policy
    chosen, wanted = (str(x).removeprefix("torch.") for x in (module.dtype, policy))
    return Finding(
        ours=f"our class of that name: {chosen}",
        holds=holds,
        why=f"the policy for this hardware: {wanted}",
    )


def throughput(study: Study, claim: dict) -> Finding:
    """Our time of the optimized call over the printed one."""
    work = r.published()["work"]
    fastest = best(
        [
            x
            for x in r.document_rows(study)
            if (r.is_plain(x) or r.is_engine(x)) and timed(x)
        ]
    )
    why = (
        f"the divisions are right; according to its source code a call did {work['done_gflop']} of the "
        f"{work['needed_gflop']} GFLOP of the stated function"
    )
    if study.rehearsal:
        return Finding(missing="the call on that device", why=why)
    ours = f"at best {number(fastest.tokens_per_s)} tokens/s" if fastest else None
    row = _document_row(study, r.is_optimised, "float32")
    if row is None or objection(row) or not row.ci:
        return Finding(ours=ours, missing="the optimized call in fp32", why=why)
    theirs = printed("000", "rows.optimised.ms") / 1e3
    found = Ratio(
        row.median / theirs,
        row.ci[0] / theirs,
        row.ci[1] / theirs,
        len(row.seconds),
        False,
    )
    return Finding({"": found}, ours=ours, why=why, timed=True)


def two_cards(study: Study, claim: dict) -> Finding:
    """The document's failed run: three score tensors in fp32; ours has at most 1.15 × a
    shard of q, k, v and out.
    """
    s, n, card = r.shape(), claim["tokens"], 8 * 2**30
    both = (
        3 * s["heads"] * n * (n // 2) * 4,
        1.15 * 4 * (n // 2) * s["heads"] * s["head_dim"] * 4,
    )
    theirs, ours = (
        f"{size(held)} a card and {'fits' if held < card else 'does not fit'}"
        for held in both
    )
    needs = f"computed: the original needs {theirs}, this library {ours}"
    if any(x.point.world_size == 2 and x.point.seq_len >= n for x in study.good):
        return Finding(ours=needs, holds=False, why="it ran on two ranks here")
    return Finding(ours=needs, missing=f"{n:,} tokens on two ranks")


# --------------------------------------------------------------------------------------
# documents 001, 003 and 004: ranks


def passed(study: Study, claim: dict) -> Finding:
    """Rows as long as the claim says passed on several ranks; without lengths, any row."""
    rows = study.rows(system=claim["system"], passes="fwd", causal=False)
    held = [x.point for x in rows if x.point.world_size > 1 and peak_bytes(x)]
    longest = max(held, key=lambda p: (p.seq_len, p.world_size), default=None)
    if longest is None:
        return Finding(missing=claim["missing"])
    heads = ", with one head" if longest.heads == 1 else ""
    ours = f"passed: {longest.seq_len:,} tokens on {longest.world_size} ranks{heads}"
    if longest.seq_len < max(claim.get("seq_lens", [0])):
        return Finding(ours=ours, missing=claim["missing"])
    return Finding(
        ours=ours, holds="fails" not in claim, why="every row passed its check"
    )


# --------------------------------------------------------------------------------------
# document 002: block-sparse attention and extreme lengths


def _row(name: str) -> dict:
    return next(x for x in published("002")["ring"] if x["name"] == name)


def stated_work(seq_len: int | None = None) -> cost.Cost:
    """FLOPs and bytes of the function that the benchmark of document 002 states, at its
    own length by default.
    """
    ring, shape = (published("002")[x] for x in ("ring_shape", "shape"))
    pattern = patterns.Dilated(
        ring["segment_lengths"], ring["dilation_rates"], "head_groups", "branch"
    )
    return cost.count(
        pattern,
        seq_len=seq_len or ring["seq_len"],
        **shape | {"dtype": getattr(torch, shape["dtype"])},
    )


def _card() -> hardware.Profile:
    return hardware.get_profile(published("002")["profile"])


def least_ms() -> float:
    """The shortest time of that work in ms that the printed rates of the document's GPU
    allow.
    """
    work, dtype = stated_work(), published("002")["shape"]["dtype"]
    return 1e3 * work.seconds(_card().peak(dtype), _card().bandwidth(work.floor_bytes))


def _extreme(study: Study, seq_len: int):
    return best(select(study, group=suite.EXTREME_LENGTHS, seq_len=seq_len))


def _heads(point) -> str:
    return "one head" if point.heads == 1 else f"{point.heads} heads"


def _held(row) -> str | None:
    """What a row holds as it is, and at the document's heads and dtype, as many times
    q, k, v and out.
    """
    peak, floor = row and peak_bytes(row), row and floor_bytes(row)
    if not peak or not floor:
        return None
    shape, p = published("002")["shape"], row.point
    there = peak / floor * stated_work(p.seq_len).floor_bytes
    return (
        f"{number(peak / MB)} MB with {_heads(p)} in {r.SHORT[p.dtype]}, in proportion "
        f"{number(there / MB)} MB with {shape['heads']} in {r.SHORT[shape['dtype']]}"
    )


def _operators(study: Study, system: str) -> int | None:
    """Aten operators of one call in the document's table, views not counted."""
    row = next(iter(select(study, group=suite.SPARSE_TABLE, system=system)), None)
    count = row.memory.get("operator_calls") if shown(row) else None
    return None if count is None else count - row.memory.get("view_calls", 0)


def possible_time(study: Study, claim: dict) -> Finding:
    """A printed time against the least that the stated work takes on the printed
    device.
    """
    theirs, n = _row(claim["row"]), published("002")["ring_shape"]["seq_len"]
    least, mine, ours = least_ms(), _extreme(study, n), None
    if timed(mine):
        ours = f"a window over {n:,} tokens, {_heads(mine.point)}: {number(mine.median * 1e3)} ms"
    source = f"according to its source code it computes {theirs['computes']}"
    if theirs["ms"] < least:
        why = f"an {_card().title} needs at least {number(least)} ms for the stated work; {source}"
        return Finding(ours=ours, impossible=why, apart=least / theirs["ms"])
    return Finding(
        ours=ours,
        elsewhere=f"possible: the stated work takes {number(least)} ms or more",
        why=source,
    )


def possible_memory(study: Study, claim: dict) -> Finding:
    """A printed memory against that of its own tensors; our peak in proportion is that
    of another function.
    """
    unit, n = SIZES[claim["unit"]], claim["seq_len"]
    ours, floor = _held(_extreme(study, n)), stated_work(n).floor_bytes
    tensors = f"q, k, v and out are {number(floor / MB)} MB in fp16"
    if claim["high"] * unit < floor:
        why = (
            f"{tensors}, out alone {number(floor / 4 / MB)}, so the inputs are left out; according to its source "
            f"code it computes {_row(claim['row'])['computes']}"
        )
        return Finding(ours=ours, impossible=why, apart=floor / unit / claim["high"])
    if not ours:
        return Finding(missing=f"a row of {n:,} tokens that passed")
    return Finding(
        ours=ours,
        elsewhere="ours is a window, another function than the document's",
        why=tensors,
    )


def ring_sizes(study: Study, claim: dict) -> Finding:
    found = {x["ring_size"]: x["mb"] * x["ring_size"] for x in published("002")["ring"]}
    if len(found) < 2:
        return Finding(
            missing="a second ring size; the document prints one, on one device"
        )
    apart = max(found.values()) / min(found.values())
    why = f"ring size × memory of its rows: {', '.join(f'{x:g} MB at {p}' for p, x in found.items())}"
    if apart > 1.1:
        return Finding(contradiction=why, apart=apart)
    return Finding(holds=True, why=why)


def pattern_share(study: Study, claim: dict) -> Finding:
    """Building a plan, as a part of the time of a first call, which builds and then
    computes.
    """
    found = {}
    for way in suite.BLOCK_WAYS:
        ways = {
            "plan_build": {"blocks": way, "warm": False},
            "ringlab": {"blocks": way},
        }
        cold, call = (
            best(select(study, group=suite.JOURNEY, system=name, options=options))
            for name, options in ways.items()
        )
        if timed(cold) and timed(call):
            found[f"({way})"] = 100 * cold.median / (cold.median + call.median)
    return Finding(found, "building, of a first call", timed=True)


def hit_rate(study: Study, claim: dict) -> Finding:
    """Of as many identical calls as the document made, a cache hits all but the first."""
    calls, cache = published("002")["source"]["calls"], PatternCache()
    for _ in range(calls):
        cache.get(("pattern",), list)
    hits = cache.stats().hits
    why = "any cache does that: it is the number of calls, and says nothing about time"
    return Finding(
        {f"({hits} of {calls} identical calls)": 100 * hits / calls}, "hits", why=why
    )


def operations(study: Study, claim: dict) -> Finding:
    before, after = (_operators(study, s) for s in (suite.ORIGINAL, suite.OPTIMIZED))
    if None in (before, after):
        return Finding(missing="operators counted in both rows")
    holds = (
        claim["before"][0] <= before <= claim["before"][1] and after <= claim["most"]
    )
    ours = f"{before:,} row by row, {after:,} batched, views not counted"
    return Finding(ours=ours, holds=holds)


# --------------------------------------------------------------------------------------
# document 003: all-gather, P2P ring and plan


SCHEMES = {V2_COLLECTIVE: "all-gather", ROBUST: "ring", "ringlab": "plan"}


def best_choice(study: Study, claim: dict) -> Finding:
    """Whether the plan is better than the all-gather in both memory and bytes, at some
    length on several ranks.
    """
    found: dict[tuple, dict] = {}  # by ranks and tokens: what each holds and sends
    for system, name in SCHEMES.items():
        for x in study.rows(system=system, passes="fwd", causal=False):
            both, key = (
                (peak_bytes(x), sent_bytes(x)),
                (x.point.world_size, x.point.seq_len),
            )
            if x.point.world_size > 1 and None not in both:
                found.setdefault(key, {})[name] = both
    shared = {k: x for k, x in found.items() if len(x) == len(SCHEMES)}
    better = [
        k
        for k, x in shared.items()
        if all(a < b for a, b in zip(x["plan"], x["all-gather"]))
    ]
    if not shared:
        return Finding(missing="all three schemes on several ranks")
    p, n = max(better or shared)
    each = [
        f"{name} holds {size(held)}, sends {size(sent)}"
        for name, (held, sent) in shared[p, n].items()
    ]
    ours = f"at {n:,} tokens on {p} ranks: {'; '.join(each)}"
    if not better:
        return Finding(ours=ours, why="no scheme is better in both memory and bytes")
    return Finding(
        ours=ours,
        holds=False,
        why="the plan holds less than the all-gather and sends fewer bytes",
    )


FINDERS: dict[str, Callable[[Study, dict], Finding]] = {
    f.__name__: f
    for f in (
        confounded,
        dtype_first,
        cache_gain,
        best_threshold,
        pool_by_length,
        flash_from_turing,
        flash_dtype,
        throughput,
        two_cards,
        passed,
        possible_time,
        possible_memory,
        ring_sizes,
        pattern_share,
        hit_rate,
        operations,
        best_choice,
    )
}
