"""Tables as parts of models: all of them under one name, or each under its own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.embedding import SGD, Table, Tables, dense_parameters


def new_tables() -> Tables:
    torch.manual_seed(0)
    settings = {"rows": 30, "dim": 4, "optimizer": SGD(lr=0.5)}
    return Tables({"items": Table(**settings, pooling="sum"), "step": Table(**settings)})


class Whole(nn.Module):
    """Keeps the object."""

    def __init__(self):
        super().__init__()
        self.tables = new_tables()
        self.last = nn.Linear(4, 2)

    def forward(self, ids):
        return self.last(self.tables["items"](ids) + self.tables["step"](ids[:, 0]))


class Parts(nn.Module):
    """Keeps the tables."""

    def __init__(self):
        super().__init__()
        tables = new_tables()
        self.bags, self.rows = tables["items"], tables["step"]
        self.last = nn.Linear(4, 2)

    def forward(self, ids):
        return self.last(self.bags(ids) + self.rows(ids[:, 0]))


def trained(make):
    model = make()
    optimizer = torch.optim.SGD(dense_parameters(model), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=2, progress=False)
    data = TensorDataset(torch.randint(0, 30, (64, 3)), torch.randint(0, 2, (64,)))
    for _ in trainer.epochs(1):
        for batch in trainer.batches(data, batch_size=16):
            trainer.step(
                lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch
            )
    return model


def test_tables_are_trained_wherever_a_model_keeps_them():
    whole, parts = trained(Whole), trained(Parts)
    before = new_tables()
    for name, part in (("items", parts.bags), ("step", parts.rows)):
        assert torch.equal(whole.tables[name].weight, part.weight)
        assert not torch.equal(part.weight, before[name].weight)
    names = {"tables.items.weight", "tables.step.weight", "last.weight", "last.bias"}
    assert whole.state_dict().keys() == names
    assert [id(p) for p in dense_parameters(whole)] == [id(whole.last.weight), id(whole.last.bias)]


def test_the_object_is_a_mapping_and_a_module():
    tables = new_tables()
    assert [*tables] == ["items", "step"] and len(tables) == 2 and "items" in tables and "item" not in tables
    assert dict(tables.items())["step"] is tables["step"]
    assert tables == tables and tables != new_tables() and len({tables, tables}) == 1
    copied = copy.deepcopy(tables)
    copied["step"](torch.tensor([3])).sum().backward()
    copied.step()
    assert (copied["step"].weight[3] != tables["step"].weight[3]).all()
    copied.zero_grad()
    assert copied["step"].weight.grad is None


@pytest.mark.parametrize("name", ["", "user.item"])
def test_a_name_that_parameters_cannot_have_is_refused(name):
    with pytest.raises(ValueError, match=r"cannot be the name of a table.*without dots"):
        Tables({name: Table(rows=3, dim=2, optimizer=SGD(lr=0.1))})
