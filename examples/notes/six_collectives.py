"""The six collectives, each by torch.distributed and by unisono.comm.

    unisono run -n 3 examples/notes/six_collectives.py

torch fills tensors that the caller has made: of the right shape, on the right ranks. unisono returns the result.
Rank r brings the number r + 1; to be scattered are 10, 20, 30. "-" is nothing: the result went to rank 0 alone.
"""

import torch
import torch.distributed as dist

import unisono
from unisono import comm

unisono.init(device="cpu")
rank, ranks = unisono.rank(), range(unisono.world_size())
mine = torch.tensor([rank + 1])
tens = [torch.tensor([10 * (r + 1)]) for r in ranks]


def text(result):
    """Numbers instead of tensors, and "-" for nothing."""
    if result is None:
        return "-"
    return str([tensor.item() for tensor in result] if isinstance(result, list) else result.item())


def show(name, by_torch, by_unisono):
    print(f"{name:11} torch {text(by_torch):10} unisono {text(by_unisono)}")


# Every rank has a part; one rank gets the result.
summed = mine.clone()  # torch: overwritten on rank 0, and undefined afterwards on the others
dist.reduce(summed, dst=0, op=dist.ReduceOp.SUM)
show("reduce", summed if rank == 0 else None, comm.reduce(mine, dst=0))

gathered = [torch.empty_like(mine) for _ in ranks] if rank == 0 else None  # torch: a list on rank 0, None elsewhere
dist.gather(mine, gathered, dst=0)
show("gather", gathered, comm.gather(mine, dst=0))

# Every rank has a part; every rank gets the result.
summed = mine.clone()
dist.all_reduce(summed, op=dist.ReduceOp.SUM)
show("all_reduce", summed, comm.all_reduce(mine, "sum"))

gathered = [torch.empty_like(mine) for _ in ranks]
dist.all_gather(gathered, mine)
show("all_gather", gathered, comm.all_gather(mine))

# One rank has it all; every rank gets it, or its part of it.
received = tens[0].clone() if rank == 0 else torch.empty_like(tens[0])
dist.broadcast(received, src=0)
show("broadcast", received, comm.broadcast(tens[0] if rank == 0 else None, src=0))

received = torch.empty_like(tens[0])
dist.scatter(received, tens if rank == 0 else None, src=0)
show("scatter", received, comm.scatter(tens if rank == 0 else None, src=0))

# Other ways to combine: torch's ReduceOp.PRODUCT, MIN, MAX; AVG works with NCCL alone there.
for op in ("product", "min", "max", "mean"):
    unisono.print0(f"all_reduce  {op:7} is {comm.all_reduce(mine.double(), op).item():.0f}")
