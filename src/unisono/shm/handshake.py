"""The handshake by which the ranks of a group on one host share a segment and get pidfds of each other.

Rank 0 creates the segment and listens on an abstract Unix socket, whose random name goes through the group's store.
Each rank sends a pidfd of itself, and receives the segment and the pidfds of all ranks. Only processes of the same user
are accepted: the kernel reports the peer's user. While ranks wait they check whether another one has died.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import wait
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from unisono.errors import PeerError, UnisonoError
from unisono.machine import host_id
from unisono.polling import pauses
from unisono.shm.peers import Newcomers, Peers, own_process
from unisono.shm.segment import Segment
from unisono.text import name_ranks

__all__ = ["died_in_handshake", "handshake"]

_PLACE, _REFUSAL, _PROCESS = "shm/place", "shm/refusal", "shm/process"
_THROUGH = "-"
_NONE = "none: "
_SLICE_S = 0.05
_LOOK_S = 0.2
"""How often a rank that waits for rank 0 checks whether the others are alive."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.01
"""The first and the longest pause between two queries of the store."""
_HELLO = struct.Struct("<i")


def handshake(
    store: Store,
    *,
    rank: int,
    size: int,
    timeout_s: float,
    make: Callable[[], Segment],
    names: Sequence[int] | None = None,
    look: Callable[[], None] | None = None,
    keeps_descriptor: bool = False,
) -> tuple[Segment, Peers]:
    """Share one segment among the ranks of a group. Every rank must call it.

    Args:
        store: A store that all ranks share. The keys used begin with "shm/".
        rank: The rank of this process in the group.
        size: The number of ranks in the group.
        timeout_s: How long to wait for the other ranks.
        make: Creates the segment. Called on rank 0 only.
        names: The numbers by which errors name ranks. Default: those in the group.
        look: Raises if a rank has died. Called several times a second. Default: ranks exchange descriptions of their
            processes through the store, and check those.
        keeps_descriptor: Leave the descriptor of the segment open on this rank, which can then share it once more.

    Returns:
        The segment, and the processes of the ranks.

    Raises:
        PeerError: A rank died or did not come in time, or rank 0 could not create the segment. The error names it. Rank
            0 itself raises the error of `make` then.
        UnisonoError: Ranks are on different hosts, or this one cannot map the segment.
    """
    names = range(size) if names is None else names
    if look is None:
        own = f"{_PROCESS}/{rank}"
        store.set(own, own_process())
        with Newcomers() as newcomers:
            look = _Look(store, newcomers, rank=rank, names=names)
            found = handshake(
                store,
                rank=rank,
                size=size,
                timeout_s=timeout_s,
                make=make,
                names=names,
                look=look,
                keeps_descriptor=keeps_descriptor,
            )
        store.set(own, _THROUGH)
        return found
    if rank == 0:
        try:
            segment = make()
        except (UnisonoError, ValueError) as error:
            store.set(_PLACE, f"{_NONE}{error}")
            raise
        keeps = keeps_descriptor
        return _receive_all(store, segment, timeout_s=timeout_s, names=names, look=look, keeps_descriptor=keeps)
    found = _go_there(store, rank=rank, timeout_s=timeout_s, names=names, look=look)
    if not keeps_descriptor:
        found[0].close_descriptor()
    return found


def _receive_all(
    store: Store,
    segment: Segment,
    *,
    timeout_s: float,
    names: Sequence[int],
    look: Callable[[], None],
    keeps_descriptor: bool,
) -> tuple[Segment, Peers]:
    deadline_s, size = time.monotonic() + timeout_s, len(names)
    guests: dict[int, _Guest] = {}
    name = f"unisono/shm/{secrets.token_hex(16)}"
    with ExitStack() as held, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{name}")
        listener.listen(size)
        listener.setblocking(False)
        silent: list[socket.socket] = []
        held.callback(_close_all, silent)
        if not keeps_descriptor:
            held.callback(segment.close_descriptor)
        store.set(_PLACE, f"{_own_host()} {socket.gethostname()} {name}")
        while len(guests) < size - 1:
            # One that says nothing, such as a stopped process, keeps nobody waiting.
            ready = wait([listener, *silent], _SLICE_S)  # by poll: to select, the process may have too many files open
            if listener in ready:
                with suppress(BlockingIOError, ConnectionError):
                    silent.append(listener.accept()[0])
            for end in silent:
                if end in ready:
                    silent.remove(end)
                    if (guest := _Guest.of(end)) is not None:
                        guests[guest.rank] = held.enter_context(guest)
                    break
            if not ready:
                _check_refusals(store)
                look()
            if time.monotonic() > deadline_s:
                missing = [names[r] for r in range(1, size) if r not in guests]
                raise PeerError(
                    f"timed out: {name_ranks(missing)} did not come within {timeout_s:g} s to share memory with "
                    f"rank {names[0]}. Did every rank of the group call init_process_group or new_group?"
                )
        own = os.pidfd_open(os.getpid())
        held.callback(os.close, own)
        pidfds = [own, *(guests[r].pidfd for r in range(1, size))]
        for guest in guests.values():
            try:
                socket.send_fds(guest.end, [b"."], [segment.fd, *pidfds])
            except OSError as error:
                raise PeerError(died_in_handshake([names[guest.rank]])) from error
        store.delete_key(_PLACE)  # a later group with this prefix must not connect here
        return segment, Peers(0, [os.dup(fd) for fd in pidfds])


def _own_host() -> str:
    """Return one word that this process has in common with those that it can reach by an abstract socket."""
    return host_id(with_network=True).replace(" ", "/")


def _close_all(ends: Sequence[socket.socket]) -> None:
    for end in ends:
        end.close()


class _Guest(NamedTuple):
    """A rank that has connected to rank 0."""

    rank: int
    end: socket.socket
    pidfd: int

    @classmethod
    def of(cls, end: socket.socket) -> _Guest | None:
        """Read what a connection says that has data; None, and it is closed, if it is not that of a rank."""
        fds: list[int] = []
        try:
            if _user_at(end) == os.getuid():
                hello, fds, _, _ = socket.recv_fds(end, _HELLO.size, 1)
                if len(hello) == _HELLO.size and fds:
                    return cls(_HELLO.unpack(hello)[0], end, fds[0])
        except OSError:
            pass  # the process has just ended; `look` finds which
        for fd in fds:
            os.close(fd)
        end.close()
        return None

    def __enter__(self) -> _Guest:
        return self

    def __exit__(self, *_: object) -> None:
        self.end.close()
        os.close(self.pidfd)


def _go_there(
    store: Store, *, rank: int, timeout_s: float, names: Sequence[int], look: Callable[[], None]
) -> tuple[Segment, Peers]:
    deadline_s, size = time.monotonic() + timeout_s, len(names)
    look_s, pauses_s = time.monotonic() + _LOOK_S, pauses(_PAUSE_S, _LONGEST_PAUSE_S)
    host_rank, own_rank = f"rank {names[0]}", f"rank {names[rank]}"
    late = (
        f"timed out: {host_rank} did not offer {own_rank} its shared memory within {timeout_s:g} s; see what it says, "
        "or does"
    )
    while True:
        # Not store.wait, which warns when a short wait times out.
        if not store.check([_PLACE]):
            if time.monotonic() > look_s:
                look()
                look_s = time.monotonic() + _LOOK_S
            if time.monotonic() > deadline_s:
                raise PeerError(late)
            time.sleep(next(pauses_s))
            continue
        place = store.get(_PLACE).decode()
        if place.startswith(_NONE):
            raise PeerError(f"{host_rank} has no shared memory to offer: {place.removeprefix(_NONE)}")
        host, host_name, name = place.split(" ")
        if host != _own_host():
            refusal = (
                f"{host_rank} runs on {host_name} and {own_rank} on {socket.gethostname()}: only ranks of one host can "
                "share memory. Use gloo or nccl for a group of several hosts."
            )
            store.set(_REFUSAL, refusal)
            raise UnisonoError(refusal)
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        door.settimeout(_SLICE_S)
        own = os.pidfd_open(os.getpid())
        with door:
            try:
                door.connect(f"\0{name}")
                if _user_at(door) != os.getuid():
                    raise UnisonoError(f"{host_rank} belongs to a different user than {own_rank} and cannot be trusted")
                socket.send_fds(door, [_HELLO.pack(rank)], [own])
                fds = _fds_from(door, size + 1, deadline_s=deadline_s, look=look)
            except OSError as error:
                # Nothing listens: the name is an earlier group's, or rank 0 is in another network namespace.
                look()
                if time.monotonic() > deadline_s:
                    raise PeerError(late) from error
                time.sleep(_SLICE_S)
                continue
            finally:
                os.close(own)
        if len(fds) < size + 1:
            for fd in fds:
                os.close(fd)
            look()  # rank 0 may have given up because another rank died
            raise PeerError(f"{host_rank} ended before it could share its memory with {own_rank}")
        return Segment(fds[0]), Peers(rank, fds[1:])


def _fds_from(door: socket.socket, count: int, *, deadline_s: float, look: Callable[[], None]) -> list[int]:
    """Receive descriptors from rank 0, which sends them when all ranks have connected, or raise TimeoutError."""
    while True:
        try:
            return socket.recv_fds(door, 1, count)[1]
        except TimeoutError:
            look()
            if time.monotonic() > deadline_s:
                raise


class _Look:
    """Raises PeerError if a rank has died that has described its process in the store."""

    def __init__(self, store: Store, newcomers: Newcomers, *, rank: int, names: Sequence[int]) -> None:
        self._store, self._newcomers, self._names = store, newcomers, names
        self._unknown = [r for r in range(len(names)) if r != rank]

    def __call__(self) -> None:
        for rank in [*self._unknown]:
            if self._store.check([f"{_PROCESS}/{rank}"]):
                self._unknown.remove(rank)
                if (process := self._told(rank)) != _THROUGH:
                    self._newcomers.add(rank, process)
        # A rank that has finished the handshake may end.
        if lost := [self._names[r] for r in self._newcomers.dead() if self._told(r) != _THROUGH]:
            raise PeerError(died_in_handshake(lost))

    def _told(self, rank: int) -> str:
        return self._store.get(f"{_PROCESS}/{rank}").decode()


def died_in_handshake(ranks: Sequence[int]) -> str:
    """Return the error message for ranks that died before all ranks shared memory."""
    whose = "the process of" if len(ranks) == 1 else "the processes of"  # launch recognizes victims by these words
    has = "has" if len(ranks) == 1 else "have"
    return f"{whose} {name_ranks(ranks)} {has} ended before all ranks had come to share memory; see what it said last"


def _check_refusals(store: Store) -> None:
    if store.check([_REFUSAL]):
        raise UnisonoError(store.get(_REFUSAL).decode())


def _user_at(end: socket.socket) -> int:
    _, uid, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)
