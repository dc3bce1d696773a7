"""Increments: changed rows alone are written, what is read is the whole, and no checkpoint needs another folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from unisono.errors import CorruptCheckpointError
from unisono.state.checkpoint_store import CheckpointStore

ROWS, DIM = 8192, 64  # 2 MiB


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "run", incremental=True)


def groups(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(ROWS, DIM, generator=generator)
    return {
        "model": {"table": table, "tied": table, "small": torch.randn(8, 8, generator=generator)},
        "optimizer": {"sums": torch.zeros(ROWS, DIM), "ids": torch.arange(2 * ROWS * DIM), "step": torch.tensor(0)},
    }


def change(state, step: int, rows: int = 40) -> None:
    chosen = torch.randint(0, ROWS, (rows,), generator=torch.Generator().manual_seed(step))
    state["model"]["table"][chosen] += 1.0
    state["model"]["small"] += 1.0
    state["optimizer"]["sums"][chosen] += 0.5
    state["optimizer"]["step"] += 1


def same(found, wanted) -> None:
    assert {group: [*tensors] for group, tensors in found.items()} == {g: [*ts] for g, ts in wanted.items()}
    for group, tensors in wanted.items():
        for name, tensor in tensors.items():
            bits = [
                each.contiguous().view(torch.uint8) if each.dim() else each for each in (found[group][name], tensor)
            ]
            assert torch.equal(*bits), (group, name)
    assert found["model"]["tied"].data_ptr() == found["model"]["table"].data_ptr()


def is_increment(info) -> bool:
    return (info.path / "model-base.safetensors").exists()


def test_changed_rows_are_written_and_the_whole_is_read(store):
    state = groups()
    whole = store.write(1, state, {})
    assert not is_increment(whole)
    change(state, 2)
    state["model"]["table"][5, :2] = torch.tensor([float("nan"), -0.0])
    state["optimizer"]["sums"][7, 0] = -0.0  # was 0.0
    increment = store.write(2, state, {"at": 2})
    assert is_increment(increment) and increment.nbytes < 0.02 * whole.nbytes
    loaded = CheckpointStore(store.folder).load(increment)
    same(loaded.groups, state)
    assert loaded.document == {"at": 2}
    store.verify(increment)
    assert not is_increment(store.write(2, state, {}, tag="whole"))
    same(CheckpointStore(store.folder).load(whole).groups, groups())


def test_a_table_that_has_grown_keeps_its_base(store):
    state = groups()
    store.write(1, state, {})
    table = torch.cat([state["model"]["table"], torch.ones(100, DIM)])
    state["model"] |= {"table": table, "tied": table}
    info = store.write(2, state, {})
    assert is_increment(info)
    same(store.load(info).groups, state)


def test_a_whole_one_is_written_when_increments_have_taken_its_space(store):
    state, written = groups(), []
    for step in range(1, 12):
        change(state, step, rows=1500)
        written.append(store.write(step, state, {}))
    kinds = [is_increment(info) for info in written]
    assert kinds[:2] == [False, True] and False in kinds[2:]
    space = sum(info.nbytes for info in written)
    assert space < 0.75 * len(written) * written[0].nbytes
    for info in written:
        store.verify(info)
    same(store.load(written[-1]).groups, state)


def test_no_base_is_needed_from_a_folder_that_was_deleted(store):
    state = groups()
    for step in range(1, 7):
        change(state, step)
        newest = store.write(step, state, {})
        store.prune(2)
    assert [info.step for info in store.list()] == [6, 5]
    same(CheckpointStore(store.folder).load(newest).groups, state)
    assert is_increment(store.write(7, state, {}))


def test_the_damage_of_a_base_is_found_and_an_older_checkpoint_without_it_is_kept(store):
    state = groups()
    before = {group: {name: tensor.clone() for name, tensor in each.items()} for group, each in state.items()}
    before["model"]["tied"] = before["model"]["table"]
    store.write(1, state, {})
    store._bases.files.clear()  # as another process, whose first checkpoint is whole
    for step in range(2, 6):
        change(state, step)
        newest = store.write(step, state, {})
        store.prune(2)
    assert [info.step for info in store.list()] == [5, 4, 1]
    with (newest.path / "model-base.safetensors").open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)
        file.seek(-100, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CorruptCheckpointError, match=r"model-base\.safetensors"):
        store.load(newest)
    with pytest.raises(CorruptCheckpointError, match=r"model-base\.safetensors"):
        store.verify(newest)
    loaded, errors = CheckpointStore(store.folder).load_newest()
    assert loaded is not None and loaded.info.step == 1 and len(errors) == 2
    same(loaded.groups, before)


@pytest.mark.parametrize("why", ["no links", "lost base", "cut base", "other shape", "all changed"])
def test_where_an_increment_is_not_possible_the_whole_is_written(store, monkeypatch, why):
    state = groups()
    base = store.write(1, state, {}).path / "model.safetensors"
    if why == "no links":
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(1, "not permitted")))
    elif why == "lost base":
        base.unlink()
    elif why == "cut base":
        os.truncate(base, 1000)
    elif why == "other shape":
        table = torch.ones(ROWS, DIM + 1)
        state["model"] |= {"table": table, "tied": table}
    else:
        state["model"]["table"] += 1
    info = store.write(2, state, {})
    assert not is_increment(info)
    same(CheckpointStore(store.folder).load(info).groups, state)
    assert [path.name for path in Path(store.folder).iterdir() if path.name.startswith(".")] == []
