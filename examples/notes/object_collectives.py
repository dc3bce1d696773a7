"""Objects over ranks: anything that can be pickled, with every backend, NCCL included.

    unisono run -n 2 examples/notes/object_collectives.py

torch has calls of their own for objects (gather_object and so on), with lists to prepare. In unisono the same calls
take tensors, numbers, nested structures and objects. Tensors inside a structure travel as tensors, not pickled.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

import unisono
from unisono import comm


@dataclass
class Result:
    name: str
    scores: torch.Tensor


unisono.init(device="cpu")
rank, world_size = unisono.rank(), unisono.world_size()
word = ["unison", "octave"][rank % 2]

# torch: gather_object to one rank, all_gather_object to all.
on_rank_0 = [None] * world_size if rank == 0 else None
dist.gather_object(word, on_rank_0, dst=0)
everywhere = [None] * world_size
dist.all_gather_object(everywhere, word)
print("torch    gather_object", on_rank_0, " all_gather_object", everywhere)

# unisono: gather and all_gather.
print("unisono  gather", comm.gather(word, dst=0), " all_gather", comm.all_gather(word))

# A dictionary with a tensor of another length on each rank, a dataclass, a number.
report = comm.all_gather({"rank": rank, "losses": torch.arange(rank + 1.0)})
print("losses by rank:", [entry["losses"].tolist() for entry in report])
best = comm.broadcast(Result("best", torch.tensor([0.5, 0.25])) if rank == 0 else None)
print("broadcast:", best.name, best.scores.tolist())
print("sum of a nested structure:", comm.all_reduce({"seen": 10 + rank, "right": (rank, 2.5)}))
