"""SyncBatchNorm: normalise by the mean and variance of the whole batch instead of each rank's part. On CPU, too.

    unisono run -n 2 examples/notes/sync_batch_norm.py

torch's SyncBatchNorm works on GPUs only. unisono's works everywhere, and ranks may have different numbers of
samples. Its state dict is that of BatchNorm: one can train with the one and go on with the other.
"""

import torch
from torch import nn

import unisono
from unisono import comm
from unisono.parallel import convert_sync_batchnorm

unisono.init(device="cpu")
rank, world_size = unisono.rank(), unisono.world_size()

# A batch of 10 samples. Rank 0 has 3 of them, rank 1 has 7.
torch.manual_seed(0)
batch = torch.randn(10, 4, dtype=torch.float64) * 3 + 5
owner = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1, 1]) % world_size
mine = batch[owner == rank]


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()


# What one process makes of the whole batch.
alone = network()
expected = alone(batch)

plain = network()
outputs = comm.all_gather(plain(mine), concat=0)
unisono.print0("BatchNorm on each rank's part is that of the whole batch:    ", torch.allclose(outputs, expected))

synced = convert_sync_batchnorm(network())
outputs = comm.all_gather(synced(mine), concat=0)
unisono.print0("SyncBatchNorm on each rank's part is that of the whole batch:", torch.allclose(outputs, expected))

same = torch.allclose(synced[1].running_var, alone[1].running_var)
unisono.print0("running variance too:", same)
alone.load_state_dict(synced.state_dict())
unisono.print0("its state dict is BatchNorm's:", list(synced[1].state_dict()) == list(plain[1].state_dict()))
