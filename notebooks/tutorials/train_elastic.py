"""Train on as many ranks as there are: if some are lost, the others go on from the last
checkpoint.

TORCHELASTIC_ENABLE_FILE_TIMER=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun
--nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d \\
    --rdzv-endpoint HOST:PORT --rdzv-conf keep_alive_interval=1,last_call_timeout=5
    train_elastic.py checkpoint.pt

Start it on both machines, on HOST first. If the second machine vanishes, torchrun
starts the ranks of the first anew. Each then holds a longer part of the sequence;
nothing below depends on how many there are. The first variable lets torchrun end ranks
whose timer expires. The second one makes torch open a new store for each start: in a
shared one, gloo may find addresses of ranks that have ended.
"""

import ctypes
import os
import signal
import sys
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.elastic.timer as timer
from ringlab import Dilated
from ringlab.nn import (
    DecoderBlock,
    average_gradients,
    mean_loss,
    next_tokens,
    shard_sequence,
)
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.utils.store import barrier

LIMIT_S = 10  # for an exchange
checkpoint, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 40
store, rank, ranks = next(dist.rendezvous("env://"))


@contextmanager
def step_in_time(step, control):
    """End this step on every rank, and say which rank failed, where one has."""
    with timer.expires(after=3 * LIMIT_S + 5):  # a rank that hangs is killed then
        try:
            yield
        except RuntimeError:  # an exchange failed: name the ranks that are not here
            try:
                dist.monitored_barrier(control, wait_all_ranks=True)
            finally:  # and by the store, where a rank has left the group
                barrier(store, ranks, f"{step}", LIMIT_S, rank, trace_timeout=LIMIT_S)
            raise


@record  # torchrun shows the traceback of the rank that raised first
def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # this rank ends with its launcher
    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=limit
    )
    group = dist.group.WORLD
    control = dist.new_group(backend="gloo", timeout=limit)  # after a failure
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
        with step_in_time(step, control):
            # (1, 512), by the step and not by the rank
            tokens = torch.arange(512)[None] * (1 + step % 3) % 64
            targets = shard_sequence(next_tokens(tokens), group)  # (1, 512 / ranks)
            loss = mean_loss(model(shard_sequence(tokens, group)), targets, group)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model, group)
            optimizer.step()
        if rank == 0:
            print(f"step {step} on {ranks} ranks: loss {loss.item():.5f}", flush=True)
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
            }
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)  # never half a file
    with step_in_time("end", control):
        dist.barrier()  # none leaves while another still talks to it
    dist.destroy_process_group()


main()
