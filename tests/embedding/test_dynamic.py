"""Dynamic tables in a loop of your own: rows for ids of any value, on first sight."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from unisono.embedding import SGD, Adam, RowwiseAdagrad, Table, Tables, dense_parameters
from unisono.errors import TableFullError

LEAST, MOST, DIM = -(2**63), 2**63 - 1, 4


def dynamic(pooling=None, *, capacity=50, optimizer=None, seed=0, **options):
    torch.manual_seed(seed)
    options = {"dtype": torch.float64, **options}
    table = Table(capacity=capacity, dim=DIM, pooling=pooling, optimizer=optimizer or SGD(lr=0.5), **options)
    return Tables({"item": table})


def step(tables, ids, *rest):
    tables.zero_grad()
    out = tables["item"](ids, *rest)
    (out * torch.arange(1.0, out.numel() + 1).view(out.shape)).sum().backward()
    tables.step()
    return out.detach()


def twin_of(tables, ids, optimizer, pooling=None, **options):
    """A table of fixed rows that has the first values of ids, the first one in row 0."""
    fixed = Tables(
        {"item": Table(rows=len(ids), dim=DIM, pooling=pooling, optimizer=optimizer, dtype=torch.float64, **options)}
    )
    rows = tables["item"].rows
    with torch.no_grad():
        fixed["item"].weight.copy_(rows.initial(ids, tables["item"].weight))
    return fixed


IDS = torch.tensor([MOST, -1, 0, LEAST, 2**40, 7])


@pytest.mark.parametrize("pooling", [None, "sum", "mean"])
def test_a_dynamic_table_computes_what_one_with_fixed_rows_does(pooling):
    """In each step, some ids are new and some are known."""
    tables = dynamic(pooling, optimizer=Adam(lr=0.1))
    fixed = twin_of(tables, IDS, Adam(lr=0.1), pooling)
    for places in torch.tensor([[[0, 1], [1, 1]], [[1, 2], [0, 3]], [[5, 4], [4, 5]], [[0, 1], [2, 3]]]):
        assert torch.equal(step(tables, IDS[places]), step(fixed, places))
    item = tables["item"]
    assert item.rows.count == len(IDS) and torch.equal(
        item(IDS.view(-1, 1)), fixed["item"](torch.arange(6).view(-1, 1))
    )
    assert item.rows.find(torch.tensor([7, 8]))[1] == -1
    free = slice(len(IDS), None)
    assert not item.weight[free].any() and not item.rows.ids[free].any()


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_bags_with_offsets_weights_and_padding_are_those_of_fixed_rows(pooling):
    tables = dynamic(pooling, padding_idx=-1, include_last_offset=True)
    fixed = twin_of(tables, IDS, SGD(lr=0.5), pooling, padding_idx=1, include_last_offset=True)
    places, offsets = torch.tensor([0, 1, 2, 0, 1, 4], dtype=torch.int32), torch.tensor([0, 2, 2, 4, 5, 6])
    for _ in range(2):
        assert torch.equal(step(tables, IDS[places], offsets), step(fixed, places, offsets))
    assert tables["item"].rows.count == 3  # of 0, 2 and 4: padding has no row
    if pooling == "sum":
        weights = torch.rand(6, dtype=torch.float64)
        pairs = [(tables["item"], IDS[places]), (fixed["item"], places)]
        found = []
        for module, ids in pairs:
            scale = weights.clone().requires_grad_()
            module(ids, offsets, per_sample_weights=scale).square().sum().backward()
            found.append(scale.grad)
        assert torch.equal(*found) and not found[0][1] and found[0][0]


def test_padding_reads_as_zeros_and_int32_ids_are_the_same_ids():
    item = dynamic(padding_idx=7)["item"]
    ids = torch.tensor([[7, -3]], dtype=torch.int32)
    assert not item(ids)[0, 0].any() and torch.equal(item(ids), item(ids.long())) and item(ids)[0, 1].all()


def test_first_values_depend_on_seed_and_id_alone():
    ids = torch.randint(LEAST, MOST, (20_000,))
    item = dynamic(dtype=torch.float32, init_std=0.5)["item"]
    whole = item(ids).detach()
    assert torch.equal(torch.cat([item(part) for part in ids.split(777)]), whole)
    assert torch.equal(dynamic(dtype=torch.float32, init_std=0.5)["item"](ids), whole)
    assert not torch.isclose(dynamic(dtype=torch.float32, init_std=0.5, seed=1)["item"](ids), whole).all(1).any()
    # 80 000 numbers: the standard error of mean and deviation is 0.002.
    assert abs(float(whole.mean())) < 0.01 and abs(float(whole.std()) - 0.5) < 0.01
    assert torch.corrcoef(whole.T).fill_diagonal_(0).abs().max() < 0.05
    neighbours = item(torch.arange(20_000)).detach()
    assert abs(float((neighbours[1:] * neighbours[:-1]).mean())) < 0.01


@pytest.mark.parametrize(
    "ids", [torch.randint(LEAST, MOST, (3000,)), torch.arange(-1500, 1500) * 4096], ids=["any", "even"]
)
def test_many_ids_are_found_while_the_map_grows(ids):
    rows = dynamic(capacity=3000)["item"].rows
    for part in ids.split(25):
        assert (rows.find(part) == -1).all()
        placed = rows.place(part.sort().values, [part, part])
        assert placed.new.tolist() == [*range(len(part))]
    found = rows.find(ids)
    assert rows.count == len(ids) and torch.equal(rows.ids[found], ids) and torch.equal(rows.taken, found.sort().values)
    for part, numbers in zip(ids.split(25), found.split(25), strict=True):
        assert torch.equal(part.sort().values, part[numbers.argsort()])  # new rows of a step ascend by id


def test_state_dicts_copies_and_pickles_have_the_ids():
    tables = dynamic(optimizer=RowwiseAdagrad(lr=0.1))
    step(tables, IDS)
    item = tables["item"]
    expected = item(IDS).detach()
    assert not dense_parameters(item) and list(item.state_dict()) == ["weight", "rows.ids", "rows.counters"]
    for other in (copy.deepcopy(item), pickle.loads(pickle.dumps(item))):
        assert torch.equal(other(IDS), expected)
    for loaded in (dynamic(seed=5), dynamic(seed=6)):
        step(loaded, torch.arange(9))  # which an index has been made for
        loaded["item"].load_state_dict(item.state_dict())
        assert torch.equal(loaded["item"](IDS), expected) and loaded["item"].rows.count == 6
        assert torch.equal(loaded["item"](torch.tensor(5)), item(torch.tensor(5)))  # the seed as well
    model, optimizer = copy.deepcopy((nn.ModuleList([item]), tables.optimizer))
    model[0](IDS.flip(0)).sum().backward()
    optimizer.step()
    assert model[0].rows.count == 6 and (model[0](IDS) < expected).all()


def test_a_step_with_too_many_new_ids_changes_no_table():
    torch.manual_seed(0)
    rule = SGD(lr=0.5)
    tables = Tables({"a": Table(capacity=9, dim=2, optimizer=rule), "b": Table(capacity=3, dim=2, optimizer=rule)})
    (tables["a"](torch.arange(5)).sum() + tables["b"](torch.tensor([-4, 4, 4, 9])).sum()).backward()
    tables.step()
    before = {name: copy.deepcopy(module.state_dict()) for name, module in tables.items()}
    tables.zero_grad()
    (tables["a"](torch.arange(8)).sum() + tables["b"](torch.tensor([-4, 6, -6])).sum()).backward()
    with pytest.raises(
        TableFullError, match=r"'b' is full: 3 of its 3 rows are taken.* 2 ids without a row, such as -6"
    ):
        tables.step()
    for name, state in before.items():
        assert all(torch.equal(value, state[key]) for key, value in tables[name].state_dict().items())


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: dynamic()["item"](torch.rand(2)), TypeError, "table 'item': the ids are float32; give int32 or int64"),
        (lambda: dynamic(capacity=0), ValueError, "capacity=0 must be at least 1"),
        (
            lambda: dynamic(capacity=2**31),
            ValueError,
            "capacity=2147483648: a dynamic table has at most 2147483647 rows",
        ),
        (lambda: dynamic(capacity=None), ValueError, r"rows=.* or capacity=.*; given is neither"),
        (lambda: dynamic(rows=3), ValueError, "given is rows=3 and capacity=50"),
        (lambda: dynamic(init_std=-0.1), ValueError, "init_std=-0.1: give a finite number of 0 or more"),
        (lambda: dynamic(padding_idx=2**63), ValueError, "padding_idx=9223372036854775808 is no id of a table"),
        (
            lambda: Tables({"item": Table(capacity=2**31 - 1, dim=64, optimizer=Adam())}),
            MemoryError,
            "Table 'item', 2147483647 rows × 64",
        ),
    ],
)
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()
