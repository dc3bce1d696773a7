"""What is written is what is read; what was changed is refused by name."""

import hashlib
import json
import math
import os
import pickle
import random

import pytest
import torch
from checkpoint_contents import FILES, assert_equal, flip, groups

from unisono.errors import CorruptCheckpointError
from unisono.state import manifest
from unisono.state import safetensors_format as layout_module
from unisono.state.codec import decode, encode


def test_every_kind_of_tensor_comes_back_to_the_bit(store):
    base = torch.randn(8, 6)
    flat = torch.randn(100)
    tensors = {
        "plain": base,
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "left of one buffer": flat[:64],
        "overlapping": flat[32:],
        "scalar": torch.tensor(math.pi, dtype=torch.float64),
        "empty": torch.empty(0),
        "empty too": torch.empty(3, 0, dtype=torch.int8),
        "nan": torch.tensor([math.nan, -0.0, math.inf]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "imaginary": torch.tensor([1 + 2j]).conj().imag,
        "rng": torch.get_rng_state(),
        "ümlaut/和.0": torch.ones(1),
        "format": torch.zeros(1),
    }
    for dtype in layout_module._DTYPES:
        tensors[str(dtype)] = torch.randint(0, 2, (3, 5)).to(dtype)
    for dtype in (torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64):
        tensors[str(dtype)] = torch.randint(0, 9, (7,)).to(dtype)
    tensors["scalar uint16"] = torch.tensor(65535, dtype=torch.uint16)
    tensors["float8 scale"] = torch.randint(0, 255, (4, 4), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    written = store.write(3, {"model": tensors, "nothing": {}}, {})
    (info,) = store.list()
    assert info == written
    found = store.load(info).groups
    assert found["nothing"] == {}
    assert_equal(found["model"], tensors)


def test_documents_come_back_and_tensors_in_them_by_the_codec(store):
    value = {"epoch": 3, "best": math.inf, "param_groups": [{"betas": (0.9, 0.999), "lr": torch.tensor(0.1)}]}
    document, tensors = encode(value)
    info = store.write(12, {"optimizer": tensors}, document)
    _, found, back = store.load(info)
    value_back = decode(back, found["optimizer"])
    assert torch.equal(value_back["param_groups"][0].pop("lr"), value["param_groups"][0].pop("lr"))
    assert value_back == value


def test_tied_tensors_are_stored_once_and_tied_again(store):
    weight = torch.randn(1000, 10)
    info = store.write(1, {"model": {"embed": weight, "view": weight.t(), "head": weight, "last": weight}}, {})
    assert info.nbytes < 2 * weight.nbytes + 4000
    found = store.load(info).groups["model"]
    assert_equal(found, {"embed": weight, "view": weight.t(), "head": weight, "last": weight})
    assert found["head"] is found["embed"]
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(info.path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"head": "embed", "last": "embed", "format": "pt"}


def test_the_folder_says_what_it_is(store):
    info = store.write(120, groups(), {"epoch": 1})
    assert info.path.name == "step-000000120"
    assert sorted(path.name for path in info.path.iterdir()) == FILES
    manifest = json.loads((info.path / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"]) == (1, 120)
    assert [entry["name"] for entry in manifest["files"]] == FILES[1:]
    assert manifest["created"].endswith("+00:00")
    assert info.nbytes == sum((info.path / name).stat().st_size for name in FILES)


def test_newest_comes_first_and_foreign_files_are_left_alone(store):
    for step in (9, 10, 1_000_000_000, 0):
        store.write(step, groups(), {})
    for name in ("step-7", "step-0000000010", "step-00000000x", "notes", ".tmp-mine"):
        (store.folder / name).mkdir()
    (store.folder / "step-000000077").write_text("a file")
    assert [info.step for info in store.list()] == [1_000_000_000, 10, 9, 0]
    store.clean()
    store.prune(1)
    assert [info.step for info in store.list()] == [1_000_000_000]
    assert len(list(store.folder.iterdir())) == 7


def test_a_folder_that_is_not_there_holds_nothing(store):
    assert store.list() == []
    assert store.load_newest() == (None, [])
    assert store.clean() == []
    assert store.prune(1) == []


# What was changed is refused.


def assert_corrupt(store, info, match):
    for read in (store.verify, store.load):
        with pytest.raises(CorruptCheckpointError, match=match):
            read(info)


@pytest.mark.parametrize("name", FILES)
def test_truncation_at_any_length_is_named(store, name):
    info = store.write(1, groups(), {"note": "x" * 50})
    path = info.path / name
    whole = path.read_bytes()
    for length in sorted({0, 1, 8, len(whole) // 2, len(whole) - 2, len(whole) - 1}):
        path.write_bytes(whole[:length])
        assert_corrupt(store, info, name)
    path.write_bytes(whole + b"\n")
    assert_corrupt(store, info, name)
    path.write_bytes(whole)
    store.verify(info)


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found_and_named(store, name):
    info = store.write(1, groups(), {"note": "x"})
    path = info.path / name
    size = path.stat().st_size
    rng = random.Random(1)
    for index in range(size) if name.endswith("json") else {0, 8, size - 1, *rng.sample(range(size), 30)}:
        bit = rng.randrange(8)
        flip(path, index, bit)
        with pytest.raises(CorruptCheckpointError, match=name):
            store.verify(info)
        flip(path, index, bit)
    store.verify(info)


@pytest.mark.parametrize("name", FILES)
def test_missing_files_and_things_that_are_not_files_are_named(store, name):
    info = store.write(1, groups(), {})
    path = info.path / name
    path.unlink()
    assert_corrupt(store, info, rf"{name}: expected .*\[Errno 2\] No such file")
    path.mkdir()
    assert_corrupt(store, info, name)
    path.rmdir()
    os.mkfifo(path)  # must not wait for a writer
    assert_corrupt(store, info, rf"{name}: expected a file, found p")


def test_sizes_and_hashes_are_in_the_message(store):
    info = store.write(1, groups(), {})
    path = info.path / "model.safetensors"
    size = path.stat().st_size
    flip(path, size - 1, 3)
    assert_corrupt(store, info, rf"expected sha256 [0-9a-f]{{64}}, found [0-9a-f]{{64}} in {size:,} bytes")
    path.write_bytes(b"")
    assert_corrupt(store, info, rf"expected {size:,} bytes, found 0: it was cut off")


def test_an_extra_file_is_ignored(store):
    info = store.write(1, groups(), {})
    (info.path / "notes.txt").write_text("mine")
    store.verify(info)
    assert set(store.load(info).groups) == {"model", "optimizer"}


def test_the_newest_good_one_is_loaded_and_what_is_wrong_with_newer_ones_told(store):
    infos = [store.write(step, groups(step), {"step": step}) for step in (1, 2, 3, 4, 5)]
    flip(infos[4].path / "model.safetensors", 200, 1)
    (infos[3].path / "manifest.json").unlink()
    (infos[2].path / "state.json").write_text("{}")
    found, errors = store.load_newest()
    assert found.info == infos[1]
    assert_equal(found.groups["model"], groups(2)["model"])
    assert [error.args[0].split(": expected")[0] for error in errors] == [
        str(infos[4].path / "model.safetensors"),
        str(infos[3].path / "manifest.json"),
        str(infos[2].path / "state.json"),
    ]
    for one in infos[:2]:
        flip(one.path / "state.json", 0, 0)
    found, errors = store.load_newest()
    assert (found, len(errors)) == (None, 5)


def rewrite_manifest(info, change):
    """Change a manifest and seal it again, as one would who means harm."""
    path = info.path / "manifest.json"
    content = json.loads(path.read_bytes())
    del content["sha256"]
    change(content)
    path.write_bytes(manifest._seal(content))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c: c.update(format=4), "format 4, and this unisono reads 1 to 3"),
        (lambda c: c.update(step=2), "is of step 2, but the folder is step-000000001"),
        (lambda c: c["files"][0].update(name="../model.safetensors"), r"names '\.\./model\.safetensors'"),
        (lambda c: c["files"][0].update(name="/etc/passwd"), "names '/etc/passwd'"),
        (lambda c: c["files"][0].update(name="model.pt"), "names 'model.pt'"),
        (lambda c: c["files"][0].update(name=3), "names 3"),
        (lambda c: c["files"].pop(), "lists the files"),
        (lambda c: c["files"].append(c["files"][0]), "lists the files"),
        (lambda c: c["files"][0].update(nbytes="8"), "lacks what it must say"),
        (lambda c: c["files"][0].update(more=1), "lacks what it must say"),
        (lambda c: c["groups"].pop("model"), "lists the files"),
        (lambda c: c["groups"].update({"../x": c["groups"]["model"]}), "lists the files"),
        (lambda c: c["groups"]["model"].pop("names"), "lacks what it must say"),
        (lambda c: c.update(groups=[]), "lacks what it must say"),
        (lambda c: c.update(files=None), "lacks what it must say"),
    ],
)
def test_a_manifest_that_lies_is_refused(store, change, match):
    info = store.write(1, groups(), {})
    rewrite_manifest(info, change)
    assert_corrupt(store, info, match)


@pytest.mark.parametrize("text", ["", "[]", "3", '{"format": 1}', "[" * 100_000, "\0\xff"], ids=range(6))
def test_a_manifest_that_is_something_else_is_refused(store, text):
    info = store.write(1, groups(), {})
    (info.path / "manifest.json").write_text(text)
    assert_corrupt(store, info, r"manifest\.json")


class Bomb:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("make", [lambda bomb, path: path.write_bytes(pickle.dumps(bomb)), torch.save])
def test_a_pickle_in_place_of_tensors_executes_nothing(store, tmp_path, make):
    info = store.write(1, {"model": {"w": torch.ones(3)}}, {})
    path = info.path / "model.safetensors"
    make(Bomb(tmp_path / "fired"), path)
    assert_corrupt(store, info, r"model\.safetensors: expected")
    # The same, by someone who also seals the manifest again: hashes are right, and it is still not a file of tensors.
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    rewrite_manifest(info, lambda c: c["files"][0].update(nbytes=path.stat().st_size, sha256=digest))
    store.verify(info)
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors does not hold the tensors"):
        store.load(info)
    assert not (tmp_path / "fired").exists()


@pytest.mark.parametrize("described", [{"names": ["gone"]}, {"dtypes": {"w": "load"}}, {"aliases": {"w": "gone"}}])
def test_a_table_of_tensors_that_lies_is_refused(store, described):
    info = store.write(1, {"model": {"w": torch.ones(3)}}, {})
    rewrite_manifest(info, lambda c: c["groups"]["model"].update(described))
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        store.load(info)
