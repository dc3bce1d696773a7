"""Train over NCCL; rank 1 is killed in the third step, and the one in its place is late in its first: `… FOLDER`."""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import unisono

os.environ["NCCL_HOSTID"], os.environ["NCCL_SOCKET_IFNAME"] = os.environ["RANK"], "lo"
killed = Path(sys.argv[1]) / "killed"
is_new = killed.exists()
job = unisono.init("nccl", timeout=60)
model = torch.nn.Linear(8, 1)
trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=2, progress=False)


def loss(model, batch):
    if job.rank == 1 and trainer.steps_done == 2:
        if is_new:
            time.sleep(5)
        elif not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return model(batch[0]).square().flatten()


for batch in trainer.batches(torch.utils.data.TensorDataset(torch.randn(32, 8)), batch_size=8):
    trainer.step(loss, batch)
print(f"steps {trainer.steps_done}, new {is_new}", flush=True)
