"""Convert a model between two steps, in each layout; print its digest, or why that is refused."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.parallel import Pipeline, Shard

LAYOUTS = {
    "one copy": dict,
    "messages": lambda: {"engine": "collective"},
    "shards": lambda: {"parallel": Shard()},
    "optimizer's state": lambda: {"parallel": Shard(zero=1)},
    "stages": lambda: {"parallel": Pipeline(stages=["last"])},
}
CONVERSIONS = {
    "channels last": lambda model: model.to(memory_format=torch.channels_last),
    "half and back": lambda model: model.half().float(),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv2d(2, 2, 3, padding=1) for _ in range(2)])
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).relu()
        return self.last(x.flatten(1))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 2, 2, 2), torch.randint(0, 3, (48,)))
for conversion, convert in CONVERSIONS.items():
    for layout, options in LAYOUTS.items():
        torch.manual_seed(1)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
        trainer = unisono.Trainer(model, optimizer, virtual_ranks=2, progress=False, **options())
        try:
            for _ in trainer.epochs(1):
                for batch in trainer.batches(data, batch_size=12):
                    if trainer.steps_done == 2:
                        convert(model)
                    trainer.step(loss, batch)
            told = trainer.digest()
        except unisono.errors.UnisonoError as error:
            told = str(error)
        print(f"{conversion}, {layout}: {told}")
