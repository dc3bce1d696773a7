"""The end of an epoch, and a resume in the middle of one: every sample exactly once.

    unisono run -n 4 examples/notes/exact_tail.py

66 samples in batches of 16 leave 2 for 4 ranks. A rank without a batch would leave the others waiting in DDP's
all-reduce for ever; repeated samples would count twice. The loader evens out the last two batches instead. Where shares
are unequal, loss * batches.weight makes the average over ranks the mean over the global batch.
"""

import torch

import unisono
from unisono import comm

unisono.init()
samples = torch.arange(66.0)


def counts(indices):
    """How often each sample occurred, over all ranks: the smallest and the largest number."""
    seen = comm.all_reduce(torch.bincount(torch.tensor(indices), minlength=66))
    return f"{seen.min()} to {seen.max()} times"


# batch_size counts the samples of all ranks together.
batches = unisono.data.loader(list(samples), batch_size=16, seed=0)
indices, sizes = [], []
for batch in batches:
    indices += batches.indices
    sizes.append(batches.size)
    average = comm.all_reduce(batch.mean() * batches.weight, "mean")
    assert torch.isclose(average, comm.all_gather(batch, concat=0).mean())
unisono.print0("global batches:", sizes, " steps:", len(batches))
unisono.print0("every sample occurs", counts(indices))
print("samples of this rank:", len(indices))

# Stop after two steps of epoch 1, and go on with another loader, as a restarted job would.
indices = []
for step, _ in enumerate(batches, start=1):
    indices += batches.indices
    if step == 2:
        break
resumed = unisono.data.loader(list(samples), batch_size=16, seed=0)
resumed.load_state_dict(batches.state_dict())
for _ in resumed:
    indices += resumed.indices
unisono.print0("with a resume in mid-epoch", counts(indices))
