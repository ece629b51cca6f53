"""Train one small model, and score it on held-out sequences.

Models of one task and seed begin with the same weights and read the same tokens: they
differ in nothing but the pattern. Every task begins with sequences so short that every
pattern shows all of them, and then doubles or quadruples their length.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from model import DSABlock, LanguageModel, PairEmbedding, patterns
from ringlab.nn import mean_loss
from tasks import TASKS, Batch
from torch import nn
from torch.nn import functional as F

CHECKPOINT_S = 10.0
WARM_STEPS = 20  # until the learning rate is full
LAST_RATE = 0.1  # the part of it that is left at the end
EVALUATIONS = {"text": 4}  # of held-out sequences for each length; else 1, at its end


@dataclass(frozen=True)
class Sizes:
    """Sizes of the models and of their training.

    ``blocks`` and ``phases`` are by task: the block size of patterns, and (seq, batch,
    steps) of each length. ``held_out``: tokens of an evaluation; at the end of a phase
    there are four times as many.
    """

    dim: int
    heads: int
    layers: int
    rate: float
    held_out: int
    blocks: dict[str, int]
    phases: dict[str, tuple[tuple[int, int, int], ...]]


SHORT = ((32, 64, 120), (64, 32, 80), (128, 16, 80), (256, 8, 80))
LONG = ((128, 64, 500), (256, 64, 300), (512, 32, 300), (1024, 16, 300))
SIZES = {
    "cpu": Sizes(
        dim=48,
        heads=4,
        layers=4,
        rate=1e-2,
        held_out=16384,
        blocks={"text": 32, "recall": 16, "copy": 16, "lists": 16},
        phases={
            "text": (
                (64, 64, 150),
                (256, 16, 100),
                (1024, 8, 100),
                (4096, 2, 120),
                (16384, 1, 8),
            ),
            "recall": (*SHORT, (512, 8, 100)),
            "copy": (*SHORT, (512, 8, 140)),
            "lists": (*SHORT, (512, 8, 100)),
        },
    ),
    "cuda": Sizes(  # never run yet
        dim=256,
        heads=8,
        layers=4,
        rate=3e-3,
        held_out=65536,
        blocks={"text": 128, "recall": 64, "copy": 64, "lists": 64},
        phases={
            "text": (
                (256, 64, 500),
                (1024, 32, 500),
                (4096, 16, 2000),
                (16384, 4, 500),
            ),
            "recall": (*LONG, (4096, 8, 600)),
            "copy": (*LONG, (4096, 8, 600)),
            "lists": (*LONG, (4096, 8, 600)),
        },
    ),
}


@dataclass(frozen=True)
class Run:
    """One training: a task, the name of a pattern, a seed, and sizes."""

    task: str
    pattern: str
    seed: int
    sizes: Sizes

    @property
    def phases(self) -> tuple[tuple[int, int, int], ...]:
        """(seq, batch, steps) of each length."""
        return self.sizes.phases[self.task]

    @property
    def definition(self) -> dict:
        """All that decides what is trained, as a row has it."""
        sizes = asdict(self.sizes)
        sizes |= {"phases": self.phases, "blocks": self.sizes.blocks[self.task]}
        about = {"task": self.task, "pattern": self.pattern, "seed": self.seed}
        return about | {"sizes": sizes}

    @property
    def id(self) -> str:
        text = json.dumps(self.definition, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def layers(self, n: int) -> list:
        """The pattern of each layer for sequences of ``n`` tokens."""
        sizes = self.sizes
        return patterns(sizes.blocks[self.task], n, sizes.layers)[self.pattern]

    def set_length(self, model: LanguageModel, n: int) -> None:
        """Give the layers of a model the patterns for sequences of ``n`` tokens."""
        for block, pattern in zip(model.blocks, self.layers(n)):
            block.attention.pattern = pattern


def build(run: Run, device: str = "cpu") -> tuple[LanguageModel, torch.optim.Optimizer]:
    """The model of a run with its initial weights, and its optimizer.

    The seed draws the weights on the CPU: the same for every pattern.
    """
    sizes, vocabulary = run.sizes, TASKS[run.task].vocabulary
    torch.manual_seed(run.seed)
    layers = run.layers(run.phases[0][0])
    model = LanguageModel(vocabulary, sizes.dim, sizes.heads, layers)
    model.embedding = PairEmbedding(vocabulary, sizes.dim)
    nn.init.normal_(model.embedding.weight, std=0.1)
    with torch.no_grad():
        # As in GPT-2: what all layers add has the size of the embedding.
        for block in model.blocks:
            block.attention.out_proj.weight /= math.sqrt(2 * sizes.layers)
            block.down.weight /= math.sqrt(2 * sizes.layers)
    model.to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), sizes.rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    return model, optimizer


def rate_at(number: int, steps: int) -> float:
    """The part of the full learning rate in a step: up, then down."""
    return min(1.0, (number + 1) / WARM_STEPS) * (1 - (1 - LAST_RATE) * number / steps)


def step(model: LanguageModel, optimizer, batch: Batch, rate: float) -> float:
    """One step of training; returns its loss, in nats a target.

    What an indexer learns by is added for the gradients.
    """
    device = model.embedding.weight.device
    loss = mean_loss(model(batch.tokens.to(device)), batch.targets.to(device))
    indexers = (x.index_loss for x in model.blocks if isinstance(x, DSABlock))
    sum(indexers, start=loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def evaluate(model: LanguageModel, task: str, seq: int, count: int) -> dict:
    """Scores of ``count`` held-out sequences of ``seq`` tokens.

    ``bits`` of a target and ``accuracy``; ``by_distance``: the end of a range of
    distances to [bits, accuracy, targets].
    """
    device, parts = model.embedding.weight.device, []
    for i in range(count):
        batch = TASKS[task].batch(1, seq, str(i), held_out=True)
        known = batch.targets >= 0  # (1, n)
        logits = model(batch.tokens.to(device))[known.to(device)].float().cpu()
        targets = batch.targets[known]
        nats = F.cross_entropy(logits, targets, reduction="none").double()
        right = logits.argmax(1) == targets
        parts.append(torch.stack([batch.distances[known], nats / math.log(2), right]))
    far, bits, right = torch.cat(parts, 1)  # each (targets,)

    def means(some) -> list[float]:
        return [round(float(x[some].mean()), 5) for x in (bits, right)]

    ranges = {
        int(end): [*means(far == end), int((far == end).sum())] for end in far.unique()
    }
    all_bits, accuracy = means(far >= 0)
    return {
        "seq": seq,
        "bits": all_bits,
        "accuracy": accuracy,
        "by_distance": ranges,
    }


def train(
    run: Run,
    folder: Path | None = None,
    *,
    device: str = "cpu",
    until: float = math.inf,
    checkpoint_s: float = CHECKPOINT_S,
) -> dict | None:
    """Train a run: ``losses`` by step, ``scores`` of held-out sequences, ``tokens``,
    and the CPU seconds that it took, ``cpu_s``.

    With a ``folder`` it leaves a checkpoint there every ``checkpoint_s``, and goes on
    from the one that lies there: the results are those of a run that was never stopped.
    Returns None where the clock (``time.monotonic``) passed ``until``.

    Raises FloatingPointError where the loss is no number.
    """
    model, optimizer = build(run, device)
    path = folder and Path(folder) / f"{run.id}.pt"
    result = {"losses": [], "scores": [], "tokens": 0, "cpu_s": 0.0}
    if path and path.exists():
        result = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict(result.pop("model"))
        optimizer.load_state_dict(result.pop("optimizer"))
    losses, first = result["losses"], len(result["losses"])
    begun, written = time.process_time() - result["cpu_s"], time.monotonic()
    steps = [
        (seq, batch, count, count - 1 - i)
        for seq, batch, count in run.phases
        for i in range(count)
    ]
    for number, (seq, batch, count, left) in enumerate(steps[first:], first):
        run.set_length(model, seq)
        data = TASKS[run.task].batch(batch, seq, f"{run.seed} {number}")
        rate = run.sizes.rate * rate_at(number, len(steps))
        losses.append(step(model, optimizer, data, rate))
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"the loss is {losses[-1]} at step {number}")
        result["tokens"] += batch * seq
        if left % math.ceil(count / EVALUATIONS.get(run.task, 1)) == 0:
            held_out = max(1, run.sizes.held_out * (1 if left else 4) // seq)
            about = {"tokens": result["tokens"], "ended": not left}
            scores = evaluate(model, run.task, seq, held_out)
            result["scores"].append(about | scores)
        result["cpu_s"] = time.process_time() - begun
        now = time.monotonic()
        due = now - written > checkpoint_s or now > until
        if path and due and number + 1 < len(steps):
            save(path, model, optimizer, result)
            written = time.monotonic()
            if written > until:
                return None
    return result


def save(path: Path, model: LanguageModel, optimizer, result: dict) -> None:
    """Replace the checkpoint at ``path`` as a whole."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state | result, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)
