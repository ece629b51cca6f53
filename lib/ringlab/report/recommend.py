"""A configuration to use: every choice from rows that passed, each with the rows that it rests on."""

from __future__ import annotations

from .rows import (
    DEFAULTS,
    FULL,
    SHORT,
    document_rows,
    dtypes,
    hardware_dtype,
    is_optimised,
    label,
    pattern,
    shape,
    switches,
)
from .study import Study, best
from .switches import NAMES, switch_pairs, with_others
from .tables import Code, number
from .trust import objection


def recommended(study: Study) -> Code:
    """A block that runs as it stands, on this profile's device or, where that is absent, on a CPU."""
    s, p = shape(), pattern()
    dtype, evidence = chosen_dtype(study)
    on, said = chosen_switches(study, dtype)
    stamp = f"{study.stamp}, the times are a CPU's; " if study.stamp else ""
    comments = [f"{stamp}{study.profile.title}: {study.profile.dtype_reason()}", *evidence, *said]
    device = '"cuda" if torch.cuda.is_available() else "cpu"' if study.profile.kind == "cuda" else '"cpu"'
    return Code(
        "".join(f"# {line}\n" for line in comments) + "import torch\n"
        "import ringlab\n\n"
        f"device = {device}\n"
        f"pattern = ringlab.Dilated({list(p.segment_lengths)}, {list(p.dilation_rates)}, mixing={p.mixing!r}, "
        f"offsets={p.offsets!r})\n"
        f"q, k, v = torch.randn(3, {s['batch']}, {s['seq_len']}, {s['heads']}, {s['head_dim']}, dtype=torch.{dtype}, "
        "device=device)\n"
        f"execution = ringlab.Execution(gather={on['gather']}, cache={on['cache']}, pool={on['pool']})\n"
        f'out = ringlab.attention(q, k, v, pattern, backend="{on["backend"]}", execution=execution)\n'
    )


def chosen_dtype(study: Study) -> tuple[str, list[str]]:
    """The profile's policy, or another dtype that was faster beyond its interval; and the times that say so."""
    policy = hardware_dtype(study)
    ours = [r for r in filter(is_optimised, document_rows(study)) if not objection(r) and r.median]
    rows = {d: best([r for r in ours if r.point.dtype == d]) for d in dtypes(ours)}
    if not rows:
        return policy, ["dtype: the hardware's policy, for no row of this function passed"]
    timed = sorted(rows.values(), key=lambda r: r.median)
    said = ", ".join(f"{SHORT[r.point.dtype]} {number(r.median * 1e3)} ms" for r in timed)
    line = f"dtype: {label(timed[0])}, {shape()['seq_len']:,} tokens: {said}"
    if policy not in rows:
        return policy, [f"{line}; {SHORT[policy]} by the policy, though no row of it passed"]
    if study.rehearsal:
        return policy, [f"{line}; {SHORT[policy]} by the policy"]
    ratio = study.ratio(rows[policy], timed[0])
    if timed[0] is rows[policy] or not ratio.significantly_slower:
        return policy, [f"{line}; {SHORT[policy]} by the policy"]
    return timed[0].point.dtype, [f"{line}; faster than the policy's choice"]


def chosen_switches(study: Study, dtype: str) -> tuple[dict, list[str]]:
    """Each switch as its pair says; the library's default where neither side is faster or a CPU stands in for a GPU."""
    chosen, said = dict(DEFAULTS), []
    for name in NAMES:
        found = [x for x in switch_pairs(study) if x[0] == name and x[2] == FULL and x[5] is not None]
        if not found:
            said.append(f"{NAMES[name]}: no pair of rows passed, so the default")
            continue
        _, one, _, off, on, ratio = min(found, key=lambda x: x[3].point.dtype != dtype)
        word = "within noise, so the default"
        if ratio.significantly_slower or ratio.significantly_faster:
            word = "faster" if ratio.significantly_slower else "slower"
            if not study.rehearsal:
                chosen[name] = switches((on if ratio.significantly_slower else off).point)[name]
        said.append(
            f"{NAMES[name]} ({with_others(name, one)}, {SHORT[on.point.dtype]}): {number(off.median * 1e3)} to "
            f"{number(on.median * 1e3)} ms, {number(ratio.value)} times ({number(ratio.low)} to {number(ratio.high)}): "
            f"{word}"
        )
    return chosen, said
