"""The claims of a document, each judged by a function of the rows; ``verdicts`` says what the words mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..measure import Ratio
from . import rows as r
from .optimization import largest_share, lent, pool_rows, switch_pairs, threshold, with_others
from .optimization import two_cards as two_cards_fit
from .study import Study, best
from .tables import number, size
from .trust import objection
from .verdicts import WORDS, Verdict, by_interval, said, undecided, untestable

__all__ = ["TESTS", "WORDS", "Verdict", "by_interval", "judge"]
PASCAL = (6, 1)
CPU_TIMES = "these are a CPU's times; only the device itself decides it"


def judge(study: Study, claims: list[dict]) -> Iterator[tuple[dict, Verdict]]:
    """(claim, verdict) in the document's order; raises KeyError for a claim whose test does not exist."""
    for claim in claims:
        yield claim, TESTS[claim["test"]](study, claim)


def _here(study: Study) -> bool:
    """The rows come from the hardware that the claim is about."""
    return study.profile.capability == PASCAL and not study.rehearsal


def _effect(study: Study, test: Callable, low: str = "float16"):
    ours = [x for x in r.document_rows(study) if test(x)]
    slow, fast = (best([x for x in ours if x.point.dtype == d]) for d in (low, "float32"))
    return study.ratio(slow, fast)


def dtype_confounded(study: Study, claim: dict) -> Verdict:
    """The two rows that the factor divides differ in dtype and in every optimisation."""
    first, second = r.published()["rows"][:2]
    dtype, optimised = _effect(study, r.is_plain), _optimised(study)
    ours = "; ".join(
        x
        for x in (
            f"fp32 alone {said(dtype)}" if dtype else "",
            f"optimizations alone {said(optimised)}" if optimised else "",
        )
        if x
    )
    if first["dtype"] != second["dtype"] and first["optimised"] != second["optimised"]:
        factor = first["ms"] / second["ms"]
        return Verdict(
            "confounded",
            ours or None,
            f"{first['ms']} / {second['ms']} = {factor:.2f} changes dtype and optimizations at once",
        )
    return by_interval(dtype, claim["low"], claim["high"], "fp32 over fp16")


def _optimised(study: Study):
    ours = [x for x in r.document_rows(study) if x.point.dtype == "float32"]
    slow, fast = (best([x for x in ours if test(x)]) for test in (r.is_plain, r.is_optimised))
    return study.ratio(slow, fast)


def dtype_alone(study: Study, claim: dict) -> Verdict:
    ratio = _effect(study, r.is_plain) or _effect(study, r.is_optimised)
    if not _here(study):
        return untestable(
            "it is about Pascal (6.1), where native fp16 runs at 1/64 of fp32; such a card tests it", said(ratio)
        )
    return by_interval(ratio, claim["low"], claim["high"], "fp32 over fp16, nothing else changed")


def dtype_first(study: Study, claim: dict) -> Verdict:
    """What fp32 alone gains beside what every optimisation together gains in fp32."""
    dtype, others = _effect(study, r.is_plain), _optimised(study)
    ours = f"fp32 alone {said(dtype)}, optimizations alone {said(others)}" if dtype and others else None
    if not _here(study):
        return untestable("it is about Pascal (6.1), where native fp16 runs at 1/64 of fp32", ours)
    if ours is None:
        return undecided("either effect alone: no pair of rows that passed")
    if dtype.low > others.high:
        return Verdict("reproduced", ours, "fp32 alone gains more")
    if dtype.high < others.low:
        return Verdict("refuted", ours, "the optimizations gain more than fp32")
    return undecided("the intervals of both effects overlap", ours)


def switch(study: Study, claim: dict) -> Verdict:
    """One switch off and on, fp32, all else equal: where the switch has work to do, with the other switches on."""
    name = claim["switch"]
    pairs = [x for x in switch_pairs(study) if x[0] == name and x[3].point.dtype == "float32" and x[5]]
    # A pool has something to lend only where branches are gathered into buffers; a cache keeps plans in either case.
    pairs.sort(key=lambda x: (x[1]["gather"] != (name == "pool"), not x[5].paired))
    ratio = pairs[0][5] if pairs else None
    if study.rehearsal:
        return untestable(CPU_TIMES, said(ratio))
    share = largest_share(study) if name == "cache" else None
    if share is not None and 1 / (1 - share) < claim["low"]:
        why = f"building takes at most {number(100 * share, 2)} % of a call, so that no cache can save more"
        return Verdict("refuted", said(ratio), why)
    where = f" ({with_others(name, pairs[0][1])})" if pairs else ""
    high = claim.get("high", float("inf"))
    return by_interval(ratio, claim["low"], high, f"time without the {name} over time with it{where}")


def best_threshold(study: Study, claim: dict) -> Verdict:
    """The published threshold against the others that were measured, at the longest length that has them."""
    swept = [pairs for off, pairs in pool_rows(study) if off.point.batch > 1 and len(pairs) > 1]
    by_size = {threshold(on.point): on for on, _ in max(swept, key=lambda x: x[0][0].point.seq_len, default=[])}
    mine = by_size.pop(claim["threshold_mb"], None)
    gains = {mb: study.ratio(row, mine) for mb, row in sorted(by_size.items())}
    gains = {mb: x for mb, x in gains.items() if x}
    if not gains:
        return undecided("it and another threshold were not both timed in one call")
    ours = ", ".join(f"{mb:g} MB takes {said(x)} as long" for mb, x in gains.items())
    if study.rehearsal:
        return untestable(CPU_TIMES, ours)
    if any(x.significantly_faster for x in gains.values()):
        return Verdict("refuted", ours, "another threshold is faster")
    if all(x.significantly_slower for x in gains.values()):
        return Verdict("reproduced", ours, "every other threshold measured is slower")
    return undecided("not every threshold can be told apart from it", ours)


def pool_by_length(study: Study, claim: dict) -> Verdict:
    """A pool that lends a buffer at two lengths, against none."""
    found: dict[int, object] = {}
    for off, pairs in pool_rows(study):
        for on, ratio in pairs:
            if ratio and off.point.batch > 1 and lent(on.point, threshold(on.point)).served:
                found.setdefault(off.point.seq_len, ratio)
    if len(found) < 2:
        ours = said(next(iter(found.values()), None))
        return undecided("a pool that lends something was timed at fewer than two lengths", ours)
    short, long = found[min(found)], found[max(found)]
    ours = f"{said(short)} at {min(found):,}, {said(long)} at {max(found):,} tokens"
    if study.rehearsal:
        return untestable(CPU_TIMES, ours)
    if long.significantly_slower and long.low > short.high:
        return Verdict("reproduced", ours, "it gains more at the longer length")
    if long.significantly_faster or long.high < short.low:
        return Verdict("refuted", ours, "it does not gain more at the longer length")
    return undecided("the intervals at both lengths overlap", ours)


def xformers(study: Study, claim: dict) -> Verdict:
    if not _here(study):
        why = "torch's own efficient kernel is xformers' only path there, so a ratio of 1"
        return untestable(f"it is about Pascal (6.1); {why}")
    theirs, own = (
        [x for x in study.good if r.switches(x.point)["backend"] == name and x.seconds]
        for name in ("xformers", "efficient")
    )
    if not theirs or not own:
        return undecided("xformers and torch's efficient kernel were not both timed")
    ratio = study.ratio(own[0], theirs[0])
    return by_interval(ratio, claim["low"], float("inf"), "torch's efficient kernel over xformers")


def flash_from_turing(study: Study, claim: dict) -> Verdict:
    if study.profile.capability is None or not (7, 5) <= study.profile.capability < (8, 0) or study.rehearsal:
        return untestable("only a Turing card (7.5) decides it; the flash kernels themselves ask for 8.0 or newer")
    rows = [x for x in study.good if "flash" in str(r.switches(x.point).get("backend"))]
    if rows:
        return Verdict("reproduced", r.label(rows[0]), "a flash kernel passed its check on this Turing card")
    asked = [x.status for x in study.results if "flash" in str(r.switches(x.point).get("backend"))]
    if not asked:
        return undecided("no flash kernel was asked for by its name")
    if set(asked) != {"unsupported"}:
        return undecided("a flash kernel that was not refused failed for another reason")
    return Verdict("refuted", None, "every flash kernel was refused on this Turing card")


def flash_row(study: Study, claim: dict) -> Verdict:
    if not _here(study):
        return untestable("it is about Pascal (6.1), for which no flash kernel is built; such a card tests it")
    ours = r.document_rows(study)
    for dtype in ("float16", "bfloat16", "float32"):
        original = best([x for x in ours if r.is_plain(x) and x.point.dtype == dtype])
        flash = best([x for x in ours if x.point.system.endswith("V2Flash") and x.point.dtype == dtype])
        if ratio := study.ratio(original, flash):
            return by_interval(ratio, claim["low"], claim["high"], f"original over V2Flash, both {r.SHORT[dtype]}")
    return undecided("no V2Flash row passed beside the original in one dtype")


def flash_dtype(study: Study, claim: dict) -> Verdict:
    from ringlab import hardware
    from ringlab.compat import RingDilatedAttentionV2Flash

    p = r.pattern()
    device = "cuda" if study.device_type == "cuda" and torch.cuda.is_available() else "cpu"
    module = RingDilatedAttentionV2Flash(list(p.segment_lengths), list(p.dilation_rates), device=device)
    chosen, policy = (
        str(module.dtype).removeprefix("torch."),
        str(hardware.default_dtype(None if device == "cpu" else study.profile.capability)),
    )
    if chosen == "float16" and policy != "torch.float16":
        return Verdict("reproduced", chosen, f"the policy says {policy.removeprefix('torch.')}")
    return undecided("the original's class does not run here; the one of its name follows the hardware policy", chosen)


def throughput(study: Study, claim: dict) -> Verdict:
    """Arithmetic on the printed rows: tokens over time, within the rounding of the printed time."""
    n = r.published()["shape"]["seq_len"]
    for row in r.published()["rows"]:
        low, high = (n / ((row["ms"] + d) / 1e3) for d in (0.005, -0.005))
        if not low - 1 <= row["tokens_per_s"] <= high + 1:
            return Verdict("inconsistent as printed", None, f"{n} / {row['ms']} ms is not {row['tokens_per_s']:,}")
    done, needed = (r.published()["work"][k] for k in ("done_gflop", "needed_gflop"))
    source = f"by the original's source each call did {done} of the {needed} GFLOP of the stated function"
    fastest = r.fastest_row(study)
    ours = f"{number(fastest.tokens_per_s)} tokens/s at best" if fastest else None
    if not _here(study):
        return untestable(f"the divisions are right, but the times are a GTX 1080's, and {source}", ours)
    row = best([x for x in r.document_rows(study) if r.is_optimised(x) and x.point.dtype == "float32"])
    if row is None or objection(row) or not row.ci:
        return undecided("the optimised fp32 row did not pass", ours)
    printed = next(x for x in r.published()["rows"] if x["key"] == "optimised")["ms"] / 1e3
    found = Ratio(row.median / printed, row.ci[0] / printed, row.ci[1] / printed, len(row.seconds), False)
    return by_interval(found, claim["low"], claim["high"], f"our time over the printed one, fp32; {source};")


def two_cards(study: Study, claim: dict) -> Verdict:
    fit = two_cards_fit(claim["tokens"])
    several = [x for x in study.good if x.point.world_size == 2]
    ours = f"{size(fit.original_bytes)} needed by the original a card, {size(fit.ours_bytes)} by this library"
    if several:
        return Verdict("refuted", ours, "it ran on two ranks")
    expected = (
        "the original's buffers exceed a card, this library's fit"
        if fit.ours_fits and not fit.original_fits
        else "computed only"
    )
    return untestable(f"computed, not run: {expected}; two ranks would test it", ours)


TESTS: dict[str, Callable[[Study, dict], Verdict]] = {
    f.__name__: f
    for f in (
        dtype_confounded, dtype_alone, dtype_first, switch, best_threshold, pool_by_length, xformers,
        flash_from_turing, flash_row, flash_dtype, throughput, two_cards,
    )
}  # fmt: skip
