"""Train on several datasets in one step and print digests: `joined.py DIRECTORY ENGINE STEPS`."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import unisono

FOLDER, ENGINE, STEPS = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])


class Noisy(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((4,), index / self.length) + 0.1 * torch.randn(4), index


CASES = {
    "two": ({"a": Noisy(43), "b": Noisy(50)}, {"batch_size": {"a": 8, "b": 20}}),
    "three": (
        {"a": Noisy(30), "b": Noisy(30), "c": Noisy(5)},
        {"batch_size": {"c": 5, "b": 7, "a": 9}, "workers": 1, "drop_last": True},
    ),
    "in order": ({"a": Noisy(18), "b": Noisy(11)}, {"batch_size": {"a": 16, "b": 4}, "shuffle": False}),
}


def loss(model, batch):
    assert [*batch] == sorted(batch)
    values = {name: model(x + torch.rand(())).squeeze(1).square() for name, (x, index) in batch.items()}
    return values["a"] + values["b"].mean()


if __name__ == "__main__":
    for name, (datasets, options) in CASES.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        trainer = unisono.Trainer(
            model, optimizer, virtual_ranks=4, directory=FOLDER / name, engine=ENGINE, progress=False
        )
        for _ in trainer.epochs(2, max_steps=STEPS or None):
            batches = trainer.batches(datasets, **options)
            left = len(batches)
            for batch in batches:
                trainer.step(loss, batch)
                left -= 1
            assert left == 0
        trainer.print(f"{name} = {trainer.digest()}")
