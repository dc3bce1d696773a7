"""Brings the state of all stages of a cut model together, where it is to be saved or to be looked at as a whole.

Ranks without shared memory write their parts of a checkpoint themselves, if they see one directory (`stage_parts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from unisono.collectives.world import World
from unisono.engine.staged import StagedBuffers, StageDivisions, StageMap
from unisono.errors import UnisonoError
from unisono.parallel.pipeline.cut_model import CutModel
from unisono.parallel.sharding.gathering import gather_state
from unisono.state.codec import decode, encode
from unisono.state.tensor_groups import TensorGroups, broadcast_groups
from unisono.trainer.divided_stage_parts import DividedStageContents, DividedStageTable, divided_stage_table
from unisono.trainer.part_saving import PartContents, PartPlace, PartSaving
from unisono.trainer.restoration import put_optimizer_state
from unisono.trainer.snapshot import Subjects, model_tensors, optimizer_state
from unisono.trainer.stage_commits import StageCommits
from unisono.trainer.stage_parts import StageContents, StageTable, own_stage_table

__all__ = ["StageGathering"]


class StageGathering:
    """Gathers the state of a run whose model is cut.

    Args:
        world: All ranks.
        cut: The model.
        subjects: The objects of the run.
        buffers: The buffers of this rank's stages.
        commits: Keep the state of all stages in shared memory, where it is gathered from if it is there.
    """

    stays_divided = False
    is_replaceable = False
    """Whether no rank is expected to have memory for the whole; see `ShardGathering`."""

    def __init__(
        self, world: World, cut: CutModel, subjects: Subjects, buffers: StagedBuffers, commits: StageCommits
    ) -> None:
        self._world, self._cut, self._subjects, self._buffers, self._commits = world, cut, subjects, buffers, commits
        self.saving = PartSaving(world, self)
        """Lets each rank write its own part of a checkpoint."""

    @property
    def is_divided(self) -> bool:
        """True if no rank has the state of all stages, neither itself nor in shared memory. Equal on all ranks."""
        return self.needs_others and self._cut.ownership.whole == "nowhere"

    def describe(self) -> StageTable | DividedStageTable:
        """Return what the stages of this rank have, or its part of that."""
        known, divisions = self._cut.ownership.map, self._cut.divisions
        assert known is not None
        is_own = partial(self._is_own, known)
        if divisions is not None and self._is_apart(divisions):
            return divided_stage_table(self._subjects, divisions, is_own)
        return own_stage_table(self._subjects, is_own)

    def contents(self, tables: Sequence[Any], place: PartPlace) -> PartContents:
        """Return what is written to a checkpoint. Every rank must call it.

        Traffic: buffers that are in no state_dict, from the stages that have them to rank 0.
        """
        ranks, own = self._cut.ranks, {}
        if self._world.rank < ranks.size:  # in the first replica
            own = {name: each.cpu() for name, each in self._buffers.own_state_dict().items()}
        transient = self._world.gather_to_main(own, "Trainer gathering buffers") or []
        for number, values in enumerate(transient):
            if number != ranks.place:
                self._buffers.take(values)
        divisions = self._cut.divisions
        if divisions is not None and self._is_apart(divisions):
            return DividedStageContents(ranks, self._world.rank, self._subjects, divisions, tables)
        return StageContents(ranks, self._world.rank, self._subjects, tables)

    def _is_apart(self, divisions: StageDivisions) -> bool:
        """Return True if no rank has all of its stages now. Equal on all ranks."""
        return any(division.whole == "nowhere" for division in divisions.of_stage.values())

    def divide_again(self) -> None:
        """Do nothing; see `ShardGathering`."""

    @property
    def is_whole(self) -> bool:
        """True if this rank has the present state of all stages."""
        return self._cut.ownership.has_all(is_main=self._cut.ranks.pipeline.rank == 0)

    @property
    def needs_others(self) -> bool:
        """True if `gather` needs all ranks, since there is something to gather that is not in shared memory."""
        ownership = self._cut.ownership
        return ownership.map is not None and ownership.whole != "everywhere" and not self._commits.is_established

    def gather(self, *, everywhere: bool) -> None:
        """Bring the weights, buffers, averages and optimizer state of all stages to the first rank of each pipeline.

        Every rank must call it, if `needs_others` is True. Traffic: each rank then sends its part of
        the state to all others. Otherwise each rank that wants the state reads it. Memory: the state, where it is
        wanted; where replicas divide it, each rank has all of its stages' until the next step.

        Args:
            everywhere: True to bring them to all ranks.
        """
        ownership, ranks = self._cut.ownership, self._cut.ranks
        if ownership.map is None or ownership.whole == "everywhere" or (ownership.whole == "main" and not everywhere):
            return
        self._gather_columns()
        wanted = everywhere or ranks.pipeline.rank == 0
        if wanted:
            self._cut.restore()
        if self._commits.is_established:
            if wanted:
                for place in range(ranks.size):
                    if place != ranks.place:
                        self._read(place)
                ownership.whole = "everywhere" if everywhere else "main"
            return
        for place in range(ranks.size):
            document, groups = broadcast_groups(ranks.pipeline, self._capture, source=place, wanted=wanted)
            if wanted and place != ranks.place:
                self._take(document, groups)
        ownership.whole = "everywhere" if everywhere else "main"

    def _gather_columns(self) -> None:
        """Bring the state of a stage together, if replicas divide it. Every rank must call it."""
        divisions = self._cut.divisions
        if divisions is not None:
            for stage, division in divisions.of_stage.items():
                gather_state(self._cut.ranks.columns[stage], division, divisions.optimizers, everywhere=True)

    def _read(self, place: int) -> None:
        """Take over what another rank's stages have from shared memory."""
        content = self._commits.read(place)
        groups = {
            # The others are copied where they belong.
            name: dict(tensors) if name in ("model", "ema") else {key: t.clone() for key, t in tensors.items()}
            for name, tensors in content.groups.items()
        }
        self._take(content.document["optimizers"], groups)

    def check_whole(self, call: str) -> None:
        """Refuse a call that needs the present state of all stages on a rank that lacks it.

        Raises:
            UnisonoError: It is not here.
        """
        if not self.is_whole:
            raise UnisonoError(
                f"{call} needs the whole model, and in mid-run each rank has the present values of its own stages "
                "alone. They come together when the loop over trainer.epochs ends."
            )

    def _capture(self) -> tuple[dict[str, Any], TensorGroups]:
        """Return what the stages of this rank have."""
        known, subjects = self._cut.ownership.map, self._subjects
        assert known is not None
        groups: TensorGroups = {
            "model": self._own(known, model_tensors(subjects.modules)),
            "ema": self._own(known, model_tensors(subjects.averages)),
            "buffers": self._buffers.own_state_dict(),
        }
        document = {}
        for key, optimizer in subjects.optimizers.items():
            state = optimizer_state(subjects.modules, optimizer)
            own = {name: values for name, values in state.items() if self._is_own(known, name)}
            document[key], groups[f"optimizer/{key}"] = encode(own)
        return document, groups

    def _take(self, document: dict[str, Any], groups: TensorGroups) -> None:
        """Take over what another rank's stages have."""
        subjects = self._subjects
        models = {"model": model_tensors(subjects.modules), "ema": model_tensors(subjects.averages)}
        with torch.no_grad():
            for group, tensors in models.items():
                for name, value in groups.get(group, {}).items():
                    tensors[name].copy_(value)
        self._buffers.take(groups.get("buffers", {}))
        for key, optimizer in subjects.optimizers.items():
            state = decode(document[key], groups.get(f"optimizer/{key}", {}))
            put_optimizer_state(subjects.modules, optimizer, state)

    def _own(self, known: StageMap, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in tensors.items() if self._is_own(known, name)}

    def _is_own(self, known: StageMap, name: str) -> bool:
        ranks = self._cut.ranks
        if name in known.parameters:
            return ranks.place_of(known.owner(name)) == ranks.place
        return name in known.buffers and ranks.place_of(known.buffers[name]) == ranks.place
