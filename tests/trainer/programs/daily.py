"""What a day's work comes to: `daily.py FOLDER ENGINE STOP`, which stops after so many steps unless that is 0.

`fit` with evaluations in mid-epoch, early stopping and a best checkpoint; predictions on the way and at the end; the
best weights in the end. What it prints last is the same on any number of ranks and after any stops.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.state.digest import digest

folder, engine, stop = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
generator = torch.Generator().manual_seed(0)
inputs, noise = torch.randn(100, 6, generator=generator), torch.randn(100, 3, generator=generator)
targets = (inputs[:, :3] + 2 * noise).argmax(1)  # some of it can be learned, and the rest only by heart
data, test = TensorDataset(inputs[:60], targets[:60]), TensorDataset(inputs[60:], targets[60:])


class Said(list):
    """What has been seen on the way, kept with the run."""

    def state_dict(self):
        return {"said": [*self]}

    def load_state_dict(self, state):
        self[:] = state["said"]


def make(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    return unisono.Trainer(model, optimizer, virtual_ranks=4, engine=engine, ema_decay=0.9, progress=False, **options)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def noisy(model, batch):
    """Outputs with random numbers, some of which belong to the place of the run."""
    scores = model(batch[0])
    return {"scores": scores, "noise": F.dropout(scores, training=True) + torch.rand(())}


def predictions(trainer, **options):
    kept = folder / "outputs.safetensors"
    everywhere = trainer.predict(noisy, test, to="all", batch_size=16, **options)
    trainer.predict(noisy, test, to=kept, batch_size=16, **options)
    unisono.comm.barrier()
    assert all(torch.equal(value, everywhere[name]) for name, value in load_file(kept).items())
    unisono.comm.barrier()
    return digest(everywhere)[:16]


def on_step(trainer, result):
    if trainer.steps_done == 5:
        said.append(f"at 5 {predictions(trainer)} {predictions(trainer, ema=True)}")
    return trainer.steps_done == stop


said = Said()
trainer = make(
    directory=folder / "run",
    stateful={"said": said},
    checkpoints=unisono.Checkpoints(every_steps=4, keep=1, best="loss", mode="min"),
)
results = trainer.fit(
    loss,
    data,
    epochs=40,
    batch_size=20,
    validation=test,
    validate_every=4,
    metrics={"loss": loss},
    on_step=on_step,
    on_evaluation=lambda trainer, values: trainer.stalled("loss", patience=4),
)
trainer.print("over", trainer.steps_done, trainer.digest(), predictions(trainer))
trainer.print([(r.epoch, r.loss, {name: (v.total, v.count) for name, v in r.validation.items()}) for r in results])
trainer.print(said)
best = trainer.load("best").source.rpartition("/")[2]
trainer.print(best, trainer.digest(), predictions(trainer, ema=True))
for options in ({}, {"ema": True}):  # by ranks that have trained nothing
    other = make()
    source = other.load(folder / "run" / "checkpoints" / best, **options).source
    assert source.endswith(best)
    trainer.print(other.digest(), predictions(other))
