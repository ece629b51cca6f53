"""Claims that need code: each function returns the ``Finding`` on the claims of ``published/*.toml`` that name it.

The functions are in the order of the documents. Each takes (study, claim, document) and compares in the unit of the
claim. ``judged`` gives the verdict on every claim of a document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from .. import cache as caches
from .. import compat, hardware
from ..measure import Ratio
from ..measure import suites as suite
from . import reuse
from . import rows as r
from .claims import NO_PAIR, Finding, Verdict, by_rows, compared, in_words, judge
from .columns import peak_bytes, per_token, sent_bytes, timed
from .computed import two_cards as two_cards_fit
from .documents import published
from .ring.rows import KB, MB, rows_of
from .session import rows as sparse
from .session.journey import shares
from .study import Study, best
from .tables import number, size
from .trust import objection

FINDERS: dict[str, Callable[[Study, dict, str], Finding]] = {}
THREE = tuple(f"RingDilatedAttention{x}" for x in ("SDPA", "Correct", "HilbertGPUOptimized"))
COLLECTIVE, ROBUST = (f"RingDilatedAttention{x}" for x in ("V2Collective", "V2Robust"))
OF = {"001": THREE[0], "004": "RingDilatedAttentionHybrid"}  # whose memory a document prints
CPU_RANKS = "these ranks are processes of a CPU"
A_GTX = "theirs are times of a GTX 1080"


def judged(study: Study, document: str) -> Iterator[tuple[dict, Verdict]]:
    """Each claim of a document with its verdict by the rows of ``study``, in the document's order.

    Raises KeyError for a claim that names a function which does not exist.
    """
    for claim in published(document)["claims"]:
        yield claim, verdict(study, document, claim)


def verdict(study: Study, document: str, claim: dict) -> Verdict:
    """The verdict on one claim by the rows of its document's suite."""
    found = FINDERS[claim["code"]](study, claim, document) if "code" in claim else by_rows(study, claim)
    if "contradiction" in claim:
        entry = next(x for x in compared() if x.key == f"{document} {claim['contradiction']}")
        if entry.contradict:
            found = replace(found, contradiction=f"it prints {entry.said}", apart=entry.apart)
    return judge(study, claim, found)


def finder(function: Callable) -> Callable:
    FINDERS[function.__name__] = function
    return function


def peaks(study: Study, system: str) -> dict[tuple[int, int], int]:
    """(tokens, ranks) -> peak bytes of a rank, of rows that passed."""
    return {k: held for k, row in rows_of(study, system).items() if (held := peak_bytes(row))}


def places(found: dict) -> dict:
    """(tokens, ranks) -> x as where -> x."""
    return {f"at {n:,} tokens" + (f" on {p} ranks" if p > 1 else ""): x for (n, p), x in found.items()}


# ---------------------------------------------------------------------------------------------------------------------
# document 000: optimizations


def _effects(study: Study) -> tuple[Ratio | None, Ratio | None]:
    """What fp32 gains over fp16 without optimizations, and what all optimizations gain in fp32."""
    ours = r.document_rows(study)

    def row(test: Callable, dtype: str):
        return best([x for x in ours if test(x) and x.point.dtype == dtype])

    plain = row(r.is_plain, "float32")
    return study.ratio(row(r.is_plain, "float16"), plain), study.ratio(plain, row(r.is_optimised, "float32"))


@finder
def confounded(study: Study, claim: dict, document: str) -> Finding:
    """A factor between two printed rows that differ in dtype and in every optimization."""
    first, second = published(document)["rows"][:2]
    values = {k: x for k, x in zip(("by fp32 alone", "by optimizations alone"), _effects(study)) if x}
    if first["dtype"] == second["dtype"] or first["optimised"] == second["optimised"]:
        return Finding({k: x for k, x in values.items() if "fp32" in k}, "gain", timed=True)
    why = f"{first['ms']} / {second['ms']} ms = {first['ms'] / second['ms']:.2f}"
    return Finding(values, "gain", contradiction=f"{why} changes dtype and optimizations at once")


@finder
def dtype_first(study: Study, claim: dict, document: str) -> Finding:
    """What fp32 alone gains, beside what all optimizations together gain in fp32."""
    dtype, others = _effects(study)
    if not dtype or not others:
        return Finding(missing=f"{NO_PAIR}, for either effect alone")
    holds = True if dtype.low > others.high else False if dtype.high < others.low else None
    ours = in_words({"by fp32 alone": dtype, "by optimizations alone": others}, what="gain")
    why = "within noise: the intervals of both effects overlap" if holds is None else ""
    return Finding(ours=ours, holds=holds, why=why, timed=True)


@finder
def cache_gain(study: Study, claim: dict, document: str) -> Finding:
    """The pattern cache on and off; it saves at most the part of a call that building the plan takes."""
    found, share = by_rows(study, claim), reuse.largest_share(study)
    if share is None or 100 * (1 / (1 - share) - 1) >= claim["low"]:
        return found
    return replace(found, holds=False, why=f"building takes at most {number(100 * share, 2)} % of a call, so that no "
                   "cache can save more")  # fmt: skip


@finder
def best_threshold(study: Study, claim: dict, document: str) -> Finding:
    """The published threshold against the others, at the longest length that has them."""
    swept = [pairs for off, pairs in reuse.pool_rows(study) if off.point.batch > 1 and len(pairs) > 1]
    by_size = {reuse.threshold(on.point): on for on, _ in max(swept, key=lambda x: x[0][0].point.seq_len, default=[])}
    mine = by_size.pop(claim["threshold_mb"], None)
    gains = {f"with {mb:g} MB": x for mb, row in sorted(by_size.items()) if (x := study.ratio(row, mine))}
    if not gains:
        return Finding(missing="it and another threshold in one call")
    faster = any(x.significantly_faster for x in gains.values())
    slower = all(x.significantly_slower for x in gains.values())
    ours = in_words(gains, what="time over that with 16 MB")
    if not faster and not slower:
        return Finding(ours=ours, why="within noise: not every threshold differs from it", timed=True)
    return Finding(ours=ours, holds=slower, timed=True)


@finder
def pool_by_length(study: Study, claim: dict, document: str) -> Finding:
    """A pool that lends a buffer against none, at two lengths."""
    found: dict[int, Ratio] = {}
    for off, pairs in reuse.pool_rows(study):
        for on, ratio in pairs:
            if ratio and off.point.batch > 1 and reuse.lent(on.point, reuse.threshold(on.point)).served:
                found.setdefault(off.point.seq_len, ratio)
    ours = in_words({f"at {n:,} tokens": found[n] for n in sorted(found)}, what="gain by the pool")
    if len(found) < 2:
        return Finding(ours=ours, missing="a pool that lends something, at two lengths")
    short, long = found[min(found)], found[max(found)]
    more = long.significantly_slower and long.low > short.high
    less = long.significantly_faster or long.high < short.low
    if not more and not less:
        return Finding(ours=ours, why="within noise: the intervals at both lengths overlap", timed=True)
    return Finding(ours=ours, holds=more, timed=True)


@finder
def flash_from_turing(study: Study, claim: dict, document: str) -> Finding:
    asked = [x for x in study.results if "flash" in (name := str(r.switches(x.point)["backend"])) and name[:3] != "cpu"]
    passed = [r.label(x) for x in asked if not objection(x)]
    why = "flash kernels ask for compute capability 8.0 or newer"
    if passed or asked and {x.status for x in asked} == {"unsupported"}:
        return Finding(ours=passed[0] if passed else None, holds=bool(passed), why="" if passed else why)
    return Finding(missing="a flash kernel that passed, or refused the GPU", why=why)


@finder
def flash_dtype(study: Study, claim: dict, document: str) -> Finding:
    """The dtype that our class of that name chooses, beside the policy for this hardware."""
    p = r.pattern()
    device = "cuda" if study.device_type == "cuda" and torch.cuda.is_available() else "cpu"
    module = compat.RingDilatedAttentionV2Flash(list(p.segment_lengths), list(p.dilation_rates), device=device)
    policy = hardware.default_dtype(None if device == "cpu" else study.profile.capability)
    holds = module.dtype == torch.float16 != policy
    chosen, wanted = (str(x).removeprefix("torch.") for x in (module.dtype, policy))
    return Finding(ours=f"our class of that name: {chosen}", holds=holds, why=f"the policy for this hardware: {wanted}")


@finder
def throughput(study: Study, claim: dict, document: str) -> Finding:
    """The printed rates against the printed times, then our time of the optimized call over the printed one."""
    about, work = published(document), published(document)["work"]
    n = about["shape"]["seq_len"]
    for row in about["rows"]:
        low, high = (n / ((row["ms"] + d) / 1e3) for d in (0.005, -0.005))
        if not low - 1 <= row["tokens_per_s"] <= high + 1:
            return Finding(contradiction=f"{n:,} tokens / {row['ms']} ms is not {row['tokens_per_s']:,} tokens/s")
    fastest = r.fastest_row(study)
    why = (f"the divisions are right; according to its source code a call did {work['done_gflop']} of the "
           f"{work['needed_gflop']} GFLOP of the stated function")  # fmt: skip
    ours = f"at best {number(fastest.tokens_per_s)} tokens/s" if fastest else None
    row = best([x for x in r.document_rows(study) if r.is_optimised(x) and x.point.dtype == "float32"])
    if row is None or objection(row) or not row.ci:
        return Finding(ours=ours, missing="the optimized call in fp32", why=why)
    theirs = next(x for x in about["rows"] if x["key"] == "optimised")["ms"] / 1e3
    found = Ratio(row.median / theirs, row.ci[0] / theirs, row.ci[1] / theirs, len(row.seconds), False)
    return Finding({"": found}, ours=ours, why=why, timed=True)


@finder
def two_cards(study: Study, claim: dict, document: str) -> Finding:
    fit = two_cards_fit(claim["tokens"])
    needs = f"computed: the original needs {size(fit.original_bytes)} on a card, this library {size(fit.ours_bytes)}"
    if any(x.point.world_size == 2 and x.point.seq_len >= claim["tokens"] for x in study.good):
        return Finding(ours=needs, holds=False, why="it ran on two ranks here")
    return Finding(ours=needs, missing=f"{claim['tokens']:,} tokens on two ranks")


# ---------------------------------------------------------------------------------------------------------------------
# document 001: one GPU and two


@finder
def recount(study: Study, claim: dict, document: str) -> Finding:
    """Printed factors against the printed rows that they come from, then what the claim's own rows come to."""
    about, (over_ranks, under_ranks) = published(document), claim["ranks"]
    found = {(x["ranks"], x["seq_len"]): x[claim["column"]] for x in about["rows"]}
    for x in about[claim["factors"]]:
        n = x["seq_len"]
        own = found[over_ranks, n] / found[under_ranks, n]
        if abs(own / x["factor"] - 1) > 0.01:
            why = f"its tables give {own:.2f}× at {n:,} tokens, not {x['factor']}×"
            return replace(by_rows(study, claim), contradiction=why, apart=max(own / x["factor"], x["factor"] / own))
    finding = by_rows(study, claim)
    if not finding.timed:
        return finding
    why = "two devices at most double the rate: a larger factor means that the two sides did not do the same work"
    return replace(finding, elsewhere=CPU_RANKS if study.device_type == "cpu" else "", why=why)


@finder
def falls_with_ranks(study: Study, claim: dict, document: str) -> Finding:
    """p times a rank's peak over one rank's, at every length and number of ranks: 1 where memory falls as n/p."""
    held = peaks(study, OF[document])
    found = places({(n, p): p * x / held[n, 1] for (n, p), x in held.items() if p > 1 and (n, 1) in held})
    counts = {p for n, p in held if p > 1 and (n, 1) in held}
    missing = "" if len(counts) > 1 else "three numbers of ranks or more, which a law needs"
    return Finding(found, "ranks × peak of a rank, over the peak on one", why=claim["why"], missing=missing)


@finder
def fills_the_memory(study: Study, claim: dict, document: str) -> Finding:
    """A length that is called the most for a memory: what its own row takes of it."""
    about = published(document)["rows"]
    row = next(x for x in about if (x["ranks"], x["seq_len"]) == (claim["ranks"], claim["tokens"]))
    share = row["mb"] * MB / claim["memory_bytes"]
    longer = [n for n, p in peaks(study, OF[document]) if p == claim["ranks"] and n > claim["tokens"]]
    ours = f"{max(longer):,} tokens ran here" if longer else None
    used = f"its own row takes {row['mb']:.0f} MB, {100 * share:.0f} % of {claim['memory_bytes'] / 1e9:g} GB"
    if share < claim["share"]:
        why = f"{used}: about {claim['tokens'] / share:,.0f} tokens would fit"
        return Finding(ours=ours, contradiction=why, apart=1 / share)
    return Finding(ours=ours, holds=False if longer else None, missing="" if longer else f"a longer row; {used}")


@finder
def twice_as_long(study: Study, claim: dict, document: str) -> Finding:
    held = peaks(study, OF[document])
    found = {(2 * n, 1): held[2 * n, 2] / x for (n, p), x in held.items() if p == 1 and (2 * n, 2) in held}
    return Finding(places(found), "peak of each of two ranks over that of one with half of the tokens")


def _fastest(study: Study, **more) -> Finding:
    known = [row.tokens_per_s for row in rows_of(study, THREE[0]).values() if timed(row)]
    return Finding({"at best": max(known)} if known else {}, elsewhere=A_GTX, timed=True, **more)


@finder
def largest_printed(study: Study, claim: dict, document: str) -> Finding:
    most = max(x["tokens_per_s"] for x in published(document)["rows"])
    if most >= claim["low"]:
        return _fastest(study)
    return _fastest(study, contradiction=f"the largest rate in its tables is {most:,}", apart=claim["low"] / most)


@finder
def all_scale(study: Study, claim: dict, document: str) -> Finding:
    """One rank's peak over that of each of two, for every system at its longest length that has both."""
    found = {}
    for system in THREE:
        held = peaks(study, system)
        if n := max((n for n, p in held if p == 2 and (n, 1) in held), default=None):
            found[f"for {system.removeprefix('RingDilatedAttention')}"] = held[n, 1] / held[n, 2]
    ours = in_words(found, what="peak on one rank over that on two")
    factors = list(found.values())
    alike = bool(factors) and min(factors) >= claim["least"] and max(factors) <= claim["alike"] * min(factors)
    absent = [s for s in THREE if f"for {s.removeprefix('RingDilatedAttention')}" not in found]
    missing = f"{' and '.join(absent)} on two ranks" if absent and (alike or not found) else ""
    return Finding(ours=ours, holds=alike, missing=missing)


@finder
def batch_of_two(study: Study, claim: dict, document: str) -> Finding:
    factors = [x["tokens_per_s"] * x["seconds"] / x["seq_len"] for x in published(document)["rows"]]
    if not all(1.75 < x < 2.25 for x in factors):  # within the rounding of the printed seconds
        return _fastest(study)
    why = "every rate is twice the printed tokens over the printed time: a batch of 2 that the text does not state"
    return _fastest(study, contradiction=why, apart=2.0)


@finder
def planning(study: Study, claim: dict, document: str) -> Finding:
    about = published(document)["rows"]
    found = {p: x / KB for (_, p), row in rows_of(study, OF[document]).items() if (x := per_token(row))}  # the longest
    both = {1, 2} <= found.keys()
    ours = f"{found[1]:.2f} KB on one rank, {found[2]:.2f} on two, inputs and results included" if both else None
    held = [(x["ranks"], x["mb"] * MB / KB / x["seq_len"]) for x in about]
    shares = [kb / claim["kb"][p - 1] for p, kb in held]
    if all(claim["low"] <= x <= claim["high"] for x in shares):
        return Finding(ours=ours, elsewhere="theirs counts projections and no inputs, ours no projections and inputs")
    own = " and ".join(f"{max(kb for p, kb in held if p == count):.1f} KB on {count}" for count in (1, 2))
    return Finding(ours=ours, contradiction=f"its own rows come to {own}: they hold a batch of 2", apart=max(shares))


@finder
def passed(study: Study, claim: dict, document: str) -> Finding:
    """Rows as long as the claim says passed on several ranks; without lengths, any row."""
    found = peaks(study, claim.get("system") or OF[document])
    longest = max(((n, p) for n, p in found if p > 1), default=None)
    ours = f"passed: {longest[0]:,} tokens on {longest[1]} ranks" if longest else None
    if not longest or longest[0] < max(claim.get("seq_lens", [0])):
        return Finding(ours=ours, missing=claim["missing"])
    return Finding(ours=ours, holds="fails" not in claim, why="every row passed its check")


# ---------------------------------------------------------------------------------------------------------------------
# document 002: block-sparse attention and extreme lengths


def _row(key: str, table: str = "block_rows") -> dict:
    return next(x for x in sparse.document()[table] if x.get("key", x.get("name")) == key)


@finder
def possible_time(study: Study, claim: dict, document: str) -> Finding:
    """A printed time against the least that the stated work takes on the printed device."""
    theirs, n = _row(claim["row"], "ring"), sparse.stated()[1]["seq_len"]
    least, mine = sparse.least_seconds(sparse.work(), sparse.card()) * 1e3, sparse.extreme(study).get(n)
    known = mine is not None and not objection(mine) and mine.median
    ours = f"a window over {n:,} tokens, {sparse.heads(mine.point)}: {number(mine.median * 1e3)} ms" if known else None
    source = f"according to its source code it computes {theirs['computes']}"
    if theirs["ms"] < least:
        why = f"an {sparse.card().title} needs at least {number(least)} ms for the stated work; {source}"
        return Finding(ours=ours, impossible=why, apart=least / theirs["ms"])
    return Finding(ours=ours, elsewhere=f"possible: the stated work takes {number(least)} ms or more", why=source)


@finder
def possible_memory(study: Study, claim: dict, document: str) -> Finding:
    """A printed memory against that of its own tensors, then our peak in proportion."""
    row, floor = sparse.extreme(study).get(claim["seq_len"]), sparse.work(seq_len=claim["seq_len"]).floor_bytes / MB
    ours = row and sparse.held(row)
    if claim["high"] < floor:
        why = (f"q, k, v and out are {number(floor)} MB in fp16, out alone {number(floor / 4)}, so the inputs are left "
               f"out; according to its source code it computes {_row(claim['row'], 'ring')['computes']}")  # fmt: skip
        return Finding(ours=ours, impossible=why, apart=floor / claim["high"])
    there = row and sparse.held_there(row)
    why = f"q, k, v and out are {number(floor)} MB; our row is a window, which the document's row is not"
    return Finding({"": there / MB} if there else {}, ours=ours, why=why)


@finder
def zero_heads(study: Study, claim: dict, document: str) -> Finding:
    """A factor between two functions; ours is the largest between two ways to compute one."""
    found, s = by_rows(study, claim), published(document)["source"]
    if not s["ring_zero_heads"]:
        return found
    why = (f"according to its source code {s['ring_zero_heads']} of {published(document)['shape']['heads']} heads of "
           f"the faster side are zeros at {s['ring_seq_len']:,} tokens: method and work differ; at 8,192, where the "
           f"segments fit, the same pair gives {s['ring_longer_factor']}×")  # fmt: skip
    return replace(found, contradiction=why)


@finder
def fits(study: Study, claim: dict, document: str) -> Finding:
    row = sparse.extreme(study).get(claim["seq_len"])
    there = row and sparse.held_there(row)
    if not there:
        return Finding(missing=f"a row of {claim['seq_len']:,} tokens that passed")
    share = f"{100 * there / (claim['high'] * 2**30):.0f} % of it"
    why = f"{share}; measured on {study.device} with a window, which the document's row is not"
    return Finding({"": there / 2**30}, ours=sparse.held(row), why=why)


@finder
def refused(study: Study, claim: dict, document: str) -> Finding:
    ring, longest = sparse.document()["ring_shape"], max(sparse.document()["ring_shape"]["segment_lengths"])
    ran = [n for n, row in sparse.extreme(study).items() if peak_bytes(row)]
    ours = f"{max(ran):,} tokens passed here" if ran else None
    if not ring["seq_len"] % longest:
        return Finding(ours=ours, missing="the original, which does not run here")
    why = (f"its own record says refused, not out of memory: a segment of {longest:,} tokens does not divide "
           f"{ring['seq_len']:,}")  # fmt: skip
    return Finding(ours=ours, contradiction=why)


@finder
def ring_sizes(study: Study, claim: dict, document: str) -> Finding:
    found = {x["ring_size"]: x["mb"] * x["ring_size"] for x in sparse.document()["ring"] if "ring_size" in x}
    if len(found) < 2:
        return Finding(missing="a second ring size; the document prints one, on one device")
    apart = max(found.values()) / min(found.values())
    why = f"ring size × memory of its rows: {', '.join(f'{x:g} MB at {p}' for p, x in found.items())}"
    if apart > 1.1:
        return Finding(contradiction=why, apart=apart)
    return Finding(holds=True, why=why)


@finder
def pattern_share(study: Study, claim: dict, document: str) -> Finding:
    found = {f"({name})": 100 * x for name, x in shares(study).items()}
    return Finding(found, "building, of a first call", timed=True)


@finder
def hit_rate(study: Study, claim: dict, document: str) -> Finding:
    """Counted on a cache, by as many identical calls as the document made."""
    kept, calls = caches.PatternCache(), published(document)["source"]["calls"]
    for _ in range(calls):
        kept.get("one pattern", lambda: 0)
    hits = kept.stats().hits
    why = "any cache does that: it is the number of calls, and says nothing about time"
    return Finding({f"({hits} of {calls} identical calls)": 100 * hits / calls}, "hits", why=why)


@finder
def operations(study: Study, claim: dict, document: str) -> Finding:
    before, after = (sparse.computing(sparse.in_table(study, s)) for s in (suite.ORIGINAL, suite.OPTIMIZED))
    lengths = published(document)["source"]["launches_seq_len"], suite.SESSION_TOKENS
    blocks = {n: int(suite.WINDOW.blocks(n).sum()) for n in lengths}
    why = "; ".join(f"2 products × {c} blocks = {2 * c} at {n:,} tokens" for n, c in blocks.items())
    why += "; according to its source code a loop over the blocks remains"
    if None in (before, after):
        return Finding(missing="operators counted in both rows", why=why)
    holds = claim["before"][0] <= before <= claim["before"][1] and after <= claim["most"]
    return Finding(ours=f"{before:,} row by row, {after:,} batched, views not counted", holds=holds, why=why)


@finder
def overall(study: Study, claim: dict, document: str) -> Finding:
    """The percentage against the document's own table."""
    a, b = _row("original")["ms"], _row("optimized")["ms"]
    first, second = published(document)["source"]["other_run_ms"]
    table = 100 * (1 - b / a)
    if abs(table - claim["percent"]) <= 1:
        return by_rows(study, claim)
    why = (f"its table gives {a} to {b} ms, {table:.1f} %; {claim['percent']} % is another run's, {first} to {second} "
           f"ms: one configuration differs by {b / second:.2f}× from run to run")  # fmt: skip
    return replace(by_rows(study, claim), contradiction=why, apart=claim["percent"] / table)


# ---------------------------------------------------------------------------------------------------------------------
# document 003: all-gather and P2P ring


@finder
def memory_by_length(study: Study, claim: dict, document: str) -> Finding:
    """The ring's peak over the all-gather's, of the same factor as printed."""
    theirs = {(x["seq_len"], 1): x["robust_mb"] / x["collective_mb"] for x in published(document)["memory"]}
    a, b = peaks(study, ROBUST), peaks(study, COLLECTIVE)
    found = {k: a[k] / b[k] for k in sorted(a.keys() & b.keys() & theirs.keys())}
    shares = places({k: x / theirs[k] for k, x in found.items()})
    return Finding(shares, ours=in_words(places(found), what="the ring's peak over the all-gather's"))


@finder
def causal_printed(study: Study, claim: dict, document: str) -> Finding:
    times = {t["causal"]: t["collective_ms"] for t in published(document)["times"]}
    share = times[True] / times[False]
    if share >= claim["low"]:
        return by_rows(study, claim)
    why = f"causal takes {share:.2f} of the time, where it can save about half of the work"
    return replace(by_rows(study, claim), contradiction=why, apart=0.5 / share)


@finder
def two_tables(study: Study, claim: dict, document: str) -> Finding:
    """A printed memory against that of the other table at the same length."""
    name, (low, high) = claim["column"], claim["mb"]
    other = next(x[f"{name}_mb"] for x in published(document)["memory"] if x["seq_len"] == claim["seq_len"])
    held = peaks(study, {"robust": ROBUST, "collective": COLLECTIVE}[name]).get((claim["seq_len"], 1))
    ours = f"{held / MB:.1f} MB, inputs and results included" if held else None
    if low <= other <= high:
        return Finding(ours=ours, elsewhere="its two tables agree, and the original does not run here")
    why = f"its next table has {other} MB at the same length"
    return Finding(ours=ours, contradiction=why, apart=max(low / other, other / high))


def _schemes(study: Study, value: Callable) -> dict[tuple[int, int], dict[str, int]]:
    """(tokens, ranks) -> scheme -> value of a rank, wherever all three schemes ran on several ranks."""
    names = {"all-gather": COLLECTIVE, "ring": ROBUST, "plan": "ringlab"}
    found = {k: {x: v for x, row in rows_of(study, s).items() if (v := value(row))} for k, s in names.items()}
    shared = set.intersection(*map(set, found.values()))
    return {k: {s: x[k] for s, x in found.items()} for k in sorted(shared, key=lambda k: (k[1], k[0])) if k[1] > 1}


@finder
def best_choice(study: Study, claim: dict, document: str) -> Finding:
    """Whether another scheme is better than the all-gather in both memory and bytes, at some length."""
    held, sent = (_schemes(study, f) for f in (peak_bytes, sent_bytes))
    shared = [k for k in held if k in sent]
    better = [k for k in shared if all(x[k]["plan"] < x[k]["all-gather"] for x in (held, sent))]
    if not shared:
        return Finding(missing="all three schemes on several ranks")
    n, p = (better or shared)[-1]
    each = [f"{s} holds {size(held[n, p][s])}, sends {size(x)}" for s, x in sent[n, p].items()]
    ours = f"at {n:,} tokens on {p} ranks: {'; '.join(each)}"
    if not better:
        return Finding(ours=ours, why="no scheme is better in both memory and bytes")
    return Finding(ours=ours, holds=False, why="the plan computes the same with less memory and fewer bytes")


# ---------------------------------------------------------------------------------------------------------------------
# document 004: the hybrid ring


def _per_token(study: Study, document: str) -> dict[int, float]:
    """Tokens -> KB of a rank per token, on two ranks."""
    found = {n: per_token(row) for (n, p), row in rows_of(study, OF[document]).items() if p == 2}
    return {n: x / KB for n, x in found.items() if x}


@finder
def end_to_end(study: Study, claim: dict, document: str) -> Finding:
    """Memory per token at the longest printed length over that at the shortest."""
    theirs = {x["seq_len"]: x["mb"] * KB / x["seq_len"] for x in published(document)["rows"]}
    first, last = min(theirs), max(theirs)
    real, own = theirs[last] / theirs[first], _per_token(study, document)
    values = {"": own[last] / own[first]} if {first, last} <= own.keys() else {}
    if claim["low"] <= real <= claim["high"]:
        return Finding(values)
    why = (f"its rows at {first:,} and {last:,} tokens come to {theirs[first]:.0f} and {theirs[last]:.1f} KB per "
           f"token, a ratio of {real:.2f}: it divides the first by twice its tokens")  # fmt: skip
    return Finding(values, contradiction=why, apart=claim["value"] / real)


@finder
def constant(study: Study, claim: dict, document: str) -> Finding:
    """The spread of memory per token over lengths."""
    theirs, own = [x["kb_per_token"] for x in published(document)["rows"]], _per_token(study, document)
    values = {f"over {len(own)} lengths": max(own.values()) / min(own.values())} if len(own) > 1 else {}
    low, high = min(theirs), max(theirs)
    if high / low <= claim["high"]:
        return Finding(values, "spread")
    return Finding(values, "spread", contradiction=f"its own figures are {low:g} to {high:g} KB", apart=high / low)


@finder
def holds_at_most(study: Study, claim: dict, document: str) -> Finding:
    held = peaks(study, OF[document]).get((claim["seq_len"], 2))
    if not held:
        return Finding(missing=f"{claim['seq_len']:,} tokens on two ranks")
    why = f"{100 * held / 1e9 / claim['high']:.0f} % of the limit, inputs and results included"
    return Finding({"": held / 1e9}, ours=f"{size(held)} on each rank", why=why)


def _scores(document: str, seq_len: int) -> int:
    """Bytes of the scores of all heads in fp32."""
    return published(document)["shape"]["heads"] * seq_len**2 * 4


@finder
def score_matrix(study: Study, claim: dict, document: str) -> Finding:
    real, dtype = _scores(document, claim["seq_len"]) / 2**30, published(document)["shape"]["dtype"]
    if abs(real / claim["gb"] - 1) <= 0.1:
        return Finding(holds=True, why="by arithmetic")
    return Finding(contradiction=f"in {dtype}, which it states, it is {number(real)} GiB", apart=real / claim["gb"])


@finder
def memory_saved(study: Study, claim: dict, document: str) -> Finding:
    held = peaks(study, OF[document]).get((claim["seq_len"], 2))
    if not held:
        return Finding(missing=f"{claim['seq_len']:,} tokens on two ranks")
    saved = 100 * (1 - held / _scores(document, claim["seq_len"]))
    return Finding({"": saved}, ours=f"{saved:.1f} % less than the scores of all heads in fp32")


@finder
def throughput_falls(study: Study, claim: dict, document: str) -> Finding:
    found = {n: row.tokens_per_s for (n, p), row in rows_of(study, OF[document]).items() if p == 2 and timed(row)}
    if len(found) < 2:
        return Finding(missing="two lengths on two ranks", timed=True)
    short, long = min(found), max(found)
    ours = f"{number(found[short])} tokens/s at {short:,} tokens, {number(found[long])} at {long:,}"
    return Finding(ours=ours, holds=found[short] > 2 * found[long], timed=True,
                   why="the work per token does not grow with the sequence")  # fmt: skip
