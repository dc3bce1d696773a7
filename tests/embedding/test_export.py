"""Rows of a table in files that other programs read."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import nn

from unisono.embedding import SGD, Table, Tables, export_rows
from unisono.errors import CheckpointError
from unisono.state.weight_files import read_weights


def trained(dtype=torch.float32, **size):
    tables = Tables({"item": Table(dim=3, dtype=dtype, optimizer=SGD(lr=1.0), **size)})
    for ids in ([5, 9, 2], [0, 9, 7], [8, 1, 3]):
        tables.zero_grad()
        tables["item"](torch.tensor(ids)).sum().backward()
        tables.step()
    return tables["item"]


def read(path):
    if path.suffix == ".safetensors":
        return read_weights(path)
    with numpy.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ({"rows": 10}, [*range(10)]),
        ({"capacity": 50}, [0, 1, 2, 3, 5, 7, 8, 9]),
        ({"capacity": 5, "when_full": "evict_oldest", "dtype": torch.float64}, [0, 1, 3, 7, 8]),
    ],
    ids=["fixed", "dynamic", "with evicted rows"],
)
def test_a_file_has_the_ids_that_have_rows_and_what_the_table_gives_for_them(tmp_path, suffix, size, expected):
    item = trained(**size)
    path = tmp_path / "new" / f"items{suffix}"
    path.parent.mkdir()
    path.write_bytes(b"old")
    export_rows(item, path)
    content = read(path)
    assert sorted(content) == ["ids", "weight"] and content["ids"].tolist() == expected
    assert torch.equal(content["weight"], item(content["ids"]))
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_an_empty_table_has_no_rows(tmp_path):
    tables = Tables({"item": Table(capacity=5, dim=3, optimizer=SGD(lr=1.0))})
    for name in ("a.npz", "a.safetensors"):
        export_rows(tables["item"], str(tmp_path / name))
        content = read(tmp_path / name)
        assert content["ids"].shape == (0,) and content["weight"].shape == (0, 3)


def test_bad_input_is_named(tmp_path):
    item = trained(rows=10)
    with pytest.raises(TypeError, match=r"table is an Embedding; give one of unisono.embedding.Tables"):
        export_rows(nn.Embedding(3, 2), tmp_path / "a.npz")
    with pytest.raises(ValueError, match=r"a.csv' must say by its suffix what to write: .safetensors or .npz"):
        export_rows(item, tmp_path / "a.csv")
    with pytest.raises(TypeError, match="path=3 must be the path of a file, and is an int"):
        export_rows(item, 3)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"were not written to .*a.npz: .*A file is where a folder must be"):
        export_rows(item, tmp_path / "file" / "a.npz")
