"""A new process group for the ranks of a job after the launcher has replaced some of them.

Ranks meet at the launcher's store, under the number of its decision. A rank that waits there looks whether a newer
decision has made this one void. Until it joins, a new rank has a job without a group: it can be asked for its numbers,
and its collectives are refused. Start reading at `RecoveryStore`.
"""

from __future__ import annotations

import hmac
import os
import pickle
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from unisono import recovery_link
from unisono.errors import PeerError
from unisono.job.connection_watch import watch_connections
from unisono.job.current import ActiveJob, Job, active_job, set_active_job
from unisono.job.default_group import close_connections, make_group
from unisono.job.group_watch import start_watch
from unisono.job.local_ranks import can_share_memory
from unisono.job.placement import own_placement
from unisono.job.rendezvous import Rendezvous
from unisono.recovery_link import Membership, RecoveryLink
from unisono.tcp_store import make_store
from unisono.text import name_ranks
from unisono.variables import CPU_BACKEND_VARIABLE

__all__ = [
    "RecoveryStore",
    "SupersededError",
    "begin_alone",
    "begin_as_new_rank",
    "is_new_rank",
    "leave_group",
    "rejoin",
    "tell_job",
]

_TIMEOUT = timedelta(seconds=1800)
"""The timeout of a job that a single rank begins for others."""
_CONNECT_S = 10.0
"""How long ranks may take to connect, once all have come: a rank that dies meanwhile is noticed no sooner."""
_PAUSE_S = 0.0005
_WAIT_S = 0.002
"""The same for a process that waits to become a rank, with others at work."""
_LOST_S = 30.0
"""How long to wait for the next decision where the host with the store is lost."""
_SIGNATURE_SIZE = 32

T = TypeVar("T")


class SupersededError(Exception):
    """The launcher has replaced another rank meanwhile: ranks meet again, under the number of that decision."""


class _JobFacts(NamedTuple):
    """The facts that a new rank needs about its job."""

    backend: str
    asked: str
    timeout_s: float
    launcher: str
    device: str


class RecoveryStore:
    """The store at which ranks meet after a decision of the launcher.

    Args:
        link: The link to the launcher.
        membership: The decision.
        timeout_s: Seconds to wait for a rank.
        check: Called while this rank waits; may raise.
    """

    def __init__(
        self,
        link: RecoveryLink,
        membership: Membership,
        *,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.membership, self._link, self._timeout_s, self._check = membership, link, timeout_s, check
        where = membership.store or f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        host, _, port = where.rpartition(":")
        store = self._try(partial(_connect, host, int(port), timeout_s))
        self.store = dist.PrefixStore(f"unisono_recovery_{membership.number}", store)  # type: ignore[attr-defined]

    def put(self, key: str, value: object) -> None:
        """Write a value for other ranks, with a signature: other users of the host can reach the store as well."""
        content = pickle.dumps(value)
        self._try(lambda: self.store.set(key, self._sign(key, content) + content))  # type: ignore[arg-type]

    def read(self, keys: Collection[str], *, doing: str) -> list[Any]:
        """Return the values that ranks have written, once all are there.

        Args:
            keys: The keys of the values. Each ends with the rank that writes it, after a slash.
            doing: Completes "rank 1 did not …" in errors.

        Raises:
            SupersededError: The launcher has made another decision.
            PeerError: Some ranks do not write in time, or somebody else has written.
        """
        deadline_s, pause_s = time.monotonic() + self._timeout_s, _PAUSE_S
        missing = [*keys]
        while missing := [key for key in missing if not self._try(partial(self.store.check, [key]))]:
            if self._link.membership().number != self.membership.number:
                raise SupersededError
            self._check()
            if time.monotonic() > deadline_s:
                ranks = [int(key.rpartition("/")[2]) for key in missing]
                raise PeerError(
                    f"timed out: {name_ranks(ranks)} did not {doing} within {self._timeout_s:g} s after another rank "
                    "had died: see what it does, with `unisono stacks`"
                )
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, 0.01)
        return [self._read(key) for key in keys]

    def _read(self, key: str) -> Any:
        value = self._try(lambda: self.store.get(key))
        signature, content = value[:_SIGNATURE_SIZE], value[_SIGNATURE_SIZE:]
        if not hmac.compare_digest(signature, self._sign(key, content)):
            raise PeerError(f"the job's store has a value {key!r} that no rank of this job has written")
        return pickle.loads(content)

    def _try(self, operation: Callable[[], T]) -> T:
        """Use the store. If its host is lost, the launcher is about to make another decision."""
        try:
            return operation()
        except RuntimeError:
            deadline_s = time.monotonic() + (_LOST_S if self.membership.store else 0.0)
            while self._link.membership().number == self.membership.number:
                if time.monotonic() >= deadline_s:
                    raise
                self._check()
                time.sleep(_WAIT_S)
            raise SupersededError from None

    def _sign(self, key: str, content: bytes) -> bytes:
        place = f"{self.membership.number} {key} ".encode()
        return hmac.digest(self._link.secret, place + content, "sha256")


def begin_as_new_rank() -> Job:
    """Begin the job of a new rank, without a group: wait until the launcher has decided that it is one of the ranks.

    The others then notice it, in the call under way or before their next step.

    Raises:
        PeerError: They do not come in time.
    """
    link = recovery_link.current
    assert link is not None
    if (active := active_job()) is not None:
        return active.job
    placement = own_placement()
    link.note("resize", 0)
    while placement.rank not in link.membership().ranks:
        time.sleep(_WAIT_S)
    while True:
        try:
            store = RecoveryStore(link, link.membership(), timeout_s=1800.0)
            survivors = [rank for rank in range(store.membership.size) if rank not in store.membership.ranks]
            facts: _JobFacts = store.read([f"job/{survivors[0]}"], doing="come to replace it")[0]
            break
        except SupersededError:
            continue
    device = _own_device(torch.device(facts.device), placement.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    local_world_size, node_rank, num_nodes = _host_of(placement.rank, store.membership)
    job = Job(
        rank=placement.rank,
        world_size=store.membership.size,
        local_rank=placement.local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        device=device,
        backend=facts.backend,
        launcher=facts.launcher,
        timeout=timedelta(seconds=facts.timeout_s),
        number=0,
        began=True,
    )
    set_active_job(ActiveJob(job=job, group=None, asked=facts.asked, where=None, store=store.store, hosted=False))
    return job


def begin_alone(device: torch.device) -> None:
    """Begin the job of a single rank that has none, without a group: others are about to join it."""
    if active_job() is not None:
        return
    placement = own_placement()
    job = Job(
        rank=0,
        world_size=1,
        local_rank=placement.local_rank,
        local_world_size=1,
        node_rank=placement.node_rank,
        num_nodes=1,
        device=device,
        # If it is shm, `rejoin` asks whether ranks can share memory.
        backend="nccl" if device.type == "cuda" else os.environ.get(CPU_BACKEND_VARIABLE) or "shm",
        launcher=placement.launcher,
        timeout=_TIMEOUT,
        number=0,
    )
    store = dist.HashStore()  # type: ignore[attr-defined]
    set_active_job(ActiveJob(job=job, group=None, asked="auto", where=None, store=store, hosted=False))


def tell_job(store: RecoveryStore) -> None:
    """Tell new ranks about the job of this rank."""
    active = active_job()
    assert active is not None, "a Trainer without a job of its own is not armed"
    job = active.job
    facts = _JobFacts(job.backend, active.asked, job.timeout.total_seconds(), job.launcher, str(job.device))
    store.put(f"job/{job.rank}", facts)


def leave_group() -> None:
    """Leave the process group of this job, if there is one. Ranks that wait for this one there notice it."""
    active = active_job()
    if active is not None and active.watch is not None:
        active.watch.stop(aborts=True)  # otherwise the end of the group would wait for a dead rank
    if active is not None:
        close_connections(active.connections)
    if dist.is_initialized():
        # Not the launcher's, which waits until other threads sleep, such as one that writes a checkpoint. That is for
        # models of DDP.
        destroy = dist.destroy_process_group
        getattr(destroy, "__wrapped__", destroy)()
    if active is not None:
        set_active_job(replace(active, group=None, watch=None))


def rejoin(store: RecoveryStore) -> None:
    """Make another process group for this job, after `leave_group`. Every rank must call it.

    Raises:
        SupersededError: The launcher has made another decision.
        PeerError: Some ranks do not come in time.
        LaunchError: The group could not be made: a rank has died meanwhile.
    """
    active = active_job()
    assert active is not None
    size = store.membership.size
    local_size, node_rank, num_nodes = _host_of(active.job.rank, store.membership)
    store.put(f"came/{active.job.rank}", can_share_memory())
    shares_memory = all(store.read([f"came/{rank}" for rank in range(size)], doing="come to go on"))
    backend = active.job.backend
    # Hosts share no memory, and there may have been one only so far. A limit may have come since.
    if backend == "shm" and (num_nodes > 1 or (active.asked == "auto" and not shares_memory)):
        backend = "gloo"
    job = replace(
        active.job,
        world_size=size,
        local_world_size=local_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        backend=backend,
    )
    os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"] = str(size), str(local_size)
    os.environ["GROUP_RANK"], os.environ["GROUP_WORLD_SIZE"] = str(node_rank), str(num_nodes)
    meeting = Rendezvous(store=store.store, rank=job.rank, world_size=job.world_size, place="the launcher's store")
    # Part of the names of groups, which must be equal on all ranks. Torch does not set it back if a group failed.
    dist.distributed_c10d._world.group_count = 0
    connections = make_group(job.backend, meeting, timedelta(seconds=_CONNECT_S), job.device)
    group = dist.group.WORLD
    assert group is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that torch knows of no timeout but those of gloo and nccl
        dist.distributed_c10d._set_pg_timeout(job.timeout, group)
    # The keys of the new store are numbered from the beginning, on old and new ranks alike.
    active = replace(
        active,
        job=job,
        group=group,
        connections=connections,
        store=store.store,
        hosted=False,
        counts=Counter(),
        watch=start_watch(job.device, number=store.membership.number)
        or watch_connections(connections, number=store.membership.number),
    )
    set_active_job(active)


def is_new_rank() -> bool:
    """Return True if this process takes the place of a rank that died, and has not joined the others yet."""
    link = recovery_link.current
    if link is None or not link.is_new:
        return False
    active = active_job()
    return active is None or active.group is None


def _connect(host: str, port: int, timeout_s: float) -> Any:
    store = make_store(host, port, is_master=False, timeout=timedelta(seconds=min(_CONNECT_S, timeout_s)))
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _host_of(rank: int, membership: Membership) -> tuple[int, int, int]:
    """Return the number of ranks on the host of a rank, the number of that host, and the number of hosts."""
    for node_rank, ranks in enumerate(membership.hosts):
        if rank in ranks:
            return len(ranks), node_rank, len(membership.hosts)
    return membership.size, 0, 1


def _own_device(theirs: torch.device, local_rank: int) -> torch.device:
    return torch.device("cuda", local_rank % torch.cuda.device_count()) if theirs.type == "cuda" else theirs
