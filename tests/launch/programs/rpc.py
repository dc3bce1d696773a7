"""torch.distributed.rpc, and a process group beside it."""

import os

import torch
import torch.distributed as dist
from torch.distributed import rpc


def add(x, y):
    return x + y


if __name__ == "__main__":
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for _ in range(2):
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=ranks)
        if rank == 0:
            print("sum", rpc.rpc_sync("worker1", add, args=(torch.ones(2), 1)).tolist())
        rpc.shutdown()
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
