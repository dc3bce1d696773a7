"""What is written is what is read; what was changed is refused by name."""

import contextlib
import hashlib
import json
import math
import os
import pickle
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

from unisono.errors import CheckpointError, CorruptCheckpointError
from unisono.state import manifest
from unisono.state import safetensors_format as layout_module
from unisono.state import store as store_module
from unisono.state.codec import decode, encode
from unisono.state.durable_files import locked
from unisono.state.store import Store

FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]


def groups(value=1.0):
    return {
        "model": {"w": torch.full((30, 4), value), "b": torch.full((4,), value, dtype=torch.bfloat16)},
        "optimizer": {"0.step": torch.tensor(value)},
    }


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "checkpoints")


def flip(path, index, bit):
    data = bytearray(path.read_bytes())
    data[index] ^= 1 << bit
    path.write_bytes(data)


def assert_equal(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), plain.reshape(-1).view(torch.uint8)), name


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
        (lambda c: c.update(format=2), "format 2, and this unisono reads 1"),
        (lambda c: c.update(step=2), "is of step 2, but the folder is step-000000001"),
        (lambda c: c["files"][0].update(name="../model.safetensors"), r"names '\.\./model\.safetensors'"),
        (lambda c: c["files"][0].update(name="/etc/passwd"), "names '/etc/passwd'"),
        (lambda c: c["files"][0].update(name="model.pt"), "names 'model.pt'"),
        (lambda c: c["files"][0].update(name=3), "names 3"),
        (lambda c: c["files"].pop(), "lists the files"),
        (lambda c: c["files"].append(c["files"][0]), "lists the files"),
        (lambda c: c["files"][0].update(nbytes="8"), "lists the files"),
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


# Writing again, pruning, cleaning.


def test_a_step_written_again_replaces_the_old_checkpoint(store):
    info = store.write(7, groups(1.0), {"value": 1})
    flip(info.path / "state.json", 0, 0)
    store.write(7, groups(2.0), {"value": 2})
    (info,) = store.list()
    _, found, document = store.load(info)
    assert document == {"value": 2}
    assert_equal(found["model"], groups(2.0)["model"])
    assert [path.name for path in store.folder.iterdir()] == ["step-000000007"]


def test_prune_keeps_the_newest(store):
    for step in range(5):
        store.write(step, groups(), {})
    assert sorted(info.step for info in store.prune(2)) == [0, 1, 2]
    assert sorted(path.name for path in store.folder.iterdir()) == ["step-000000003", "step-000000004"]
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        store.prune(0)


def test_prune_never_removes_the_newest_good_one(store):
    infos = [store.write(step, groups(), {}) for step in range(5)]
    for info in infos[2:]:
        flip(info.path / "state.json", 0, 0)
    fresh = Store(store.folder)
    assert [info.step for info in fresh.prune(2)] == [2, 0]
    assert fresh.load_newest()[0].info == infos[1]
    flip(infos[1].path / "state.json", 0, 0)
    assert fresh.prune(1) == []


def test_clean_removes_what_dead_writers_left(store):
    store.write(1, groups(), {})
    left = store.folder / ".tmp-99-abcdef01-step-000000002"
    pruned = store.folder / ".tmp-99-abcdef01-pruned-step-000000000"
    for path in (left, pruned):
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"half")
    assert sorted(store.clean()) == sorted([left, pruned])
    assert [path.name for path in store.folder.iterdir()] == ["step-000000001"]


def test_clean_puts_back_what_was_moved_aside_to_be_replaced(store):
    info = store.write(1, groups(), {})
    aside = store.folder / ".tmp-99-abcdef01-replaced-step-000000001"
    shutil.copytree(info.path, aside)
    assert store.clean() == [aside]
    info.path.rename(aside)
    assert store.clean() == []
    store.verify(info)


def test_clean_leaves_a_living_writer_alone(store, monkeypatch):
    removed = []
    real = store_module.write_file

    def write_and_clean(path, pieces):
        removed.extend(Store(store.folder).clean())
        return real(path, pieces)

    monkeypatch.setattr(store_module, "write_file", write_and_clean)
    store.verify(store.write(1, groups(), {}))
    assert removed == []


# Failures to write.


def test_a_file_where_the_folder_must_be_is_named(tmp_path):
    (tmp_path / "run").write_text("a file")
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        with pytest.raises(
            CheckpointError, match=r"step 3 was not written .* while creating the folder\. .*move it away"
        ):
            Store(folder).write(3, groups(), {})
    with pytest.raises(CheckpointError, match=r"cannot be listed.*move it away"):
        Store(tmp_path / "run").list()


def test_a_file_where_the_checkpoint_must_be_is_not_deleted(store):
    store.write(1, groups(), {})
    (store.folder / "step-000000002").write_text("a file")
    with pytest.raises(
        CheckpointError, match=r"while renaming it to step-000000002\. .*step-000000002\): move it away"
    ):
        store.write(2, groups(), {})
    assert sorted(path.name for path in store.folder.iterdir()) == ["step-000000001", "step-000000002"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_rights_is_named(store):
    store.write(1, groups(), {})
    store.folder.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match=rf"\[Errno 13\].*Give uid {os.geteuid()} the right to write"):
            store.write(2, groups(), {})
    finally:
        store.folder.chmod(0o700)


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
@pytest.mark.parametrize("at", range(8))
def test_an_error_of_any_call_leaves_the_old_checkpoint(store, monkeypatch, call, at):
    store.write(1, groups(1.0), {"value": 1})
    real, count = getattr(os, call), 0

    def failing(*args, **kwargs):
        nonlocal count
        count += 1
        if count == at + 1:
            raise OSError(5, "Input/output error")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        try:
            store.write(1, groups(2.0), {"value": 2})
            failed = False
        except CheckpointError as error:
            failed = True
            assert "[Errno 5] Input/output error" in str(error)
    assert failed == (count > at)
    (info,) = store.list()
    value = store.load(info).document["value"]
    assert value == (1 if failed else 2)
    store.clean()
    assert len(list(store.folder.iterdir())) == 1


def test_tensors_and_names_that_cannot_be_stored_are_refused_before_anything_is_written(store):
    for tensors, match in (
        ({"w": torch.eye(2).to_sparse()}, r"'model\.w' .* to_dense"),
        ({"w": torch.ones(2, device="meta")}, "meta device"),
        ({"__metadata__": torch.ones(1)}, "Rename it"),
        ({"\udcff": torch.ones(1)}, "Rename it"),
    ):
        with pytest.raises(CheckpointError, match=match):
            store.write(1, {"model": tensors}, {})
    with pytest.raises(ValueError, match=r"group name '\.\./model'"):
        store.write(1, {"../model": {}}, {})
    with pytest.raises(ValueError, match="step=-1"):
        store.write(-1, groups(), {})
    with pytest.raises(TypeError, match="document"):
        store.write(1, groups(), {"a": (1, 2)})
    assert not store.folder.exists()


def test_a_path_without_rights_and_without_an_answer_is_explained(store, monkeypatch):
    def no_answer(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(store_module.shutil, "disk_usage", no_answer)
    monkeypatch.setattr(store_module, "make_folder", no_answer)
    with pytest.raises(CheckpointError, match=r"\[Errno 13\] Permission denied, while .* free space is unknown"):
        store.write(1, groups(), {})


def test_the_names_of_all_new_folders_are_flushed(tmp_path, monkeypatch):
    flushed = []

    def fsync(handle):
        flushed.append(Path(f"/proc/self/fd/{handle}").readlink())

    monkeypatch.setattr(os, "fsync", fsync)
    Store(tmp_path / "a" / "b" / "c").write(1, groups(), {})
    assert flushed[:3] == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]


def test_a_worker_that_outlives_a_writer_does_not_keep_its_folder(tmp_path):
    (folder := tmp_path / ".tmp-1-2-step-000000001").mkdir()
    reading, writing = os.pipe()
    if not (writer := os.fork()):
        with locked(folder):
            if not os.fork():
                os.write(writing, os.getpid().to_bytes(4, "little"))
                os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
    worker = int.from_bytes(os.read(reading, 4), "little")
    try:
        os.waitpid(writer, 0)
        assert Store(tmp_path).clean() == [folder]
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(reading)
        os.close(writing)


def test_an_interrupt_leaves_nothing(store, monkeypatch):
    store.write(1, groups(), {})

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(store_module, "flush_folder", interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        store.write(2, groups(), {})
    assert [path.name for path in store.folder.iterdir()] == ["step-000000001"]
