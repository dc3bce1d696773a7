"""The ranks of a generation: their first processes, those in the place of dead ones, and another number.

The agent's loop calls. Four parts do the work: `Replacing`, `Spares`, `Scaling` and `Servers`. Start reading at
`RankChanges.tick`.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from unisono.launch.forkserver_handle import ForkServerHandle
from unisono.launch.generation import Generation
from unisono.launch.launch_job import LaunchJob
from unisono.launch.output.relay import Relay
from unisono.launch.replacing import Replacing
from unisono.launch.scaling import Scaling
from unisono.launch.servers import Servers
from unisono.launch.spares import Spares

if TYPE_CHECKING:
    from unisono.launch.hosts.job_hosts import JobHosts

__all__ = ["RankChanges"]


class RankScaling(Protocol):
    """The side that changes the number of ranks, on one machine or on several."""

    @property
    def status(self) -> dict[str, Any]:
        """The change under way, or how the latest one has ended."""

    def request(self, size: int) -> str:
        """Begin to change the number of ranks; return why that is not possible, or "" if it is."""

    def on_exit(self, rank: int, code: int) -> None:
        """Handle the end of a process that is not one of the ranks."""

    def on_unstarted(self, rank: int, problem: str) -> bool:
        """Handle that a process could not be started. Return False if it was to be one of the present ranks."""


class RankChanges:
    """The changes of ranks in one generation.

    Args:
        number: The number of the last decision of earlier generations.
        completed: See `Replacing`.
        lost: See `Servers`.
        port: The port of the job's store.
        visible_gpus: CUDA_VISIBLE_DEVICES of the launcher; None if it is not set.
        hosts: The other hosts of the job; None if there are none.
    """

    def __init__(
        self,
        job: LaunchJob,
        generation: Generation,
        *,
        server: ForkServerHandle,
        relay: Relay,
        selector: selectors.BaseSelector,
        number: int,
        completed: Callable[[dict[str, Any]], None],
        lost: Callable[[str], None],
        port: int,
        visible_gpus: str | None,
        hosts: JobHosts | None = None,
    ) -> None:
        self._generation, self._server = generation, server
        self.servers = Servers(
            generation, server=server, relay=relay, environment=lambda: self._environment(None), lost=lost
        )
        self._port, self._visible_gpus = port, visible_gpus
        self._are_new = job.place is not None and job.place.joins
        self.spares = Spares(
            job.spares,
            generation,
            stdin=job.stdin,
            server=server,
            relay=relay,
            selector=selector,
            environment=self._environment,
        )
        options: dict[str, Any] = {
            "enabled": job.recover,
            "server": server,
            "relay": relay,
            "number": number,
            "completed": completed,
            "fork": self._fork,
            "spares": self.spares,
        }
        self.replacing: Replacing
        self.resizing: RankScaling
        if hosts is not None:
            from unisono.launch.hosts.host_replacing import HostReplacing  # noqa: PLC0415  not needed on one machine

            self.replacing = on_hosts = HostReplacing(generation, hosts=hosts, **options)
            self.resizing = on_hosts.scaling
        else:
            self.replacing = Replacing(generation, **options)
        self.scaling = Scaling(job, generation, self.replacing, server=server, relay=relay, fork=self._fork)
        if hosts is None:
            self.resizing = self.scaling

    def start(self) -> None:
        """Start the processes of all ranks and servers."""
        self.servers.start()
        for rank in self._generation.ranks:
            files = self._generation.open(rank)
            if self._are_new:
                self._generation.pages[rank].mark_new()
            self._fork(rank, files)

    def tick(self) -> bool:
        """Do what is due. Return False if no rank that has died is to be replaced: then the job ends as a whole."""
        if not self.replacing.tick():
            return False
        self.scaling.tick()
        self.spares.tick(is_calm=self.replacing.is_calm)
        return True

    def next_deadline_s(self) -> float | None:
        """Return when `tick` is due, by the monotonic clock; None if nothing is under way."""
        deadlines = [part.next_deadline_s() for part in (self.replacing, self.scaling, self.spares)]
        return min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=None)

    def on_exit(self, rank: int, code: int) -> None:
        """Handle the end of a process that matters for the number of ranks; the generation knows it already."""
        generation = self._generation
        if generation.host is not None:
            self.resizing.on_exit(rank, code)
        elif rank >= generation.size:
            self.scaling.on_exit(rank, code)
        elif not any(each < generation.size for each in generation.running):
            self.scaling.on_members_end()

    def _fork(self, rank: int, files: Mapping[str, int]) -> None:
        self._server.fork(rank, environment=self._environment(rank), files=files)

    def _environment(self, rank: int | None) -> dict[str, str]:
        generation = self._generation
        ranks = len(generation.ranks)
        if rank is not None and generation.host is None and rank >= generation.size:
            ranks = self.scaling.wanted
        elif rank is not None:
            ranks = generation.expected_here(rank) or ranks
        return generation.environment(rank, ranks=ranks, port=self._port, visible_gpus=self._visible_gpus)
