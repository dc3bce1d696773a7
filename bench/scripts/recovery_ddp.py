"""Train with DistributedDataParallel and checkpoints: `recovery_ddp.py FOLDER STEPS STEPS_TO_A_CHECKPOINT`.

It begins with the latest checkpoint, as the documentation of torchrun recommends.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from bench.scripts.recovery_task import BATCH, Diary, make_data, make_model, own_samples

folder, steps, every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", timeout=timedelta(seconds=10))
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
x, y = make_data()
module = make_model()
optimizer = torch.optim.AdamW(module.parameters())
checkpoint, part, done = Path(folder, "checkpoint.pt"), Path(folder, "part"), 0
if checkpoint.exists():
    state = torch.load(checkpoint)
    module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["steps"]
model = DistributedDataParallel(module)
diary = Diary(folder, rank)
while done < steps:
    own = own_samples(done, rank, ranks)
    optimizer.zero_grad()
    F.cross_entropy(model(x[own]), y[own]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    done += 1
    if rank == 0 and done % every == 0:
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "steps": done}
        torch.save(state, part)
        part.replace(checkpoint)
    diary.step(done, BATCH)
diary.end(module)
dist.destroy_process_group()
