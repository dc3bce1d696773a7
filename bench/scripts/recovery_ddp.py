"""Train with DistributedDataParallel and a checkpoint after each step: the peer of recovery_unisono.py."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

folder, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(0)
x, y = torch.randn(1024, 64), torch.randint(10, (1024,))
module = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(module.parameters())
checkpoint, part, done = Path(folder, "checkpoint.pt"), Path(folder, "part"), 0
if checkpoint.exists():
    state = torch.load(checkpoint)
    module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["steps"]
model = DistributedDataParallel(module)
with Path(folder, f"steps.{os.getpid()}").open("w", buffering=1) as stamps:
    while done < steps:
        first = done * 64 % 1024 + rank * (64 // ranks)
        own = slice(first, first + 64 // ranks)
        optimizer.zero_grad()
        F.cross_entropy(model(x[own]), y[own]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        done += 1
        if rank == 0:
            state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "steps": done}
            torch.save(state, part)
            part.replace(checkpoint)
        stamps.write(f"{time.monotonic()} {done}\n")
        time.sleep(0.005)
dist.destroy_process_group()
