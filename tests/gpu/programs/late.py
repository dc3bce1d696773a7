"""Train over NCCL; rank 1 is late in the third step, where rank 0 waits for its sums; then reduce by hand, likewise."""

import os
import time

import torch

import unisono
from unisono import comm

os.environ["NCCL_HOSTID"], os.environ["NCCL_SOCKET_IFNAME"] = os.environ["RANK"], "lo"
job = unisono.init("nccl", timeout=60)
model = torch.nn.Linear(8, 1)
trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=2, progress=False)


def loss(model, batch):
    if job.rank == 1 and trainer.steps_done == 2:
        time.sleep(5)
    return model(batch[0]).square().flatten()


for batch in trainer.batches(torch.utils.data.TensorDataset(torch.randn(32, 8)), batch_size=8):
    trainer.step(loss, batch)
if job.rank == 1:
    time.sleep(5)
x = torch.ones(4, device=job.device)
torch.distributed.all_reduce(x)
print(x.sum().item())
comm.barrier()
