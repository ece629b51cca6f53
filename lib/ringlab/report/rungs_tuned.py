"""The tile sizes that ``ringlab tune`` timed for the list kernels, each way of reading beside the others."""

from __future__ import annotations

import json

import torch

from ..cost import count
from ..patterns import from_dict
from .rung_rows import data
from .study import Study
from .tables import Cell, Table, number

FILE = "tuned.json"  # beside the rows; `python -m ringlab tune` writes it
WAYS = {
    "pointers": "pointers", "descriptors": "tensor descriptors", "specialized": "descriptors, warps that read",
    "gluon": "Gluon, a program for each tile", "persistent": "Gluon, programs that stay",
}  # fmt: skip


def tuned(study: Study) -> Table | None:
    """Every candidate by use, the fastest first, then those that were refused; None where nothing was tuned."""
    try:
        found = json.loads((study.folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    shape, about = found["shape"], found["about"]
    lines = []
    for use in dict.fromkeys(one["use"] for one in found["timed"]):
        tried = [one for one in found["timed"] if one["use"] == use]
        default = next((one["seconds"] for one in tried if one["default"]), None)
        for one in sorted(tried, key=lambda x: (x["seconds"] is None, x["seconds"])):
            lines.append(_line(study, one, default, shape))
    return study.table(
        f"Candidates for the tile lists: {from_dict(shape['pattern'])}, {shape['seq_len']:,} tokens, "
        f"{shape['heads']} heads",
        ["Pass", "Reads", "Tile, warps, stages", ">Time (ms)", ">Predicted (TFLOP/s)", ">Useful TFLOP/s",
         ">Default over it", "Outcome"],
        lines,
        note=f"{about['device']}, torch {about['torch']}, triton {about['triton']}, commit {about['commit'][:12]}"
        f"{' and changes' * (about['dirty'] is True)}. Medians of one candidate after another, so small differences "
        "tell nothing. Each result was held against that of the defaults on the same tensors, those against float64. "
        "The rate is of a forward pass, branch by branch.",
    )  # fmt: skip


def _line(study: Study, one: dict, default: float | None, shape: dict) -> list:
    seconds, size = one["seconds"], one["size"]
    tile = f"{size['rows']} × {size['cols']}, {size['warps']}, {size['stages']}"
    said = ", ".join(["kept"] * one["kept"] + ["the default"] * one["default"]) or None
    rate = foreseen = None
    if one["name"] == "forward" and study.profile.name == data()["profile"]:
        ways = data()["reads"].get(size["reads"], {}).get(str(one["head_dim"]), {})
        foreseen = ways.get("causal" if one["causal"] else "forward")
    if seconds and one["name"] == "forward" and not one["joins"]:
        asked = {name: shape[name] for name in ("batch", "seq_len", "heads", "kv_heads")}
        dtype = getattr(torch, one["dtype"])
        work = count(from_dict(shape["pattern"]), head_dim=one["head_dim"], dtype=dtype, causal=one["causal"], **asked)
        rate = number(work.flops / seconds / 1e12)
    return [
        one["use"], WAYS[size["reads"]], tile,
        number(1e3 * seconds) if seconds else Cell("refused", kind="bad"),
        " to ".join(map(number, foreseen)) if foreseen else None, rate,
        f"{number(default / seconds)}×" if seconds and default else None, one["why"] or said,
    ]  # fmt: skip
