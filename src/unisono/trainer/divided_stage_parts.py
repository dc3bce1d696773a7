"""The part of a checkpoint that each rank of a cut model writes whose replicas divide what stages have.

Each rank writes the elements that it has, so that no rank needs all of its stages; what the ranks of a stage have as a
whole, they share out. Start reading at `DividedStageContents`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from unisono.engine.model_contents import parameter_names
from unisono.engine.sharded import Division
from unisono.engine.staged import StageDivisions, StageRanks
from unisono.state.part_plan import PartPlan, TensorForm, even_claims, form_of, plan_parts
from unisono.state.safetensors_format import lay_out
from unisono.trainer.divided_parts import ClaimedTensors, ParameterForm, PieceState, merged_state, own_table
from unisono.trainer.snapshot import Subjects, model_tensors, tied_members

__all__ = ["DividedStageContents", "DividedStageTable", "divided_stage_table"]


class DividedStageTable(NamedTuple):
    """What a rank has of its stages."""

    whole: dict[str, dict[str, TensorForm]]
    """The tensors that all ranks of the stage have, by group, "model" or "ema", and name."""
    spans: dict[str, dict[str, tuple[int, int]]]
    """The elements that it has of divided weights, by group and name: start and stop, in the order of memory."""
    pieces: dict[str, list[PieceState]]
    """Those of the optimizers' state."""
    forms: dict[str, ParameterForm]
    """The forms of the parameters of its stages, by name."""


def divided_stage_table(
    subjects: Subjects, divisions: StageDivisions, is_own: Callable[[str], bool]
) -> DividedStageTable:
    """Return what this rank has of its stages.

    Args:
        subjects: The objects of the run.
        divisions: What the replicas divide.
        is_own: Returns True for the name of a parameter or buffer of one of its stages.
    """
    names = parameter_names(subjects.modules)
    units = [unit for division in divisions.of_stage.values() for unit in division.units]
    forms = {
        names[id(p)]: ParameterForm(p.shape, unit.strides[i], unit.is_row_major(i))
        for unit in units
        for i, p in enumerate(unit.parameters)
    }
    pieces: dict[str, list[PieceState]] = {key: [] for key in subjects.optimizers}
    for division in divisions.of_stage.values():
        for key, found in own_table(division, subjects.optimizers).items():
            pieces[key] += found
    apart = {names[id(p)] for unit in units if not unit.keeps_weights for p in unit.parameters}
    spans = {
        name: (piece.start, piece.stop)
        for unit in units
        if not unit.keeps_weights
        for piece, _ in unit.updated_values()
        for name in (names[id(unit.parameters[piece.parameter])],)
    }
    groups = subjects.weights
    whole = {
        group: {n: form_of(t) for n, t in model_tensors(modules).items() if is_own(n) and n not in apart}
        for group, modules in groups.items()
    }
    return DividedStageTable(whole, dict.fromkeys(groups, spans), pieces, forms)


class DividedStageContents:
    """The groups "model", "ema" and "optimizer" of a checkpoint; see `divided_parts.Contents`.

    Every rank must make it. Memory: the part. Traffic: that of what is assembled.

    Args:
        ranks: The place of this rank.
        rank: This rank.
        subjects: The objects of the run.
        divisions: What the replicas divide.
        tables: What each rank has.

    Raises:
        CheckpointError: A tensor cannot be stored, or ranks do not have all of one.
    """

    increments = None
    """Files are written as a whole."""

    def __init__(
        self,
        ranks: StageRanks,
        rank: int,
        subjects: Subjects,
        divisions: StageDivisions,
        tables: Sequence[DividedStageTable],
    ) -> None:
        self._ranks, self._rank, self._divisions, self._tables = ranks, rank, divisions, tables
        forms = {name: form for table in tables for name, form in table.forms.items()}
        self._names = parameter_names(subjects.modules)
        self._division_of: dict[str, Division] = {
            self._names[id(p)]: division
            for division in divisions.of_stage.values()
            for unit in division.units
            for p in unit.parameters
        }
        of_pieces = [table.pieces for table in tables]
        self.optimizers = merged_state(of_pieces, {name: form.shape for name, form in forms.items()})
        """The state of the optimizers, with tensors on the meta device for what is divided."""
        groups = subjects.weights
        claimed = {
            group: ClaimedTensors(group, rank, len(tables), forms, self._assemble) for group in (*groups, "optimizer")
        }
        self.values = {group: each.values for group, each in claimed.items()}
        """The part of each group that this rank writes."""
        self.plans = {group: self._plan_weights(group, modules, claimed[group]) for group, modules in groups.items()}
        own = {
            key: {
                piece.name: piece.state
                for division in divisions.of_stage.values()
                for piece in division.shards_of(optimizer).pieces()
            }
            for key, optimizer in subjects.optimizers.items()
        }
        self.plans["optimizer"] = claimed["optimizer"].claim_optimizers(self.optimizers, of_pieces, own)

    def _plan_weights(self, group: str, modules: Mapping[str, nn.Module], claimed: ClaimedTensors) -> PartPlan:
        tensors, aliases = model_tensors(modules), tied_members(modules)
        own = self._own_vectors(modules)
        for name in sorted({name for table in self._tables for name in table.spans[group]}):
            spans = {
                rank: table.spans[group][name] for rank, table in enumerate(self._tables) if name in table.spans[group]
            }
            claimed.claim(name, name, spans, own.get(name, tensors[name].new_empty(0)))
        whole = [{name: form.empty() for name, form in table.whole[group].items()} for table in self._tables]
        forms = {name: tensor.to("meta") for name, tensor in tensors.items()}
        forms |= {name: form for of_rank in whole for name, form in of_rank.items()}
        starts = lay_out(forms, aliases, group).starts  # in this order, each part is one piece of the file
        for place in range(self._ranks.size):
            of_place = {name: whole[place][name] for name in starts if name in whole[place]}
            for replica, claims in enumerate(even_claims(of_place, self._ranks.replicas)):
                claimed.claims[rank := replica * self._ranks.size + place] += claims
                claimed.keep(tensors, claims if rank == self._rank else [])
        claimed.claim_rest({name: tensor for name, tensor in tensors.items() if name in starts})
        return plan_parts(group, forms, aliases, claimed.claims)

    def _own_vectors(self, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
        """Return the elements that this rank has of the divided weights of a model or its average, by name."""
        if not self._divisions.divides_weights:
            return {}
        (model,) = modules.values()
        names = parameter_names(modules)
        return {
            names[id(unit.parameters[piece.parameter])]: vector
            for division in self._divisions.of(model).of_stage.values()
            for unit in division.units
            if not unit.keeps_weights
            for piece, vector in unit.updated_values()
        }

    def _assemble(self, parameter: str, own: Tensor, numels: Mapping[int, int], owner: int) -> Tensor | None:
        """Put a tensor together on one rank of those of its stage."""
        if parameter not in self._division_of:
            return None
        of_replicas = {rank // self._ranks.size: numel for rank, numel in numels.items()}
        exchange = self._division_of[parameter].exchange
        return exchange.assemble(own, of_replicas, owner=owner // self._ranks.size)
