"""The public settings of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from unisono.arguments import choice, real, whole
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
    Pipeline(stages=('layers.4', 'layers.8'), schedule='1f1b', replicas=None, memory_gib=None)

    Args:
        stages: The names of the submodules with which the second stage and those after it begin, in the order in which
            the forward pass calls them. A stage has all that is called until the next one begins. Or the number of
            stages: then the first batch is used to measure the parts of the model, and the division is the one whose
            slowest stage is fastest.
        schedule: The order of passes: "gpipe" (all forward passes first, which takes the most memory), "1f1b" (a stage
            keeps at most as many micro-batches as there are stages), or "interleaved" (several stages on each rank, for
            shorter waits; the number of stages is a multiple of the number of ranks of a replica).
        replicas: Number of copies of the model, which divide the virtual ranks. None: one for each full set of ranks
            with a rank for each stage; with "interleaved", one.
        memory_gib: The memory that the stages of a rank may take, in GiB, where the number of stages is given: for
            parameters, gradients and two averages of the optimizer, and for activations. None: 90 % of a GPU's memory,
            and any on a CPU.

    Raises:
        TypeError: stages are neither names nor a number.
        ValueError: There is one stage, or there is no such schedule.
    """

    stages: int | Sequence[str]
    schedule: ScheduleName = "1f1b"
    replicas: int | None = None
    memory_gib: float | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        stages: Any = self.stages
        if isinstance(stages, int) and not isinstance(stages, bool):
            whole("stages", stages, least=2)
            stages = ()
        elif isinstance(stages, str) or not isinstance(stages, Sequence):
            raise TypeError(
                f"stages={stages!r} is {a_type(stages)}: give the number of stages, or the names of the submodules "
                'with which they begin, as in stages=["layers.4"] for two stages'
            )
        for name in stages:
            if not isinstance(name, str):
                raise TypeError(f"stages={stages!r} has {name!r}, {a_type(name)}, where the name of a submodule is due")
        if not stages and not isinstance(self.stages, int):
            raise ValueError("stages=[] leaves the model whole: name the submodule with which a second stage begins")
        if not isinstance(self.stages, int):
            object.__setattr__(self, "stages", tuple(stages))
        if self.memory_gib is not None and not real("memory_gib", self.memory_gib) > 0:
            raise ValueError(f"memory_gib={self.memory_gib} must be positive; None sets no limit on a CPU")
        choice("schedule", self.schedule, tuple(name for name in SCHEDULES if name != "zero-bubble"))
        if self.replicas is not None:
            whole("replicas", self.replicas, least=1)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.stages if isinstance(self.stages, int) else len(self.stages) + 1

    @property
    def names(self) -> tuple[str, ...] | None:
        """The submodules with which stages begin; None if the number of stages is given."""
        return None if isinstance(self.stages, int) else tuple(self.stages)

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
        count, replicas = self.num_stages, self.replicas
        if replicas is None:
            replicas = 1 if self.schedule == "interleaved" else max(1, world_size // count)
        size, rest = divmod(world_size, replicas)
        if self.schedule == "interleaved":
            if rest or size < 2 or count % size:
                raise ValueError(
                    f'schedule="interleaved" has equally many stages on each rank, and {count} stages cannot be '
                    f"divided among {_ranks(world_size, replicas)}: start {replicas * _divisor(count, size)} ranks, or "
                    "name other stages"
                )
        elif rest or size != count:
            start = f"start {replicas * count} ranks"
            if self.replicas is None:
                start = f"start a multiple of {count} ranks"
            raise ValueError(
                f"{count} stages need {count} ranks for each replica of the model, and there are "
                f"{_ranks(world_size, replicas)}: {start}, name other stages, or give "
                'schedule="interleaved" for several stages on a rank'
            )
        return size


def _ranks(world_size: int, replicas: int) -> str:
    return f"{world_size} ranks" + (f" for {replicas} replicas" if replicas > 1 else "")


def _divisor(number: int, near: int) -> int:
    """Return the divisor of a number, above 1, that is next to another number."""
    return min((each for each in range(2, number + 1) if number % each == 0), key=lambda each: abs(each - near))
