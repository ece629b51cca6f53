"""Small causal language models that differ in their attention alone, and the loop that
trains them.

A ``Run`` names a task, a pattern and a seed; its seed gives the initial weights and all
tokens, so runs of one seed differ in nothing but the pattern. Every task begins with
sequences so short that every pattern shows all of them, and doubles or quadruples their
length in ``phases``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..adaptive import Adaptive
from ..block_patterns import (
    bigbird,
    block_count,
    hierarchical,
    local_global,
    sliding_window,
)
from ..nn import LanguageModel, average_gradients, mean_loss, shard_sequence
from ..patterns import Dense, Dilated
from ..ring.group import Group
from .tasks import TASKS, Batch, pairs

CHECKPOINT_S = 10.0
WARM_STEPS, LAST_RATE = (
    20,
    0.1,
)  # steps until the learning rate is full; its part at the end
EVALUATIONS = {"text": 4}  # of held-out sequences in each phase, else one, at its end


@dataclass(frozen=True)
class Sizes:
    """Sizes of the models and of their training. ``phases``: (seq, batch, steps) by
    task; ``blocks``: block size.

    ``held_out``: tokens of an evaluation; at the end of a phase there are four times as
    many.
    """

    dim: int
    heads: int
    layers: int
    rate: float
    held_out: int
    blocks: dict[str, int]
    phases: dict[str, tuple[tuple[int, int, int], ...]]


_SHORT = ((32, 64, 120), (64, 32, 80), (128, 16, 80), (256, 8, 80))
_LONG = ((128, 64, 500), (256, 64, 300), (512, 32, 300), (1024, 16, 300))
SIZES = {
    "cpu": Sizes(
        48,
        4,
        4,
        1e-2,
        16384,
        {"text": 32, "recall": 16, "copy": 16, "lists": 16},
        {
            "text": (
                (64, 64, 150),
                (256, 16, 100),
                (1024, 8, 100),
                (4096, 2, 120),
                (16384, 1, 8),
            ),
            "recall": (*_SHORT, (512, 8, 100)),
            "copy": (*_SHORT, (512, 8, 140)),
            "lists": (*_SHORT, (512, 8, 100)),
        },
    ),
    "cuda": Sizes(  # never run yet
        256,
        8,
        4,
        3e-3,
        65536,
        {"text": 128, "recall": 64, "copy": 64, "lists": 64},
        {
            "text": (
                (256, 64, 500),
                (1024, 32, 500),
                (4096, 16, 2000),
                (16384, 4, 500),
            ),
            "recall": (*_LONG, (4096, 8, 600)),
            "copy": (*_LONG, (4096, 8, 600)),
            "lists": (*_LONG, (4096, 8, 600)),
        },
    ),
}


def patterns(block: int, n: int, layers: int = 4) -> dict[str, list]:
    """The attention of each layer by the name that readers see, for blocks of ``block``
    positions and ``n`` tokens.

    Every sparse pattern shows a query about 2.5 blocks of keys. All see all of a
    sequence of two blocks.

    >>> {name: str(found[0]) for name, found in patterns(16, 512).items()}["LongNet"]
    'dilated [64, 256, 1024] / [1, 4, 16]'
    """
    rates = [
        4**i for i in range(12) if i == 0 or block * 4**i < n
    ]  # the last segment holds the whole sequence
    window, ladder = (
        sliding_window(2, block_size=block),
        Dilated([4 * block * r for r in rates], rates),
    )
    alike = {
        "Dense": Dense(),
        "Window": window,
        "LongNet": ladder,
        "Local and global": local_global(1, 1, block_size=block),
        "BigBird": bigbird(1, 1, 1, block_size=block),
        "Hierarchical": hierarchical([(1, 1), (8, 16)], block_size=block),
        "Adaptive": Adaptive(block, min(3, block_count(n, block))),
    }
    mixed = {
        "Window, first layer dense": lambda i: window if i % 4 else Dense(),
        "Window, last layer dense": lambda i: window if (i + 1) % 4 else Dense(),
        "LongNet and window": lambda i: window if i % 2 else ladder,
    }
    found = {name: [pattern] * layers for name, pattern in alike.items()}
    return found | {
        name: [layer(i) for i in range(layers)] for name, layer in mixed.items()
    }


@dataclass(frozen=True)
class Run:
    """One training: a task, a pattern and a seed on a kind of device, which decides the
    ``sizes``.
    """

    task: str
    pattern: str
    seed: int
    sizes: Sizes

    @property
    def definition(self) -> dict:
        sizes = asdict(self.sizes) | {"phases": self.phases, "blocks": self.block}
        return {
            "task": self.task,
            "pattern": self.pattern,
            "seed": self.seed,
            "sizes": sizes,
        }

    @property
    def id(self) -> str:
        return hashlib.sha256(
            json.dumps(self.definition, sort_keys=True).encode()
        ).hexdigest()[:12]

    @property
    def phases(self) -> tuple[tuple[int, int, int], ...]:
        return self.sizes.phases[self.task]

    @property
    def block(self) -> int:
        return self.sizes.blocks[self.task]

    def layers(self, n: int) -> list:
        """The pattern of each layer for sequences of ``n`` tokens."""
        return patterns(self.block, n, self.sizes.layers)[self.pattern]

    def steps(self) -> Iterator[tuple[int, int, int]]:
        """(seq, batch, how many steps of its phase are left after it) of every step."""
        return (
            (seq, batch, count - 1 - i)
            for seq, batch, count in self.phases
            for i in range(count)
        )


class PairEmbedding(nn.Embedding):
    """The embedding of each token and, through a matrix, of the one before it: (b, n,
    2) to (b, n, dim).

    Models of this size learn to recall in minutes instead of hours where a layer need
    not copy the token before.
    """

    def __init__(self, vocabulary: int, dim: int, **made):
        super().__init__(vocabulary, dim, **made)
        self.before = nn.Linear(dim, dim, bias=False, **made)

    def forward(self, tokens: Tensor) -> Tensor:
        here, before = (F.embedding(t, self.weight) for t in tokens.unbind(2))
        return here + self.before(before)


def build(run: Run, device: torch.device | str = "cpu", group=None) -> LanguageModel:
    """The model of a run with its initial weights, which its seed draws on the CPU: the
    same for every pattern.
    """
    sizes, vocabulary = run.sizes, TASKS[run.task].vocabulary
    torch.manual_seed(run.seed)
    model = LanguageModel(
        vocabulary,
        sizes.dim,
        sizes.heads,
        run.layers(run.phases[0][0]),
        num_layers=sizes.layers,
        group=group,
    )
    model.embedding = PairEmbedding(vocabulary, sizes.dim)
    nn.init.normal_(model.embedding.weight, std=0.1)
    with (
        torch.no_grad()
    ):  # as in GPT-2: what layers add has the size of the embedding in all
        for block in model.blocks:
            block.attention.out_proj.weight /= math.sqrt(2 * sizes.layers)
            block.down.weight /= math.sqrt(2 * sizes.layers)
    return model.to(device)


def set_length(model: LanguageModel, run: Run, n: int) -> None:
    """Give the layers the patterns for sequences of ``n`` tokens."""
    for block, pattern in zip(model.blocks, run.layers(n)):
        block.attention.pattern = pattern


def optimizer_of(model: LanguageModel, run: Run) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), run.sizes.rate, betas=(0.9, 0.98), weight_decay=0.01
    )


def step(
    model: LanguageModel, optimizer, batch: Batch, rate: float, group=None
) -> float:
    """One step of training; returns its loss, in nats a target. ``group``: the ranks
    among which sequences are cut.
    """
    device = model.embedding.weight.device
    tokens, targets = pairs(batch.tokens), batch.targets
    if group is not None:
        tokens, targets = (shard_sequence(t, group) for t in (tokens, targets))
    loss = mean_loss(
        model(tokens.to(device)), targets.to(device), *[group] * (group is not None)
    )
    loss.backward()
    average_gradients(model, *[group] * (group is not None))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for one in optimizer.param_groups:
        one["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def evaluate(model: LanguageModel, task: str, seq: int, count: int) -> dict:
    """Scores of ``count`` held-out sequences: ``bits`` of a target, ``accuracy``, and
    both by range of distances.
    """
    device, found = model.embedding.weight.device, []
    for i in range(count):
        batch = TASKS[task].batch(1, seq, str(i), held_out=True)
        known = batch.targets >= 0  # (1, n)
        logits = (
            model(pairs(batch.tokens).to(device))[known.to(device)].float().cpu()
        )  # (targets, vocabulary)
        targets = batch.targets[known]
        bits = F.cross_entropy(logits, targets, reduction="none").double() / math.log(2)
        found.append(
            torch.stack([batch.distances[known], bits, logits.argmax(1) == targets])
        )
    far, bits, right = torch.cat(found, 1)  # each (targets of all,)
    ranges = {
        int(end): [
            *(round(float(x[far == end].mean()), 5) for x in (bits, right)),
            int((far == end).sum()),
        ]
        for end in far.unique()
    }
    means = {
        name: round(float(x.mean()), 5)
        for name, x in (("bits", bits), ("accuracy", right))
    }
    return {"seq": seq, **means, "by_distance": ranges}


def train(
    run: Run,
    folder: Path | None = None,
    *,
    device: torch.device | str = "cpu",
    group=None,
    until: float = math.inf,
    checkpoint_s: float = CHECKPOINT_S,
) -> dict | None:
    """Train a run: its losses by step, its held-out scores and the CPU seconds that it
    took.

    With a ``folder`` it leaves a checkpoint there every ``checkpoint_s``, and goes on
    from the one that lies there: the results are those of a run that was never stopped.
    Returns None where the clock (``time.monotonic``) passed ``until``. Over a process
    ``group`` every rank calls it, and held-out scores are not computed.

    Raises FloatingPointError where the loss is no number.
    """
    model = build(run, device, group)
    optimizer = optimizer_of(model, run)
    path = folder and Path(folder) / f"{run.id}.pt"
    losses, scores, tokens, spent, first = [], [], 0, 0.0, 0
    if path and path.exists():
        saved = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        losses, scores, tokens, spent = (
            saved["losses"],
            saved["scores"],
            saved["tokens"],
            saved["cpu_s"],
        )
        first = len(losses)
    begun, written, total = (
        time.process_time(),
        time.monotonic(),
        sum(steps for *_, steps in run.phases),
    )
    whole = group is None or Group.of(group).process_group is None
    for number, (seq, batch, left) in enumerate(run.steps()):
        if number < first:
            continue
        set_length(model, run, seq)
        share = min(1.0, (number + 1) / WARM_STEPS) * (
            1 - (1 - LAST_RATE) * number / total
        )
        data = TASKS[run.task].batch(batch, seq, f"{run.seed} {number}")
        losses.append(step(model, optimizer, data, run.sizes.rate * share, group))
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"the loss is {losses[-1]} at step {number}")
        tokens += batch * seq
        count = next(steps for n, _, steps in run.phases if n == seq)
        if whole and left % math.ceil(count / EVALUATIONS.get(run.task, 1)) == 0:
            held_out = max(1, run.sizes.held_out * (1 if left else 4) // seq)
            scores.append(
                {"tokens": tokens, "ended": not left}
                | evaluate(model, run.task, seq, held_out)
            )
        if (
            path
            and (time.monotonic() - written > checkpoint_s or time.monotonic() > until)
            and number + 1 < total
        ):
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "losses": losses,
                "scores": scores,
                "tokens": tokens,
                "cpu_s": spent + time.process_time() - begun,
            }
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
            written = time.monotonic()
            if written > until:
                return None
    return {
        "losses": losses,
        "scores": scores,
        "tokens": tokens,
        "cpu_s": spent + time.process_time() - begun,
    }
