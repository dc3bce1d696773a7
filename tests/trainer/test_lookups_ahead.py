"""`lookups=`: rows are read one step ahead, and the run is the same: its bits, its errors and its checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import unisono
from unisono.embedding import Adam, Table, Tables, dense_parameters

generator = torch.Generator().manual_seed(5)
DATA = TensorDataset(torch.randint(0, 500, (80, 3), generator=generator), torch.randn(80, generator=generator))


class Net(nn.Module):
    def __init__(self, directory):
        super().__init__()
        torch.manual_seed(3)
        table = Table(rows=500, dim=4, pooling="sum", init_std=0.5, optimizer=Adam(lr=0.1), directory=directory)
        self.tables, self.out = Tables({"item": table}), nn.Linear(4, 1)

    def forward(self, ids):
        return self.out(self.tables["item"](ids)).squeeze(1)


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square()


def lookups(batch):
    return {"item": batch[0]}


def trainer_of(tmp_path, *, run=None, model=None):
    (tmp_path / "rows").mkdir(exist_ok=True)
    model = Net(tmp_path / "rows") if model is None else model
    optimizer = torch.optim.SGD(dense_parameters(model) or model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, virtual_ranks=2, progress=False, directory=run)


def trained(tmp_path, dataset=DATA, **options):
    trainer = trainer_of(tmp_path)
    for _ in trainer.epochs(2):
        for batch in trainer.batches(dataset, batch_size=16, **options):
            trainer.step(loss, batch)
    return trainer.digest()


def test_the_bits_are_those_without(tmp_path):
    calls = []

    def counted(batch):
        calls.append(len(batch[0]))
        return lookups(batch)

    expected = trained(tmp_path)
    assert trained(tmp_path, lookups=counted) == expected
    assert trained(tmp_path, lookups=counted, micro_batch_size=3) == trained(tmp_path, micro_batch_size=3)
    assert calls == [8] * 20 + [3, 3, 2] * 20
    trainer = trainer_of(tmp_path)
    trainer.fit(loss, DATA, batch_size=16, epochs=2, lookups=lookups, validation=DATA)
    assert trainer.digest() == expected


def test_a_run_goes_on_from_the_batch_that_was_not_dealt(tmp_path):
    for steps in (3, 4, None):
        trainer, seen = trainer_of(tmp_path, run=tmp_path / "run"), []
        for _ in trainer.epochs(2, max_steps=steps):
            for batch in trainer.batches(DATA, batch_size=16, lookups=lookups):
                seen.append((batch.epoch, batch.step))
                trainer.step(loss, batch)
        assert seen == {3: [(0, 0), (0, 1), (0, 2)], 4: [(0, 3)]}.get(
            steps, [(0, 4), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4)]
        )
    assert trainer.digest() == trained(tmp_path)


class Failing(Dataset):
    def __len__(self):
        return len(DATA)

    def __getitem__(self, index):
        if index == 40:
            raise OSError("sample 40 is damaged")
        return DATA[index]


@pytest.mark.parametrize(
    ("dataset", "function", "error", "message"),
    [
        (DATA, lambda batch: {"item": batch[0] + 500 * int(batch[0][0, 0] == DATA[32][0][0])}, IndexError, "id "),
        (
            DATA,
            lambda batch: {"items": batch[0]} if batch[0][0, 0] == DATA[32][0][0] else {},
            ValueError,
            "mean 'item'",
        ),
        (DATA, lambda batch: batch[9] if batch[0][0, 0] == DATA[32][0][0] else {}, IndexError, "list index"),
        (
            DATA,
            lambda batch: 7 if batch[0][0, 0] == DATA[32][0][0] else {},
            TypeError,
            "what lookups returned is an int",
        ),
        (Failing(), lookups, OSError, "sample 40 is damaged"),
    ],
)
def test_an_error_comes_when_its_batch_is_asked_for(tmp_path, dataset, function, error, message):
    trainer, steps = trainer_of(tmp_path), 0
    with pytest.raises(error, match=message):
        for batch in trainer.batches(dataset, batch_size=16, shuffle=False, lookups=function):
            trainer.step(loss, batch)
            steps += 1
    assert steps == 2


def test_what_has_nothing_to_read_ahead(tmp_path):
    def never(batch):
        raise AssertionError(batch)

    trainer = trainer_of(tmp_path, model=Net(None))
    for batch in trainer.batches(DATA, batch_size=16, lookups=never):
        trainer.step(loss, batch)
    with pytest.raises(TypeError, match="lookups is an int, which cannot be called: give a function of a micro-batch"):
        trainer.batches(DATA, batch_size=16, lookups=3)
    with pytest.raises(ValueError, match=r"is for models with tables of unisono\.embedding, and this one has none"):
        trainer_of(tmp_path, model=nn.Linear(3, 1)).batches(DATA, batch_size=16, lookups=never)
