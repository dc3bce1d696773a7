"""Brings the parts of a divided run together, where its state is to be saved or to be looked at as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.collectives.world import World
from unisono.engine.sharded import Division
from unisono.errors import UnisonoError
from unisono.parallel.sharding.gathering import gather_state
from unisono.trainer.divided_parts import Contents, Table, own_table
from unisono.trainer.part_saving import PartPlace, PartSaving
from unisono.trainer.snapshot import Subjects

__all__ = ["ShardGathering"]


class ShardGathering:
    """Gathers the state of a run that is divided over ranks; see `StageGathering`.

    Args:
        world: The ranks.
        division: The state of the run on this rank.
        subjects: The objects of the run.
    """

    def __init__(self, world: World, division: Division, subjects: Subjects) -> None:
        self._world, self._division, self._subjects = world, division, subjects
        self.saving = PartSaving(world, self)
        """Lets each rank write its own part of a checkpoint."""

    def describe(self) -> Table:
        """Return what this rank has of the optimizers' state."""
        return own_table(self._division, self._subjects.optimizers)

    def contents(self, tables: Sequence[Table], place: PartPlace) -> Contents:
        """Return what is written to a checkpoint. Every rank must call it. Memory and traffic: see `Contents`."""
        return Contents(self._world.rank, self._division, self._subjects, tables)

    is_replaceable = False

    @property
    def is_divided(self) -> bool:
        """True if no rank has the whole state, so that each can write its part. Equal on all ranks."""
        return self._division.whole == "nowhere"

    @property
    def stays_divided(self) -> bool:
        """True if no rank is expected to have memory for the whole, also after the loop over epochs."""
        return self._division.stays_divided

    @property
    def is_whole(self) -> bool:
        """True if this rank has the present state of all ranks."""
        return self._division.is_whole

    @property
    def needs_others(self) -> bool:
        """True if `gather` needs all ranks, since there is something to gather."""
        return self._division.whole != "everywhere"

    def divide_again(self) -> bool:
        """Drop the whole copy of rank 0, and return True if the run is divided then. Every rank must call it; local."""
        if self._division.whole == "main":
            self._division.divide()
        return self.is_divided

    def gather(self, *, everywhere: bool) -> None:
        """Bring weights and optimizer state to rank 0. Every rank must call it.

        Memory and traffic: see `gather_state`.

        Args:
            everywhere: True to bring them to all ranks.
        """
        gather_state(self._world, self._division, self._subjects.optimizers.values(), everywhere=everywhere)

    def check_whole(self, call: str) -> None:
        """Refuse a call that needs the whole state on a rank that lacks it.

        Raises:
            UnisonoError: It is not here.
        """
        if not self.is_whole:
            if self.stays_divided:
                raise UnisonoError(
                    f"{call} needs the whole model, and one that was built by unisono.parallel.build stays divided "
                    "over ranks: compare or read the files of trainer.export or trainer.save(tag=...)"
                )
            raise UnisonoError(
                f"{call} needs the whole model, and in mid-run each rank has the present values of its own part alone. "
                "They come together when the loop over trainer.epochs ends."
            )
