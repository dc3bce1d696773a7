"""Steps whose time is known: timed_steps.py HOW FOLDER ENGINE, with "-" for no folder."""

import os
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import unisono

HOW, FOLDER, ENGINE = sys.argv[1:]
SLEEP_S, READ_S = 0.001, 0.006


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        if HOW == "data" and os.environ.get("RANK") == "1":
            time.sleep(READ_S)
        return torch.full((4,), index / 160), index % 3


def loss(model, batch):
    if HOW == "compute":
        time.sleep(SLEEP_S)
    if HOW == "loses rank 1" and os.environ["RANK"] == "1" and trainer.steps_done == 20 and not lost.exists():
        lost.touch()
        os.kill(os.getpid(), 9)
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


lost = Path(FOLDER, "lost")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
folder = None if FOLDER == "-" else FOLDER
trainer = unisono.Trainer(
    model, torch.optim.AdamW(model.parameters()), virtual_ranks=4, directory=folder, progress=False, engine=ENGINE
)
for _ in trainer.epochs(2):
    for batch in trainer.batches(Rows(), batch_size=8):
        time.sleep(SLEEP_S)  # the loop's own
        trainer.step(loss, batch)
trainer.print(trainer.digest())
