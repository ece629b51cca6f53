"""Train over a mesh of ranks: the sequence on one dimension, weights and data (FSDP2)
on the other.

torchrun --nproc-per-node 4 notebooks/tutorials/train_sharded.py

It runs on CPUs over gloo. For GPUs: "nccl" and "cuda" below, and
torch.cuda.set_device(local rank) before.
"""

import torch
import torch.distributed as dist
from ringlab import Dilated
from ringlab.nn import LanguageModel, mean_loss, next_tokens, shard_sequence
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def train():
    ranks = dist.get_world_size()
    across = 2 if ranks % 2 == 0 else 1  # ranks that share a sequence
    mesh = init_device_mesh(
        "cpu", (across, ranks // across), mesh_dim_names=("sequence", "data")
    )
    sequence, data = mesh["sequence"], mesh["data"]

    torch.manual_seed(0)  # the same weights on every rank
    pattern = Dilated([64, 256, 1024], [1, 4, 16])
    model = LanguageModel(
        64, 128, 8, pattern, num_layers=4, num_kv_heads=2, group=sequence
    )
    for block in model.blocks:
        fully_shard(
            block, mesh=mesh
        )  # weights are sharded along "data" and replicated along "sequence"
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    document = torch.arange(16).repeat(64) * 3 + 2
    generator = torch.Generator().manual_seed(
        data.get_local_rank()
    )  # ranks of one sequence read the same documents
    for step in range(20):
        borders = [
            0,
            *sorted(torch.randint(1, 1024, (2,), generator=generator).tolist()),
            1024,
        ]
        tokens = torch.cat([document[: b - a] for a, b in zip(borders, borders[1:])])[
            None
        ]  # (1, 1024), packed
        targets = next_tokens(tokens, borders)  # before they are cut
        tokens, targets = (shard_sequence(t, sequence) for t in (tokens, targets))
        loss = mean_loss(
            model(tokens, cu_seqlens=borders), targets, sequence, data
        )  # of all ranks' tokens
        optimizer.zero_grad()
        loss.backward()  # FSDP averages the gradients over the mesh, which is what mean_loss expects
        optimizer.step()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


dist.init_process_group("gloo")
train()
dist.destroy_process_group()  # after train(): a variable that still held a group would keep its threads
