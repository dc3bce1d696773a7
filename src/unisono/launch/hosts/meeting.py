"""The meeting of a job's hosts at a store, as torchrun's agents do it: with them, or among themselves.

Hosts get their numbers from torch's rendezvous: the dynamic handler of `torch.distributed.elastic` ("c10d"), or the
number that each was given ("static"). Then they exchange how many ranks each has, in the form of torchrun's agents.
Start reading at `meet`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from unisono.launch.hosts.addresses import HostAddresses
from unisono.launch.hosts.arrivals import Arrivals
from unisono.launch.hosts.endpoint import Door, HostRefusedError, listen, open_door
from unisono.launch.hosts.host_settings import HostPlace, HostSettings
from unisono.launch.hosts.late_host import JobRunsError, unless_job_runs
from unisono.launch.hosts.meeting_round import MeetingRound
from unisono.launch.hosts.term import STORE_ERRORS
from unisono.tcp_store import make_store, serve_store

__all__ = ["Meeting", "meet"]

_PAUSE_S = 0.1
_CLOSED_S = 10.0
"""How long a host comes again where it finds a job of the same name that has ended."""
_READ_S = 5.0
"""How long a host that serves the store waits for others to read why hosts cannot form a job."""

_ROLE_INFO = "torchelastic/role_info"
_ASSIGNED_RANKS = "torchelastic/assigned_ranks"
_HELLO = "unisono/hello"
_READ = "unisono/read"


@dataclass(kw_only=True)
class Meeting:
    """The result of a rendezvous of hosts. It owns the stores that this host serves."""

    place: HostPlace
    """The place of this host among them."""
    store: Any
    """The store of this round of the rendezvous."""
    handler: DynamicRendezvousHandler | None
    """torch's handler; None with the static rendezvous."""
    hellos: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By number, what each host of unisono has said; those of torchrun say nothing."""
    hosts_store: bool = False
    """True if others need a store of this process."""
    servers: list[Any] = field(default_factory=list)
    """The stores that this process serves."""

    def names(self) -> dict[str, str]:
        """Return the names of all hosts by their numbers, as JSON."""
        told = {str(host): str(hello["name"]) for host, hello in self.hellos.items()}
        return {str(host): "(torchrun)" for host in range(self.place.hosts)} | told

    def let_all_read(self) -> None:
        """Return when all hosts know what each has said, if this process serves the store; after 5 s at most."""
        with suppress(*STORE_ERRORS):
            self.store.add(_READ, 1)
            end_s = time.monotonic() + _READ_S
            while self.hosts_store and self.store.add(_READ, 0) < len(self.hellos) and time.monotonic() < end_s:
                time.sleep(0.02)

    def close_rendezvous(self) -> None:
        """Close torch's rendezvous, so that torchrun, which does not know of reports, starts no ranks anew."""

        def close(handler: DynamicRendezvousHandler) -> None:
            with suppress(*STORE_ERRORS):
                handler.shutdown()

        if self.handler is not None:
            # It may wait for a lost endpoint.
            closing = threading.Thread(target=close, args=(self.handler,), daemon=True)
            closing.start()
            closing.join(1.0)


def meet(
    settings: HostSettings,
    addresses: HostAddresses,
    *,
    ranks: int,
    role: str,
    hello: Mapping[str, Any],
    notice: Callable[[str], None],
    warn: Callable[[str], None],
    may_be_late: bool = False,
) -> Meeting:
    """Wait for the other hosts; return who they are and which ranks are whose.

    Args:
        ranks: The number of ranks of this host.
        role: ROLE_NAME of its ranks.
        hello: What this host says of itself to others of unisono.
        notice: Called with a line about what is waited for.
        warn: Called, also later and by another thread, with a sentence about strangers.
        may_be_late: True to look whether the job runs already.

    Raises:
        HostRefusedError: The endpoint cannot be reached or used, or not enough hosts come in time.
        JobRunsError: It does, and may have room for this host.
    """
    began_s = time.monotonic()
    while True:
        try:
            return _meet(
                settings,
                addresses,
                ranks=ranks,
                role=role,
                hello=hello,
                notice=notice,
                warn=warn,
                may_be_late=may_be_late and settings.min_hosts < settings.max_hosts,
                deadline_s=began_s + settings.join_timeout_s,
            )
        except RendezvousClosedError as error:
            # The job before this one, which is about to give up its port.
            if time.monotonic() - began_s > _CLOSED_S:
                raise HostRefusedError(
                    f"the job {settings.run_id!r} at {settings.endpoint} has ended; give the next one another --rdzv-id"
                ) from error
        time.sleep(_PAUSE_S)


def _meet(
    settings: HostSettings,
    addresses: HostAddresses,
    *,
    ranks: int,
    role: str,
    hello: Mapping[str, Any],
    notice: Callable[[str], None],
    warn: Callable[[str], None],
    may_be_late: bool,
    deadline_s: float,
) -> Meeting:
    door = open_door(settings, addresses, notice=notice, warn=warn, deadline_s=deadline_s)
    servers: list[Any] = [] if door.store is None else [door.store]

    def connect(*, joins: bool = False) -> Any:
        return make_store(
            door.address,
            door.port,
            # torchrun's host of a static rendezvous waits until so many have connected; a client does not wait.
            settings.max_hosts if joins else None,
            is_master=False,
            timeout=timedelta(seconds=60),
            wait_for_workers=joins,
        )

    store = servers[0] if servers else connect(joins=settings.backend == "static")
    notice(f"unisono: waiting for hosts at {settings.endpoint} ...")

    def number() -> Meeting:
        with Arrivals(connect(), settings, hello, notice=notice, warn=warn) as came:
            try:
                return _number(
                    settings,
                    addresses,
                    store,
                    servers,
                    came,
                    door,
                    ranks=ranks,
                    role=role,
                    hello=hello,
                    deadline_s=deadline_s,
                )
            except dist.DistNetworkError as error:
                raise HostRefusedError(came.closed()) from error

    if not may_be_late:
        return number()
    try:
        return unless_job_runs(connect(), settings, number)
    except JobRunsError as found:
        found.servers = servers  # of the endpoint, if this host is it: more hosts may come there
        raise


def _number(  # noqa: PLR0917  parts of one function
    settings: HostSettings,
    addresses: HostAddresses,
    store: Any,
    servers: list[Any],
    came: Arrivals,
    door: Door,
    *,
    ranks: int,
    role: str,
    hello: Mapping[str, Any],
    deadline_s: float,
) -> Meeting:
    """Get this host's number and ranks from the rendezvous."""
    handler = None if settings.backend == "static" else _Handler.made(settings, addresses, store, servers)
    while True:
        if handler is None:
            assert settings.node_rank is not None
            host, hosts = settings.node_rank, settings.max_hosts
            own: Any = dist.PrefixStore(settings.run_id, store)  # type: ignore[attr-defined]
            master = (settings.endpoint_host, settings.endpoint_port)
        else:
            host, hosts, own, master = handler.next_round(came)
        if settings.token:  # ranks meet at the store of the hosts, to which only they have a way
            master = (door.address, door.port)
        own.set(f"{_HELLO}/{host}", json.dumps(hello))  # before the ranks, so that whoever knows these can read it
        # With numbers of their own, hosts that come anew take their old places.
        meets = None if handler is None else MeetingRound(own, came)
        numbers = _assign_ranks(own, host, hosts, ranks=ranks, role=role, deadline_s=deadline_s, meets=meets)
        if numbers is not None:
            break
        if meets is None or not meets.is_off:
            raise HostRefusedError(came.too_few(hosts))
    first_rank, world_size, first_role_rank, role_world_size = numbers
    names = [f"{_HELLO}/{each}" for each in range(hosts)]
    hellos = {each: json.loads(own.get(name)) for each, name in enumerate(names) if own.check([name])}
    place = HostPlace(
        host=host,
        hosts=hosts,
        first_rank=first_rank,
        world_size=world_size,
        first_role_rank=first_role_rank,
        role_world_size=role_world_size,
        master_addr=master[0],
        master_port=master[1],
        identity=f"{host} {hello['nonce']}",
    )
    return Meeting(
        place=place,
        store=own,
        handler=handler,
        hellos=hellos,
        hosts_store=bool(servers),
        servers=servers,
    )


class _Handler(DynamicRendezvousHandler):
    """torch's handler, which serves the ranks' store on this host's address only, not on all."""

    _addresses: HostAddresses
    _servers: list[Any]
    _guarded: bool
    _least: int

    @classmethod
    def made(cls, settings: HostSettings, addresses: HostAddresses, store: Any, servers: list[Any]) -> _Handler:
        def limit(name: str) -> timedelta | None:
            return timedelta(seconds=float(settings.conf[name])) if name in settings.conf else None

        handler = cls.from_backend(
            settings.run_id,
            store,
            C10dRendezvousBackend(store, settings.run_id),
            settings.min_hosts,
            settings.max_hosts,
            addresses.local,
            RendezvousTimeout(
                join=timedelta(seconds=settings.join_timeout_s),
                last_call=limit("last_call_timeout"),
                close=limit("close_timeout"),
                heartbeat=limit("heartbeat_timeout"),
            ),
            keep_alive_interval=int(settings.conf.get("keep_alive_interval", 5)),
            keep_alive_max_attempt=int(settings.conf.get("keep_alive_max_attempt", 3)),
        )
        assert isinstance(handler, cls)
        handler._addresses, handler._servers, handler._guarded = addresses, servers, bool(settings.token)
        handler._least = settings.min_hosts
        return handler

    def next_round(self, came: Arrivals) -> tuple[int, int, Any, tuple[str, int]]:
        """Wait for the other hosts; return this one's number, how many there are, their store, and the ranks' one.

        Raises:
            HostRefusedError: Too few come in time, or the endpoint is gone.
        """
        self._bootstrap_store_info = None  # otherwise a later round has the store of the one before
        try:
            info = self.next_rendezvous()
        except RendezvousTimeoutError as error:
            raise HostRefusedError(came.too_few(self._least)) from error
        except RendezvousConnectionError as error:
            raise HostRefusedError(came.closed()) from error
        boot = info.bootstrap_store_info
        assert boot is not None
        if info.rank == 0 and not self.use_agent_store:
            # torch then expects that rank 0 serves the store of the ranks; those of unisono expect it of their host.
            self.serve(boot.master_port)
        return info.rank, info.world_size, info.store, (boot.master_addr, boot.master_port)

    def _create_tcp_store_server(self, _: str, master_port: int) -> Any:
        return self.serve(master_port)

    def serve(self, master_port: int) -> Any:
        """Serve the store of the ranks."""
        # With a token, ranks use the store of the hosts: this one is for nobody.
        address = "127.0.0.1" if self._guarded else self._addresses.local
        server = serve_store(address, listen(address, master_port))
        self._servers.append(server)
        return server


def _assign_ranks(
    store: Any, host: int, hosts: int, *, ranks: int, role: str, deadline_s: float, meets: MeetingRound | None
) -> tuple[int, int, int, int] | None:
    """Exchange numbers of ranks with torchrun's agents, or others like this one.

    Returns:
        The first rank of this host, the number of ranks, and the same two among ranks with its role; None if not all
        hosts have answered in time, or the round has been given up.
    """
    if os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL", "0") == "1":  # torchrun's promise that all hosts are alike
        return host * ranks, hosts * ranks, host * ranks, hosts * ranks
    store.set(f"{_ROLE_INFO}/{host}", json.dumps({"role": role, "rank": host, "local_world_size": ranks}))
    if host == 0:
        names = [f"{_ROLE_INFO}/{each}" for each in range(hosts)]
        if not _await(store, names, deadline_s, meets) or (meets is not None and not meets.begin()):
            return None
        infos = [json.loads(store.get(f"{_ROLE_INFO}/{each}")) for each in range(hosts)]
        for each, numbers in enumerate(number_ranks([(info["role"], info["local_world_size"]) for info in infos])):
            store.set(f"{_ASSIGNED_RANKS}/{each}", json.dumps(numbers))
    if not _await(store, [f"{_ASSIGNED_RANKS}/{host}"], deadline_s, meets):
        return None
    first, size, first_of_role, size_of_role = json.loads(store.get(f"{_ASSIGNED_RANKS}/{host}"))
    return first, size, first_of_role, size_of_role


def number_ranks(hosts: list[tuple[str, int]]) -> list[list[int]]:
    """Return the first rank, the number of ranks, and both among ranks of the same role, for each host. Pure.

    Args:
        hosts: The role and the number of ranks of each host.

    >>> number_ranks([("default", 2), ("default", 3)])
    [[0, 5, 0, 5], [2, 5, 2, 5]]
    >>> number_ranks([("reader", 1), ("default", 2), ("default", 1)])
    [[0, 4, 0, 1], [1, 4, 0, 3], [3, 4, 2, 3]]
    """
    sizes: dict[str, int] = {}
    for role, ranks in hosts:
        sizes[role] = sizes.get(role, 0) + ranks
    first, in_role, numbers = 0, dict.fromkeys(sizes, 0), []
    for role, ranks in hosts:
        numbers.append([first, sum(sizes.values()), in_role[role], sizes[role]])
        first += ranks
        in_role[role] += ranks
    return numbers


def _await(store: Any, keys: list[str], deadline_s: float, meets: MeetingRound | None) -> bool:
    """Wait for keys; return False if some are not there in time, or the round has been given up."""
    while not store.check(keys):
        if time.monotonic() >= deadline_s or (meets is not None and not meets.check()):
            return False
        time.sleep(_PAUSE_S / 2)
    return True
