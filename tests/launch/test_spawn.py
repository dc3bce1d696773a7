"""`unisono.spawn` does what `torch.multiprocessing.spawn` does: arguments, results, exceptions, contexts."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from multiprocessing import shared_memory

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import unisono
from printed import printed
from unisono.errors import LaunchError

TIMEOUT_S = 60


def add_up(rank, seen, word):
    dist.init_process_group("gloo")
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    seen[rank] = total
    print(word, rank, os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"])
    dist.destroy_process_group()


def fail(rank, event):
    if rank == 1:
        raise ValueError("a bad batch")
    event.wait(TIMEOUT_S)


def leave(rank, how):
    if rank == 1 and how < 0:
        os.kill(os.getpid(), -how)
    if rank == 1:
        sys.exit(how)
    signal.pause()


def use_everything(rank, lock, queue, end, event, memory):
    event.wait(TIMEOUT_S)
    with lock:
        memory.buf[rank] += rank + 1
    queue.put(rank)
    if rank == 0:
        end.send("from rank 0")
    memory.close()


def stay(rank, queue, heard, never):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    queue.put(rank)
    if rank == 1:
        heard.wait()  # a rank 0 that does not ignore SIGTERM yet would end at once
        raise ValueError("a bad batch")
    never.wait()


@pytest.fixture
def spawning():
    return multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def no_resource_tracker_left_behind():
    """Multiprocessing keeps a helper process for its locks and shared memory; end it, as the program's end would."""
    yield
    if multiprocessing.resource_tracker._resource_tracker._fd is not None:
        multiprocessing.resource_tracker._resource_tracker._stop()


@pytest.mark.usefixtures("warm_spawn")
@pytest.mark.parametrize(
    ("start_method", "ranks"), [("fork", 2), ("spawn", 1), pytest.param("spawn", 2, marks=pytest.mark.soak)]
)
def test_every_rank_is_called_with_its_rank_and_shares_tensors(capsys, start_method, ranks):
    seen = torch.zeros(ranks, dtype=torch.long)
    assert unisono.spawn(add_up, (seen, "hello"), nprocs=ranks, start_method=start_method) is None
    assert seen.tolist() == [sum(range(1, ranks + 1))] * ranks
    out, err = capsys.readouterr()
    assert (printed(out), err) == ({rank: [f"hello {rank} {rank} {ranks}"] for rank in range(ranks)}, "")


@pytest.mark.usefixtures("warm_spawn")
def test_an_exception_is_raised_with_its_traceback_and_said_once(capsys, spawning):
    context = unisono.spawn(fail, (spawning.Event(),), nprocs=2, join=False)
    pids = context.pids()
    with pytest.raises(ProcessRaisedException) as raised:
        while not context.join():
            pass
    assert (raised.value.error_index, raised.value.error_pid) == (1, pids[1])
    assert raised.value.msg.startswith("\n\n-- Process 1 terminated with the following error:\nTraceback ")
    assert 'raise ValueError("a bad batch")' in raised.value.msg
    assert raised.value.msg.endswith("ValueError: a bad batch\n")
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("warm_spawn")
@pytest.mark.parametrize(("how", "name"), [(3, None), (-signal.SIGKILL, "SIGKILL")])
def test_an_end_without_an_exception_gives_its_code(how, name):
    with pytest.raises(ProcessExitedException) as raised:
        unisono.spawn(leave, (how,), nprocs=2)
    assert (raised.value.error_index, raised.value.exit_code, raised.value.signal_name) == (1, how, name)
    ending = f"signal {name}" if name else f"exit code {how}"
    assert raised.value.msg == f"process 1 terminated with {ending}"


@pytest.mark.usefixtures("warm_spawn")
def test_locks_queues_pipes_and_shared_memory_are_shared(spawning):
    lock, queue, event = spawning.Lock(), spawning.Queue(), spawning.Event()
    ours, theirs = spawning.Pipe()
    memory = shared_memory.SharedMemory(create=True, size=2)
    context = unisono.spawn(use_everything, (lock, queue, theirs, event, memory), nprocs=2, join=False)
    assert not context.join(timeout=0.01)
    assert len(set(context.pids())) == 2
    event.set()
    assert sorted(queue.get(timeout=TIMEOUT_S) for _ in range(2)) == [0, 1]
    assert ours.recv() == "from rank 0"
    while not context.join():
        pass
    assert context.join()
    assert bytes(memory.buf[:2]) == b"\x01\x02"
    memory.close()
    memory.unlink()
    for end in (ours, theirs):
        end.close()
    queue.close()
    queue.join_thread()


@pytest.mark.usefixtures("warm_spawn")
@pytest.mark.parametrize(
    "grace_period", [0, pytest.param(0.0, marks=pytest.mark.soak), pytest.param(0.01, marks=pytest.mark.soak), 0.1]
)
def test_ranks_that_do_not_end_are_killed_after_the_grace_period(spawning, grace_period):
    queue, heard = spawning.SimpleQueue(), spawning.Event()
    context = unisono.spawn(stay, (queue, heard, spawning.Event()), nprocs=2, join=False)
    assert sorted(queue.get() for _ in range(2)) == [0, 1]
    heard.set()
    with pytest.raises(ProcessRaisedException, match="a bad batch"):
        while not context.join(grace_period=grace_period):
            pass
    queue.close()


def test_a_fork_that_fails_is_an_error_that_names_the_limits(monkeypatch):
    def fail(*_, **__):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    files = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(LaunchError, match="no process could be started: fork failed with EAGAIN"):
        unisono.spawn(print, nprocs=2)
    assert len(os.listdir("/proc/self/fd")) == len(files)  # noqa: PTH208


def test_what_cannot_be_sent_is_said_before_anything_is_started():
    with pytest.raises(TypeError, match="pickle"):
        unisono.spawn(print, (threading.Lock(),), nprocs=2)


@pytest.mark.parametrize(
    ("options", "message"), [({"nprocs": 0}, "nprocs=0"), ({"start_method": "thread"}, "start_method='thread'")]
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        unisono.spawn(print, **options)
