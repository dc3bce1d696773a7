"""The beginning of a job: `init` makes a process group from the launcher's variables and the arguments of all ranks.

`job.rendezvous` brings the ranks together, and `job.hosts` chooses the backend. Start reading at `init`.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unisono import recovery_link
from unisono.arguments import whole
from unisono.backend import register
from unisono.errors import LaunchError, UnisonoError
from unisono.job.connection_watch import watch_connections
from unisono.job.current import ActiveJob, Job, active_job, current_job, refuse_lone_rank, set_active_job, store_of
from unisono.job.default_group import make_group
from unisono.job.group_watch import start_watch
from unisono.job.local_ranks import can_share_memory, choose_backend, own_gpu, place_on_hosts
from unisono.job.placement import Placement, own_placement
from unisono.job.rejoin import begin_as_new_rank, is_new_rank
from unisono.job.rendezvous import Rendezvous, rendezvous
from unisono.job.store_exchange import StoreExchange
from unisono.machine import host_id
from unisono.text import a_type
from unisono.variables import CPU_BACKEND_VARIABLE

__all__ = ["begin_job", "init", "require_job"]

TIMEOUT_S = 1800.0
"""How long ranks wait for each other by default: torch's default for gloo."""

_numbers = itertools.count()
"""Numbers of this process's jobs."""

_adopted = 0
"""Number of groups made by the script that this process has adopted; part of the prefix of their keys."""


def init(
    backend: str = "auto",
    init_method: str | None = None,
    *,
    store: dist.Store | None = None,  # type: ignore[name-defined]
    rank: int | None = None,
    world_size: int | None = None,
    timeout: timedelta | float = TIMEOUT_S,
    device: str | torch.device | None = None,
) -> Job:
    """Bring the ranks of this job together and return the job. Every rank must call it.

    Rank and number of ranks come from the launcher: `unisono run`, torchrun, Slurm's srun, mpirun of Open MPI, MPICH or
    Intel MPI, `unisono.spawn`. Without one this process is a job of one rank, and everything works. A default group
    that the script has made with torch.distributed is used as it is. A second call returns the same job. The job ends
    at exit.

    Args:
        backend: "auto" selects nccl if each rank uses a separate GPU, shm if no rank uses a GPU and all are on one
            Linux host, otherwise gloo. Any name that torch knows is valid too, such as "gloo", "mpi" or
            "cpu:gloo,cuda:nccl".
        init_method: The address at which ranks meet: "env://", "tcp://host:port" (rank 0's host and a free port), or
            "file:///path" (a file that does not exist yet, which all ranks can write to). Default: the launcher's.
        store: A store of torch.distributed that all ranks share, in place of an init_method.
        rank: The global rank of this process. Default: the launcher's.
        world_size: The number of processes in the job. Default: the launcher's.
        timeout: How long ranks wait for each other, here and in every collective; seconds or a timedelta.
        device: The device on which this rank computes. "cuda" selects the GPU that belongs to the local rank; so does
            None, or the CPU if there is no GPU or the backend is shm or mpi. "cuda:1" and "cpu" are used as given.

    Raises:
        LaunchError: Ranks cannot meet, or the backend or device cannot be used here.
        PeerError: Some ranks do not call in time, or cannot go on.
        RankMismatchError: Ranks request different backends.
        ValueError: Arguments are invalid, or contradict each other or the current job.
        TypeError: An argument has the wrong type.
    """
    limit = _timeout_of(timeout)
    if not isinstance(backend, str):
        raise TypeError(f'backend={backend!r} must be a name such as "auto", "gloo", "nccl" or "shm"')
    if not isinstance(init_method, (str, type(None))):
        raise TypeError(f"init_method={init_method!r} must be a text: env://, tcp://host:port or file:///path")
    if store is not None and not isinstance(store, dist.Store):  # type: ignore[attr-defined]
        raise TypeError(f"store is {a_type(store)}; give a store of torch.distributed, such as a TCPStore")
    rank = None if rank is None else whole("rank", rank)
    world_size = None if world_size is None else whole("world_size", world_size)
    backend = backend.lower()
    if is_new_rank():
        return replace(begin_as_new_rank(), began=False)
    active = active_job()
    if active is not None and active.pid != os.getpid():
        raise LaunchError(
            f"this process was forked from rank {active.job.rank} of a job after the job had begun, and cannot use its "
            'group: call init() in the new process alone, or start it with the method "spawn"'
        )
    if active is not None:
        _check_same(
            active,
            backend=backend,
            init_method=init_method,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=limit,
            device=device,
        )
        return replace(active.job, began=False)
    if dist.is_initialized():
        return _adopt(backend, rank=rank, world_size=world_size, timeout=limit, device=device)
    return begin_job(backend, init_method, store=store, rank=rank, world_size=world_size, timeout=limit, device=device)


def begin_job(
    backend: str,
    init_method: str | None = None,
    *,
    store: dist.Store | None = None,  # type: ignore[name-defined]
    rank: int | None = None,
    world_size: int | None = None,
    timeout: timedelta,
    device: str | torch.device | None = None,
) -> Job:
    """Begin a job where there is none, with the arguments of `init`. Every rank must call it."""
    register()
    _check_backend(backend)
    placement = own_placement()
    if rank is world_size is store is init_method is None:
        _check_meant_alone(placement)
    meeting = rendezvous(
        init_method, store=store, rank=rank, world_size=world_size, placement=placement, timeout=timeout
    )
    ranks = _RendezvousRanks(meeting, placement, timeout)
    own = ranks.exchange("facts", lambda: _facts(backend, ranks, device))
    name, remark = choose_backend(
        [fact["backend"] for fact in own],
        hosts=[fact["host"] for fact in own],
        gpus=[fact["gpu"] for fact in own],
        cpu_backend=own[0]["cpu_backend"],
        shares_memory=all(fact["shares_memory"] for fact in own),
    )
    if remark is not None and meeting.rank == 0:
        print(f"unisono: {remark}", file=sys.stderr)
    chosen = torch.device(own[meeting.rank]["device"])
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    number = 0 if recovery_link.current is None else recovery_link.current.membership().number
    connections = make_group(name, meeting, timeout, chosen)
    job = replace(ranks.job(name, chosen), began=True)
    group = dist.group.WORLD
    assert group is not None
    set_active_job(
        ActiveJob(
            job=job,
            group=group,
            asked=backend,
            where=init_method,
            store=meeting.store,
            hosted=meeting.hosted,
            file=meeting.file,
            connections=connections,
            watch=start_watch(chosen, number=number) or watch_connections(connections, number=number),
        )
    )
    return job


def require_job() -> Job:
    """Return the job of this process; begin one with the script's group, or of this process alone, if there is none.

    Raises:
        GroupError: There are other ranks, and they have not met.
    """
    job = current_job()
    if job is None:
        refuse_lone_rank()
        job = init()
    return job


def rank_device(device: str | torch.device | None, backend: str, *, local_rank: int) -> torch.device:
    """Return the device on which a rank computes.

    Raises:
        LaunchError: There is no such GPU.
        ValueError: The device is unknown or computes nothing.
    """
    if device is None:
        wanted = backend not in ("shm", "mpi") and torch.cuda.is_available()
        device = torch.device("cuda" if wanted else "cpu")
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f'device={device!r} is no device: give "cpu", "cuda", "cuda:1" or None') from error
    if device.type == "meta":
        raise ValueError('device="meta" computes nothing: give "cpu", "cuda", "cuda:1" or None')
    if device.type != "cuda":
        return device
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= gpus:
        raise LaunchError(f"device={str(device)!r} is asked for, and torch finds {gpus} GPUs here: choose another one")
    return torch.device("cuda", local_rank % gpus) if device.index is None else device


class _RendezvousRanks:
    """The ranks at a rendezvous: their placement on nodes, and the values they exchange before they have a group."""

    def __init__(self, meeting: Rendezvous, placement: Placement, timeout: timedelta) -> None:
        if (meeting.rank, meeting.world_size) != (placement.rank, placement.world_size):
            # The script passed the rank: the launcher's numbers belong to another job.
            placement = Placement(launcher="none", rank=meeting.rank, world_size=meeting.world_size)
        self._meeting, self._timeout = meeting, timeout
        host = host_id(with_network=True)
        told = self.exchange("node", lambda: [placement.launcher, placement.numbered, placement.node_name(host), host])
        # Among processes that a rank started, one can have that rank's number: the launcher's belong to another job.
        launcher = placement.launcher if len({launcher for launcher, *_ in told}) == 1 else "none"
        numbered = launcher != "none" and all(by_launcher for _, by_launcher, _, _ in told)
        nodes = [node if numbered else host for *_, node, host in told]
        self._num_nodes = len(set(nodes))
        found = place_on_hosts(nodes, launcher=launcher)[meeting.rank]
        if numbered:
            found = replace(found, local_rank=placement.local_rank, node_rank=placement.node_rank)
        self.placement = found
        """The place of this process among the ranks that have joined, regardless of its launcher's variables."""

    def exchange(self, name: str, make: Callable[[], Any]) -> list[Any]:
        """Return the results of `make` on all ranks, in rank order."""
        meeting, value = self._meeting, None
        try:
            value = make()
        except (UnisonoError, ValueError, RuntimeError) as error:
            value = error
        store_exchange = StoreExchange(
            meeting.store,
            name,
            rank=meeting.rank,
            size=meeting.world_size,
            timeout_s=self._timeout.total_seconds(),
        )
        return store_exchange.exchange(value, doing=f"join the {meeting.world_size} ranks at {meeting.place}")

    def job(self, backend: str, device: torch.device) -> Job:
        """Return the job, after its group has been made."""
        placement = self.placement
        return Job(
            rank=placement.rank,
            world_size=placement.world_size,
            local_rank=placement.local_rank,
            local_world_size=placement.local_world_size,
            node_rank=placement.node_rank,
            num_nodes=self._num_nodes,
            device=device,
            backend=backend,
            launcher=placement.launcher,
            timeout=self._timeout,
            number=next(_numbers),
        )


def _facts(backend: str, ranks: _RendezvousRanks, device: str | torch.device | None) -> dict[str, Any]:
    """Return the facts about this rank on which the choice of the backend depends."""
    chosen = rank_device(device, backend, local_rank=ranks.placement.local_rank)
    return {
        "backend": backend,
        "host": host_id(with_network=True),
        "device": str(chosen),
        "gpu": own_gpu(chosen),
        "cpu_backend": os.environ.get(CPU_BACKEND_VARIABLE),
        "shares_memory": can_share_memory(),
    }


def _adopt(
    backend: str,
    *,
    rank: int | None,
    world_size: int | None,
    timeout: timedelta,
    device: str | torch.device | None,
) -> Job:
    """Begin a job with the default group that the script has made. Every rank must call it."""
    global _adopted  # noqa: PLW0603  counts default groups, of which torch has one per process
    group = dist.group.WORLD
    assert group is not None
    found = str(dist.get_backend(group))
    for name, asked, there in (
        ("backend", None if backend == "auto" else backend, found),
        ("rank", rank, group.rank()),
        ("world_size", world_size, group.size()),
    ):
        if asked is not None and asked != there:
            raise ValueError(
                f"{name}={asked!r}, but the group that the script has made with torch.distributed has {there!r}: leave "
                "the argument out, or call init() in place of init_process_group"
            )
    _adopted += group.size() > 1
    meeting = Rendezvous(
        store=dist.PrefixStore(f"unisono_adopted_{_adopted}", store_of(group)),  # type: ignore[attr-defined]
        rank=group.rank(),
        world_size=group.size(),
        place="the group that the script has made",
    )
    ranks = _RendezvousRanks(meeting, own_placement(), timeout)
    chosen = torch.device(
        ranks.exchange("device", lambda: str(rank_device(device, found, local_rank=ranks.placement.local_rank)))[
            group.rank()
        ]
    )
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    job = ranks.job(found, chosen)
    set_active_job(
        ActiveJob(job=job, group=group, asked=found, where=None, store=meeting.store, hosted=False, adopted=True)
    )
    return job


def _timeout_of(timeout: timedelta | float) -> timedelta:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"timeout={timeout!r} must be seconds or a timedelta")
    if not 0 < seconds < math.inf:
        raise ValueError(f"timeout={timeout!r} must be more than 0 seconds, and finite")
    return timedelta(seconds=seconds)


def _check_backend(backend: str) -> None:
    if backend == "auto":
        return
    available = {"nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available, "gloo": dist.is_gloo_available}
    for name in (pair.rpartition(":")[2] for pair in backend.split(",")):
        if name not in dist.Backend.backend_list or name == "undefined":
            raise ValueError(
                f'backend={backend!r} names no backend that torch has: give "auto", "nccl", "gloo", "shm" or "mpi"'
            )
        if name in available and not available[name]():
            raise LaunchError(f'backend={backend!r}: this torch is built without {name}; use "auto", or another build')


def _check_meant_alone(placement: Placement) -> None:
    """Refuse, or warn of, a job of one rank in a process that another process started without telling it its rank."""
    if placement.launcher != "none" or multiprocessing.parent_process() is None:
        return
    if os.environ.get("MASTER_ADDR"):
        raise LaunchError(
            "this process was started by another one, and MASTER_ADDR is set, but nothing says which rank it is: call "
            "init(rank=..., world_size=...), or start the function with unisono.spawn"
        )
    warnings.warn(
        "this process was started by another one, and nothing says which rank it is, so it is a job of one rank: if it "
        "is one of several, call init(rank=..., world_size=..., init_method=...); otherwise init(rank=0, world_size=1)",
        stacklevel=4,
    )


def _check_same(
    active: ActiveJob,
    *,
    backend: str,
    init_method: str | None,
    store: dist.Store | None,  # type: ignore[name-defined]
    rank: int | None,
    world_size: int | None,
    timeout: timedelta,
    device: str | torch.device | None,
) -> None:
    """Raise ValueError for arguments that contradict the current job."""
    job = active.job
    if device is not None:
        device = rank_device(device, job.backend, local_rank=job.local_rank)
    for name, asked, there in (
        ("backend", None if backend in ("auto", active.asked) else backend, job.backend),
        (
            "init_method",
            None if init_method == active.where else init_method,
            active.where or "the address from the launcher",
        ),
        ("rank", rank, job.rank),
        ("world_size", world_size, job.world_size),
        ("timeout", None if timeout.total_seconds() == TIMEOUT_S else timeout, job.timeout),
        ("device", device, job.device),
    ):
        if asked is not None and asked != there:
            raise ValueError(
                f"{name}={asked!s}, but this process is in a job that has {there!s}: leave the argument out, or end "
                "that job first"
            )
    if store is not None:
        raise ValueError("a store is given, but this process is in a job already: leave it out, or end that job first")
