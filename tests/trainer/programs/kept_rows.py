"""Train tables whose rows are kept on two ranks, of which some die: `kept_rows.py KIND DIRECTORY|- DEATHS MARKS`.

KIND is "fixed" or "dynamic". DEATHS is a list RANK:STEP:WHERE, with commas between: in the loss function ("loss"),
after the update of the step ("written"), at a number of calls of functions from the beginning of the step ("17"), in an
evaluation after it ("evaluate"), or while rows are exported ("export"). With "late", the rank does not die, but never
learns that the step has ended. MARKS is a directory that notes who has died. With
"fixed,FOLDER", tables are in files in that folder; with "fixed,,named", lookups are named before they are made.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.embedding import Adam, RowwiseAdagrad, Table, Tables, dense_parameters, export_rows
from unisono.engine.collective import CollectiveEngine
from unisono.engine.kept_updates import KeptUpdates
from unisono.engine.row_transfer import RowTransfer

kind, files, named = (sys.argv[1] + ",,").split(",")[:3]
directory = None if sys.argv[2] == "-" else Path(sys.argv[2])
deaths = [each.split(":") for each in sys.argv[3].split(",") if each]
marks = Path(sys.argv[4])


def dies(where):
    """Return True, once, if this rank is to die here."""
    for number, (rank, step, place) in enumerate(deaths):
        mark = marks / f"died-{number}"
        if int(rank) == trainer.rank and int(step) == trainer.steps_done and place == where and not mark.exists():
            mark.touch()
            return True
    return False


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        words, bags = {"rows": 3000, "init_std": 0.1}, {"rows": 300, "init_std": 0.1}
        if kind == "dynamic":
            words, bags = {"capacity": 3000}, {"capacity": 60, "when_full": "evict_oldest"}
        words["directory"] = bags["directory"] = files or None
        self.tables = Tables(
            {
                "words": Table(**words, dim=8, optimizer=Adam(lr=0.1)),
                "bags": Table(**bags, dim=4, pooling="sum", optimizer=RowwiseAdagrad(lr=0.1)),
            },
            divided=True,
            copies=2,
        )
        self.last = nn.Linear(12, 3)

    def forward(self, x):
        words, bags = self.tables.values()
        return self.last(torch.cat([words(x[:, :2]).mean(1), bags(x[:, 2:] % 300)], 1))


def loss(model, batch):
    if dies("loss"):
        die()
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def lookups(batch):
    return {"words": batch[0][:, :2], "bags": batch[0][:, 2:] % 300}


class Fuse:
    """Ends this process at a number of calls of functions."""

    def __init__(self, calls):
        self.left = calls

    def __call__(self, frame, event, arg):
        self.left -= event == "call"
        if not self.left:
            die()


torch.manual_seed(1)
generator = torch.Generator().manual_seed(2)
samples = (3000 * torch.rand(90, 4, generator=generator) ** 3).long()
data = TensorDataset(samples, torch.randint(0, 3, (90,), generator=generator))
model = Net()
of_tables = model.tables.optimizer
trainer = unisono.Trainer(
    model,
    {"dense": torch.optim.AdamW(dense_parameters(model), lr=0.01), "tables": of_tables},
    scheduler={"tables": torch.optim.lr_scheduler.ExponentialLR(of_tables, 0.9)},
    virtual_ranks=6,
    engine="collective",
    progress=False,
    directory=directory,
    checkpoints=unisono.Checkpoints(every_steps=2, every_minutes=None, keep=20),
)
serve = RowTransfer.serve


def serve_or_die(transfer, order=None):
    if dies("export"):
        die()
    serve(transfer, order)


RowTransfer.serve = serve_or_die
agree, make_up, update = KeptUpdates.agree, KeptUpdates.make_up, CollectiveEngine.update


def agree_late(updates, optimizers):
    agree(updates, optimizers)
    if dies("late"):
        raise RuntimeError("Connection closed by peer")  # as gloo says it


def make_up_and_tell(updates, wanted, optimizers):
    before = updates.counts(optimizers)
    make_up(updates, wanted, optimizers)
    if before != wanted:
        print("made up for", before, flush=True)


def update_and_die(engine, scaler):
    update(engine, scaler)
    if dies("written"):
        die()


KeptUpdates.agree, KeptUpdates.make_up, CollectiveEngine.update = agree_late, make_up_and_tell, update_and_die
for _ in trainer.epochs(9, max_steps=14):
    for batch in trainer.batches(data, batch_size=12, lookups=lookups if named else None):
        for _, _, place in deaths:
            if place.isdecimal() and dies(place):
                sys.setprofile(Fuse(int(place)))
        trainer.step(loss, batch)
        sys.setprofile(None)
    if directory is not None:
        export_rows(model.tables["words"], directory / "words.safetensors")
    trainer.evaluate(lambda model, batch: die() if dies("evaluate") else loss(model, batch), data, batch_size=30)
unisono.print0("state sha256:", trainer.digest(), flush=True)
