"""Workers that are slow are told of and waited for; those that die are named, with their samples."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import traceback
from pathlib import Path

import pytest
from torch.utils.data import IterableDataset

from unisono.data import loader
from unisono.data.fetch import Fetcher, Part, Task
from unisono.data.loader_settings import LoaderSettings
from unisono.data.loader_workers import TaskReader
from unisono.errors import DataError

TASKS = [Task(0, step, 10, [Part(0, 0, [*range(10 * step, 10 * step + 10)])]) for step in range(4)]


class Gated:
    """A dataset whose sample 17 comes once a file is there."""

    def __init__(self, gate):
        self.gate = gate

    def __getitem__(self, index):
        if index == 17:
            with self.gate.open("rb"):  # a named pipe, which waits for its writer
                pass
        return index


class Deadly:
    """A dataset whose sample 17 ends the process that reads it."""

    def __init__(self, end):
        self.end = end

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 17:
            self.end()
        return index


class DeadlyStream(IterableDataset):
    def __iter__(self):
        yield 0
        os.kill(os.getpid(), signal.SIGKILL)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def ended():
    os._exit(3)


def failed():
    raise ConnectionResetError("the dataset's own")


def reader(dataset, **options):
    fetcher = Fetcher(dataset, LoaderSettings(batch_size=1, seed=0, shuffle=False, workers=2))
    return TaskReader(fetcher, TASKS, **options)


def test_a_slow_worker_is_waited_for_and_told_of_with_its_samples(tmp_path: Path):
    gate, told = tmp_path / "gate", []
    os.mkfifo(gate)

    def tell(message):
        if re.match(r"waiting for worker 1 for \d+ s: it is reading", message):  # and not about one that starts
            told.append(message.partition(" s: ")[2])
            if len(told) == 2:
                gate.open("wb").close()

    assert [task.indices for task, _ in reader(Gated(gate), tell=tell, patience_s=0.05)] == [t.indices for t in TASKS]
    assert told[:2] == ["it is reading samples 10, 11, 12, 13, 14, 15, 16, 17, … (10 in all)"] * 2


def test_workers_may_finish_what_they_read_for_an_epoch_that_was_left(tmp_path: Path):
    """However long it takes them: here, until they have been told of twice."""
    gate, told = tmp_path / "gate", []
    os.mkfifo(gate)

    def tell(message):
        if re.match(r"waiting for worker 1 for \d+ s: it is reading samples 10, 11", message):
            told.append(message)
            if len(told) == 2:
                gate.open("wb").close()

    read = reader(Gated(gate), tell=tell, patience_s=0.6)
    left = iter(read)
    assert next(left)[0] is TASKS[0]
    left.close()
    again = iter(read)
    assert next(again)[0] is TASKS[0]
    assert len(told) == 2
    told.clear()
    assert [task.indices for task, _ in again] == [task.indices for task in TASKS[1:]]
    assert len(told) >= 2


def test_a_worker_that_dies_between_epochs_is_named(tmp_path: Path):
    gate, has_left = tmp_path / "gate", []
    os.mkfifo(gate)

    def tell(_):
        if has_left:  # on a busy machine, it is told of workers that start, too
            multiprocessing.active_children()[-1].kill()

    read = reader(Gated(gate), tell=tell, patience_s=0.05)
    left = iter(read)
    next(left)
    left.close()
    has_left.append(True)
    with pytest.raises(DataError, match=r"worker [01] of 2 \(process \d+\) was killed by SIGKILL while it was "):
        next(iter(read))


def test_a_worker_that_does_not_start_is_told_of(fork_python, tmp_path):
    """As happens if another thread of the process that is forked holds a lock that the worker needs."""
    script = tmp_path / "script.py"
    script.write_text("""
import os
from torch.utils.data import TensorDataset
import torch
from unisono.data.fetch import Fetcher, Part, Task
from unisono.data.loader_settings import LoaderSettings
from unisono.data.loader_workers import TaskReader

gates = []
gate = os.path.join(os.path.dirname(__file__), "gate")
os.mkfifo(gate)
os.register_at_fork(after_in_child=lambda: open(gate).close())

def tell(message):
    print(message.partition(" s: ")[2], flush=True)
    gates.append(os.open(gate, os.O_RDWR))  # waits for nobody

data = TensorDataset(torch.arange(3))
fetcher = Fetcher(data, LoaderSettings(batch_size=1, seed=0, shuffle=False, workers=1))
read = TaskReader(fetcher, [Task(0, 0, 3, [Part(0, 0, [0, 1, 2])])], tell=tell, patience_s=0.05)
print([found[0][0].tolist() for _, found in read])
""")
    lines = fork_python(script)
    assert lines[0] == "it is starting"
    assert lines[-1] == "[[0, 1, 2]]"


@pytest.mark.parametrize(("end", "how"), [(killed, "was killed by SIGKILL"), (ended, "ended with exit code 3")])
def test_a_dead_worker_is_named_with_its_samples(end, how):
    with pytest.raises(DataError, match=rf"worker 1 of 2 \(process \d+\) {how} while it was reading samples 10, 11"):
        list(reader(Deadly(end)))
    with pytest.raises(DataError, match=rf"worker [01] of 2 \(process \d+\) {how} while it was reading sample 17: "):
        list(loader(Deadly(end), 1, shuffle=False, workers=2))


def test_a_dead_worker_of_a_stream_is_named():
    with pytest.raises(DataError, match=r"worker 0 of 1 \(process \d+\) was killed by SIGKILL while it was reading"):
        list(loader(DeadlyStream(), 1, workers=2))


def test_what_a_dataset_raises_itself_is_raised():
    with pytest.raises(ConnectionResetError, match="the dataset's own") as caught:
        list(reader(Deadly(failed)))
    # They hold the workers, which end when their loader goes; if the collector took it, it would wait 5 s for each.
    traceback.clear_frames(caught.tb)


def test_more_workers_than_cores_are_warned_of_once():
    number = len(os.sched_getaffinity(0)) + 1
    with pytest.warns(UserWarning, match=f"will create {number} worker processes") as warned:
        assert len([*loader([*range(40)], 10, workers=number)]) == 4
    assert len(warned) == 1


GARBAGE = """
import gc, os, sys, torch, unisono
from pathlib import Path

class Owner:
    def __init__(self):
        self.itself = self  # freed by the collector only

    def __del__(self):
        with Path(sys.argv[1]).open("a") as file:
            print(os.getpid(), file=file)

class Data:
    def __len__(self):
        return 16

    def __getitem__(self, index):
        assert gc.isenabled() == (sys.argv[2] == "collects")
        gc.collect()
        return torch.ones(2)

model = torch.nn.Linear(2, 1)
trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=2, progress=False)
if sys.argv[2] != "collects":
    gc.disable()
    for _ in range(3):
        Owner()
for batch in trainer.batches(Data(), batch_size=4, workers=2):
    trainer.step(lambda model, batch: model(batch).flatten(), batch)
assert gc.isenabled() == (sys.argv[2] == "collects")
gc.collect()
print(os.getpid())
"""


def test_workers_leave_the_garbage_of_the_training_process_to_it(fork_python, tmp_path):
    script, told = tmp_path / "script.py", tmp_path / "told"
    script.write_text(GARBAGE)
    (pid,) = fork_python(script, told, "does not collect")
    assert told.read_text().split() == [pid] * 3
    fork_python(script, told, "collects")


def test_workers_end_at_once_when_the_garbage_collector_finds_their_loader(fork_python, tmp_path):
    """By default it would find their queues first, and each worker would end 5 s later: here, after 10 minutes."""
    script = tmp_path / "script.py"
    script.write_text("""
import gc, multiprocessing
import torch
from torch.utils.data import TensorDataset, _utils

_utils.MP_STATUS_CHECK_INTERVAL = _utils.worker.MP_STATUS_CHECK_INTERVAL = 600.0

import unisono

class Ends(unisono.Trainer):
    pass

for data in TensorDataset(torch.randn(40, 3)), [torch.zeros(3)] * 40:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Ends(model, optimizer, virtual_ranks=2, progress=False)
    trainer.itself = trainer
    for batch in trainer.batches(data, batch_size=8, workers=2):
        pass
    processes = multiprocessing.active_children()
    assert len(processes) == 2
    del trainer, batch
    gc.collect()
    assert not multiprocessing.active_children()
    print([process.exitcode for process in processes])
""")
    assert fork_python(script) == ["[0, 0]", "[0, 0]"]
