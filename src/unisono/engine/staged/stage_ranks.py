"""The ranks of each stage: a grid of replicas of the model, each of them cut over the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from unisono.backend import register
from unisono.collectives.world import World
from unisono.job.default_group import make_subgroup
from unisono.machine import host_id, shared_memory_obstacle

__all__ = ["StageRanks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRanks:
    """The place of this rank in the grid, with the groups that it exchanges tensors in.

    The ranks of a replica follow each other: rank = replica * size + place. Stage s is at the place s modulo the number
    of places.
    """

    size: int
    """Number of ranks of a pipeline."""
    stages: int
    """Number of stages."""
    place: int
    """The place of this rank in its pipeline."""
    replicas: int
    """Number of pipelines."""
    pipeline: World
    """The ranks of this rank's pipeline, by place. Tensors travel from the CPU."""
    columns: dict[int, World]
    """By stage of this rank: the ranks that compute it, one of each replica."""

    @classmethod
    def connect(cls, world: World, *, stages: int, size: int) -> StageRanks:
        """Make the groups of the grid. Every rank must call it. A new rank that has not joined the others is alone.

        Args:
            world: All ranks; their number is a multiple of `size`.
            stages: Number of stages, a multiple of `size`.
            size: Number of ranks of a pipeline.
        """
        replicas, place = world.size // size, world.rank % size
        if world.group is None:
            return cls._alone(world, stages=stages, size=size)
        register()
        shares = shared_memory_obstacle() is None
        hosts = world.gather(host_id(with_network=True) if shares else f"rank {world.rank}", "Trainer making stages")
        made = []
        for first in range(0, world.size, size):
            ranks = range(first, first + size)
            # Activations of ranks on one host go through shared memory, those of GPUs, too. NCCL's receives wait on the
            # GPU, and what waits for the whole GPU, such as the loading of a kernel, would wait for a message as well.
            between_hosts = "gloo" if world.device.type == "cuda" else None
            backend = "shm" if len({hosts[rank] for rank in ranks}) == 1 else between_hosts
            made.append(_world_of(world, ranks, backend=backend))
        columns = {}
        for stage in range(stages):  # a group for each, since their messages overtake each other
            column = _world_of(world, [replica * size + stage % size for replica in range(replicas)])
            if stage % size == place:
                assert column is not None
                columns[stage] = column
        pipeline = made[world.rank // size]
        assert pipeline is not None
        return cls(size=size, stages=stages, place=place, replicas=replicas, pipeline=pipeline, columns=columns)

    @classmethod
    def _alone(cls, world: World, *, stages: int, size: int) -> StageRanks:
        """Return the place of a new rank that has not joined the others yet, without groups."""
        replica, place = divmod(world.rank, size)
        replicas = world.size // size
        return cls(
            size=size,
            stages=stages,
            place=place,
            replicas=replicas,
            pipeline=World(rank=place, size=size, local_rank=world.local_rank),
            columns={
                stage: World(rank=replica, size=replicas, local_rank=world.local_rank)
                for stage in range(place, stages, size)
            },
        )

    def disconnect(self) -> None:
        """Release the groups, for all who hold this grid."""
        for each in (self.pipeline, *self.columns.values()):
            each.group = None

    def reconnect(self, world: World) -> None:
        """Make the groups anew, for all who hold this grid, after ranks have been replaced. Every rank must call it."""
        fresh = StageRanks.connect(world, stages=self.stages, size=self.size)
        self.pipeline.renew(fresh.pipeline)
        for stage, column in self.columns.items():
            column.renew(fresh.columns[stage])

    @property
    def own_stages(self) -> tuple[int, ...]:
        """The stages of this rank, ascending."""
        return tuple(self.columns)

    @property
    def has_last_stage(self) -> bool:
        """True if this rank computes losses."""
        return self.place == self.place_of(self.stages - 1)

    def place_of(self, stage: int) -> int:
        """Return the place of a stage in each pipeline."""
        return stage % self.size


def _world_of(world: World, ranks: Sequence[int], *, backend: str | None = None) -> World | None:
    """Make the group of some ranks; return it to those in it. Every rank must call it."""
    if len(ranks) == 1:
        return World(local_rank=world.local_rank, device=world.device) if ranks[0] == world.rank else None
    group = make_subgroup(ranks, timeout=timedelta(seconds=world.timeout_s), backend=backend)
    if group is None:
        return None
    device = world.device if backend is None else torch.device("cpu")
    return World(
        rank=ranks.index(world.rank),
        size=len(ranks),
        local_rank=world.local_rank,
        group=group,
        device=device,
        waiter=world.waiter,
    )
