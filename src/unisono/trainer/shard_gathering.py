"""Brings the parts of a divided run together, where its state is to be saved or to be looked at as a whole."""

from __future__ import annotations

from typing import Any

from unisono.collectives.world import World
from unisono.engine.sharded import Division
from unisono.errors import UnisonoError
from unisono.state.codec import decode, encode
from unisono.trainer.part_saving import PartSaving
from unisono.trainer.snapshot import Subjects
from unisono.trainer.tensor_groups import TensorGroups, broadcast_groups

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
        self.saving = PartSaving(world, division, subjects)
        """Lets each rank write its own part of a checkpoint."""

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

        Memory: the state, where it is wanted, and another rank's part of it. Traffic: each rank's weights to the ranks
        that want them, and its optimizer state to all others.

        Args:
            everywhere: True to bring them to all ranks.
        """
        division, world = self._division, self._world
        if division.whole == "everywhere" or (division.whole == "main" and not everywhere):
            return
        division.join_weights(everywhere=everywhere)
        wanted = everywhere or world.rank == 0
        for key, optimizer in self._subjects.optimizers.items():
            shards = division.shards_of(optimizer)
            shards.clear()

            def capture(key: str = key) -> tuple[dict[str, Any], TensorGroups]:
                document, tensors = encode(division.shards_of(self._subjects.optimizers[key]).own_state())
                return {"state": document}, {"state": tensors}

            for rank in range(world.size):
                document, groups = broadcast_groups(world, capture, source=rank, wanted=wanted)
                if wanted:
                    shards.show(decode(document["state"], groups.get("state", {})))
        division.note_whole("everywhere" if everywhere else "main")

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
