"""The part of a checkpoint that each rank of a cut model writes: the tensors of its stages, whole, by name.

Ranks tell each other what theirs look like, and the numbers beside them, such as the count of steps; the ranks that
compute the same stage in several replicas share its tensors out. Start reading at `StageContents`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from unisono.engine.staged import StageRanks
from unisono.state.codec import decode, encode
from unisono.state.digest import copied_range
from unisono.state.part_plan import Claim, PartPlan, TensorForm, even_claims, form_of, plan_parts
from unisono.state.safetensors_format import lay_out
from unisono.trainer.snapshot import Subjects, model_tensors, optimizer_state, tied_members

__all__ = ["StageContents", "StageTable", "own_stage_table"]


class StageTable(NamedTuple):
    """What the stages of a rank have."""

    weights: dict[str, dict[str, TensorForm]]
    """By group, "model" or "ema", and name."""
    optimizers: dict[str, dict[str, dict[str, Any]]]
    """The state of optimizers, with the form of each tensor that is more than a number in its place."""


def own_stage_table(subjects: Subjects, is_own: Callable[[str], bool]) -> StageTable:
    """Return what the stages of this rank have.

    Args:
        subjects: The objects of the run.
        is_own: Returns True for the name of a parameter or buffer that this rank has.
    """
    return StageTable(
        {
            group: {name: form_of(t) for name, t in model_tensors(modules).items() if is_own(name)}
            for group, modules in subjects.weights.items()
        },
        {
            key: {
                name: {each: _described(value) for each, value in state.items()}
                for name, state in optimizer_state(subjects.modules, optimizer).items()
                if is_own(name)
            }
            for key, optimizer in subjects.optimizers.items()
        },
    )


class StageContents:
    """The groups "model", "ema" and "optimizer" of a checkpoint: who writes what, and copies of what this rank writes.

    Local. What belongs to no stage, such as the number of updates of an average, rank 0 writes. Memory: the part.

    Args:
        ranks: The place of this rank.
        rank: This rank.
        subjects: The objects of the run.
        tables: What the stages of each rank have.

    Raises:
        CheckpointError: A tensor cannot be stored, or ranks do not have all of one.
    """

    increments = None
    """Files are written as a whole."""

    def __init__(self, ranks: StageRanks, rank: int, subjects: Subjects, tables: Sequence[StageTable]) -> None:
        self._ranks, self._rank, self._tables = ranks, rank, tables
        self.values: dict[str, dict[Claim, Tensor]] = {}
        """The part of each group that this rank writes."""
        self.optimizers = self._merged()
        """The state of the optimizers, with tensors on the meta device for those of stages."""
        self.plans = {
            group: self._plan(
                group,
                [{name: form.empty() for name, form in table.weights[group].items()} for table in tables],
                model_tensors(modules),
                tied_members(modules),
            )
            for group, modules in subjects.weights.items()
        }
        """By group, who writes what."""
        self.plans["optimizer"] = self._plan_optimizers(subjects)

    def _merged(self) -> dict[str, dict[str, dict[str, Any]]]:
        merged: dict[str, dict[str, dict[str, Any]]] = {}
        for key in self._tables[0].optimizers:
            states = {name: state for table in self._tables for name, state in table.optimizers[key].items()}
            merged[key] = {
                name: {each: value.empty() if isinstance(value, TensorForm) else value for each, value in state.items()}
                for name, state in sorted(states.items())
            }
        return merged

    def _plan_optimizers(self, subjects: Subjects) -> PartPlan:
        single = [*self.optimizers] == [""]
        document, tensors = encode(self.optimizers[""] if single else self.optimizers)
        found = decode(document, tensors)
        names = {id(tensor): name for name, tensor in tensors.items()}
        forms: list[dict[str, Tensor]] = [{} for _ in self._tables]
        values: dict[str, Tensor] = {name: each for name, each in tensors.items() if not each.is_meta}
        for key, optimizer in subjects.optimizers.items():
            merged, own = found if single else found[key], optimizer_state(subjects.modules, optimizer)
            for of_rank, table in zip(forms, self._tables, strict=True):
                for parameter in table.optimizers[key]:
                    for each, form in merged[parameter].items():
                        if isinstance(form, Tensor) and form.is_meta:
                            of_rank[names[id(form)]] = form
                            if table is self._tables[self._rank]:
                                values[names[id(form)]] = own[parameter][each]
        return self._plan("optimizer", forms, values, {})

    def _plan(
        self,
        group: str,
        forms: Sequence[Mapping[str, Tensor]],
        values: Mapping[str, Tensor],
        aliases: Mapping[str, str],
    ) -> PartPlan:
        """Plan a file, and copy this rank's part.

        Args:
            group: Its name.
            forms: For each rank, a tensor of the form of each that its stages have.
            values: Those of this rank, and what belongs to no stage.
            aliases: See `plan_parts`.
        """
        everything = {name: form for of_rank in forms for name, form in of_rank.items()}
        rest = {name: tensor for name, tensor in values.items() if name not in everything}
        everything |= rest
        starts = lay_out(everything, aliases, group).starts  # in this order, each part is one piece of the file
        claims: list[list[Claim]] = [[] for _ in forms]
        for place in range(self._ranks.size):
            of_place = {name: everything[name] for name in starts if name in forms[place]}
            parts = even_claims(of_place, self._ranks.replicas)
            for replica, part in enumerate(parts):
                claims[replica * self._ranks.size + place] += part
        claims[0] += [Claim(name, 0, tensor.numel()) for name, tensor in rest.items() if name in starts]
        plan = plan_parts(group, everything, aliases, claims)
        self.values[group] = {
            claim: copied_range(values[claim.name], claim.start, claim.stop, f"{group}.{claim.name}")
            for claim in plan.starts[self._rank]
        }
        return plan


def _described(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() > 0:
        return form_of(value)
    return value.cpu() if isinstance(value, Tensor) else value
