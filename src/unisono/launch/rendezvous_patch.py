"""Patches torch's rendezvous, so that the ranks of a job can meet more than once. Scripts need not know of it.

Torch gives the first process group the same name every time, so a group that is created after another was destroyed
reads the addresses of the destroyed one in the job's store. Here the n-th rendezvous of a given number of ranks has
separate keys, and so does every generation of ranks. An address that the script itself has chosen is not the job's
store: rank 0 hosts a store there, as without a launcher. Start reading at `install`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from unisono.imports import when_imported
from unisono.tcp_store import LOCAL_HOSTS, LOOPBACK, make_store, open_store

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["address_of", "install", "is_job_store"]

Meeting = tuple["Store", int, int]
"""The result of torch's rendezvous: a store, the rank, the number of ranks."""


def install(environment: Mapping[str, str]) -> None:
    """Patch `torch.distributed` as this module describes, at once or when it is imported.

    Args:
        environment: The variables that the launcher gave this rank, before the script could change them.
    """
    meetings = _Meetings(dict(environment))
    when_imported("torch.distributed.rendezvous", meetings.mend_store)
    when_imported("torch.distributed.distributed_c10d", meetings.mend_rendezvous)


def address_of(url: str, environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the host and port of the store that an `init_method` names, or None if it names none.

    >>> address_of("tcp://localhost:23456?rank=0", {})
    ('localhost', 23456)
    >>> address_of("env://", {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    ('127.0.0.1', 29500)
    >>> address_of("file:///tmp/meeting", {})
    """
    parts = urlparse(url)
    host: str | None
    if parts.scheme == "env":
        host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT", "")
        return (host, int(port)) if host and port.isdigit() else None
    if parts.scheme == "tcp" and parts.hostname and parts.port:
        return parts.hostname, parts.port
    return None


def is_job_store(host: str, port: int, given: Mapping[str, str]) -> bool:
    """Return True if an address is that of the job's store. A script may use another name for the same machine.

    >>> given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "40001"}
    >>> is_job_store("localhost", 40001, given), is_job_store("localhost", 12355, given)
    (True, False)
    """
    return str(port) == given.get("MASTER_PORT") and host in (given.get("MASTER_ADDR"), *LOCAL_HOSTS)


class _Meetings:
    """Counts the rendezvous of one rank and gives each its keys."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given
        self._generation = given.get("TORCHELASTIC_RESTART_COUNT", "0")
        # By number of ranks: some ranks may form a group before all ranks do.
        self._counts: Counter[int] = Counter()

    def mend_store(self, rendezvous: ModuleType) -> None:
        """Replace the function that opens the store at an address; groups and RPC both call it."""
        rendezvous._create_c10d_store = self._open_store  # type: ignore[attr-defined]

    def mend_rendezvous(self, c10d: ModuleType) -> None:
        """Number the rendezvous of `init_process_group`. RPC numbers its own."""
        rendezvous: Callable[..., Iterator[Meeting]] = c10d.rendezvous

        def numbered(url: str, *arguments: Any, **options: Any) -> Iterator[Meeting]:
            return self._number(url, rendezvous(url, *arguments, **options))

        c10d.rendezvous = numbered  # type: ignore[attr-defined]

    def _number(self, url: str, meetings: Iterator[Meeting]) -> Iterator[Meeting]:
        # Not at the top: this module is imported before torch.
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # noqa: PLC0415

        address = address_of(url, os.environ)
        for store, rank, ranks in meetings:
            kept = store
            if address is not None and is_job_store(*address, self._given):
                self._counts[ranks] += 1
                # The first rendezvous of all ranks has plain keys, so a process without this patch can take part.
                if self._counts[ranks] > 1 or str(ranks) != self._given.get("WORLD_SIZE"):
                    kept = PrefixStore(f"meeting_{self._counts[ranks]}_of_{ranks}", store)
            yield kept, rank, ranks

    def _open_store(  # noqa: PLR0917  torch's signature
        self, hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
    ) -> Store:
        """Replace torch's `_create_c10d_store`: the address decides which process hosts the store."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # noqa: PLC0415

        if not 0 <= port < 1 << 16:
            raise ValueError(f"port must have value from 0 to 65535 but was {port}.")
        host = LOOPBACK if hostname in LOCAL_HOSTS else hostname
        if is_job_store(host, port, self._given):
            store = make_store(host, port, world_size, is_master=False, timeout=timeout)
            return store if self._generation == "0" else PrefixStore(f"generation_{self._generation}", store)
        return open_store(host, port, rank, world_size, timeout=timeout, use_libuv=use_libuv)
