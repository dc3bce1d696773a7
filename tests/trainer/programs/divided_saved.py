"""A run that is divided or cut, with odd parameters: saved by parts of ranks, and by rank 0, to the same files.

Arguments: the directory; how to divide, "" for not at all; and options. max_steps=N ends early. compare saves the state
of step 5 twice, and compares. load loads the weights of step 3 after step 6. apart=R lets rank R see no files of
checkpoints. die=N kills rank 1 once, while it writes its part of the checkpoint of step N. width=N is another model.
two has two optimizers.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import unisono
from unisono.state.open_checkpoint import OpenCheckpoint
from unisono.state.part_writing import PartWriter

folder, how, *rest = sys.argv[1:]
options = dict(each.partition("=")[::2] for each in rest)
SHARDS = {
    "block": {"unit_bytes": 1},
    "size": {"by": "size", "unit_bytes": 100_000},
    "zero1": {"zero": 1},
    "offload": {"offload": True},
    "offload_zero1": {"offload": True, "zero": 1},
    "replicas": {"replicas": 2},
}
STAGES = {
    "stages": {"stages": 2},
    "both": {"stages": 2, "replicas": 2, "zero": 1},
    "parts": {"stages": 4, "replicas": 2, "zero": 3},
}
DIE = int(options.get("die", -1))


class Odd(nn.Module):
    """Parameters that are tied, cut in the order of channels, of no dimension, empty, frozen, and of another dtype."""

    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(300, width)
        self.convolution = nn.Conv2d(16, 130, 3, bias=False).to(memory_format=torch.channels_last)
        self.layers = nn.ModuleList(nn.Linear(width, 300) for _ in range(3))
        self.back = nn.Linear(300, width)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 4))
        self.low = nn.Parameter(torch.randn(40_000).bfloat16())
        self.frozen = nn.Parameter(torch.randn(9), requires_grad=False)
        self.head = nn.Linear(width, 300, bias=False)
        self.head.weight = self.embedding.weight
        self.norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(0.1)
        self.register_buffer("turned", torch.randn(5, 3).t())

    def forward(self, numbers):
        x = self.norm(self.embedding(numbers)) * self.scale
        image = x.view(-1, 16, 2, 2).repeat(1, 1, 2, 2)[:, :, :3, :3]
        for layer in self.layers:
            x = x + self.back(self.dropout(layer(x)).relu())
        rest = self.convolution(image).mean() + self.low.float().mean() + self.none.sum()
        return self.head(x) + rest


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[0], reduction="none")


torch.manual_seed(0)
model = Odd(int(options.get("width", 64)))
data = torch.utils.data.TensorDataset(torch.randint(0, 300, (48,)))
trained = [p for p in model.parameters() if p.requires_grad]
if os.environ.get("RANK") == options.get("apart", "none"):
    for each in (PartWriter, OpenCheckpoint):
        make = each.__init__
        each.__init__ = lambda self, path, *more, make=make: make(self, path / "of another host", *more)
once = Path(folder) / "died"
if DIE >= 0 and os.environ["RANK"] == "1" and not once.exists():
    write = PartWriter.write

    def die_in(writer, ranges, nbytes):
        if writer._work.name.endswith(f"{DIE:09d}"):
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        write(writer, ranges, nbytes)

    PartWriter.write = die_in
optimizer = torch.optim.AdamW(trained, lr=1e-2)
if "two" in options:
    optimizer = {
        "one": torch.optim.AdamW(trained[:3], lr=1e-2),
        "other": torch.optim.SGD(trained[3:], lr=1e-2, momentum=0.9),
    }
parallel = None
if how:
    parallel = unisono.parallel.Pipeline(**STAGES[how]) if how in STAGES else unisono.parallel.Shard(**SHARDS[how])
trainer = unisono.Trainer(
    model,
    optimizer,
    virtual_ranks=4,
    directory=folder,
    progress=False,
    clip_grad_norm=1.0,
    ema_decay=0.9,
    checkpoints=unisono.Checkpoints(every_steps=3, keep=9),
    parallel=parallel,
)
begun = trainer.steps_done
for _ in trainer.epochs(2, max_steps=int(options["max_steps"]) if "max_steps" in options else None):
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(loss, batch)
        if trainer.steps_done == 6 and "load" in options:
            trainer.load(Path(folder) / "checkpoints" / "step-000000003")
        if trainer.steps_done == 5 and "compare" in options:
            trainer.save("parts")
            trainer.export(Path(folder) / "weights.safetensors")
            trainer.save("whole")
if "compare" in options and trainer.is_main:
    parts, whole = (Path(folder) / "checkpoints" / f"tag-{name}" for name in ("parts", "whole"))
    assert '"regions"' in (parts / "manifest.json").read_text()
    for file in ("model.safetensors", "ema.safetensors", "optimizer.safetensors", "other.safetensors", "state.json"):
        assert (parts / file).read_bytes() == (whole / file).read_bytes(), file
averaged = trainer.evaluate(loss, data, batch_size=12, ema=True)
print(f"from {begun} to {trainer.steps_done}: {trainer.digest()} {averaged!r}")
