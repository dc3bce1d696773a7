"""Which ids of a dynamic table get rows and lose them, against a model in plain Python; and that it can be undone."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from unisono.embedding import SGD, Adam, RowwiseAdagrad, Table, Tables
from unisono.errors import TableFullError

CAPACITY = 40


class Model:
    """What a table with a policy does, by dictionaries."""

    def __init__(self, *, admit_after=1, evict_after=None, when_full="raise"):
        self.admit_after, self.evict_after, self.when_full = admit_after, evict_after, when_full
        self.rows, self.seen, self.sightings, self.waiting, self.step = {}, {}, {}, {}, 0

    def update(self, ids):
        self.step += 1
        known, new = [i for i in ids if i in self.rows], sorted(i for i in ids if i not in self.rows)
        admitted = [i for i in new if self.waiting.get(i, 0) + 1 >= self.admit_after]
        for i in known:
            self.seen[i], self.sightings[i] = self.step, self.sightings[i] + 1
        wanted = len(admitted) + len(self.rows) - CAPACITY
        expired = []
        if self.evict_after is not None and (wanted > 0 or self.step % max(self.evict_after // 8, 1) == 0):
            expired = [i for i in self.rows if self.seen[i] <= self.step - self.evict_after]
        if wanted > len(expired) and self.when_full != "raise":
            idle = [i for i in self.rows if self.seen[i] < self.step]
            rare = self.when_full == "evict_rarest"
            idle.sort(key=lambda i: (self.sightings[i] if rare else 0, self.seen[i], self.rows[i]))
            expired = idle[: max(wanted, CAPACITY // 8)]
        if wanted > len(expired):
            raise TableFullError
        if self.admit_after > 1:
            self.wait(new, admitted)
        for i in expired:
            del self.rows[i]
        free = sorted({*range(CAPACITY)} - {*self.rows.values()})
        for i, row in zip(admitted, free, strict=False):
            self.rows[i], self.seen[i], self.sightings[i] = row, self.step, 1
        return expired

    def wait(self, new, admitted):
        """Count; of too many ids, the newest half is kept, without those that have got a row."""
        fresh = [i for i in new if i not in self.waiting]
        for i in new:
            if i in self.waiting:
                self.waiting[i] = 0 if i in admitted else self.waiting[i] + 1
        if len(self.waiting) + len(fresh) > CAPACITY:
            kept = [i for i in self.waiting if self.waiting[i]][-CAPACITY // 2 :]
            self.waiting = {i: self.waiting[i] for i in kept}
        self.waiting |= dict.fromkeys(fresh, 1)


def table(*, optimizer=None, capacity=CAPACITY, **policy):
    policy = {"waiting_capacity": CAPACITY, **policy}
    settings = Table(capacity=capacity, dim=2, dtype=torch.float64, optimizer=optimizer or SGD(lr=1.0), **policy)
    torch.manual_seed(0)
    return Tables({"item": settings})


def step(tables, ids):
    tables.zero_grad()
    tables["item"](torch.tensor(ids)).sum().backward()
    tables.step()


POLICIES = [
    {"admit_after": 2},
    {"evict_after": 5},
    {"evict_after": 17, "admit_after": 3},
    {"when_full": "evict_oldest"},
    {"when_full": "evict_rarest", "admit_after": 2},
    {"when_full": "evict_rarest", "evict_after": 30},
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: ", ".join(map(str, policy.values())))
def test_rows_come_and_go_as_in_a_plain_model(policy):
    chance = random.Random(1)
    tables, model = table(**policy), Model(**policy)
    rows, refused, lost = tables["item"].rows, 0, set()
    for number in range(60):
        ids = [int(60 * chance.random() ** 2) - 20 + number // 7 for _ in range(chance.randint(1, 12))]
        before = {name: value.clone() for name, value in rows.state_dict().items()}
        former = copy.deepcopy(model)
        try:
            lost.update(model.update({*ids}))
        except TableFullError:
            refused += 1
            with pytest.raises(TableFullError, match=r"'item' is full: .* of its 40 rows"):
                step(tables, ids)
            model = former
            assert all(torch.equal(value, before[name]) for name, value in rows.state_dict().items())
            continue
        if number % 3 == 0:  # what is undone has left no trace
            rows.place(torch.tensor(sorted({*ids})))
            rows.undo()
            assert all(torch.equal(value, before[name]) for name, value in rows.state_dict().items())
        if number % 30 == 29:  # neither does the way of the state through a checkpoint
            state, tables = copy.deepcopy(tables["item"].state_dict()), table(**policy)
            tables["item"].load_state_dict(state)
            rows = tables["item"].rows
        step(tables, ids)
        every = torch.tensor([*model.rows, *lost, 1000])
        expected = [model.rows.get(i, -1) for i in every.tolist()]
        assert rows.find(every).tolist() == expected, number
        assert rows.count == len(model.rows) and rows.taken.tolist() == sorted(model.rows.values())
    assert (refused > 0) == (policy == {"admit_after": 2})
    assert (len(lost) > 0) == (rows.evicted > 0) == (policy != {"admit_after": 2})


@pytest.mark.parametrize("rule", [Adam(lr=0.1), RowwiseAdagrad(lr=0.1)], ids=["Adam", "RowwiseAdagrad"])
def test_an_id_that_comes_back_starts_anew(rule):
    tables = table(capacity=2, when_full="evict_oldest", optimizer=rule)
    step(tables, [7, 8])
    once = tables["item"](torch.tensor([7])).detach()
    for ids in ([7, 8], [5], [6], [9, 5]):
        step(tables, ids)
    first = tables["item"](torch.tensor([7, 8])).detach()
    assert tables["item"].rows.taken.tolist() == [0, 1] and tables["item"].rows.find(torch.tensor([7])).item() == -1
    tables.optimizer.state[tables["item"].weight]["step"] = 0  # it counts steps of the table
    step(tables, [8, 7])
    assert torch.equal(tables["item"](torch.tensor([7])), once)
    assert torch.equal(first, table(capacity=2)["item"](torch.tensor([7, 8])))


def test_gradients_of_ids_that_wait_are_dropped():
    tables = table(admit_after=3)
    first = tables["item"](torch.tensor([5])).detach()
    for count, expected in ((0, first), (0, first), (1, first - 1.0), (1, first - 2.0)):
        step(tables, [5])
        assert tables["item"].rows.count == count and torch.equal(tables["item"](torch.tensor([5])), expected)


def test_ids_that_wait_longest_are_forgotten_when_there_are_too_many():
    tables = table(capacity=8, admit_after=2, waiting_capacity=8)
    step(tables, [*range(6)])
    step(tables, [0, 1])  # which get rows
    step(tables, [*range(10, 16)])  # 2 to 5 wait with them: of these ten, 4 are kept from before, and 4 are new
    waiting = tables["item"].rows.waiting
    assert waiting.counts_of(torch.tensor([2, 5, 10, 13, 14])).tolist() == [1, 1, 1, 1, 0]
    step(tables, [20])  # the newest half
    assert waiting.counts_of(torch.tensor([2, 5, 10, 13, 20])).tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("policy", [{}, {"admit_after": 2}, {"evict_after": 6}], ids=str)
def test_a_table_that_grows_computes_what_a_large_one_does(policy):
    grows = table(capacity=2, when_full="grow", optimizer=Adam(lr=0.1), **policy)
    large = table(capacity=200, optimizer=Adam(lr=0.1), **policy)
    chance, every = random.Random(2), torch.arange(-60, 60)
    for number in range(30):
        ids = [chance.randint(-2 * number, 2 * number) for _ in range(9)]
        for tables in (grows, large):
            if number % 3 != 1:  # otherwise gradients of two steps add up, over a growth as well
                tables.zero_grad()
            tables["item"](torch.tensor(ids)).square().sum().backward()
            tables.step()
        assert torch.equal(grows["item"](every), large["item"](every)), number
    item = grows["item"]
    assert item.rows.count == large["item"].rows.count and len(item.weight) == len(item.rows.ids) > 32
    assert 2 * item.rows.count > len(item.weight) or "evict_after" in policy
    again = table(capacity=3, when_full="grow", optimizer=Adam(lr=0.1), **policy)
    again["item"].load_state_dict(item.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(grows.optimizer.state_dict()))
    for tables in (grows, again):
        tables.zero_grad()
        tables["item"](every).square().sum().backward()
        tables.step()
    assert torch.equal(grows["item"](every), again["item"](every))
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        table(capacity=3)["item"].load_state_dict(item.state_dict())


def test_growth_beyond_the_memory_is_refused(monkeypatch):
    tables = table(capacity=3, when_full="grow")
    tables["item"](torch.arange(4)).sum().backward()
    monkeypatch.setattr("unisono.embedding.growth.available_bytes", lambda: 90)
    with pytest.raises(
        MemoryError, match=r"'item' is full and cannot grow from 3 to 6 rows: they take 9.6e-08 GB, and 9e-08"
    ):
        tables.step()
    assert len(tables["item"].weight) == 3 and tables["item"].rows.count == 0


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"waiting_capacity": 2**31}, "waiting_capacity=2147483648: at most 2147483647 ids can wait"),
        ({"admit_after": 0}, "admit_after=0 must be at least 1"),
        ({"evict_after": 0}, "evict_after=0 must be at least 1"),
        ({"when_full": "evict"}, "when_full='evict'"),
    ],
)
def test_bad_settings_are_named(policy, words):
    with pytest.raises(ValueError, match=words):
        table(**policy)


def test_fixed_rows_have_no_policy():
    with pytest.raises(
        ValueError, match="admit_after, waiting_capacity, evict_after and when_full are for tables with capacity="
    ):
        Table(rows=3, dim=2, optimizer=SGD(lr=1.0), admit_after=2)
