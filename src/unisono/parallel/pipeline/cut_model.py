"""The model of a run that is cut over the ranks of a pipeline: what runs it, and which stage has what."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.engine.model_contents import plain_name
from unisono.engine.staged import StageDivisions, StageMap, StageOwnership, StageRanks
from unisono.errors import UnisonoError
from unisono.parallel.call_check import CallCheck
from unisono.parallel.pipeline.foreign import ForeignParameters
from unisono.parallel.pipeline.mapping import map_stages
from unisono.parallel.pipeline.pipeline import Pipeline
from unisono.parallel.pipeline.placeholder import TensorLayout
from unisono.parallel.pipeline.runner import PipelineRunner
from unisono.parallel.pipeline.stage_division import divide, measure_places
from unisono.parallel.pipeline.stage_link import NO_DELAY, StageLink, measure_link
from unisono.parallel.pipeline.stage_plan import PipelinePlan, check_readers
from unisono.parallel.pipeline.stage_turns import StageTurns
from unisono.watch.event_kinds import PipelineFields

__all__ = ["CutModel"]

_KEPT_PLANS = 256


class CutModel:
    """A model over the ranks of a pipeline. Every rank has all of its modules, and the present values of its stages.

    Args:
        pipeline: The user's settings.
        model: The model.
        world: All ranks, more than one.

    Raises:
        ValueError: The ranks cannot be divided so.
    """

    def __init__(self, pipeline: Pipeline, model: nn.Module, world: World) -> None:
        size = pipeline.ranks_of_replica(world.size)
        self._pipeline, self._world, self.model = pipeline, world, model
        self.ranks = StageRanks.connect(world, stages=pipeline.num_stages, size=size)
        self.ownership = StageOwnership()
        self.starts = pipeline.names
        """The submodules with which stages begin; None until the first batch, if the number of stages is given."""
        self._schedule = pipeline.schedule_for(size)
        """The name of the schedule; with a number of stages and "auto", that of the first batch's choice."""
        self._averages: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self.tell: Callable[[PipelineFields], None] | None = None
        """Called once on each rank with an automatic division."""
        self.before_release: Callable[[], None] | None = None
        """Called by all ranks together, before they give back memory while each has the present state of all stages."""
        self.divisions: StageDivisions | None = None
        """The state of this rank's stages, with zero=1 or 3; None: each replica has all of it."""
        self._layouts: dict[str, TensorLayout] = {}
        """The layouts of all parameters, from the first step on, where the memory of the rank's own comes and goes."""
        self._runners: dict[int, tuple[PipelineRunner, ForeignParameters]] = {}
        self._goes_on = False
        """True if it is known from a checkpoint which stage has what."""
        self._checked: dict[int, PipelinePlan] = {}
        """Plans that agree with the map of the first step, by id."""
        self._writers: dict[str, int] = {}
        self._readers: dict[str, dict[int, str]] = {}
        """Of buffers, in all of these plans: what a step modifies may be read in an evaluation."""
        model.register_forward_pre_hook(CallCheck(self))

    def check_call(self, module: nn.Module) -> None:
        """Refuse a call of the model, or of its average, where this rank lacks the weights of other stages.

        Raises:
            UnisonoError: No step and no evaluation is under way, and the model is cut.
        """
        has_all = self.ownership.has_all(is_main=self.ranks.pipeline.rank == 0)
        if not has_all and not any(runner.is_running for runner, _ in self._runners.values()):
            raise UnisonoError(
                f"{type(module).__name__} was called in mid-run outside of the steps and evaluations of its pipeline, "
                "where each rank has the weights of its own stages alone: use trainer.evaluate or trainer.predict (in "
                "a loop of your own, forward of the stages), or call it once the weights are together, after the loop "
                "over trainer.epochs (or gather)"
            )

    def runner(self, model: nn.Module) -> PipelineRunner:
        """Return what runs a model of this form: the model itself, or its average."""
        if id(model) not in self._runners:
            assert self.starts is not None
            foreign = ForeignParameters(model)
            runner = PipelineRunner(
                model,
                starts=self.starts,
                schedule=self._schedule,
                group=self.ranks.pipeline.group,
                layouts=foreign.layouts if self._divided_weights is None else self._layouts,
            )
            self._runners[id(model)] = runner, foreign
        return self._runners[id(model)][0]

    def has_beside(self, averages: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
        """Note the averages and the optimizers of the model, which have memory for all of its parameters, too."""
        self._averages, self._optimizers = list(averages), list(optimizers)
        for average in self._averages:
            average.register_forward_pre_hook(CallCheck(self))
        if (weights := self._divided_weights) is not None:
            for average in self._averages:
                weights.of(average)

    @property
    def _divided_weights(self) -> StageDivisions | None:
        """The weights of this rank's stages, if replicas divide them."""
        return self.divisions if self.divisions is not None and self.divisions.divides_weights else None

    def release(self) -> None:
        """Give back the memory of parameters that the stages of this rank do not use, before a step."""
        if self.ownership.map is None or self.ownership.whole == "nowhere":
            return
        if self.ownership.whole == "everywhere" and self.before_release is not None:
            self.before_release()
        self.drop()

    def drop(self) -> None:
        """Give that memory back, whatever it holds."""
        used = {*self.used}
        for model in (self.model, *self._averages):
            self.runner(model)
            own = {name for name, _ in model.named_parameters() if plain_name(name) in used}
            self._runners[id(model)][1].release(own)
        parameters = dict(self.model.named_parameters())
        for optimizer in self._optimizers:
            for name in self.foreign:
                optimizer.state.pop(parameters[name], None)
        self.ownership.whole = "nowhere"

    def refuse_writes(self, model: nn.Module) -> None:
        """Refuse writes to parameters that no rank has as a whole, whose values would be lost.

        All ranks look at all parameters, so that a write by all of them is an error on all.

        Raises:
            UnisonoError: There was one, with zero=3.
        """
        if (weights := self._divided_weights) is None:
            return
        apart = [d for d in weights.of(model).of_stage.values() if not d.has_weights]
        found = [name for division in apart for unit in division.units if (name := unit.written_apart()) is not None]
        if id(model) in self._runners and (other := self._runners[id(model)][1].written()) is not None:
            found.append(other)
        if found:
            raise UnisonoError(
                f"parameter {min(found)!r} was written to where each rank has no more than a part of it, so that the "
                "values are lost (torch refuses that, except for fill_ and zero_): write to it before the first step "
                "or after the loop over trainer.epochs, or by trainer.load"
            )

    def restore(self) -> None:
        """Give all parameters memory again, for values from other ranks."""
        for _, foreign in self._runners.values():
            foreign.restore()

    def disconnect(self) -> None:
        """Release the groups of the ranks, some of which are to be replaced."""
        self.ranks.disconnect()
        for runner, _ in self._runners.values():
            runner.connect(None)

    def reconnect(self) -> None:
        """Make groups anew. Every rank must call it."""
        self.ranks.reconnect(self._world)
        for runner, _ in self._runners.values():
            runner.connect(self.ranks.pipeline.group)

    def begin_anew(self, starts: Sequence[str] | None) -> None:
        """Forget which stage has what, before any rank has given memory back; stages begin with these submodules."""
        self.ownership.map = None
        self._checked.clear()
        if starts is not None:
            starts = tuple(starts)
        if starts != self.starts:
            self.starts = starts
            self._runners.clear()

    def stages_document(self) -> dict[str, Any] | None:
        """Return which stage has what, for a checkpoint; None before that is known."""
        known = self.ownership.map
        if known is None or self.starts is None:
            return None
        limit = self._pipeline.memory_gib
        how = {"starts": list(self.starts), "ranks": self.ranks.size, "memory_gib": limit, "schedule": self._schedule}
        return {**how, **known.document()}

    def has_same_stages(self, document: Mapping[str, Any]) -> bool:
        """Return True if what `stages_document` has returned holds here, too; stages may be left to a measurement.

        Args:
            document: That of a run with the same model.
        """
        if self.starts is not None:
            return bool(list(self.starts) == document["starts"])
        here = self.ranks.stages, self.ranks.size, self._pipeline.memory_gib
        return here == (len(document["starts"]) + 1, document["ranks"], document["memory_gib"])

    def begin_with(self, document: Mapping[str, Any]) -> None:
        """Go on with the stages of a run before, instead of finding in the first step which of them has what."""
        if self.starts is None:
            self.starts = tuple(document["starts"])
            if document["schedule"] in self._pipeline.schedules_for(self.ranks.size):
                self._schedule = document["schedule"]
        self._goes_on = True
        self._know(StageMap.of(document))

    def owns(self, parameter: str) -> bool:
        """Return True if a stage of this rank updates a parameter, by plain name."""
        assert self.ownership.map is not None
        return self.ownership.map.owner(parameter) in self.ranks.own_stages

    def _know(self, found: StageMap) -> None:
        self.ownership.map = found
        if self._divided_weights is not None:
            self._layouts.update({name: TensorLayout.of(p) for name, p in self.model.named_parameters()})

    @property
    def used(self) -> Collection[str]:
        """The plain names of the parameters that the stages of this rank use, once that is known."""
        known, own = self.ownership.map, set(self.ranks.own_stages)
        assert known is not None
        return [name for name, stages in known.parameters.items() if not own.isdisjoint(stages)]

    @property
    def foreign(self) -> Collection[str]:
        """The names of the model's parameters whose memory has been given back."""
        known = self._runners.get(id(self.model))
        return () if known is None else known[1].layouts

    def own_pairs(self, average: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter of an averaged model that has memory, or the part of it, and that of the model."""
        foreign, divisions = self.foreign, self.divisions
        apart = set[int]() if divisions is None else divisions.apart
        pairs = zip(average.parameters(), self.model.named_parameters(), strict=True)
        found: list[tuple[Tensor, Tensor]] = [
            (each, p) for each, (name, p) in pairs if name not in foreign and id(p) not in apart
        ]
        return found if divisions is None or not apart else found + divisions.pairs(average)

    def divide(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Any] | None,
        *,
        micro_batches: int,
        loss_of: Callable[[Any], Tensor] | None,
    ) -> None:
        """Find where stages begin, if the user has left it open, and the fastest schedule, if that is open, too.

        Every rank must call it before the first plan.

        The first rank measures the model, all measure what messages take if that decides, and all compute the same
        division. Time: four passes of a micro-batch of the whole model.

        Args:
            function: The forward pass with its loss, called with the model and the inputs of a micro-batch.
            inputs: Those of a micro-batch; needed on the first rank.
            micro_batches: The number of micro-batches of this replica in a step.
            loss_of: Returns the scalar from which backward starts. None: only forward passes are measured.

        Raises:
            CutError: On the first rank, if the model cannot be cut.
            PeerError: On the others.
            ValueError: On all ranks, if there are too few places for stages to begin, or too little memory.
        """
        if self.starts is not None:
            return
        since_s, stages = time.monotonic(), self.ranks.stages

        def measure() -> bytes:
            assert inputs is not None
            found = measure_places(self.model, function, inputs, stages=stages, loss_of=loss_of)
            return json.dumps(micro_batches).encode() + b"\n" + found

        head, _, measured = self._world.broadcast_bytes(measure).partition(b"\n")
        count = int(head)
        schedules = self._pipeline.schedules_for(self.ranks.size)
        division = divide(
            measured,
            stages=stages,
            schedules=schedules,
            ranks=self.ranks.size,
            micro_batches=count,
            limit_nbytes=self._limit_nbytes(),
            link=self._slowest_link() if len(schedules) > 1 else NO_DELAY,
        )
        self.starts, self._schedule = division.starts, division.schedule
        if self.tell is not None:
            seconds = division.split.seconds
            self.tell(
                {
                    "stages": division.starts,
                    "shares": [round(each / sum(seconds), 4) for each in seconds],
                    "nbytes": division.split.nbytes,
                    "excess": round(division.split.excess, 4),
                    "schedule": division.schedule,
                    "micro_batches": count,
                    "step_s": round(division.step_s, 6),
                    "waiting": round(division.waiting, 4),
                    "least_step_s": round(division.least_step_s, 6),
                    "advised_micro_batches": None if division.advice is None else division.advice.micro_batches,
                    "advised_waiting": None if division.advice is None else round(division.advice.waiting, 4),
                    "seconds": round(time.monotonic() - since_s, 3),
                }
            )

    def _slowest_link(self) -> StageLink:
        """Return the longest times of messages between stages, equal on all ranks. Every rank must call it."""
        everyone = self._world.gather_numbers(measure_link(self.ranks.pipeline))
        return StageLink(*(max(times) for times in zip(*everyone, strict=True)))

    def _limit_nbytes(self) -> int | None:
        """Return the memory that the stages of any rank may take, equal on all ranks. Every rank must call it."""
        limits = [
            each for each in self._world.gather(self._own_limit_nbytes(), "trainer.step cutting the model") if each
        ]
        return min(limits, default=None)

    def _own_limit_nbytes(self) -> int | None:
        if self._pipeline.memory_gib is not None:
            return int(self._pipeline.memory_gib * 2**30)
        device = next(self.model.parameters()).device
        if device.type != "cuda":
            return None
        return int(0.9 * torch.cuda.get_device_properties(device).total_memory)

    def turns(self, model: nn.Module, *, backward: bool) -> StageTurns:
        """Return what brings the weights of this rank's stages together for a step or a batch, where ranks divide them.

        Args:
            model: The model, or its average.
            backward: True if backward passes follow.
        """
        weights = self._divided_weights
        return StageTurns({} if weights is None else weights.of(model).of_stage, backward=backward)

    def plan(
        self, model: nn.Module, function: Callable[..., Any], inputs: Sequence[Any], state: Hashable = None
    ) -> PipelinePlan:
        """Return the plan of a function for the inputs of a micro-batch; see `PipelineRunner.plan`.

        Raises:
            CutError: The model cannot be cut so, or a stage reads a buffer that another one modifies in other passes.
            UnisonoError: A stage would need a parameter that it has not had in the first step.
        """
        plan = self.runner(model).plan(function, inputs, state)
        known = self.ownership.map
        if known is None or self._checked.get(id(plan)) is plan:
            return plan
        if difference := known.difference(self._map(plan, model)):
            before, remedy = (
                "in the first step",
                "Begin stages with blocks that are called in the same order in training ",
            )
            remedy += "and in evaluation, and for all inputs."
            if self._goes_on:
                before = "in the run that the checkpoint is of"
                remedy += " If the code of the model was changed, name other stages: then each rank reads all of it."
            raise UnisonoError(f"the model's forward pass went another way than {before}: {difference}. {remedy}")
        if len(self._checked) >= _KEPT_PLANS:
            self._checked.clear()
        self._writers |= plan.written_buffers
        for name, stages in plan.read_buffers.items():
            self._readers.setdefault(name, {}).update(stages)
        check_readers(self._writers, self._readers)
        self._checked[id(plan)] = plan
        return plan

    def settle(self, plan: PipelinePlan | None) -> StageMap:
        """Agree on which stage has what, in the first step, and return it. Every rank must call it.

        Args:
            plan: The plan of a micro-batch; None on a rank that has none in this step.

        Raises:
            UnisonoError: Ranks have found different answers.
        """
        own = None if plan is None else self._map(plan, self.model)
        parts = None if own is None else (dict(own.parameters), dict(own.buffers))
        everyone = [StageMap(*each) for each in self._world.gather(parts, "trainer.step cutting the model") if each]
        for other in everyone[1:]:
            if difference := everyone[0].difference(other):
                raise UnisonoError(f"the ranks have cut the model differently: {difference}.")
        self._know(everyone[0])
        return everyone[0]

    def _map(self, plan: PipelinePlan, model: nn.Module) -> StageMap:
        assert self.starts is not None
        return map_stages(plan, model, self.starts)
