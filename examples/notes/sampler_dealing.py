"""How DistributedSampler deals samples to ranks, and what set_epoch is for.

    unisono run -n 3 examples/notes/sampler_dealing.py

Like cards: of 9 samples rank 0 gets 0, 3, 6, rank 1 gets 1, 4, 7 and rank 2 gets 2, 5, 8. Shuffled, all ranks must
shuffle alike, so the order comes from seed and epoch: without set_epoch every epoch has the same order. If the
number does not divide, torch's sampler repeats samples, and unisono's does not.
"""

import torch
from torch.utils.data import DistributedSampler

import unisono

unisono.init()

sampler = DistributedSampler(range(9), shuffle=False)
print("dealt:", list(sampler))

shuffled = DistributedSampler(range(9), shuffle=True, seed=0)
first, forgotten = list(shuffled), list(shuffled)
shuffled.set_epoch(1)
print("same order without set_epoch:", first == forgotten, " with it:", first == list(shuffled))


def counts(indices):
    """How often each of 10 samples occurs over all ranks."""
    return unisono.comm.all_reduce(torch.bincount(torch.tensor(indices), minlength=10)).tolist()


unisono.print0("torch's sampler, 10 samples:", counts(list(DistributedSampler(range(10), shuffle=False))))
unisono.print0("unisono's sampler:          ", counts(list(unisono.data.DistributedSampler(range(10), shuffle=False))))

# The loader deals in the same way, batches by itself and counts epochs by itself.
batches = unisono.data.loader(list(range(9)), batch_size=9, shuffle=False)
print("loader:", next(iter(batches)).tolist())
