"""Trainings that tests run in other processes, where functions must be importable by
name.
"""

import torch
import torch.distributed as dist
from ringlab.measure.learning import Run, Sizes, train


def small(
    task: str,
    pattern: str,
    *phases: tuple[int, int, int],
    seed: int = 0,
    held_out: int = 256,
) -> Run:
    """A run of a few steps of tiny models."""
    blocks = {task: 16}
    return Run(
        task,
        pattern,
        seed,
        Sizes(
            16, 4, 4, 1e-2, held_out, blocks, {task: phases or ((32, 4, 6), (64, 2, 4))}
        ),
    )


def on_a_rank(run: Run) -> list[float]:
    torch.set_num_threads(1)
    return train(run, group=dist.group.WORLD)["losses"]


def with_checkpoints(channel, run: Run, folder) -> None:
    torch.set_num_threads(1)
    found = train(run, folder, checkpoint_s=0.05)
    channel.send({name: found[name] for name in ("losses", "scores", "tokens")})
