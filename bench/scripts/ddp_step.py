"""A training script as anybody writes it: DDP over gloo. Rank 0 writes down the median seconds of a step.

unisono run -n 2 ddp_step.py 66k|4m STEPS FILE
"""

import itertools
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

model_name, steps, file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
widths, batch_size = {"66k": ((64, 256, 184, 10), 128), "4m": ((1024, 1024, 1024, 1024, 1024, 10), 64)}[model_name]

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
model = DistributedDataParallel(nn.Sequential(*layers[:-1]))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
inputs, targets = torch.randn(batch_size, widths[0]), torch.randint(widths[-1], (batch_size,))

seconds = []
for _ in range(steps + 5):
    start = time.perf_counter()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    loss.item()
    seconds.append(time.perf_counter() - start)
if dist.get_rank() == 0:
    file.write_text(str(statistics.median(seconds[5:])))
dist.destroy_process_group()
