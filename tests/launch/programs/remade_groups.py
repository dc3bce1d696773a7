"""Groups that are made, destroyed and made again in one job: all ranks, some ranks, and all ranks again."""

import os

import torch
import torch.distributed as dist

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
for meeting in range(4):
    if rank < ranks - 1:  # a meeting that the last rank has no part in
        dist.init_process_group("gloo", rank=rank, world_size=ranks - 1)
        dist.barrier()  # gloo: a rank that leaves at once fails one that still connects
        dist.destroy_process_group()
    dist.init_process_group("gloo")
    total = torch.tensor(rank + meeting)
    dist.all_reduce(total)
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.barrier(pair)
    dist.destroy_process_group()
    print("sum", total.item())
