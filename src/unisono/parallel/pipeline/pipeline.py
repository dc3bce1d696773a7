"""The public settings of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from unisono.arguments import choice, whole
from unisono.parallel.pipeline.schedule import SCHEDULES
from unisono.text import a_type

__all__ = ["Pipeline", "ScheduleName"]

ScheduleName: TypeAlias = Literal["gpipe", "1f1b", "interleaved"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """Cuts a model over ranks, for `Trainer(parallel=...)`: each computes a stage of it, with the bits of one process.

    Micro-batches are the shares of virtual ranks, or their parts where `micro_batch_size` is given. With one rank, the
    model stays whole.

    >>> Pipeline(stages=["layers.4", "layers.8"])
    Pipeline(stages=('layers.4', 'layers.8'), schedule='1f1b', replicas=None)

    Args:
        stages: The names of the submodules with which the second stage and those after it begin, in the order in which
            the forward pass calls them. A stage has all that is called until the next one begins.
        schedule: The order of passes: "gpipe" (all forward passes first, which takes the most memory), "1f1b" (a stage
            keeps at most as many micro-batches as there are stages), or "interleaved" (several stages on each rank, for
            shorter waits; the number of stages is a multiple of the number of ranks of a replica).
        replicas: Number of copies of the model, which divide the virtual ranks. None: one for each full set of ranks
            with a rank for each stage; with "interleaved", one.

    Raises:
        TypeError: stages are no names.
        ValueError: There are no names, or there is no such schedule.
    """

    stages: Sequence[str]
    schedule: ScheduleName = "1f1b"
    replicas: int | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        stages: Any = self.stages
        if isinstance(stages, str) or not isinstance(stages, Sequence):
            raise TypeError(
                f"stages={stages!r} is {a_type(stages)}: give the names of the submodules with which stages begin, as "
                'in stages=["layers.4"] for two stages'
            )
        for name in stages:
            if not isinstance(name, str):
                raise TypeError(f"stages={stages!r} has {name!r}, {a_type(name)}, where the name of a submodule is due")
        if not stages:
            raise ValueError("stages=[] leaves the model whole: name the submodule with which a second stage begins")
        object.__setattr__(self, "stages", tuple(stages))
        choice("schedule", self.schedule, tuple(name for name in SCHEDULES if name != "zero-bubble"))
        if self.replicas is not None:
            whole("replicas", self.replicas, least=1)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages) + 1

    def ranks_of_replica(self, world_size: int) -> int:
        """Return the number of ranks over which each replica is cut.

        Raises:
            ValueError: The ranks cannot be divided so.

        >>> pipeline = Pipeline(stages=["layers.4", "layers.8"])
        >>> pipeline.ranks_of_replica(6), pipeline.ranks_of_replica(1)
        (3, 1)
        """
        if world_size == 1:
            return 1
        count = self.num_stages
        replicas = self.replicas
        if replicas is None:
            replicas = 1 if self.schedule == "interleaved" else max(1, world_size // count)
        size, rest = divmod(world_size, replicas)
        if rest or not size:
            raise ValueError(
                f"{world_size} ranks cannot be divided among {replicas} replicas: start {replicas * count} ranks, or "
                f"give Pipeline replicas={_divisor(world_size, replicas)}"
            )
        if size == 1:
            raise ValueError(
                f"{world_size} ranks and {replicas} replicas leave one rank for the {count} stages of each: start "
                f"{replicas * count} ranks, or leave out parallel= for replicas of the whole model"
            )
        if self.schedule == "interleaved":
            if count % size:
                raise ValueError(
                    f"{count} stages cannot be divided among the {size} ranks of a replica: start "
                    f"{replicas * _divisor(count, size)} ranks, or name another number of stages"
                )
        elif size != count:
            raise ValueError(
                f"{world_size} ranks and {replicas} replicas leave {size} ranks for the {count} stages of each, which "
                f'need one each: start a multiple of {count} ranks, or give schedule="interleaved" for several stages '
                "on a rank"
            )
        return size


def _divisor(number: int, near: int) -> int:
    """Return the largest divisor of a number that is not above another one."""
    return next(each for each in range(near, 0, -1) if number % each == 0)
