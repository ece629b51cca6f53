"""What arithmetic says of a device that nobody has at hand: floors, lower bounds, what fits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import cost, hardware, patterns
from .rows import pattern, published, shape
from .study import Study
from .tables import Cell, Table, Text, number, size

CARD = 8 * 2**30  # bytes of the card in document 000
SCORES_LIVE = 3  # score tensors that the original held at once, by its own analysis of the failure
OVERHEAD = 1.15  # our peak over q, k, v and out: what the engine is held to


@dataclass(frozen=True)
class TwoCards:
    """16K tokens on two cards, bytes a card: the original's score tensors, and ours."""

    original_bytes: int
    ours_bytes: float
    card_bytes: int = CARD

    @property
    def original_fits(self) -> bool:
        return self.original_bytes < self.card_bytes

    @property
    def ours_fits(self) -> bool:
        return self.ours_bytes < self.card_bytes


def two_cards(seq_len: int = 16384, heads: int = 8, head_dim: int = 64, dtype=torch.float32) -> TwoCards:
    """The document's failed run: every query against half of the keys, whole score tensors in fp32, three alive.

    Ours holds a shard of q, k, v and out; segments of 2048 and 4096 fit a shard of 8192, so that nothing is received.

    >>> fit = two_cards()
    >>> fit.original_bytes // 2**30, fit.original_fits, fit.ours_fits
    (12, False, True)
    """
    shard = seq_len // 2
    scores = heads * seq_len * shard * 4
    return TwoCards(SCORES_LIVE * scores, OVERHEAD * 4 * shard * heads * head_dim * dtype.itemsize)


def gpu_of(study: Study):
    """The GPU that computed figures are for: the profile's own, or the document's where the profile has none."""
    if study.profile.kind == "cuda" and study.profile.capability is not None:
        return study.profile
    return hardware.get_profile(published()["profile"])


def computed(study: Study) -> Table:
    """What arithmetic alone says of the document's call on a GPU that was not at hand."""
    return computed_table(gpu_of(study), shape(), pattern())


def two_cards_table(study: Study) -> Table:
    """Whether the document's failed run, 16K tokens on two 8 GB cards, fits."""
    return fit_table()


def policy(study: Study) -> Text:
    """The dtype that the profile's policy chooses and why, and the torch build that drives it."""
    gpu = gpu_of(study)
    lines = [f"**{gpu.title}**: {gpu.dtype_reason()}."]
    lines.append(f"The torch that drives it: `{hardware.install_line(gpu.capability)}`")
    if study.profile.kind == "cpu":
        lines.insert(0, f"**{study.device}**: {study.profile.dtype_reason()}.")
    return study.text(*lines)


def bounds(profile, shape: dict, pattern, dtypes=("float32", "float16", "bfloat16")) -> list[tuple]:
    """(dtype, pattern, Cost, lower bound in s or None) of the document's call and of dense attention on a profile."""
    fields = {k: shape[k] for k in ("batch", "seq_len", "heads", "head_dim", "causal", "passes")}
    found = []
    for name in dtypes:
        dtype = getattr(torch, name)
        for p in (pattern, patterns.Dense()):
            work = cost.count(p, dtype=dtype, **fields)
            rate, bandwidth = profile.peak(dtype), profile.bandwidth_bytes_per_s
            found.append((name, p, work, work.seconds(rate, bandwidth) if rate and bandwidth else None))
    return found


def computed_table(profile, shape: dict, pattern) -> Table:
    """The document's call on ``profile`` by its peak rates, none of it measured."""
    rows = [
        [
            "dense" if isinstance(p, patterns.Dense) else "dilated", name,
            number(work.flops / 1e9), size(work.floor_bytes),
            number(seconds * 1e3) if seconds else None, profile.peak_reason(name),
        ]
        for name, p, work, seconds in bounds(profile, shape, pattern)
    ]  # fmt: skip
    return Table(
        f"Computed for {profile.title}: {shape['seq_len']:,} tokens, forward",
        ["Pattern", "dtype", ">GFLOP", ">Floor", ">Lower bound (ms)", "Rate used"],
        rows,
        note="Floor: q, k, v and out once. Lower bound: the larger of work over peak rate and floor over bandwidth"
        + (f" ({number(profile.bandwidth_bytes_per_s / 1e9)} GB/s)." if profile.bandwidth_bytes_per_s else "."),
    )


def fit_table(seq_len: int = 16384) -> Table:
    """Whether the document's failed run fits: 16K tokens on two cards of 8 GB."""
    fit = two_cards(seq_len)

    def verdict(fits):
        return Cell("fits" if fits else "does not fit", kind="good" if fits else "bad")

    one = fit.original_bytes // SCORES_LIVE
    rows = [
        ["The original", f"{SCORES_LIVE} score tensors of 8 × {seq_len} × {seq_len // 2} × 4 B = {size(one)}",
         size(fit.original_bytes), size(fit.card_bytes), verdict(fit.original_fits)],
        ["This library", f"{OVERHEAD} × a shard of q, k, v and out, {seq_len // 2:,} tokens each, fp32",
         size(fit.ours_bytes), size(fit.card_bytes), verdict(fit.ours_fits)],
    ]  # fmt: skip
    return Table(
        f"Computed: {seq_len:,} tokens on two cards of {size(CARD)}",
        ["System", "What it holds", ">Needs a card", ">Card has", "Verdict"],
        rows,
        note="Not run on two cards. Segments of 2,048 and 4,096 tokens lie within a shard of 8,192, so that no keys "
        "are received.",
    )
