"""Kill writers of checkpoints and look at what they leave. Run by test_crash.py, in a process of its own.

    python crash_campaign.py FOLDER random KILLS SEED    # SIGKILL after random times
    python crash_campaign.py FOLDER increments KILLS SEED    # the same, of checkpoints with changed rows alone
    python crash_campaign.py FOLDER calls                # SIGKILL before every call that changes the disk

Torch is imported once and writers are forked, so that a kill costs milliseconds. Prints one JSON line.
"""

import functools
import json
import os
import random
import select
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from unisono.state import checkpoint_work as work_module
from unisono.state.best import Best, read_best, write_best
from unisono.state.checkpoint_store import CheckpointInfo, CheckpointStore

CHANGING_CALLS = ["mkdir", "rename", "replace", "symlink", "fsync", "unlink", "rmdir"]
TAG, BEST = "tag-mine", ("best", "best.json")


def groups(value):
    return {
        "model": {"w": torch.full((100_000,), float(value)), "b": torch.full((3,), float(value))},
        "optimizer": {"0.exp_avg": torch.full((50_000,), -float(value), dtype=torch.bfloat16)},
    }


def mark(store, value, *, tag=False):
    """Record the newest checkpoint as the best one, or save it under a tag."""
    if tag:
        store.write(int(value), groups(value), {"value": value}, tag="mine")
    else:
        write_best(store.folder, Best(step=int(value), metric="value", mode="max", value=value))


def check(store, *, best=None, tag=None):
    """Do what a run does at its start. Returns the value that all parts of the newest checkpoint agree on.

    Args: best and tag are values that the best checkpoint and the one with the tag must at least have.
    """
    store.clean()
    left = {path.name for path in store.folder.iterdir() if not path.name.startswith("step-")}
    assert left <= {TAG, *BEST}, left
    loaded, errors = store.load_newest()
    assert errors == [], errors
    assert loaded is not None
    if best is not None:
        found = read_best(store.folder)
        assert found.value >= best, (found, best)
        kept = store.load(CheckpointInfo(path=store.step_path(found.step), step=found.step, nbytes=0))
        assert values_of(kept) >= found.value, (found, kept.document)
        linked = (store.folder / "best").resolve()
        values_of(store.load(CheckpointInfo(path=linked, step=0, nbytes=0)))
        write_best(store.folder, found)  # the link may be older than the record
    if tag is not None:
        assert values_of(store.load(CheckpointInfo(path=store.folder / TAG, step=0, nbytes=0))) >= tag
    return values_of(loaded)


def values_of(loaded):
    """Give the value that all parts of a checkpoint agree on."""
    info, found, document = loaded
    expected = groups(document["value"])
    for group, tensors in expected.items():
        for name, tensor in tensors.items():
            assert torch.equal(found[group][name], tensor), (info, group, name)
    return document["value"]


def fork(work):
    """Start a process that does work(report) and nothing else. Returns its id and the pipe of its reports."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            work(lambda text: os.write(writer, f"{text}\n".encode()))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    return child, reader


def drain(reader):
    with os.fdopen(reader) as file:
        return [float(line) for line in file.read().split("\n")[:-1]]


def at_random_moments(folder, kills, seed):
    rng = random.Random(seed)
    store = CheckpointStore(folder)
    store.write(0, groups(0), {"value": 0})
    for tag in (False, True):
        mark(store, 0.0, tag=tag)
    value = best = 0.0
    written = 0
    for _ in range(kills):

        def write_for_ever(report, start=value):
            mine = CheckpointStore(folder)
            now = start
            while True:
                now += 0.5  # each step twice: a new checkpoint, then one in its place
                mine.write(int(now), groups(now), {"value": now})
                report(now)
                if now % 2 == 0.5:
                    mark(mine, now)
                    mark(mine, now, tag=True)
                    report(-now)
                mine.prune(2)

        child, reader = fork(write_for_ever)
        select.select([reader], [], [])  # the first checkpoint of this writer is there
        time.sleep(rng.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        reported = drain(reader)
        best = max([best, *(-each for each in reported)])
        value = check(store, best=best, tag=best)
        assert value >= max(reported), (value, reported)
        written += sum(each > 0 for each in reported)
    return {"kills": kills, "checkpoints": written}


def at_every_call(folder):
    """With a file system that can exchange names, and then the writes alone without one."""
    able = work_module.swap_names
    kills = [kills_at_every_call(folder)]
    work_module.swap_names = lambda first, second: False
    kills.append(kills_at_every_call(folder, writes_alone=True))
    work_module.swap_names = able
    return {"kills": sum(kills)}


def kills_at_every_call(folder, *, writes_alone=False):
    def work(report):
        store = CheckpointStore(folder)
        for value in (3.0, 3.5):
            store.write(3, groups(value), {"value": value})
            report(value)
        if writes_alone:
            return
        store.prune(1)  # not the best one, which is of step 1
        mark(store, 3.5)
        report(-1)
        mark(store, 3.5, tag=True)
        report(-2)
        store.prune(1)

    def work_and_die(report, at):
        count = 0

        def wrapped(real, *args, **kwargs):
            nonlocal count
            count += 1
            if count == at:  # what the disk has after a call, it has before the next one
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        for name in CHANGING_CALLS:
            setattr(os, name, functools.partial(wrapped, getattr(os, name)))
        work_module.swap_names = functools.partial(wrapped, work_module.swap_names)
        work(report)

    begun = CheckpointStore(folder.with_name("begun"))
    for step in (1, 2):
        begun.write(step, groups(step), {"value": step})
    for tag in (False, True):
        mark(begun, 1.0, tag=tag)
    kills, at, finished = 0, 0, False
    while not finished:
        at += 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(begun.folder, folder, symlinks=True)
        store = CheckpointStore(folder)
        child, reader = fork(functools.partial(work_and_die, at=at))
        reported = [2.0, *drain(reader)]
        _, status = os.waitpid(child, 0)
        finished = os.WIFEXITED(status)
        assert finished or os.WTERMSIG(status) == signal.SIGKILL, status
        assert not finished or os.WEXITSTATUS(status) == 0
        kills += not finished
        best, tag = (3.5 if done in reported else 1.0 for done in (-1, -2))
        value = check(store, best=best, tag=tag)
        assert value >= max(reported), (at, value, reported)
    return kills


def table_after(step):
    table = torch.zeros(8192, 64)
    for each in range(1, step + 1):
        table[(37 * each + torch.arange(40)) % 8192] = each
    return table


def increments_at_random_moments(folder, kills, seed):
    rng = random.Random(seed)
    store, step, increments = CheckpointStore(folder), 0, 0
    store.write(0, {"model": {"table": table_after(0)}}, {})
    for _ in range(kills):

        def write_for_ever(report, begun=step):
            mine = CheckpointStore(folder, incremental=True)
            for each in range(begun + 1, begun + 1000):
                mine.write(each, {"model": {"table": table_after(each)}}, {})
                report(each)
                mine.prune(2)

        child, reader = fork(write_for_ever)
        text = b""
        while text.count(b"\n") < 2:  # the first checkpoint of a process is whole
            text += os.read(reader, 100)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        reported = [*map(float, text.split()), *drain(reader)]
        store.clean()
        found, errors = store.load_newest()
        assert found is not None and not errors, errors
        assert found.info.step >= max(reported), (found.info, reported)
        assert torch.equal(found.groups["model"]["table"], table_after(found.info.step)), found.info
        for info in store.list():
            store.verify(info)
        increments += (found.info.path / "model-base.safetensors").exists()
        step = found.info.step
    return {"kills": kills, "increments": increments}


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads of the parent would not be there in the forks
    target = Path(sys.argv[1])
    if sys.argv[2] == "random":
        print(json.dumps(at_random_moments(target, int(sys.argv[3]), int(sys.argv[4]))))
    elif sys.argv[2] == "increments":
        print(json.dumps(increments_at_random_moments(target, int(sys.argv[3]), int(sys.argv[4]))))
    else:
        print(json.dumps(at_every_call(target)))
