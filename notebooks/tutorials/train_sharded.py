"""Train over a mesh of ranks: the sequence on one dimension, weights and data (FSDP2)
on the other.

torchrun --nproc-per-node 4 notebooks/tutorials/train_sharded.py

It needs an even number of ranks, and runs on CPUs over gloo. For GPUs: "nccl" and "cuda" below, and
torch.cuda.set_device(local rank) before.
"""

import sys

import torch
import torch.distributed as dist
from ringlab import Dilated
from ringlab.nn import mean_loss, next_tokens, shard_sequence
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.append("notebooks/quality")  # of the checkout, which is the working folder
from model import LanguageModel  # noqa: E402


def train():
    shape = 2, dist.get_world_size() // 2  # two ranks share a sequence
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("sequence", "data"))
    sequence, data = mesh["sequence"], mesh["data"]

    torch.manual_seed(0)  # the same weights on every rank
    pattern = Dilated([64, 256, 1024], [1, 4, 16])
    model = LanguageModel(64, 128, 8, [pattern] * 4, num_kv_heads=2, group=sequence)
    # Weights are sharded along "data" and replicated along "sequence".
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    document = torch.arange(16).repeat(64) * 3 + 2
    # Ranks of one sequence read the same documents.
    generator = torch.Generator().manual_seed(data.get_local_rank())
    for step in range(20):
        cuts = torch.randint(1, 1024, (2,), generator=generator)
        borders = [0, *sorted(cuts.tolist()), 1024]
        packed = [document[: b - a] for a, b in zip(borders, borders[1:])]
        tokens = torch.cat(packed)[None]  # (1, 1024)
        targets = next_tokens(tokens, borders)  # before they are cut
        tokens, targets = (shard_sequence(t, sequence) for t in (tokens, targets))
        # The mean over all ranks' tokens.
        loss = mean_loss(model(tokens, cu_seqlens=borders), targets, sequence, data)
        optimizer.zero_grad()
        # FSDP averages the gradients over the mesh, which is what mean_loss expects.
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


dist.init_process_group("gloo")
train()
dist.destroy_process_group()  # after train(): a variable that still held a group would keep its threads
