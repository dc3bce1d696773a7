"""Messages of the shm backend to ranks that die, come late, leave or are forked: who is missing is named, in time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

_BEGIN = """
import os, random, signal, sys, threading, time
from datetime import timedelta
from pathlib import Path
import pytest, torch
import torch.distributed as dist
import unisono
torch.set_num_threads(1)
"""

_FORKED = (
    _BEGIN
    + """
def ranks(n, body, *, timeout_s=30):
    # Forked here, without a launcher, which would end the others when one dies. Gives exit codes.
    folder, pids = sys.argv[1], []
    for rank in range(n):
        pid = os.fork()
        if not pid:
            try:
                signal.alarm(60)
                dist.init_process_group("shm", init_method=f"file://{folder}/meeting", rank=rank, world_size=n,
                                        timeout=timedelta(seconds=timeout_s))
                body(rank)
            except BaseException as error:
                print(rank, type(error).__name__, error, flush=True)
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]

def took(function):
    begin = time.monotonic()
    try:
        function()
    except dist.DistBackendError as error:
        # The others have a second; this is a busy machine's allowance, far below the group's timeout.
        print(f"raised {'in time' if time.monotonic() - begin < 10 else 'late'}: {error}", flush=True)
        return
    raise AssertionError("no error")
"""
)


def _run(fork_python: Callable[..., list[str]], folder: Path, body: str) -> str:
    script = folder / "script.py"
    script.write_text(_FORKED + body)
    return "\n".join(fork_python(script, folder))


@pytest.fixture
def forked(fork_python: Callable[..., list[str]], tmp_path: Path) -> Callable[[str], str]:
    """Run a script that forks its ranks; give what it printed."""
    return partial(_run, fork_python, tmp_path)


_DEATH = """
def body(rank):
    sent = torch.ones(3)
    if rank == 1:
        dist.send(sent, 0, tag=1)  # it lies in the channel when its sender dies
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    got = torch.zeros(3)
    if rank == 0:
        time.sleep(0.3)
        dist.recv(got, 1, tag=1)
        assert got.tolist() == [1, 1, 1]
        took(lambda: dist.recv(got, 1, tag=2))
        took(lambda: dist.isend(sent, 1))
    else:
        took(lambda: dist.recv(got, None, tag=2))
        took(lambda: dist.send(torch.ones(8_000_000), 1))
print(ranks(3, body))
"""


def test_a_dead_rank_is_named_and_what_it_sent_before_arrives(forked: Callable[[str], str]):
    said = forked(_DEATH)
    assert "[0, -9, 0]" in said, said
    lines = [line for line in said.splitlines() if line.startswith("raised")]
    assert len(lines) == 4 and all(line.startswith("raised in time") for line in lines), said
    assert all("the process of rank 1 has ended" in line for line in lines), said


_LATE = """
def body(rank):
    given_up = Path(sys.argv[1], "given-up")
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        took(lambda: dist.recv(torch.zeros(5), 1, group, tag=3))
        given_up.touch()
    else:
        while not given_up.exists():
            time.sleep(0.01)
        took(lambda: dist.recv(torch.zeros(5), 0, group, tag=4))
print(ranks(2, body))
"""


def test_a_timeout_names_the_rank_that_is_missing(forked: Callable[[str], str]):
    said = forked(_LATE)
    assert "[0, 0]" in said, said
    assert said.count("receive from rank 1 (tag 3, 20 bytes) timed out: rank 1 did not take part within 1 s") == 2, said


_GONE = """
def body(rank):
    got = torch.zeros(1)
    left, named = Path(sys.argv[1], "left"), Path(sys.argv[1], "named")
    if rank == 2:
        dist.send(torch.ones(1), 0)
        dist.destroy_process_group()
        left.touch()
        while not named.exists():  # its process is still there
            time.sleep(0.01)
        return
    if rank == 0:
        dist.recv(got, 2)
    while rank == 1 and not left.exists():
        time.sleep(0.01)
    # Whoever has left for good does not disturb the others who receive from any.
    if rank == 0:
        assert dist.recv(got, None, tag=1) == 1
        took(lambda: dist.recv(got, 2))
        named.touch()
    else:
        dist.send(got, 0, tag=1)
print(ranks(3, body))
"""


def test_a_rank_that_has_left_the_group_is_named_too(forked: Callable[[str], str]):
    said = forked(_GONE)
    assert "[0, 0, 0]" in said, said
    assert "receive from rank 2 (tag 0, 4 bytes): the group was left by rank 2" in said, said


_FORKS = """
def body(rank):
    other = 1 - rank
    got = torch.zeros(2_000_000)
    receive = dist.irecv(got, other)
    child = os.fork()
    if not child:
        try:
            dist.isend(torch.ones(2_000_000), other)
        except RuntimeError as error:
            print(f"child: {error}", flush=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.send(torch.full((2_000_000,), float(rank)), other)
    receive.wait()
    assert (got == other).all()
    dist.destroy_process_group()
print(ranks(2, body))
"""


def test_a_forked_child_cannot_disturb_its_parent(forked: Callable[[str], str]):
    said = forked(_FORKS)
    assert "[0, 0]" in said and said.count("is not part of the group") == 2, said
