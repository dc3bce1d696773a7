"""Train over NCCL; rank 1 fails in the third step, where rank 0 waits for its sums."""

import os

import torch

import unisono

os.environ["NCCL_HOSTID"], os.environ["NCCL_SOCKET_IFNAME"] = os.environ["RANK"], "lo"
job = unisono.init("nccl", timeout=60)
model = torch.nn.Linear(8, 1)
trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=2, progress=False)


def loss(model, batch):
    if job.rank == 1 and trainer.steps_done == 2:
        raise RuntimeError("no more data")
    return model(batch[0]).square().flatten()


for batch in trainer.batches(torch.utils.data.TensorDataset(torch.randn(64, 8)), batch_size=8):
    trainer.step(loss, batch)
