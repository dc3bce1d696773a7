"""The state of a run as recovery undoes, repairs and sends it: where each rank has all of it, or shares one copy.

`staged_state` is for a model that is cut over ranks. Start reading at `RecoverableState`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from unisono.collectives.world import World
from unisono.engine import BufferTransaction, EngineFactory, StepTransaction, share_files
from unisono.engine.sharded import ShardedEngineFactory
from unisono.engine.staged import StagedEngineFactory
from unisono.state.tensor_groups import TensorGroups
from unisono.trainer.restoration import restore
from unisono.trainer.run_context import RunContext
from unisono.trainer.snapshot import Subjects, capture
from unisono.trainer.step import StepRunner

__all__ = ["RecoverableState", "WholeState"]


class RecoverableState(Protocol):
    """Objects that depend on the present ranks: engines, and the state that they write."""

    @property
    def engines(self) -> EngineFactory | StagedEngineFactory | ShardedEngineFactory:
        """Makes engines for the ranks that there are now."""

    def begin(self) -> None:
        """Note that a step begins. Every rank must call it."""

    def give_up(self) -> None:
        """Note that this rank does not end the step that it has begun."""

    def commit(self, step: StepTransaction) -> None:
        """Make sure that all ranks have done a step, before any of them returns from it. Every rank must call it.

        Raises:
            PeerError: Some rank will never have done it.
        """

    def obstacle(self) -> str | None:
        """Return why the call under way cannot be undone; None if it can."""

    def repair(self, dead: Collection[int]) -> str | None:
        """Put back what a step has written that was not committed; return why that is not possible, if it is not."""

    def disconnect(self) -> None:
        """Release the process group: only when nothing holds it does it close its connections, as others wait for."""

    def connect(self, world: World) -> None:
        """Make engines for other ranks. Every one of these ranks must call it."""

    def capture(self, facts: Mapping[str, Any]) -> tuple[TensorGroups, dict[str, Any]]:
        """Return what a new rank needs from this one; see `snapshot.capture`."""

    def heed(self, document: Mapping[str, Any]) -> None:
        """Follow the rank that sends the state in what all ranks must agree on. Every rank must call it."""

    def restore(self, groups: TensorGroups, document: Mapping[str, Any], *, source: str) -> None:
        """Take over what `capture` has returned on another rank."""

    def complete(self) -> None:
        """Bring to new ranks what `capture` leaves out. Every rank must call it, after `restore` on those that do."""


class WholeState:
    """The state of a run in which each rank has all of it.

    Args:
        run: The ranks.
        select: Makes the factory of engines for the ranks that there are. Every rank must call it.
        engines: The present one.
        subjects: The objects of the run.
        buffers: The buffers of the models.
        runners: Run the steps.
    """

    def __init__(
        self,
        run: RunContext,
        *,
        select: Callable[[], EngineFactory],
        engines: EngineFactory | ShardedEngineFactory,
        subjects: Subjects,
        buffers: BufferTransaction,
        runners: Mapping[str | None, StepRunner],
    ) -> None:
        self._run, self._select, self.engines = run, select, engines
        self._subjects, self._buffers, self._runners = subjects, buffers, runners

    def begin(self) -> None:
        """Do nothing: where ranks share weights, the engine keeps account of a step."""

    def give_up(self) -> None:
        """Do nothing; see `begin`."""

    def commit(self, step: StepTransaction) -> None:
        """Do nothing; see `begin`."""

    def obstacle(self) -> str | None:
        """See `RecoverableState`."""
        is_writing = any(runner.transaction.writing for runner in self._runners.values())
        return "a rank died while this one wrote weights" if is_writing and not self.engines.shares else None

    def repair(self, dead: Collection[int]) -> str | None:
        """See `RecoverableState`."""
        if self.engines.repair(dead) and self._undo_buffers():
            return None
        return "a rank died while it wrote weights that all ranks share, and the state from before cannot be put back"

    def _undo_buffers(self) -> bool:
        """Put back the buffers of a step that was not committed; return False if that is not possible."""
        is_whole = True
        for runner in self._runners.values():
            if runner.transaction.writing:
                is_whole = self._buffers.undo()
                runner.transaction.writing = False
        return is_whole

    def disconnect(self) -> None:
        """See `RecoverableState`."""
        world = self._run.world
        world.group = None
        if not self.engines.shares:
            self.connect(world)

    def connect(self, world: World) -> None:
        """See `RecoverableState`."""
        self._run.world.renew(world)
        former = self.engines
        former.close()
        # Before there are engines: a rank that has come in the place of another takes the files of the others.
        share_files(world, self._subjects.modules.values(), self._subjects.optimizers.values())
        self.engines = self._select()
        if isinstance(former, EngineFactory) and world.size > 1 and not self.engines.shares:
            former.make_private()  # ranks of other hosts have come, which share no memory
        self._buffers.connect(self.engines.all_reduce)
        for runner in self._runners.values():
            runner.connect(self.engines)

    def capture(self, facts: Mapping[str, Any]) -> tuple[TensorGroups, dict[str, Any]]:
        """See `RecoverableState`."""
        return capture(self._subjects, facts)

    def heed(self, document: Mapping[str, Any]) -> None:
        """Do nothing: the ranks agree."""

    def restore(self, groups: TensorGroups, document: Mapping[str, Any], *, source: str) -> None:
        """See `RecoverableState`."""
        restore(self._subjects, groups, document, source=source)

    def complete(self) -> None:
        """Do nothing: all of the state has been sent."""
