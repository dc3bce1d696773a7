"""Ranks without a launcher: a function is called in several processes.

    python examples/notes/spawned_ranks.py

torch.multiprocessing.spawn(fn, args, nprocs) calls fn(rank, *args), and the function then has to set an address, a
port that is free, and the group. unisono.spawn has the same signature, sets all that, works in notebooks, and shows
which rank printed a line. If a rank fails, the others are ended and its traceback is raised here.
"""

import torch
import torch.multiprocessing as mp

import unisono
from unisono import comm


def train(rank, target, results):
    """What every rank does; args are copied to it, and CPU tensors in them shared."""
    job = unisono.init()
    torch.manual_seed(rank)
    guess = torch.zeros(1)
    for _ in range(20):
        gradient = guess - target - 0.01 * torch.randn(1)  # every rank sees other data
        guess -= 0.5 * comm.all_reduce(gradient, "mean")
    print(f"rank {rank} of {job.world_size}: local rank {job.local_rank}", flush=True)
    results[rank] = guess


def fail(rank):
    if rank == 1:
        raise ValueError("wrong learning rate")
    unisono.init()


if __name__ == "__main__":
    results = torch.zeros(2, 1)
    unisono.spawn(train, args=(3.0, results), nprocs=2)
    print(f"both found {results[0].item():.1f}; equal: {torch.equal(results[0], results[1])}")
    try:
        unisono.spawn(fail, nprocs=2)
    except mp.ProcessRaisedException as error:
        print(f"rank {error.error_index} failed:", str(error).strip().splitlines()[-1])
