"""How the ranks of a group on one host come to share a segment, and to know each other's processes.

Rank 0 makes the segment and listens on a local socket that has no file; its random name goes through the group's store.
Each rank hands over a pidfd of itself, and gets the segment and everybody's pidfd. Only processes of the same user are
let in: the kernel tells who is at the other end.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from unisono.comm.shm.peers import Peers
from unisono.comm.shm.segment import Segment
from unisono.errors import UnisonoError

__all__ = ["meet"]

_PLACE, _REFUSAL = "shm/place", "shm/refusal"
_NONE = "none: "
_SLICE_S = 0.05
_HELLO = struct.Struct("<i")


def meet(
    store: Store,
    *,
    rank: int,
    size: int,
    timeout_s: float,
    make: Callable[[], Segment],
    names: Sequence[int] | None = None,
) -> tuple[Segment, Peers]:
    """Bring the ranks of a group together around one segment. Every rank must call it.

    Args: store is one that all ranks share, used under names that begin with "shm/". make is called on rank 0.
        names are the numbers by which errors name ranks; None: those in the group.
    Raises: UnisonoError if a rank does not come in time, naming it, if ranks are on different hosts, or if rank 0 has
        no segment; there, what make raises.
    """
    names = range(size) if names is None else names
    if rank == 0:
        try:
            segment = make()
        except (UnisonoError, ValueError) as error:
            store.set(_PLACE, f"{_NONE}{error}")
            raise
        return _receive_all(store, size=size, timeout_s=timeout_s, segment=segment, names=names)
    return _go_there(store, rank=rank, size=size, timeout_s=timeout_s, names=names)


def _receive_all(
    store: Store, *, size: int, timeout_s: float, segment: Segment, names: Sequence[int]
) -> tuple[Segment, Peers]:
    deadline_s = time.monotonic() + timeout_s
    guests: dict[int, tuple[socket.socket, int]] = {}
    name = f"unisono/shm/{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{name}")
        listener.listen(size)
        listener.settimeout(_SLICE_S)
        store.set(_PLACE, f"{_host()} {socket.gethostname()} {name}")
        while len(guests) < size - 1:
            try:
                guest, _ = listener.accept()
            except TimeoutError:
                _check_refusals(store)
                if time.monotonic() > deadline_s:
                    missing = [names[r] for r in range(1, size) if r not in guests]
                    raise UnisonoError(
                        f"timed out: {_ranks(missing)} did not come within {timeout_s:g} s to share memory with rank "
                        f"{names[0]}. "
                        "Did every rank of the group call init_process_group or new_group?"
                    ) from None
                continue
            guest.settimeout(max(_SLICE_S, deadline_s - time.monotonic()))
            if _user_at(guest) != os.getuid():
                guest.close()
                continue
            hello, fds, _, _ = socket.recv_fds(guest, _HELLO.size, 1)
            if len(hello) < _HELLO.size or not fds:  # it ended just then
                guest.close()
                continue
            guests[_HELLO.unpack(hello)[0]] = guest, fds[0]
    pidfds = [os.pidfd_open(os.getpid()), *(guests[r][1] for r in range(1, size))]
    for guest, _ in guests.values():
        with guest:
            socket.send_fds(guest, [b"."], [segment.fd, *pidfds])
    store.delete_key(_PLACE)  # a later group with this prefix must not go there
    segment.close_descriptor()
    return segment, Peers(0, pidfds)


def _go_there(store: Store, *, rank: int, size: int, timeout_s: float, names: Sequence[int]) -> tuple[Segment, Peers]:
    deadline_s = time.monotonic() + timeout_s
    host_rank, own_rank = f"rank {names[0]}", f"rank {names[rank]}"
    late = (
        f"timed out: {host_rank} did not offer {own_rank} its shared memory within {timeout_s:g} s; see what it says, "
        "or does"
    )
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            store.wait([_PLACE], timedelta(seconds=max(left_s, 0.001)))
        except DistStoreError as error:
            raise UnisonoError(late) from error
        place = store.get(_PLACE).decode()
        if place.startswith(_NONE):
            raise UnisonoError(f"{host_rank} has no shared memory to offer: {place.removeprefix(_NONE)}")
        host, host_name, name = place.split(" ")
        if host != _host():
            refusal = (
                f"{host_rank} runs on {host_name} and {own_rank} on {socket.gethostname()}: only ranks of one host can "
                "share memory. Use gloo or nccl for a group of several hosts."
            )
            store.set(_REFUSAL, refusal)
            raise UnisonoError(refusal)
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        door.settimeout(max(left_s, 0.001))
        own = os.pidfd_open(os.getpid())
        with door:
            try:
                door.connect(f"\0{name}")
                if _user_at(door) != os.getuid():
                    raise UnisonoError(f"{host_rank} belongs to another user than {own_rank}, and cannot be trusted")
                socket.send_fds(door, [_HELLO.pack(rank)], [own])
                _, fds, _, _ = socket.recv_fds(door, 1, size + 1)
            except TimeoutError as error:
                raise UnisonoError(late) from error
            except OSError as error:
                # Nobody is there: the name is that of an earlier group, or rank 0 is in another network namespace.
                if time.monotonic() > deadline_s:
                    raise UnisonoError(late) from error
                time.sleep(_SLICE_S)
                continue
            finally:
                os.close(own)
        if len(fds) < size + 1:
            raise UnisonoError(f"{host_rank} ended before it could share its memory with {own_rank}")
        segment = Segment(fds[0])
        segment.close_descriptor()
        return segment, Peers(rank, fds[1:])


def _check_refusals(store: Store) -> None:
    if store.check([_REFUSAL]):
        raise UnisonoError(store.get(_REFUSAL).decode())


def _user_at(end: socket.socket) -> int:
    _, uid, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


@cache
def _host() -> str:
    """Name the running system, also where containers have host names of their own."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
