"""Train on iterable datasets in shards and print digests: `sharded.py DIRECTORY ENGINE STEPS`.

Each rank also prints the shards that it has opened.
"""

import random
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import IterableDataset

import unisono

FOLDER, ENGINE, STEPS = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
OPENED = set()


class Stream(IterableDataset):
    """Has as many samples in each shard as `lengths` says."""

    def __init__(self, lengths, numbers=None):
        self.lengths, self.numbers, self.epoch = lengths, numbers, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def shard(self, num_shards, index):
        assert num_shards == len(self.lengths)
        OPENED.add(index)
        numbers = [1000 * index + i for i in range(self.lengths[index])]
        random.shuffle(numbers)
        return Stream(self.lengths, numbers)

    def __iter__(self):
        for number in self.numbers:
            yield torch.full((4,), number / 1000) + 0.1 * torch.randn(4), self.epoch


CASES = {
    "even": (Stream([16, 16, 16, 16]), {"batch_size": 16}),
    "tail": (Stream([13, 13, 13, 13]), {"batch_size": 10, "micro_batch_size": 2}),
    "uneven": (Stream([20, 12, 49, 16]), {"batch_size": 8}),
    "dropped": (Stream([20, 14, 49, 16]), {"batch_size": 12, "drop_last": True}),
    "worker": (Stream([10, 12, 9, 16]), {"batch_size": 8, "workers": 1}),
}


def loss(model, batch):
    return model(batch[0] + torch.rand(())).squeeze(1).square()


if __name__ == "__main__":
    for name, (dataset, options) in CASES.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        trainer = unisono.Trainer(
            model, optimizer, virtual_ranks=4, directory=FOLDER / name, engine=ENGINE, progress=False
        )
        sizes = []
        for _ in trainer.epochs(2, max_steps=STEPS or None):
            for batch in trainer.batches(dataset, sharded=True, **options):
                trainer.step(loss, batch)
                sizes.append(len(batch))
        trainer.print(f"{name} = {trainer.digest()}" + ("" if STEPS else f" after {trainer.steps_done} steps"))
        trainer.print(f"{name} sizes {sizes}")
    print("opened", sorted(OPENED), flush=True)
