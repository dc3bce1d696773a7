"""How ranks meet to share memory: beside processes that say nothing, that die after their hello, and without files."""

from __future__ import annotations

import errno
import gc
import os
import resource
import socket
import struct
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from unisono.errors import UnisonoError
from unisono.shm.handshake import handshake
from unisono.shm.segment import Segment


def connect(store) -> socket.socket:
    """Connect to rank 0 as a rank does, without a word."""
    while not store.check(["shm/place"]):
        time.sleep(0.001)
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.connect("\0" + store.get("shm/place").decode().split(" ")[2])
    return end


class Rank(threading.Thread):
    """A rank that meets the others in a thread."""

    def __init__(self, store, rank, size) -> None:
        super().__init__()
        self._meet = partial(meet, store, rank, size)
        self.found: object = None
        self.start()

    def run(self) -> None:
        try:
            self.found = self._meet()
        except UnisonoError as error:
            self.found = f"{type(error).__name__}: {error}"  # without its frames


def meet(store, rank, size, **options):
    make = partial(Segment.create, 100, name="unisono test")
    found = handshake(store, rank=rank, size=size, timeout_s=20.0, make=make, look=lambda: None, **options)
    found[1].close()
    return found


def open_files() -> set[str]:
    gc.collect()  # a frame of an error may hold the memory
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_who_says_nothing_keeps_nobody_waiting():
    store, begun_s = dist.HashStore(), time.monotonic()
    host = Rank(store, 0, 2)
    with connect(store):
        guest = Rank(store, 1, 2)
        guest.join()
        host.join()
    assert isinstance(host.found, tuple) and isinstance(guest.found, tuple)
    assert time.monotonic() - begun_s < 10


def test_a_rank_that_dies_after_its_hello_is_named():
    store = dist.HashStore()
    before = open_files()
    host = Rank(store, 0, 3)
    own = os.pidfd_open(os.getpid())
    with connect(store) as end:
        socket.send_fds(end, [struct.pack("<i", 1)], [own])
    os.close(own)
    guest = Rank(store, 2, 3)
    host.join()
    guest.join()
    assert str(host.found).startswith("PeerError: the process of rank 1 has ended before all ranks had come to share")
    assert str(guest.found).startswith("PeerError: rank 0 ended before it could share its memory with rank 2")
    assert open_files() == before


def test_a_rank_without_files_left_tells_the_others(monkeypatch):
    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none_left)
    store = dist.HashStore()
    with pytest.raises(UnisonoError, match="100 bytes of shared memory cannot be had: Too many open files"):
        meet(store, 0, 2)
    with pytest.raises(UnisonoError, match=r"rank 0 has no shared memory to offer: 100 bytes .* Too many open files"):
        meet(store, 1, 2)


MANY_FILES = """
import os, resource
import torch, unisono
from unisono import comm

_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 2000), most))
files = [open(os.devnull) for _ in range(1100)]
unisono.init("shm")
print(comm.all_reduce(torch.ones(1)).item())
"""


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1200, reason="needs more open files")
def test_ranks_may_have_many_files_open(fork_ranks):
    assert fork_ranks(2, MANY_FILES).out == "[0] 2.0\n[1] 2.0\n"
