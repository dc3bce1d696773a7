"""The state of workers that train on their own (`sync=`), which is with the rank that trains them, in checkpoints.

Where ranks see one directory, each writes the tensors of its own workers, and a part of what all have: the outer
weights and their momentum. Otherwise rank 0 gets them at each save. Start reading at `WorkerGathering`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from unisono.collectives.world import World
from unisono.engine.local_steps import Workers
from unisono.engine.model_contents import parameter_names
from unisono.state.digest import copied_range
from unisono.state.part_plan import Claim, PartPlan, TensorForm, even_plan, form_of, plan_parts
from unisono.state.safetensors_format import lay_out, tied_names
from unisono.trainer.modules import name_of_parameter
from unisono.trainer.part_saving import OptimizerStates, PartPlace, PartSaving
from unisono.trainer.snapshot import Subjects, model_tensors, optimizer_state

__all__ = ["SYNC_GROUP", "WorkerGathering", "owner_of"]

SYNC_GROUP = "sync"
"""The group of a checkpoint with the tensors of workers, whose names begin with the worker's number, and momentum."""
_MOMENTUM = "momentum"


class _WorkerTable(NamedTuple):
    """What a rank has of its workers."""

    forms: dict[str, TensorForm]
    """The tensors by the name that they have in checkpoints."""
    numbers: dict[int, Any]
    """By worker and parameter, the keys of these tensors in the optimizer's state, and what else it has."""


class WorkerGathering:
    """Gathers the state of workers for checkpoints, and restores it; see `StageGathering`.

    The outer weights are those of the models, which all ranks have, so nothing is gathered for other uses.

    Args:
        world: The ranks.
        workers: Those of this rank.
        subjects: The objects of the run.
    """

    stays_divided = True
    is_replaceable = False
    """No rank needs the state of the workers of others."""

    def __init__(self, world: World, workers: Workers, subjects: Subjects) -> None:
        self._world, self._workers, self._subjects = world, workers, subjects
        names = parameter_names(subjects.modules)
        self._names = {p: name_of_parameter(names, p) for p in workers.parameters}
        self._tensors: dict[str, Tensor] = {}
        """On rank 0, the tensors of all workers, if `_gathered` is the number of steps that are done."""
        self._gathered = -1
        self._numbers: tuple[int, dict[int, Any]] = (-1, {})
        """The numbers of all workers, and after how many steps they were so."""
        self.found: Mapping[str, Tensor] = {}
        """The tensors of a checkpoint, of which `load_state_dict` takes those of this rank's workers."""
        self._are_behind = False
        """Whether the workers of the checkpoint were; see `Workers.are_behind`."""
        self.saving = PartSaving(world, self)
        """Lets each rank write its own part of a checkpoint."""

    def describe(self) -> _WorkerTable:
        """Return what this rank has of its workers. Every rank must call it."""
        return _WorkerTable({name: form_of(tensor) for name, tensor in self._own().items()}, self._own_numbers())

    def contents(self, tables: Sequence[_WorkerTable], place: PartPlace) -> _WorkerContents:
        """Return what is written to a checkpoint. Every rank must call it; local."""
        self._note(tables)
        momentum = self._momentum()
        return _WorkerContents(self._world.rank, self._subjects, tables, self._own(), momentum)

    @property
    def is_divided(self) -> bool:
        """True if rank 0 has not the state of all workers, so that each can write its part. Equal on all ranks."""
        return self._world.group is not None and not self._is_gathered

    @property
    def is_whole(self) -> bool:
        """True if this rank has the state of all workers, or is not to save it."""
        return self._world.rank > 0 or not self.is_divided

    @property
    def needs_others(self) -> bool:
        """True if ranks have to know when a state is saved."""
        return self._world.group is not None

    def divide_again(self) -> None:
        """Do nothing; see `ShardGathering`."""

    def gather(self, *, everywhere: bool) -> None:
        """Bring the state of all workers to rank 0. Every rank must call it. Traffic: each rank sends its workers'.

        Args:
            everywhere: Makes no difference.
        """
        if self.is_divided:
            own = {name: tensor.cpu() for name, tensor in self._own().items()}
            mine = (_WorkerTable({}, self._own_numbers()), own)
            everyone = self._world.gather_to_main(mine, "Trainer gathering the state of workers") or []
            self._note([table for table, _ in everyone])
            self._tensors = {name: tensor for _, tensors in everyone for name, tensor in tensors.items()}
            self._gathered = self._workers.steps

    def check_whole(self, call: str) -> None:
        """Do nothing: every rank has the outer weights."""

    def put_whole(self, groups: dict[str, dict[str, Tensor]]) -> None:
        """Add the tensors that this rank has of workers to the groups of a checkpoint: all, after `gather`."""
        tensors = self._tensors if self._world.group is not None and self._is_gathered else self._own()
        groups[SYNC_GROUP] = {**self._momentum(), **tensors}

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the tensors that `put_whole` adds."""
        workers = self._workers
        done, numbers = self._numbers
        return {
            "count": workers.count,
            "every": workers.sync.every,
            "steps": workers.steps,
            "position": workers.position,
            "are_behind": workers.are_behind,
            "workers": numbers if done == workers.steps else self._own_numbers(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's workers from `found`, and the numbers of all.

        Raises:
            ValueError: The run had another number of workers, or rounds of another length.
        """
        workers = self._workers
        if (state["count"], state["every"]) != (workers.count, workers.sync.every):
            raise ValueError(
                f"the run has {state['count']} workers and rounds of {state['every']} steps, and sync= says "
                f"{workers.count} and {workers.sync.every}: they decide its result, so give the same as before"
            )
        self._tensors, self._gathered, self._numbers = {}, -1, (-1, {})
        found, self.found = self.found, {}
        momentum = {p: f"{_MOMENTUM}.{name}" for p, name in self._names.items()}
        own = {p: found[name] for p, name in momentum.items() if name in found}
        self._are_behind = state["are_behind"]
        workers.restore(state["steps"], state["position"], own)
        for worker in workers.own if state["workers"] else ():
            weights = [found[f"{worker}.weights.{name}"] for name in self._names.values()]
            numbers = state["workers"][worker]
            optimizer = {
                p: numbers[name]["values"]
                | {key: found[f"{worker}.optimizer.{name}.{key}"] for key in numbers[name]["tensors"]}
                for p, name in self._names.items()
                if name in numbers
            }
            workers.restore_worker(worker, weights, optimizer)

    def note_restored(self) -> None:
        """Note that the models have the weights of the checkpoint that was loaded."""
        self._workers.note_restored(are_behind=self._are_behind)

    @property
    def _is_gathered(self) -> bool:
        return self._gathered == self._workers.steps

    def _note(self, tables: Sequence[_WorkerTable]) -> None:
        numbers = {worker: each for table in tables for worker, each in table.numbers.items()}
        self._numbers = (self._workers.steps, numbers)

    def _own(self) -> dict[str, Tensor]:
        """Return the tensors of this rank's workers by name, without a copy."""
        tensors: dict[str, Tensor] = {}
        for worker in self._workers.own:
            weights, state = self._workers.of(worker)
            tensors |= {f"{worker}.weights.{name}": t for name, t in zip(self._names.values(), weights, strict=False)}
            for p, values in state.items():
                for key in _tensors_in(values):
                    tensors[f"{worker}.optimizer.{self._names[p]}.{key}"] = values[key]
        return tensors

    def _own_numbers(self) -> dict[int, Any]:
        """Return the numbers of this rank's workers: a tensor without dimensions is one, such as the count of steps."""
        found: dict[int, Any] = {}
        for worker in self._workers.own:
            weights, state = self._workers.of(worker)
            if not weights:
                continue
            found[worker] = {self._names[p]: _numbers_of(values) for p, values in state.items()}
        return found

    def _momentum(self) -> dict[str, Tensor]:
        """Return the outer momentum, which is equal on all ranks."""
        momentum = self._workers.momentum
        return {f"{_MOMENTUM}.{name}": momentum[p] for p, name in self._names.items() if p in momentum}


class _WorkerContents:
    """The groups "model" and "sync" of a checkpoint: who writes what, and copies of what this rank writes.

    Args:
        rank: This rank.
        subjects: The objects of the run.
        tables: What each rank has.
        own: The tensors of this rank's workers.
        momentum: The outer momentum.

    Raises:
        CheckpointError: A tensor cannot be stored.
    """

    increments = None
    """Files are written as a whole."""

    def __init__(
        self,
        rank: int,
        subjects: Subjects,
        tables: Sequence[_WorkerTable],
        own: Mapping[str, Tensor],
        momentum: Mapping[str, Tensor],
    ) -> None:
        self.optimizers: OptimizerStates = {
            key: optimizer_state(subjects.modules, each) for key, each in subjects.optimizers.items()
        }
        model = model_tensors(subjects.modules)
        forms = {name: form.empty() for table in tables for name, form in table.forms.items()}
        self.plans: dict[str, PartPlan] = {
            "model": even_plan("model", model, tied_names(model), len(tables)),
            SYNC_GROUP: _plan(momentum, tables, forms),
        }
        """By group, who writes what."""
        values = {"model": model, SYNC_GROUP: {**momentum, **own}}
        self.values = {
            group: {
                claim: copied_range(values[group][claim.name], claim.start, claim.stop, f"{group}.{claim.name}")
                for claim in plan.starts[rank]
            }
            for group, plan in self.plans.items()
        }
        """The part of each group that this rank writes."""


def _plan(momentum: Mapping[str, Tensor], tables: Sequence[_WorkerTable], forms: Mapping[str, Tensor]) -> PartPlan:
    everything = {**momentum, **forms}
    starts = lay_out(everything, {}, SYNC_GROUP).starts
    claims = even_plan(SYNC_GROUP, momentum, {}, len(tables)).starts
    own = [[Claim(name, 0, forms[name].numel()) for name in starts if name in table.forms] for table in tables]
    return plan_parts(
        SYNC_GROUP, everything, {}, [[*shared, *private] for shared, private in zip(claims, own, strict=True)]
    )


def _tensors_in(values: Mapping[str, Any]) -> list[str]:
    return [key for key, value in values.items() if isinstance(value, Tensor) and value.dim() > 0]


def _numbers_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the tensors of a parameter's state, and its other values."""
    tensors = _tensors_in(values)
    others = {key: value for key, value in values.items() if key not in tensors}
    return {
        "tensors": tensors,
        "values": {key: value.cpu() if isinstance(value, Tensor) else value for key, value in others.items()},
    }


def owner_of(workers: Workers, group: str, name: str) -> int | None:
    """Return the rank that alone needs a tensor of a checkpoint; None if all ranks do."""
    worker, _, _ = name.partition(".")
    return workers.owners.get(int(worker)) if group == SYNC_GROUP and worker != _MOMENTUM else None
