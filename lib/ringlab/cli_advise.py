"""``python -m ringlab advise``: its options, and an advice as text, table or code."""

from __future__ import annotations

import argparse

from . import hardware
from .advise import advise
from .cli_estimate import size_in_bytes
from .cost import PASSES

NUMBERS = {
    "--seq-len": (None, "tokens of the whole sequence"), "--ranks": (1, "GPUs or processes that share it"),
    "--batch": (1, "sequences at a time"), "--heads": (8, "query heads"),
    "--kv-heads": (None, "K/V heads (default: as many as heads)"), "--head-dim": (64, "size of a head"),
    "--layers": (1, "layers that keep their tensors from forward to backward"),
}  # fmt: skip
SHOWN = ("text", "table", "code")


def add_options(one: argparse.ArgumentParser) -> None:
    """The options of the command; ``--profile`` is there already."""
    add = one.add_argument
    for name, (default, about) in NUMBERS.items():
        about += "" if default is None else f" (default: {default})"
        add(name, type=int, default=default, metavar="N", help=about, required=name == "--seq-len")
    add("--causal", action="store_true", help="hide what comes after (default: no)")
    add("--passes", default="fwd+bwd", choices=list(PASSES), help="(default: fwd+bwd)")
    add("--pattern", default="auto", help="auto, dense, ladder or local (default: auto)")
    add("--memory", type=size_in_bytes, metavar="SIZE", help="of a rank, as 8GiB (default: the profile's)")
    add("--seconds", type=float, metavar="S", help="what a call may take at its bound (default: any)")
    add("--show", choices=SHOWN, help="text, Markdown table or code alone (default: text and code)")


def run(given: argparse.Namespace) -> str:
    """What the command prints; raises ValueError, in one line, for what cannot be."""
    from .report.evidence import stored  # after the options are known to be right: it reads all rows

    machine = hardware.detect()
    profile = hardware.resolve(given.profile, machine).on(machine)
    asked = ("ranks", "batch", "heads", "kv_heads", "head_dim", "layers", "causal", "passes", "pattern", "seconds")
    advice = advise(profile, given.seq_len, memory_bytes=given.memory, rows=stored(profile),
                    **{name: getattr(given, name) for name in asked})  # fmt: skip
    return getattr(advice, given.show)() if given.show else f"{advice.text()}\n\n{advice.code()}"
