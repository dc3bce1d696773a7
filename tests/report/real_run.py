"""A small run for the tests of reports: real_run.py HOW FOLDER [further arguments that are recorded]."""

import os
import signal
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import unisono


def loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def main(how: str, folder: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02 if how == "other" else 0.01)
    data = torch.utils.data.TensorDataset(torch.randn(256, 4), torch.arange(256) % 3)
    every = unisono.Checkpoints(every_steps=4)
    options = {"virtual_ranks": 4, "checkpoints": every, "clip_grad_norm": 1.0, "progress": False}
    trainer = unisono.Trainer(model, optimizer, directory=folder, digest_every=2, **options)
    for _ in trainer.epochs(2):
        for batch in trainer.batches(data, batch_size=16):
            if trainer.steps_done == 20 and how == "raises":
                raise ValueError("five is bad\nand so is the second line")
            if trainer.steps_done == 20 and how in ("breaks", "breaks and raises"):
                break
            if trainer.steps_done == 20 and how == "is asked to end":
                os.kill(os.getpid(), signal.SIGTERM)
            is_victim = how == f"loses rank {os.environ.get('RANK')}" and not Path(folder, "lost").exists()
            if trainer.steps_done == 20 and is_victim:
                Path(folder, "lost").touch()
                raise RuntimeError("only once")
            trainer.step(loss, batch)
            if trainer.steps_done == 7 and how == "changes a weight":
                with torch.no_grad():
                    model[2].bias[1] += 1e-6
        if trainer.steps_done == 20 and how.startswith("breaks"):
            break
        trainer.evaluate(loss, data, name="train")
    if how == "breaks and raises":
        raise KeyError("the loop has nothing to do with it")


main(*sys.argv[1:3])
