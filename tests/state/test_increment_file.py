"""Parts of tensors of which a checkpoint has changed rows are what is read as a whole."""

from __future__ import annotations

import json
import random

import pytest
import torch

from unisono.errors import CorruptCheckpointError
from unisono.state.checkpoint_store import CheckpointStore
from unisono.state.tensor_file import TensorRange


def written(folder, seed: int):
    """Write a checkpoint with changed rows; return its store and what it has."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = 3000 + seed, 97
    table = torch.randn(rows, width, generator=generator)
    state = {
        "model": {
            "table": table,
            "tied": table,
            "flags": torch.zeros(1 << 20, dtype=torch.uint8),
            "dense": torch.randn(70, 70, generator=generator),
        },
        "optimizer": {"sums": torch.zeros(rows, width), "step": torch.tensor(3)},
    }
    state["model"]["same"] = state["model"]["dense"]
    store = CheckpointStore(folder, incremental=True)
    store.write(1, state, {})
    if seed % 2:  # a table that has grown
        table = torch.cat([table, torch.randn(50, width, generator=generator)])
        state["model"] |= {"table": table, "tied": table}
    for tensor in (table, state["model"]["flags"], state["optimizer"]["sums"]):
        tensor[torch.randint(0, len(tensor), (60,), generator=generator)] += 1
        tensor[[0, 1, -2, -1]] += 2
    state["model"]["dense"] += 1
    info = store.write(2, state, {})
    assert (info.path / "model-base.safetensors").exists()
    return store, info, state


@pytest.mark.parametrize(
    "seed", [0, 1, pytest.param(2, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.soak)]
)
def test_parts_are_those_of_the_whole(tmp_path, seed, monkeypatch):
    monkeypatch.setattr("unisono.state.increment_file._PIECE_NBYTES", 100_000)
    store, info, state = written(tmp_path, seed)
    checkpoint, dice = store.open(info), random.Random(seed)
    checkpoint.verify()
    for group, tensors in state.items():
        source = checkpoint.group(group)
        assert {name: (form.shape, form.dtype) for name, form in source.forms.items()} == {
            name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()
        }
        assert sorted(source.stored) == sorted({"model": ["table", "flags", "dense"]}.get(group, ["sums", "step"]))
        for _ in range(40):
            ranges = []
            for name in dice.sample([*tensors], dice.randint(1, len(tensors))):
                count = tensors[name].numel()
                start = dice.randint(0, count)
                stop = dice.choice([count, min(count, start + dice.choice([0, 1, 96, 97, 500, 30_000])), start])
                ranges.append(TensorRange(name, start, torch.empty(stop - start, dtype=tensors[name].dtype)))
            source.read(ranges)
            for name, start, into in ranges:
                assert torch.equal(into, tensors[name].reshape(-1)[start : start + len(into)]), (name, start, len(into))
        assert all(torch.equal(found, tensors[name]) for name, found in source.read_all().items())
    with pytest.raises(ValueError, match=r"1 elements of torch\.float32 from 7760000 on are not in table"):
        checkpoint.group("model").read([TensorRange("table", 7_760_000, torch.empty(1))])


def test_damage_is_found_where_it_is_read(tmp_path):
    store, info, _ = written(tmp_path, 0)
    for name in ("model.safetensors", "model-base.safetensors"):
        path = info.path / name
        good = path.read_bytes()
        length = int.from_bytes(good[:8], "little")
        start, stop = json.loads(good[8 : 8 + length])["table"]["data_offsets"]
        place = 8 + length + (start + stop) // 2
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(CorruptCheckpointError, match=rf"{name}.*the file was changed or the disk is failing"):
            store.open(info).group("model").read_tensor("table")
        path.write_bytes(good)
    store.open(info).group("model").read_tensor("table")
