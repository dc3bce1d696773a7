"""A script that does not read the launcher's address: it brings its own, by variables and by URL."""

import os
import sys

import torch
import torch.distributed as dist

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", sys.argv[1]
dist.init_process_group("gloo", rank=rank, world_size=ranks)
total = torch.ones(1)
dist.all_reduce(total)
dist.destroy_process_group()
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=ranks)
dist.all_reduce(total)
print("sum", total.item())
dist.destroy_process_group()
