"""Train on as many ranks as there are: if some are lost, the others go on from the last
checkpoint.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 2
--max-restarts 3 --rdzv-backend c10d \\
    --rdzv-endpoint HOST:PORT --rdzv-conf keep_alive_interval=1,last_call_timeout=5
    train_elastic.py checkpoint.pt

Start it on both machines, on HOST first. If the second machine vanishes, torchrun
starts the ranks of the first anew. Each then holds a longer part of the sequence;
nothing below depends on how many there are. The variable makes torch open a new store
for each start: in a shared one, gloo may find addresses of ranks that have ended.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ringlab import Dilated
from ringlab.nn import (
    DecoderBlock,
    average_gradients,
    mean_loss,
    next_tokens,
    shard_sequence,
)
from ringlab.ring import joined
from torch import nn

checkpoint, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 40

with joined(
    "gloo", timeout_s=20
):  # a rank, host or link that fails ends all ranks, so that torchrun can start anew
    group, rank = dist.group.WORLD, dist.get_rank()
    torch.manual_seed(0)  # the same weights on every rank
    pattern = Dilated([64, 256], [1, 4])
    blocks = [DecoderBlock(64, 4, pattern, group=group) for _ in range(2)]
    ends = nn.Embedding(64, 64), nn.Linear(64, 64)  # of tokens, and to logits
    model = nn.Sequential(ends[0], *blocks, nn.RMSNorm(64), ends[1])
    optimizer, first = torch.optim.AdamW(model.parameters(), 1e-3), 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    for step in range(first, steps):
        tokens = (
            torch.arange(512)[None] * (1 + step % 3) % 64
        )  # (1, 512), by the step and not by the rank
        targets = shard_sequence(next_tokens(tokens), group)  # (1, 512 / ranks)
        loss = mean_loss(model(shard_sequence(tokens, group)), targets, group)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, group)
        optimizer.step()
        if rank == 0:
            print(
                f"step {step} on {dist.get_world_size()} ranks: loss {loss.item():.5f}",
                flush=True,
            )
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
            }
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)  # never half a file
