"""Embedding tables in a Trainer: the same bits on any number of ranks and in each engine, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from tests.digests import digests
from unisono.embedding import SGD, Adam, Table, Tables, dense_parameters
from unisono.report.page import render_page
from unisono.report.source import open_run

PROGRAM = Path(__file__).parent / "programs" / "tables.py"
SOME = ("Adam", "resumed", "aborted", "divided and clipped", "full", "dynamic and clipped")
REST = ("SGD", "Adagrad", "clipped", "resumed", "aborted", "read", "divided", "dynamic")
DATA = TensorDataset(torch.arange(120).view(40, 3) ** 2 % 17, torch.arange(40) % 3)


@pytest.fixture(scope="module")
def on_one_rank(fork_python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    found = digests(fork_python(PROGRAM, folder, "auto"), least=14)
    return folder / "begun", {name.removeprefix("auto: "): sha for name, sha in found.items()}


@pytest.mark.parametrize(
    ("n", "engines", "names"),
    [
        (2, ["collective"], SOME),
        (3, ["shared"], REST),
        *(pytest.param(n, ["shared", "collective"], (), marks=pytest.mark.soak) for n in (2, 3, 4)),
    ],
)
def test_tables_have_one_digest_on_any_number_of_ranks_in_each_engine(
    fork_ranks, on_one_rank, tmp_path, n, engines, names
):
    begun, expected = on_one_rank
    for engine in engines:
        shutil.copytree(begun, tmp_path / engine)
    lines = fork_ranks(n, PROGRAM, tmp_path, ",".join(engines), *names).lines()
    found = digests([line.split("] ", 1)[-1] for line in lines], least=6 * len(engines))
    assert found == {f"{engine}: {name}": expected[name] for engine in engines for name in names or expected}


def test_what_must_matter_does(on_one_rank):
    _, sha = on_one_rank
    assert sha["resumed"] == sha["RowwiseAdam"]
    assert len({*sha.values()}) == len(sha) - 1


def build(rule):
    torch.manual_seed(0)
    tables = Tables({"item": Table(rows=17, dim=4, pooling="sum", optimizer=rule)})
    return tables, nn.Sequential(tables["item"], nn.Linear(4, 3))


def per_sample(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def train(model, optimizer, **options):
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=1, progress=False, **options)
    for batch in trainer.batches(DATA, batch_size=20, shuffle=False):
        trainer.step(per_sample, batch)
    return trainer


def test_one_step_updates_both_as_a_plain_loop_does():
    (_, model), (tables, plain) = build(Adam(lr=0.1)), build(Adam(lr=0.1))
    train(model, optim.AdamW(dense_parameters(model), lr=0.1))
    optimizer = optim.AdamW(dense_parameters(plain), lr=0.1)
    for part in (slice(20), slice(20, 40)):
        optimizer.zero_grad(), tables.zero_grad()
        per_sample(plain, (DATA.tensors[0][part], DATA.tensors[1][part])).mean().backward()
        optimizer.step(), tables.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_their_optimizer_may_be_given_by_name():
    (_, model), (tables, named) = build(Adam(lr=0.1)), build(Adam(lr=0.1))
    one = train(model, optim.SGD(dense_parameters(model), lr=0.1))
    two = train(named, {"rest": optim.SGD(dense_parameters(named), lr=0.1), "items": tables.optimizer})
    assert all(map(torch.equal, model.parameters(), named.parameters()))
    assert one.digest() != two.digest() and two.optimizer["items"].state[named[0].weight]["step"] == 2


def test_an_optimizer_that_takes_a_tables_weight_is_refused():
    _, model = build(SGD(lr=0.1))
    with pytest.raises(ValueError, match=r"table 'item' has an optimizer of its own, SGD.*an AdamW.*dense_parameters"):
        train(model, optim.AdamW(model.parameters()))
    other = {"tables": optim.SGD(dense_parameters(model), lr=0.1)}
    with pytest.raises(ValueError, match="Trainer names the optimizer of embedding tables 'tables'"):
        train(model, other)


@pytest.mark.parametrize(
    ("parallel", "named"),
    [(unisono.parallel.Shard(by=["1"]), "Shard"), (unisono.parallel.Pipeline(stages=["1"]), "Pipeline")],
)
def test_a_division_of_the_model_is_refused(parallel, named):
    _, model = build(SGD(lr=0.1))
    with pytest.raises(ValueError, match=rf"embedding table 'item'.*parallel={named}.*Leave out parallel="):
        train(model, optim.SGD(dense_parameters(model), lr=0.1), parallel=parallel)


def test_a_run_that_ended_with_a_full_table_goes_on_with_one_that_grows(tmp_path):
    def run(directory, steps, **size):
        torch.manual_seed(0)
        tables = Tables({"item": Table(dim=4, pooling="sum", optimizer=Adam(lr=0.1), **size)})
        model = nn.Sequential(tables["item"], nn.Linear(4, 3))
        optimizer = optim.SGD(dense_parameters(model), lr=0.1)
        trainer = unisono.Trainer(model, optimizer, virtual_ranks=1, progress=False, directory=directory)
        data = TensorDataset(torch.arange(60).view(20, 3) * 7**20, DATA.tensors[1][:20])
        for _ in trainer.epochs(1, max_steps=steps):
            for batch in trainer.batches(data, batch_size=5):
                trainer.step(per_sample, batch)
        return trainer.digest(), len(tables["item"].weight)

    run(tmp_path / "a", 2, capacity=40)
    with pytest.raises(unisono.errors.TableFullError, match=r'30 of its 40 rows are taken.* Give it when_full="grow"'):
        run(tmp_path / "a", None, capacity=40)
    assert run(tmp_path / "a", None, capacity=7, when_full="grow") == run(None, None, capacity=40, when_full="grow")


def test_averages_of_a_dynamic_table_are_refused():
    tables = Tables({"item": Table(capacity=17, dim=4, pooling="sum", optimizer=SGD(lr=0.1))})
    model = nn.Sequential(tables["item"], nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"'item' is dynamic.*ema_decay=0.9 .*Leave out ema_decay"):
        train(model, optim.SGD(dense_parameters(model), lr=0.1), ema_decay=0.9)


def test_an_id_out_of_range_names_table_and_sample_and_changes_nothing():
    _, model = build(SGD(lr=0.1))
    trainer = unisono.Trainer(model, optim.SGD(dense_parameters(model), lr=0.1), virtual_ranks=1, progress=False)
    ids = DATA.tensors[0].clone()
    ids[13, 2] = 17
    before = trainer.digest()
    with pytest.raises(IndexError, match=r"table 'item' has ids 0 to 16, and id 17 .* sample 13, position 2"):
        for batch in trainer.batches(TensorDataset(ids, DATA.tensors[1]), batch_size=20, shuffle=False):
            trainer.step(per_sample, batch)
    assert trainer.digest() == before


def test_a_checkpoint_of_another_dim_is_refused(tmp_path):
    _, model = build(SGD(lr=0.1))
    train(model, optim.SGD(dense_parameters(model), lr=0.1), directory=tmp_path).save()
    tables = Tables({"item": Table(rows=17, dim=5, pooling="sum", optimizer=SGD(lr=0.1))})
    other = nn.Sequential(tables["item"], nn.Linear(5, 3))
    with pytest.raises(unisono.errors.CheckpointError, match=r"0.weight.*\[17, 4\]") as caught:
        train(other, optim.SGD(dense_parameters(other), lr=0.1), directory=tmp_path)
    assert "[17, 5]" in str(caught.value)


@pytest.mark.parametrize("kind", ["fixed", pytest.param("dynamic", marks=pytest.mark.soak)])
def test_a_killed_run_goes_on_from_the_changed_rows_of_its_tables(fork_python, fork_ranks, tmp_path, kind):
    program = PROGRAM.with_name("incremental.py")
    (expected,) = fork_python(program, tmp_path / f"{kind} calm")
    killed = fork_ranks(2, program, tmp_path / kind, 5, code=None)
    assert killed.codes == [-9, -9]
    kept = sorted((tmp_path / kind / "checkpoints").glob("step-*"))
    assert (kept[-1] / "model-base.safetensors").exists() and (kept[-1] / "optimizer-base.safetensors").exists()
    assert fork_ranks(3, program, tmp_path / kind).lines() == [expected]


def test_the_events_have_what_a_step_looks_up(tmp_path):
    events = []
    sizes = {"fixed": {"rows": 17}, "grown": {"capacity": 30}}
    tables = Tables({name: Table(dim=4, pooling="sum", optimizer=SGD(lr=0.1), **size) for name, size in sizes.items()})
    model = nn.ModuleDict({"tables": tables, "head": nn.Linear(4, 3)})

    def loss(model, batch):
        bags = model["tables"]["fixed"](batch[0]) + model["tables"]["grown"](batch[0])
        return F.cross_entropy(model["head"](bags), batch[1], reduction="none")

    optimizer = optim.SGD(dense_parameters(model), lr=0.1)
    options = {"virtual_ranks": 2, "progress": False, "directory": tmp_path / "run", "listeners": [events.append]}
    trainer = unisono.Trainer(model, optimizer, **options)
    for batch in trainer.batches(DATA, batch_size=20, shuffle=False):
        trainer.step(loss, batch)
    (told,) = [event for event in events if event["event"] == "tables"]  # one second has not passed
    seen, numbers = DATA.tensors[0][:20].unique(return_counts=True)
    hottest = told["tables"]["tables.fixed"].pop("hottest")
    assert told["total_steps"] == 1
    assert told["tables"]["tables.fixed"] == {
        "rows": 17, "capacity": 17, "ids": 60, "distinct": round(len(seen) / 60, 16), "nbytes": 60 * 16,
    }  # fmt: skip
    parts = dict(zip(seen.tolist(), (numbers / 60).tolist(), strict=True))
    assert [part for _, part in hottest] == sorted((round(parts[row], 6) for row, _ in hottest), reverse=True)
    assert hottest[0][1] == round(max(parts.values()), 6)
    grown = told["tables"]["tables.grown"]
    assert (grown["rows"], grown["hit_rate"], grown["evicted"]) == (len(seen), 0.0, 0)
    assert not tables["fixed"]._forward_pre_hooks and not tables["grown"]._forward_pre_hooks
    document = open_run(tmp_path / "run")
    assert document["tables"]["tables.grown"]["rows"] == len(seen)
    assert "<h2>Embedding tables</h2>" in render_page({**document, "title": "run"})
