"""The rendezvous of a job's ranks before they have a process group: a store that all share.

`rendezvous` opens the store, for any launcher and `init_method`. `job.initialize` exchanges facts over it
(`store_exchange`) and makes the group.
"""

from __future__ import annotations

import atexit
import os
import secrets
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist

from unisono.errors import LaunchError, PeerError
from unisono.job.placement import Placement
from unisono.job.store_exchange import late_message, wait_for_keys
from unisono.tcp_store import LOCAL_HOSTS, open_store

__all__ = ["Rendezvous", "rendezvous"]


_PAUSE_S = 0.02
"""First pause of a rank that finds the store of an earlier job and waits for rank 0 to open the next one."""

_rendezvous_counts: Counter[tuple[str, int]] = Counter()
"""Number of rendezvous of this process by place and number of ranks; part of the prefix of their keys."""

_names: set[str] = set()
"""Names, chosen by rank 0, of the jobs that this process has joined at stores of rank 0."""

_listeners: dict[str, str] = {}
"""By address on this machine, the socket of rank 0's store at which this process has met last."""

_LISTENS = "0A"
"""The state of a socket that listens, in /proc/net/tcp."""

_CLOSING_S = 1.0
"""How long rank 0 may take to close a store. It does not close one that its program has kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """The store at which the ranks of a job meet, and the rank of this process there."""

    store: dist.Store  # type: ignore[name-defined]
    rank: int
    world_size: int
    place: str
    """Name of the store in messages."""
    hosted: bool = False
    """True if rank 0's process hosts the store, so that the store ends with that process."""
    file: Path | None = None
    """Where the store is, if that is a file. The last rank to let go of the store removes it."""


def rendezvous(
    init_method: str | None,
    *,
    store: dist.Store | None,  # type: ignore[name-defined]
    rank: int | None,
    world_size: int | None,
    placement: Placement,
    timeout: timedelta,
) -> Rendezvous:
    """Open the store at which the ranks of this job meet. Every rank must call it.

    The launcher's values, in `placement`, are the defaults of `init_method`, `rank` and `world_size`.

    Raises:
        LaunchError: The store cannot be opened or reached, or another process has come with this rank.
        PeerError: Rank 0 does not open a new store in time.
        ValueError: The arguments do not determine the address, the rank or the number of ranks.
    """
    scheme = "" if init_method is None else urlsplit(init_method).scheme
    if scheme not in ("", "env", "tcp", "file"):
        raise ValueError(
            f"init_method={init_method!r} is none of env://, tcp://host:port and file:///path: give one of these, or "
            "leave it out under a launcher"
        )
    if init_method is not None and store is not None:
        raise ValueError("init_method and store both say where ranks meet: give one of them")
    rank, world_size = _rank_and_size(init_method, rank=rank, world_size=world_size, placement=placement)
    if store is not None:
        return _numbered(store, rank, world_size, place="the given store")
    if scheme == "file":
        assert init_method is not None
        return _meet_in_file(_file_of(init_method), rank, world_size)
    if scheme in ("", "env") and world_size == 1:
        return Rendezvous(store=dist.HashStore(), rank=0, world_size=1, place="this process alone")  # type: ignore[attr-defined]
    if scheme != "tcp" and placement.rendezvous_url.startswith("file:"):
        path = _rendezvous_folder() / placement.rendezvous_url.removeprefix("file:")
        atexit.register(path.unlink, missing_ok=True)  # runs after the group has ended: last in, first out
        return _meet_in_file(path, rank, world_size)
    url = _address_of(init_method if scheme == "tcp" else placement.rendezvous_url, world_size=world_size)
    place = url if url != "env://" else f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if not _is_launchers(url):
        return _meet_at_rank_0(url, rank, world_size, place=place, timeout=timeout)
    try:
        found = _rendezvous(url, rank, world_size, timeout=timeout)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise _not_met(url, rank, world_size, error) from error
    return _numbered(found, rank, world_size, place=place)


def _rank_and_size(
    init_method: str | None, *, rank: int | None, world_size: int | None, placement: Placement
) -> tuple[int, int]:
    """Return rank and number of ranks: the arguments, otherwise the address's, otherwise the launcher's."""
    query = parse_qs(urlsplit(init_method).query) if init_method else {}
    if rank is None and "rank" in query:
        rank = int(query["rank"][0])
    if world_size is None and "world_size" in query:
        world_size = int(query["world_size"][0])
    if rank is None and world_size is None:
        rank, world_size = placement.rank, placement.world_size
        if placement.launcher == "none" and init_method and not init_method.startswith("env:"):
            raise ValueError(
                f"init_method={init_method!r} needs to know who this process is: give rank= (from 0) and world_size= "
                "(how many processes call init), or start them with `unisono run`"
            )
    if rank is None or world_size is None:
        given, other = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise ValueError(f"{given} is given and {other} is not: give both, or neither under a launcher")
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"rank={rank} and world_size={world_size} do not fit: ranks count from 0, so rank is one of "
            f"0..{max(world_size - 1, 0)}, and world_size at least 1"
        )
    return rank, world_size


def _address_of(method: str | None, *, world_size: int) -> str:
    """Return the address of the store for torch: tcp://host:port, or env:// if it is in the environment."""
    if method and method.startswith("tcp:"):
        parts = urlsplit(method)
        try:
            port = parts.port
        except ValueError:  # no number
            port = None
        if not parts.hostname or port is None:
            raise ValueError(f"init_method={method!r} lacks a host or a port: write tcp://host:port")
        return f"tcp://{parts.netloc}"
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"{world_size} ranks are to meet and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
            "set: give init_method='tcp://host:port' (rank 0's host, a free port there) or 'file:///path', or start "
            "with `unisono run`"
        )
    return "env://"


def _is_launchers(url: str) -> bool:
    """Return True if the launcher hosts a store, and this is its address."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    return url == "env://" or url.endswith(f":{os.environ.get('MASTER_PORT')}")


def _meet_at_rank_0(url: str, rank: int, world_size: int, *, place: str, timeout: timedelta) -> Rendezvous:
    """Meet at the store that rank 0 opens at an address, and not at the one of an earlier job that it is closing.

    Rank 0 writes a name of the job to its store. A rank that reads the name of a job that it has been in leaves that
    store at once, before its connection breaks, and tries again until rank 0 has opened the next one.
    """
    deadline_s = time.monotonic() + timeout.total_seconds()
    pause_s = _PAUSE_S
    if rank != 0 and _names:  # if the last job met here, rank 0 is closing its store now
        time.sleep(pause_s)
        closed_s = min(deadline_s, time.monotonic() + _CLOSING_S)
        while url in _listeners and _listener_at(url) == _listeners[url] and time.monotonic() < closed_s:
            time.sleep(pause_s)
    while True:
        left = timedelta(seconds=max(0.001, deadline_s - time.monotonic()))
        try:
            store = _rendezvous(url, rank, world_size, timeout=left)
            store.set_timeout(timeout)
            name = _name_job(store, rank, deadline_s)
        except (dist.DistError, RuntimeError, ValueError) as error:
            # In a process without an earlier job, the broken connection was to the right store.
            broken = isinstance(error, dist.DistNetworkError) and rank != 0 and bool(_names)
            if not broken or time.monotonic() + pause_s >= deadline_s:
                raise _not_met(url, rank, world_size, error) from error
        else:
            if name is not None and name not in _names:
                _names.add(name)
                if rank != 0 and (listener := _listener_at(url)) is not None:
                    _listeners[url] = listener
                return _admit(store, name, rank, world_size, place=place, hosted=True)
            if time.monotonic() + pause_s >= deadline_s:
                doing = f"join the {world_size} ranks at {place}"
                raise PeerError(late_message(f"rank 0 did not {doing} within {timeout.total_seconds():g} s"))
            del store
        time.sleep(pause_s)
        pause_s = min(0.1, 1.5 * pause_s)


def _listener_at(url: str) -> str | None:
    """Return a name of the socket that listens at an address; None if that is not on this machine, or unknown.

    A rank that connects to a store just before it is closed gets a warning of torch on its terminal, with a stack.
    """
    host, port = urlsplit(url).hostname, urlsplit(url).port
    if url == "env://":
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if host not in LOCAL_HOSTS:
        return None
    for table in ("tcp", "tcp6"):
        with suppress(OSError):  # not on Linux
            for row in map(str.split, Path("/proc/net", table).read_text().splitlines()[1:]):
                if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port:
                    return row[9]  # its inode
    return None


def _name_job(store: dist.Store, rank: int, deadline_s: float) -> str | None:  # type: ignore[name-defined]
    """Return the name that rank 0 chose for the job at its store; None if it does not write one in time."""
    if rank == 0:
        store.set("unisono/job", secrets.token_hex(8))
    elif not wait_for_keys(store, ["unisono/job"], deadline_s):
        return None
    return str(store.get("unisono/job").decode())


def _numbered(store: dist.Store, rank: int, world_size: int, *, place: str) -> Rendezvous:  # type: ignore[name-defined]
    """Meet at a store that outlives the job, where each rendezvous has a number."""
    _rendezvous_counts[place, world_size] += 1
    return _admit(store, str(_rendezvous_counts[place, world_size]), rank, world_size, place=place)


def _meet_in_file(path: Path, rank: int, world_size: int) -> Rendezvous:
    return replace(_numbered(_file_store(path, world_size), rank, world_size, place=f"file://{path}"), file=path)


def _admit(
    store: dist.Store,  # type: ignore[name-defined]
    name: str,
    rank: int,
    world_size: int,
    *,
    place: str,
    hosted: bool = False,
) -> Rendezvous:
    """Return a rendezvous whose keys have a separate prefix, and refuse a rank that is there twice."""
    own = dist.PrefixStore(f"unisono_{name}_of_{world_size}", store)  # type: ignore[attr-defined]
    if own.add(f"came/{rank}", 1) > 1:
        reason = "two processes have this rank" + (
            ", or the file is left from an earlier job. Give each process its own rank, and each job its own file"
            if place.startswith("file:")
            else ", or an earlier job met there. Give each process its own rank"
        )
        raise LaunchError(f"rank {rank} of {world_size} has been at {place} before: {reason}.")
    return Rendezvous(store=own, rank=rank, world_size=world_size, place=place, hosted=hosted)


def _rendezvous(url: str, rank: int, world_size: int, *, timeout: timedelta) -> dist.Store:  # type: ignore[name-defined]
    """Open the store at an address; rank 0 hosts it there unless the launcher does."""
    parts = urlsplit(url)

    def meet() -> Any:
        if parts.scheme == "tcp" and not _is_launchers(url):
            # Not torch's function: if a launcher hosts a store, torch assumes that it does so at every address, also in
            # processes that inherit the launcher's variables, and then no process opens a store at this one.
            return open_store(str(parts.hostname), int(parts.port or 0), rank, world_size, timeout=timeout)
        # torch's function: the launcher's patch of it numbers the rendezvous.
        return next(dist.distributed_c10d.rendezvous(url, rank, world_size, timeout=timeout))[0]  # type: ignore[attr-defined]

    return _interruptible(meet)


def _not_met(url: str, rank: int, world_size: int, error: Exception) -> LaunchError:
    advice = (
        f"start the other {world_size - 1} with the same address and world_size"
        if rank == 0
        else "rank 0 must be running, on that host and with that port"
    )
    return LaunchError(f"rank {rank} of {world_size} could not meet the others at {url} ({error}): {advice}")


def _interruptible(make: Callable[[], Any]) -> Any:
    """Call a function in a thread: it may wait long within torch, where Ctrl-C has no effect."""
    answer: Future[Any] = Future()

    def call() -> None:
        try:
            answer.set_result(make())
        except (dist.DistError, RuntimeError, ValueError) as error:
            answer.set_exception(error)

    threading.Thread(target=call, name="unisono-rendezvous", daemon=True).start()
    return answer.result()


def _file_of(init_method: str) -> Path:
    parts = urlsplit(init_method)
    if parts.netloc or not parts.path:
        raise ValueError(
            f"init_method={init_method!r} has no absolute path: write file:///path, with three slashes, of a file that "
            "does not exist yet"
        )
    return Path(parts.path)


def _file_store(path: Path, world_size: int) -> dist.Store:  # type: ignore[name-defined]
    if not path.parent.is_dir() or path.is_dir():
        reason = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise LaunchError(
            f"ranks cannot meet at {path}: {reason}. "
            "Name a file that does not exist yet, in a folder that all ranks can write to."
        )
    try:
        return dist.FileStore(str(path), world_size)  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise LaunchError(f"ranks cannot meet at {path}: {error}") from error


def _rendezvous_folder() -> Path:
    """Make and return the folder, private to this user, in which the ranks of one host meet at a file."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / f"unisono-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat(follow_symlinks=False)
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise LaunchError(f"{folder} belongs to somebody else or is open to others: remove it, or set TMPDIR")
    return folder
