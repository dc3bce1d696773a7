"""Weights from every kind of file, between steps: `loading.py FOLDER ENGINE`. Prints what all ranks must agree on.

FOLDER gets the files of this run; the ranks other than 0 work as if they could not see it.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file, save_model
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.errors import CheckpointError, RankMismatchError
from unisono.state.digest import digest
from unisono.trainer import storage

folder, engine = Path(sys.argv[1]), sys.argv[2]
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(60, 6, generator=generator), torch.arange(60) % 4)


def make(seed=0):
    torch.manual_seed(seed)
    model = nn.ModuleDict(
        {"first": nn.Linear(6, 8), "norm": nn.BatchNorm1d(8), "last": nn.Linear(8, 8), "tied": nn.Linear(8, 8)}
    )
    model["tied"].weight = model["last"].weight
    return model


def loss(model, batch):
    hidden = model["norm"](torch.tanh(model["first"](batch[0])))
    return F.cross_entropy(model["tied"](model["last"](hidden)), batch[1], reduction="none")


model = make()
trainer = unisono.Trainer(
    model,
    torch.optim.AdamW(model.parameters(), lr=0.01),
    virtual_ranks=4,
    engine=engine,
    ema_decay=0.9,
    directory=folder / "run",
    checkpoints=unisono.Checkpoints(every_steps=2, best="loss", mode="min"),
    progress=False,
)
if trainer.rank:

    def blind(*args, **options):
        raise AssertionError("a rank other than 0 looks at the disk")

    storage.read_source = blind


def say(*values):
    trainer.print(*values)
    everyone = unisono.comm.all_gather([str(value) for value in values])
    assert all(each == everyone[0] for each in everyone), everyone


def state():
    return trainer.digest()[:16], digest(dict(trainer._averaged()[""].state_dict()))[:16]


if trainer.is_main:  # what others write
    other = make(1)
    torch.save(other.state_dict(), folder / "plain.pt")
    torch.save({"model": {f"module.{k}": v for k, v in other.state_dict().items()}, "epoch": 3}, folder / "ddp.pt")
    save_model(make(2), str(folder / "plain.safetensors"))
    some = {name: value.half() for name, value in make(3).state_dict().items() if name.startswith("first")}
    save_file({**some, "head.weight": torch.ones(2)}, folder / "some.safetensors")
    torch.save({**other.state_dict(), "first.weight": torch.ones(8, 7)}, folder / "wide.pt")
unisono.comm.barrier()

files = iter(
    [
        ("plain.pt", {}),
        ("ddp.pt", {"key": "model"}),
        ("plain.safetensors", {}),
        ("some.safetensors", {"strict": False}),
        ("run", {}),
        ("run", {"ema": True}),
        ("run/checkpoints/tag-old", {}),
    ]
)
for _ in trainer.epochs(2):
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(loss, batch)
        if trainer.steps_done == 1:
            trainer.save(tag="old")
        if trainer.steps_done > 1 and (found := next(files, None)):
            before = state(), trainer.steps_done
            name, options = found
            loaded = trainer.load(folder / name, **options)
            assert (trainer.steps_done, before[0] != state()) == (before[1], True), name
            say(name, Path(loaded.source).name, loaded.missing_keys[:3], loaded.unexpected_keys, *state())
    say("loss", float(trainer.evaluate(loss, data, name="loss")).hex())
say("end", *state())
say("best", Path(trainer.load("best").source).name, *state())

for name, options in (
    ("wide.pt", {"strict": False}),
    ("some.safetensors", {}),
    ("nothing", {}),
    ("ddp.pt", {}),
    ("plain.pt", {"ema": True}),
):
    before = state()
    try:
        trainer.load(folder / name, **options)
    except CheckpointError as error:
        say(str(error).replace(str(folder), ""))
    assert state() == before

for name in ("weights.pt", "weights.safetensors"):
    trainer.export(folder / "out" / name)
    before = state()
    trainer.load(folder / "plain.pt")
    trainer.load(folder / "out" / name)
    assert state()[0] == before[0]
trainer.export(folder / "out" / "average.pt", ema=True)
fresh = make(5)
fresh.load_state_dict(torch.load(folder / "out" / "average.pt", weights_only=True))
say("average", digest(dict(fresh.state_dict()))[:16], state()[1])

(folder / "file").write_text("")
for call in (lambda: trainer.export(folder / "file" / "x.pt"), lambda: trainer.save(tag="blocked")):
    try:
        (folder / "run" / "checkpoints" / "tag-blocked").write_text("")
        call()
    except CheckpointError as error:
        print(trainer.rank, "told:", str(error).removeprefix("rank 0: ").partition(" to ")[0])
if trainer.world_size > 1:
    for call in (
        lambda: trainer.load(folder / f"rank{trainer.rank}"),
        lambda: trainer.export(folder / f"{trainer.rank}.pt"),
        lambda: trainer.save(tag=f"t{trainer.rank}"),
        lambda: trainer.load("best", strict=bool(trainer.rank)),
    ):
        try:
            call()
        except RankMismatchError as error:
            print(trainer.rank, "differ:", str(error)[:30])
