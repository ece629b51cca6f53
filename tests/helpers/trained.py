"""Trainings that tests run in other processes, where functions must be importable by
name.
"""

import torch
from train import Run, Sizes, train


def small(
    task: str,
    pattern: str,
    *phases: tuple[int, int, int],
    seed: int = 0,
    held_out: int = 256,
) -> Run:
    """A run of a few steps of tiny models."""
    sizes = Sizes(
        dim=16,
        heads=4,
        layers=4,
        rate=1e-2,
        held_out=held_out,
        blocks={task: 16},
        phases={task: phases or ((32, 4, 6), (64, 2, 4))},
    )
    return Run(task, pattern, seed, sizes)


def with_checkpoints(channel, run: Run, folder) -> None:
    torch.set_num_threads(1)
    found = train(run, folder, checkpoint_s=0.05)
    channel.send({name: found[name] for name in ("losses", "scores", "tokens")})
