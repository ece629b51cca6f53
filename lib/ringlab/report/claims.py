"""The claims of a document, each judged by a function of the rows; the words are few and mean the same everywhere.

reproduced                    our interval lies in the tolerance that was set beforehand
refuted                       it lies outside
inconsistent as printed       the document's own numbers disagree
confounded                    the document changed several things at once
not testable on this profile  the rows that would decide it are missing here, and the reason says which
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from . import rows as r
from .computed import two_cards as two_cards_fit
from .study import Study
from .tables import number, size

WORDS = {
    "reproduced": "reproduced",
    "refuted": "refuted",
    "inconsistent as printed": "inconsistent",
    "confounded": "confounded",
    "not testable on this profile": "untestable",
}
PASCAL = (6, 1)


@dataclass(frozen=True)
class Verdict:
    """A word of ``WORDS``, what we have measured, and why the one follows from the other."""

    word: str
    ours: str | None
    why: str

    @property
    def kind(self) -> str:
        return WORDS[self.word]


def judge(study: Study, claims: list[dict]) -> Iterator[tuple[dict, Verdict]]:
    """(claim, verdict) in the document's order; raises KeyError for a claim whose test does not exist."""
    for claim in claims:
        yield claim, TESTS[claim["test"]](study, claim)


def untestable(why: str, ours: str | None = None) -> Verdict:
    return Verdict("not testable on this profile", ours, why)


def said(ratio) -> str | None:
    return None if ratio is None else f"{number(ratio.value)}× ({number(ratio.low)} to {number(ratio.high)})"


def by_interval(ratio, low: float, high: float, what: str) -> Verdict:
    """Compare an interval with a tolerance: inside, outside, or too wide to say."""
    if ratio is None:
        return untestable(f"{what}: no pair of rows that passed")
    if low <= ratio.low and ratio.high <= high:
        return Verdict("reproduced", said(ratio), f"{what} lies within {_range(low, high)}")
    if ratio.high < low or ratio.low > high:
        return Verdict("refuted", said(ratio), f"{what} lies outside {_range(low, high)}")
    return untestable(
        f"{what} is not known well enough: its interval crosses the edge of {_range(low, high)}", said(ratio)
    )


def _range(low: float, high: float) -> str:
    return f"above {low:g}" if high == float("inf") else f"{low:g} to {high:g}"


def _here(study: Study) -> bool:
    """The rows come from the hardware that the claim is about."""
    return study.profile.capability == PASCAL and not study.rehearsal


def _effect(study: Study, test: Callable, low: str = "float16"):
    ours = [x for x in r.document_rows(study) if test(x)]
    slow, fast = (r.best([x for x in ours if x.point.dtype == d]) for d in (low, "float32"))
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
    slow, fast = (r.best([x for x in ours if test(x)]) for test in (r.is_plain, r.is_optimised))
    return study.ratio(slow, fast)


def dtype_alone(study: Study, claim: dict) -> Verdict:
    ratio = _effect(study, r.is_plain) or _effect(study, r.is_optimised)
    if not _here(study):
        return untestable(
            "it is about Pascal (6.1), where native fp16 runs at 1/64 of fp32; GPU=gtx1080 tests it", said(ratio)
        )
    return by_interval(ratio, claim["low"], claim["high"], "fp32 over fp16, nothing else changed")


def switch(study: Study, claim: dict) -> Verdict:
    """One switch off and on, fp32, all else equal; the pair with the other switches on where there is one."""
    pairs = [x for x in r.switch_pairs(study) if x[0] == claim["switch"] and x[3].point.dtype == "float32" and x[5]]
    pairs.sort(key=lambda x: (x[1]["gather"], not x[5].paired))
    ratio = pairs[0][5] if pairs else None
    return by_interval(
        ratio, claim["low"], claim.get("high", float("inf")), f"time without the {claim['switch']} over time with it"
    )


def pool_by_length(study: Study, claim: dict) -> Verdict:
    rows = study.rows(system="ringlab", dtype="float32")
    found: dict[int, object] = {}
    for off in rows:
        for on in rows:
            same = {**r.switches(off.point), "pool": True} == r.switches(on.point) and not r.switches(off.point)["pool"]
            if (
                same
                and (off.run, off.composition) == (on.run, on.composition)
                and off.point.but(options=()) == on.point.but(options=())
            ):
                ratio = study.ratio(off, on)
                if ratio:
                    found[off.point.seq_len] = ratio
    if len(found) < 2:
        return untestable("the pool was switched at one length only", said(next(iter(found.values()), None)))
    short, long = found[min(found)], found[max(found)]
    ours = f"{said(short)} at {min(found):,}, {said(long)} at {max(found):,} tokens"
    if long.low > max(1.0, short.high):
        return Verdict("reproduced", ours, "it gains more at the longer length")
    if long.high < 1.0 or long.high < short.low:
        return Verdict("refuted", ours, "it does not gain more at the longer length")
    return untestable("the intervals at both lengths overlap", ours)


def xformers(study: Study, claim: dict) -> Verdict:
    rows = [x for x in study.good if r.switches(x.point).get("backend") == "xformers" and x.seconds]
    torch_rows = [x for x in study.good if r.switches(x.point).get("backend") == "efficient" and x.seconds]
    if not rows or not torch_rows or not _here(study):
        return untestable(
            "xformers has no kernel for a CPU; on Pascal its only path is torch's own efficient kernel, so 1.00 is "
            "expected"
        )
    return by_interval(
        study.ratio(torch_rows[0], rows[0]), 1.02, float("inf"), "torch's efficient kernel over xformers"
    )


def flash_from_turing(study: Study, claim: dict) -> Verdict:
    if study.profile.capability is None or not (7, 5) <= study.profile.capability < (8, 0) or study.rehearsal:
        return untestable("only a Turing card (7.5) decides it; the flash kernels themselves ask for 8.0 or newer")
    rows = [x for x in study.good if "flash" in str(r.switches(x.point).get("backend"))]
    if rows:
        return Verdict("reproduced", r.label(rows[0]), "a flash kernel passed its check on this Turing card")
    return Verdict("refuted", None, "every flash kernel was refused on this Turing card")


def flash_row(study: Study, claim: dict) -> Verdict:
    if study.rehearsal:
        return untestable("these are a CPU's times; only the device itself decides it")
    ours = r.document_rows(study)
    for dtype in ("float16", "bfloat16", "float32"):
        original = r.best([x for x in ours if r.is_plain(x) and x.point.dtype == dtype])
        flash = r.best([x for x in ours if x.point.system.endswith("V2Flash") and x.point.dtype == dtype])
        if ratio := study.ratio(original, flash):
            return by_interval(ratio, claim["low"], claim["high"], f"original over V2Flash, both {r.SHORT[dtype]}")
    return untestable("no V2Flash row passed beside the original in one dtype")


def flash_dtype(study: Study, claim: dict) -> Verdict:
    from .. import hardware
    from ..variants import RingDilatedAttentionV2Flash

    p = r.pattern()
    device = "cuda" if study.device_type == "cuda" and torch.cuda.is_available() else "cpu"
    module = RingDilatedAttentionV2Flash(list(p.segment_lengths), list(p.dilation_rates), device=device)
    chosen, policy = (
        str(module.dtype).removeprefix("torch."),
        str(hardware.default_dtype(None if device == "cpu" else study.profile.capability)),
    )
    if chosen == "float16" and policy != "torch.float16":
        return Verdict("reproduced", chosen, f"the policy says {policy.removeprefix('torch.')}")
    return untestable("it is about the original's class; the one of that name here follows the hardware policy", chosen)


def throughput(study: Study, claim: dict) -> Verdict:
    """Arithmetic on the printed rows: tokens over time, within the rounding of the printed time."""
    n = r.published()["shape"]["seq_len"]
    for row in r.published()["rows"]:
        low, high = (n / ((row["ms"] + d) / 1e3) for d in (0.005, -0.005))
        if not low - 1 <= row["tokens_per_s"] <= high + 1:
            return Verdict("inconsistent as printed", None, f"{n} / {row['ms']} ms is not {row['tokens_per_s']:,}")
    fastest = r.fastest_row(study)
    ours = f"{number(fastest.tokens_per_s)} tokens/s at best" if fastest else None
    work = r.published()["work"]
    if work["done_gflop"] < work["needed_gflop"]:
        return untestable(
            f"the division is right, but by the original's source each call did {work['done_gflop']} of the "
            f"{work['needed_gflop']} GFLOP of the stated function", ours,
        )  # fmt: skip
    return Verdict("reproduced", ours, "each is 8,192 over its time, within rounding")


def two_cards(study: Study, claim: dict) -> Verdict:
    fit = two_cards_fit()
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
        dtype_confounded, dtype_alone, switch, pool_by_length, xformers, flash_from_turing, flash_row, flash_dtype,
        throughput, two_cards,
    )
}  # fmt: skip
