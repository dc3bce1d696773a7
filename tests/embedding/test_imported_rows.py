"""Rows whose values come from elsewhere: what lookups read, what training makes of them, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unisono
from unisono.embedding import SGD, Table, Tables, export_rows, import_rows
from unisono.errors import TableFullError

IDS = torch.tensor([5, 1, 8])
VALUES = torch.arange(12.0).view(3, 4)
FORMS = {
    "plain": {"rows": 10},
    "lazy": {"rows": 10, "init_std": 0.1},
    "dynamic": {"capacity": 10, "init_std": 0.1},
    "admitted": {"capacity": 10, "admit_after": 3, "init_std": 0.1},
    "evicted": {"capacity": 4, "when_full": "evict_oldest"},
    "growing": {"capacity": 2, "when_full": "grow"},
}


def table_of(form, **more):
    torch.manual_seed(0)
    settings = {"dim": 4, "optimizer": SGD(lr=0.5), **FORMS[form], **more}
    tables = Tables({"item": Table(**settings)})
    return tables, tables["item"]


@pytest.mark.parametrize("form", FORMS)
def test_rows_have_their_values_and_are_trained_from_there(form):
    tables, table = table_of(form)
    others = torch.tensor([0, 7])
    before = None if form in ("plain", "growing", "evicted") else table(others).detach().clone()
    import_rows(table, IDS, VALUES.double())
    assert torch.equal(table(IDS), VALUES)
    if before is not None:
        assert torch.equal(table(others), before)
    table(IDS).sum().backward()
    tables.step()
    assert torch.equal(table(IDS), VALUES - 0.5)
    import_rows(table, IDS[:1], VALUES[:1])
    assert torch.equal(table(IDS), torch.cat([VALUES[:1], VALUES[1:] - 0.5]))


def test_a_table_grows_for_several_parts_before_it_is_trained():
    tables, table = table_of("growing")
    for part in range(4):
        import_rows(table, IDS + 10 * part, VALUES + part)
    assert table.rows.count == 12
    assert all(torch.equal(table(IDS + 10 * part), VALUES + part) for part in range(4))
    assert int(table.rows.counters[2]) == 0  # no step
    table(IDS).sum().backward()
    tables.step()
    with pytest.raises(TableFullError, match="table 'item' is full"):
        import_rows(table, torch.arange(100, 200), torch.ones(100, 4))


def test_no_row_is_given_up_for_another():
    _, table = table_of("evicted")
    import_rows(table, IDS, VALUES)
    with pytest.raises(TableFullError):
        import_rows(table, torch.tensor([20, 21]), VALUES[:2])
    assert torch.equal(table(IDS), VALUES)
    assert table.rows.count == 3


def test_what_is_exported_is_imported(tmp_path):
    _, table = table_of("dynamic")
    import_rows(table, IDS * 2**40, VALUES)
    export_rows(table, tmp_path / "rows.npz")
    numpy = pytest.importorskip("numpy")
    found = numpy.load(tmp_path / "rows.npz")
    _, other = table_of("lazy", rows=None, capacity=3)
    import_rows(other, torch.from_numpy(found["ids"]), torch.from_numpy(found["weight"]))
    assert torch.equal(other(IDS * 2**40), VALUES)


class Net(nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.tables, self.head = tables, nn.Linear(4, 1)

    def forward(self, ids):
        return self.head(self.tables["item"](ids))


def trainer_of(tables):
    net = Net(tables)
    return unisono.Trainer(net, torch.optim.SGD(net.head.parameters(), lr=0.1), virtual_ranks=2, progress=False)


@pytest.mark.parametrize("form", ["lazy", "dynamic", "growing"])
def test_what_would_be_lost_is_refused_before_training(form):
    tables, table = table_of(form)
    with torch.no_grad():
        table.weight[1] = 3.0
    with pytest.raises(ValueError, match=r"row 1 of table 'item' was written, and reads as its first values all the"):
        trainer_of(tables)


@pytest.mark.parametrize("form", ["plain", "lazy", "dynamic", "growing"])
def test_what_was_imported_or_loaded_is_not(form):
    tables, table = table_of(form)
    import_rows(table, IDS, VALUES)
    again, loaded = table_of(form)
    again.load_state_dict(tables.state_dict())
    for each, rows in ((tables, table), (again, loaded)):
        trainer_of(each)
        assert torch.equal(rows(IDS), VALUES)


@pytest.mark.parametrize(
    ("form", "ids", "values", "error", "says"),
    [
        ("plain", [1, 10], 2, IndexError, "id 10 is at position 1"),
        ("lazy", [-1, 2], 2, IndexError, "id -1 is at position 0"),
        ("dynamic", [4, 4, 1], 3, ValueError, "id 4 comes 2 times"),
        ("plain", [1], 2, ValueError, r"ids have the shape \[1\], and values \[2, 4\]"),
        ("plain", [1.0], 1, TypeError, "int32 or int64"),
        ("dynamic", list(range(11)), 11, TableFullError, "is full"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(form, ids, values, error, says):
    _, table = table_of(form)
    before = {name: value.clone() for name, value in table.state_dict().items()}
    with pytest.raises(error, match=says):
        import_rows(table, torch.tensor(ids), torch.ones(values, 4))
    assert all(torch.equal(value, before[name]) for name, value in table.state_dict().items())


def test_more_bad_input():
    _, table = table_of("dynamic", padding_idx=1)
    with pytest.raises(ValueError, match="id 1 is padding_idx of table 'item', which gets no row"):
        import_rows(table, IDS, VALUES)
    with pytest.raises(TypeError, match=r"values are of torch.int64; table 'item' takes"):
        import_rows(table, IDS, VALUES.long())
    with pytest.raises(TypeError, match=r"give one of unisono.embedding.Tables, such as tables\['item'\]"):
        import_rows(nn.Embedding(3, 4), IDS, VALUES)


ON_RANKS = """
import sys, torch, unisono
from torch import nn
from unisono.embedding import Adam, Table, Tables, import_rows
unisono.init()
torch.manual_seed(0)
def table(**form):
    return Table(dim=4, optimizer=Adam(lr=0.1), pooling="sum", init_std=0.1, **form)
tables = Tables({"fixed": table(rows=500), "any": table(capacity=300)})
ids = torch.arange(0, 400, 2)
for name in ("fixed", "any"):
    import_rows(tables[name], ids, torch.randn(200, 4))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables, self.head = tables, nn.Linear(8, 2)
    def forward(self, x):
        return self.head(torch.cat([self.tables[name](x) for name in ("fixed", "any")], 1))
net = Net()
trainer = unisono.Trainer(net, torch.optim.SGD(net.head.parameters(), lr=0.1), virtual_ranks=4, progress=False)
data = torch.utils.data.TensorDataset(torch.randint(0, 400, (48, 3)), torch.randint(0, 2, (48,)))
loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
for batch in trainer.batches(data, batch_size=16):
    trainer.step(loss, batch)
print(trainer.digest())
"""


def test_any_number_of_ranks_trains_imported_rows_to_the_same_bits(fork_ranks):
    (alone,) = fork_ranks(1, ON_RANKS).lines(0)
    assert [fork_ranks(2, ON_RANKS).lines(rank) for rank in range(2)] == [[alone]] * 2
