"""Checkpoints that are written again, pruned and cleaned, and errors on the way: what was whole stays whole."""

import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from checkpoint_contents import assert_equal, flip, groups

from unisono.errors import CheckpointError
from unisono.state import checkpoint_store as store_module
from unisono.state import checkpoint_work
from unisono.state.checkpoint_store import CheckpointStore
from unisono.state.durable_files import locked

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
    fresh = CheckpointStore(store.folder)
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
        removed.extend(CheckpointStore(store.folder).clean())
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
            CheckpointStore(folder).write(3, groups(), {})
    with pytest.raises(CheckpointError, match=r"cannot be listed.*move it away"):
        CheckpointStore(tmp_path / "run").list()


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

    monkeypatch.setattr(checkpoint_work.shutil, "disk_usage", no_answer)
    monkeypatch.setattr(checkpoint_work, "make_folder", no_answer)
    with pytest.raises(CheckpointError, match=r"\[Errno 13\] Permission denied, while .* free space is unknown"):
        store.write(1, groups(), {})


def test_the_names_of_all_new_folders_are_flushed(tmp_path, monkeypatch):
    flushed = []

    def fsync(handle):
        flushed.append(Path(f"/proc/self/fd/{handle}").readlink())

    monkeypatch.setattr(os, "fsync", fsync)
    CheckpointStore(tmp_path / "a" / "b" / "c").write(1, groups(), {})
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
        assert CheckpointStore(tmp_path).clean() == [folder]
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(reading)
        os.close(writing)


def test_an_interrupt_leaves_nothing(store, monkeypatch):
    store.write(1, groups(), {})

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_work, "flush_folder", interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        store.write(2, groups(), {})
    assert [path.name for path in store.folder.iterdir()] == ["step-000000001"]
