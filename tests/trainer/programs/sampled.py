"""Train in the orders of samplers and print digests: `sampled.py DIRECTORY|none ENGINE STEPS [NAME ...]`."""

import random
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import unisono

FOLDER = None if sys.argv[1] == "none" else Path(sys.argv[1])
ENGINE, STEPS = sys.argv[2], int(sys.argv[3])
N = 50


class Noisy(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        return torch.full((4,), float(index)) / N + 0.1 * torch.randn(4), torch.tensor(index)


class Lazy:
    """Draws from Python's generator as it goes."""

    def __len__(self):
        return 37

    def __iter__(self):
        for _ in range(37):
            yield random.randrange(N)


class ByLength:
    """Lists of unequal lengths, shuffled by the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        sizes = [1, 3, 17, 8, 2, 9, 10]
        random.Random(self.epoch).shuffle(sizes)
        left = list(range(N))
        return iter([[left.pop() for _ in range(size)] for size in sizes])


SAMPLERS = {
    "weighted": lambda: {"sampler": WeightedRandomSampler(torch.arange(1.0, N + 1), 40), "batch_size": 12},
    "generator": lambda: {
        "sampler": WeightedRandomSampler(torch.ones(N), 40, generator=torch.Generator()),
        "batch_size": 12,
        "workers": 1,
    },
    "subset": lambda: {"sampler": SubsetRandomSampler(range(0, N, 2)), "batch_size": 8, "drop_last": True},
    "random": lambda: {"sampler": RandomSampler(range(N)), "batch_size": 16, "micro_batch_size": 2},
    "lazy": lambda: {"sampler": Lazy(), "batch_size": 8},
    "list": lambda: {"sampler": [7, 7, 7, 3, 2, 1, 0, 49, 7], "batch_size": 6},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(N)), 9, drop_last=False)},
    "sequential": lambda: {"batch_sampler": BatchSampler(SequentialSampler(range(N)), 9, drop_last=True)},
    "lengths": lambda: {"batch_sampler": ByLength()},
}


def loss(model, batch):
    return model(batch[0] + torch.rand(())).squeeze(1).square()


if __name__ == "__main__":
    for name in sys.argv[4:] or SAMPLERS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        directory = FOLDER and FOLDER / name
        trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, directory=directory, engine=ENGINE, progress=False)
        dataset, options = Noisy(), SAMPLERS[name]()
        for _ in trainer.epochs(2, max_steps=STEPS or None):
            batches = trainer.batches(dataset, **options)
            left = len(batches)
            for batch in batches:
                left -= 1
                assert len(batches) == left
                trainer.step(loss, batch)
            assert left == 0
        trainer.print(f"{name} = {trainer.digest()}")
