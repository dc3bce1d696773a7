"""The public settings of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from unisono.arguments import choice, real, whole
from unisono.parallel.pipeline.schedule import SCHEDULES, StageCost, make_schedule
from unisono.parallel.pipeline.schedule_timeline import draw, simulate
from unisono.text import a_type

__all__ = ["Pipeline", "ScheduleName"]

ScheduleName: TypeAlias = Literal["auto", "gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble", "breadth-first"]

_ONE_STAGE = frozenset({"gpipe", "1f1b", "eager-1f1b", "zero-bubble"})
"""The schedules with one stage on each rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """Cuts a model over ranks, for `Trainer(parallel=...)`: each computes a stage of it, with the bits of one process.

    Micro-batches are the shares of virtual ranks, or their parts where `micro_batch_size` is given. With one rank, the
    model stays whole.

    >>> Pipeline(stages=["layers.4", "layers.8"])
    Pipeline(stages=('layers.4', 'layers.8'), schedule='auto', replicas=None, memory_gib=None, zero=None)

    Args:
        stages: The names of the submodules with which the second stage and those after it begin, in the order in which
            the forward pass calls them. A stage has all that is called until the next one begins. Or the number of
            stages: then the first batch is used to measure the parts of the model, and the division is the one whose
            slowest stage is fastest.
        schedule: The order of passes: "gpipe" (all forward passes first, which takes the most memory), "1f1b" (a stage
            keeps at most as many micro-batches as there are stages), "eager-1f1b" (up to twice as many are under way,
            so that messages travel while ranks compute), "zero-bubble" (gradients of weights are computed later, where
            a rank would wait, for some more computing and memory), "interleaved" (several stages on each rank, for
            shorter waits; the number of stages is a multiple of the number of ranks of a replica), "breadth-first" (so,
            too, and all micro-batches go through a stage before the rank turns to its next one), or "auto": with zero=3
            "breadth-first"; otherwise "1f1b" where each stage has a rank of its own, or "zero-bubble" or "eager-1f1b"
            if the number of stages is given and that is faster by the measured times of passes and messages; and
            "interleaved" where ranks have several stages.
        replicas: Number of copies of the model, which divide the virtual ranks. None: one for each full set of ranks
            with a rank for each stage; with "interleaved", or fewer ranks than stages, one.
        memory_gib: The memory that the stages of a rank may take, in GiB, where the number of stages is given: for
            parameters, gradients and two averages of the optimizer, and for activations. None: 90 % of a GPU's memory,
            and any on a CPU.
        zero: 1 divides the optimizer's state of each stage over its ranks, one of each replica; 3 divides its weights
            and gradients as well, which come together while micro-batches go through the stage, and needs
            schedule="breadth-first" or "auto". None: each replica has all of it. (The numbers are those of Rajbhandari
            et al., "ZeRO", 2020.)

    Raises:
        TypeError: stages are neither names nor a number.
        ValueError: There is one stage, or there is no such schedule.
    """

    stages: int | Sequence[str]
    schedule: ScheduleName = "auto"
    replicas: int | None = None
    memory_gib: float | None = None
    zero: Literal[1, 3] | None = None

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
        choice("schedule", self.schedule, ("auto", *SCHEDULES))
        if self.replicas is not None:
            whole("replicas", self.replicas, least=1)
        if self.zero is not None and whole("zero", self.zero) not in (1, 3):
            raise ValueError(
                f"zero={self.zero} must be 1, which divides the optimizer's state of stages over replicas, 3, which "
                "divides their weights and gradients as well, or None"
            )
        if self.zero == 3 and self.schedule not in ("auto", "breadth-first"):
            raise ValueError(
                f'schedule="{self.schedule}" with zero=3 would bring the weights of a stage together for each '
                'micro-batch, or keep them together for the whole step: give schedule="breadth-first", or zero=1'
            )

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
        if not rest and (size == count if self.schedule in _ONE_STAGE else size > 1 and count % size == 0):
            return size
        there = f"{world_size} ranks" + (f" for {replicas} replicas" if replicas > 1 else "")
        start = f"start {'a multiple of ' if self.replicas is None else ''}{(self.replicas or 1) * count} ranks"
        if self.schedule in _ONE_STAGE:
            raise ValueError(
                f'schedule="{self.schedule}" needs a rank for each of the {count} stages of a replica, and there are '
                f'{there}: {start}, name other stages, or give schedule="auto" for several stages on a rank'
            )
        raise ValueError(
            f"{count} stages cannot be divided evenly among {there}: {start}, or a number that divides {count}, or "
            "name other stages"
        )

    def schedule_for(self, ranks: int) -> str:
        """Return the name of the schedule for a number of ranks of a replica, if there are no measured times.

        >>> pipeline = Pipeline(stages=4)
        >>> pipeline.schedule_for(4), pipeline.schedule_for(2)
        ('1f1b', 'interleaved')
        """
        if self.schedule != "auto":
            return self.schedule
        return self.schedules_for(ranks)[0]

    def schedules_for(self, ranks: int) -> tuple[str, ...]:
        """Return the names of the schedules to choose from by measured times.

        >>> Pipeline(stages=4).schedules_for(4), Pipeline(stages=4, schedule="gpipe").schedules_for(4)
        (('1f1b', 'zero-bubble', 'eager-1f1b'), ('gpipe',))
        """
        if self.schedule != "auto":
            return (self.schedule,)
        if self.zero == 3:
            return ("breadth-first",)
        # GPipe is faster where messages take longer than passes, but keeps the activations of all micro-batches.
        return ("1f1b", "zero-bubble", "eager-1f1b") if ranks == self.num_stages else ("interleaved",)

    def draw(self, *, micro_batches: int, ranks: int | None = None, columns: int = 100) -> str:
        """Return a drawing of a step: a line for each rank, F and B for the passes of micro-batches, · for waits.

        All stages take the same time here, and backward passes twice as long as forward ones. With "zero-bubble", I and
        W are the two parts of a backward pass.

        Args:
            micro_batches: Those of a replica.
            ranks: The number of ranks of a replica. None: one for each stage.
            columns: About the width, in characters.

        Raises:
            ValueError: The stages cannot be divided among the ranks.

        >>> print(Pipeline(stages=2).draw(micro_batches=2, columns=27))
        rank 0 F0─F1─······B0────···B1────
        rank 1 ···F0─B0────F1─B1────······
        """
        ranks = self.num_stages if ranks is None else replace(self, replicas=1).ranks_of_replica(ranks)
        passes = make_schedule(
            self.schedule_for(ranks),
            ranks=ranks,
            micro_batches=micro_batches,
            stages_per_rank=self.num_stages // ranks,
        )
        return draw(simulate(passes, [StageCost()] * self.num_stages), columns=columns)
