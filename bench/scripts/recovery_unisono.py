"""Train with a Trainer, which recovers by itself: `recovery_unisono.py FOLDER STEPS ENGINE`."""

import time

began_s = time.monotonic()

import sys  # noqa: E402
from typing import cast  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import unisono  # noqa: E402
from bench.scripts.recovery_task import BATCH, Diary, make_data, make_model, tell_way  # noqa: E402
from unisono.engine import EngineKind  # noqa: E402

folder, steps, engine = sys.argv[1], int(sys.argv[2]), cast(EngineKind, sys.argv[3])
data = torch.utils.data.TensorDataset(*make_data())
model = make_model()
optimizer = torch.optim.AdamW(model.parameters())
tell_way(folder, time.monotonic() - began_s)
trainer = unisono.Trainer(model, optimizer, virtual_ranks=8, engine=engine, progress=False)


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the loss of each sample."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


diary = Diary(folder, trainer.rank)
for _ in trainer.epochs(steps, max_steps=steps):
    for batch in trainer.batches(data, batch_size=BATCH):
        trainer.step(loss, batch)
        diary.step(trainer.steps_done, BATCH)
diary.end(model)
