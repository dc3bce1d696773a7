"""DDP jobs that end the moment their last collective has, while a thread of gloo still wants the interpreter."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.setswitchinterval(30)  # other threads run when this one waits, and not in between


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(8, 1))
    model(torch.ones(4, 8)).sum().backward()
    weights = [torch.empty(1, 8) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, model.module.weight.detach())
    dist.destroy_process_group()


for _ in range(30):
    main()
print("ended")
