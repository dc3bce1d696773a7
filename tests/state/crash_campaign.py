"""Kill writers of checkpoints and look at what they leave. Run by test_crash.py, in a process of its own.

    python crash_campaign.py FOLDER random KILLS SEED    # SIGKILL after random times
    python crash_campaign.py FOLDER calls                # SIGKILL before and after every call that changes the disk

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

from unisono.state.store import Store

CHANGING_CALLS = ["mkdir", "rename", "fsync", "unlink", "rmdir"]


def groups(value):
    return {
        "model": {"w": torch.full((100_000,), float(value)), "b": torch.full((3,), float(value))},
        "optimizer": {"0.exp_avg": torch.full((50_000,), -float(value), dtype=torch.bfloat16)},
    }


def check(store):
    """Do what a run does at its start. Returns the value that all parts of the newest checkpoint agree on."""
    store.clean()
    left = [path.name for path in store.folder.iterdir() if not path.name.startswith("step-")]
    assert left == [], left
    loaded, errors = store.load_newest()
    assert errors == [], errors
    assert loaded is not None
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
    store = Store(folder)
    store.write(0, groups(0), {"value": 0})
    value = 0.0
    written = 0
    for _ in range(kills):

        def write_for_ever(report, start=value):
            mine = Store(folder)
            now = start
            while True:
                now += 0.5  # each step twice: a new checkpoint, then one in its place
                mine.write(int(now), groups(now), {"value": now})
                report(now)
                mine.prune(2)

        child, reader = fork(write_for_ever)
        select.select([reader], [], [])  # the first checkpoint of this writer is there
        time.sleep(rng.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        reported = drain(reader)
        value = check(store)
        assert value >= reported[-1], (value, reported)
        written += len(reported)
    return {"kills": kills, "checkpoints": written}


def at_every_call(folder):
    def work(report):
        store = Store(folder)
        for value in (3.0, 3.5):
            store.write(3, groups(value), {"value": value})
            report(value)
        store.prune(1)

    def work_and_die(report, at, before):
        count = 0

        def wrapped(real, *args, **kwargs):
            nonlocal count
            count += 1
            if count == at and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        for name in CHANGING_CALLS:
            setattr(os, name, functools.partial(wrapped, getattr(os, name)))
        work(report)

    kills, at, finished = 0, 0, False
    while not finished:
        at += 1
        for before in (True, False):
            shutil.rmtree(folder, ignore_errors=True)
            store = Store(folder)
            for step in (1, 2):
                store.write(step, groups(step), {"value": step})
            child, reader = fork(functools.partial(work_and_die, at=at, before=before))
            reported = [2.0, *drain(reader)]
            _, status = os.waitpid(child, 0)
            finished = os.WIFEXITED(status)
            assert finished or os.WTERMSIG(status) == signal.SIGKILL, status
            assert not finished or os.WEXITSTATUS(status) == 0
            kills += not finished
            value = check(store)
            assert value >= reported[-1], (at, before, value, reported)
    return {"kills": kills}


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads of the parent would not be there in the forks
    target = Path(sys.argv[1])
    if sys.argv[2] == "random":
        print(json.dumps(at_random_moments(target, int(sys.argv[3]), int(sys.argv[4]))))
    else:
        print(json.dumps(at_every_call(target)))
