"""Gather and scatter tensors whose sizes differ between ranks, and tensors that are not contiguous.

    unisono run -n 3 examples/notes/different_sizes.py

torch's gather wants the same size on every rank, and contiguous tensors: with others it fails, hangs or mixes up
bytes. unisono tells the receivers shapes and types, so nobody prepares or pads anything.
"""

import torch

import unisono
from unisono import comm

unisono.init()
rank, world_size = unisono.rank(), unisono.world_size()

# Rank r has r rows: rank 0 has none.
rows = torch.full((rank, 2), float(rank))
print("all_gather  shapes", [tuple(part.shape) for part in comm.all_gather(rows)])
print("all_gather  joined", comm.all_gather(rows, concat=0).tolist())

at_rank_0 = comm.gather(rows, dst=0)
print("gather      shapes", None if at_rank_0 is None else [tuple(part.shape) for part in at_rank_0])

# A batch of 7 cut into unequal parts: 3, 2, 2.
print("scatter     part", comm.scatter(torch.arange(7) if rank == 0 else None, src=0).tolist())

# Each rank sends r + 1 numbers to rank r.
outgoing = [torch.full((r + 1,), rank) for r in range(world_size)]
print("all_to_all  got", [part.tolist() for part in comm.all_to_all(outgoing)])

# A transposed matrix is not contiguous; no .contiguous() needed.
matrix = torch.arange(6).view(2, 3).T
assert not matrix.is_contiguous()
print("broadcast   transposed", comm.broadcast(matrix if rank == 0 else None).tolist())
