"""The state of a run whose tables are divided over ranks, as recovery undoes, repairs and sends it.

Each row is on two ranks. A new rank gets the rows that it keeps from the ranks that keep the same ones, and everything
else as from ranks that have all of it. Start reading at `DividedTableState.heed`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from unisono.collectives.world import World
from unisono.engine.kept_updates import KeptUpdates
from unisono.state.tensor_groups import TensorGroups
from unisono.trainer.divided_tables import ROWS_LOST_TWICE, DividedTables
from unisono.trainer.recoverable_state import WholeState
from unisono.trainer.run_context import RunContext
from unisono.trainer.save_announcement import SaveAnnouncement

__all__ = ["DividedTableState"]


class DividedTableState(WholeState):
    """See `RecoverableState`.

    Args:
        run: The ranks.
        tables: The tables, of which each row is on two ranks.
        announcement: Tells all ranks that a checkpoint is due.
        is_new: True on a rank that takes the place of another one, and has no rows.
        whole: See `WholeState`.
    """

    def __init__(
        self, run: RunContext, *, tables: DividedTables, announcement: SaveAnnouncement, is_new: bool, **whole: Any
    ) -> None:
        super().__init__(run, **whole)
        self._tables, self._announcement, self._lacks_rows = tables, announcement, is_new

    def repair(self, dead: Collection[int]) -> str | None:
        """See `RecoverableState`."""
        return ROWS_LOST_TWICE if self._tables.lost_with(dead) else super().repair(dead)

    def disconnect(self) -> None:
        """See `RecoverableState`."""
        self._tables.exchange.disconnect()
        super().disconnect()

    def connect(self, world: World) -> None:
        """See `RecoverableState`."""
        super().connect(world)
        if world.group is not None:
            self._tables.exchange.connect()

    def capture(self, facts: Mapping[str, Any]) -> tuple[TensorGroups, dict[str, Any]]:
        """See `RecoverableState`: all but what is divided."""
        groups, document = super().capture(facts)
        for group, tensors in groups.items():
            divided = self._tables.divided(group)
            groups[group] = {name: tensor for name, tensor in tensors.items() if name not in divided}
        document["updates"] = self._updates.counts(self._subjects.optimizers.values())
        document["saves"] = self._announcement.is_agreed
        return groups, document

    def heed(self, document: Mapping[str, Any]) -> None:
        """See `RecoverableState`: make the updates that other ranks have made, and know whether they are to save."""
        self._announcement.agree(is_wanted=document["saves"])
        optimizers = self._subjects.optimizers.values()
        if self._lacks_rows:
            self._updates.make_state(document["updates"], optimizers)
        else:
            self._updates.make_up(document["updates"], optimizers)

    def restore(self, groups: TensorGroups, document: Mapping[str, Any], *, source: str) -> None:
        """See `RecoverableState`. What is divided stays as it is."""
        own, _ = super().capture({})
        for group, tensors in own.items():
            divided = self._tables.divided(group)
            groups.setdefault(group, {}).update({name: each for name, each in tensors.items() if name in divided})
        super().restore(groups, document, source=source)

    def complete(self) -> None:
        """See `RecoverableState`."""
        self._tables.replenish(lacks=self._lacks_rows)
        self._lacks_rows = False

    @property
    def _updates(self) -> KeptUpdates:
        updates = self._tables.exchange.updates
        assert updates is not None, "each row is on two ranks"
        return updates
