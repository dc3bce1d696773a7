"""The state of a run whose model is cut over ranks, as recovery undoes, repairs and sends it.

What each rank has alone is in memory that all ranks share (`stage_commits`): new ranks take it from there. Only what
all ranks have alike is sent. Start reading at `StagedState.repair`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from unisono.collectives.world import World
from unisono.engine import EngineFactory, StepTransaction
from unisono.engine.optimizer_hooks import is_hooked
from unisono.engine.staged import StagedBuffers, StagedEngineFactory, StageMap
from unisono.parallel.pipeline.cut_model import CutModel
from unisono.state.tensor_groups import TensorGroups
from unisono.trainer.restoration import restore, restore_common
from unisono.trainer.run_context import RunContext
from unisono.trainer.snapshot import Subjects, capture, capture_common
from unisono.trainer.stage_commits import CHANGED, StageCommits
from unisono.trainer.stage_gathering import StageGathering
from unisono.trainer.step import StepRunner

__all__ = ["StagedState", "make_staged_engines"]

_COUNTED = ("scaler/", "average/")


def make_staged_engines(
    cut: CutModel, base: EngineFactory, modules: Mapping[str, nn.Module], *, virtual_ranks: int
) -> StagedEngineFactory:
    """Return the factory of engines for the stages of this rank, which compares ranks as another factory does."""
    return StagedEngineFactory(
        cut.ranks,
        list(modules.values()),
        cut.ownership,
        base.comparison,
        virtual_ranks=virtual_ranks,
        overlap=base.overlap,
        divisions=cut.divisions,
    )


class StagedState:
    """See `RecoverableState`.

    Args:
        run: The ranks.
        select: Makes the factory that compares ranks and knows their shared memory. Every rank must call it.
        engines: The present engines.
        cut: The model.
        subjects: The objects of the run.
        buffers: The buffers of this rank's stages.
        runners: Run the steps.
        gathering: Brings the stages together.
        commits: Keep the state of all stages in shared memory.
    """

    def __init__(
        self,
        run: RunContext,
        *,
        select: Callable[[], EngineFactory],
        engines: StagedEngineFactory,
        cut: CutModel,
        subjects: Subjects,
        buffers: StagedBuffers,
        runners: Mapping[str | None, StepRunner],
        gathering: StageGathering,
        commits: StageCommits,
    ) -> None:
        self._run, self._select, self.engines = run, select, engines
        self._cut, self._subjects, self._buffers, self._runners = cut, subjects, buffers, runners
        self._gathering, self._commits = gathering, commits
        self._counted: dict[str, Any] = {}
        """The scale of losses and the numbers of updates of averages, from before the step."""
        self._is_torn = False
        """True if a step was broken off while this rank wrote weights."""
        self._lacks_stages = False
        """True on a new rank until it has the state of its stages."""

    def begin(self) -> None:
        """See `RecoverableState`."""
        self._commits.begin()
        others = self._subjects.others
        self._counted = {name: each.state_dict() for name, each in others.items() if name.startswith(_COUNTED)}

    def give_up(self) -> None:
        """See `RecoverableState`."""
        self._commits.give_up()

    def commit(self, step: StepTransaction) -> None:
        """See `RecoverableState`."""
        self._commits.commit(step)

    def obstacle(self) -> str | None:
        """See `RecoverableState`."""
        if self._is_writing():
            if not self._commits.is_established:
                return "a rank died while this one wrote weights"
            if any(is_hooked(optimizer) for optimizer in self._subjects.optimizers.values()):
                return "a rank died in an update with hooks of the script, whose effects cannot be undone"
        elif self._commits.was_changed():
            return CHANGED
        return None

    def repair(self, dead: Collection[int]) -> str | None:
        """See `RecoverableState`."""
        more, is_torn, self._is_torn = self._commits.settle(), self._is_torn, False
        for runner in self._runners.values():
            if runner.scaler is not None:  # it may have unscaled the gradients of a step that is repeated
                runner.scaler._per_optimizer_states.clear()
        if more:
            if not is_torn:
                self._cut.drop()  # this was the commit before which no rank gives memory back
            return None
        if not is_torn:
            return None
        if not self._buffers.undo():
            return "a rank died in the step that gave some buffers their first values, which cannot be taken back"
        self._commits.return_to_last()
        for name, state in self._counted.items():
            self._subjects.others[name].load_state_dict(state)
        return None

    def disconnect(self) -> None:
        """See `RecoverableState`."""
        self._is_torn = self._is_torn or self._is_writing()
        self._run.world.group = None
        self._cut.disconnect()
        self._make_engines()

    def connect(self, world: World) -> None:
        """See `RecoverableState`."""
        self._run.world.renew(world)
        self._cut.reconnect()
        base = self._make_engines()
        self._commits.connect(base.runtime)

    def _make_engines(self) -> EngineFactory:
        self.engines.close()
        base = self._select()
        virtual_ranks = self._run.virtual_ranks
        self.engines = make_staged_engines(self._cut, base, self._subjects.modules, virtual_ranks=virtual_ranks)
        self._buffers.connect(self.engines.all_reduce_of)
        for runner in self._runners.values():
            runner.connect(self.engines)
        return base

    def capture(self, facts: Mapping[str, Any]) -> tuple[TensorGroups, dict[str, Any]]:
        """See `RecoverableState`: all of the state where this rank has it, otherwise what ranks have alike."""
        cut, known = self._cut, self._cut.ownership.map
        is_whole = not self._commits.is_established or cut.ownership.whole == "everywhere"
        groups, document = (capture if is_whole else capture_common)(self._subjects, facts)
        found = None
        if known is not None and self._commits.is_established:  # otherwise the first step begins anew
            found = [dict(known.parameters), dict(known.buffers)]
        document["cut"] = {"starts": cut.starts, "map": found, "is_whole": is_whole}
        return groups, document

    def heed(self, document: Mapping[str, Any]) -> None:
        """See `RecoverableState`: where stages begin, which one has what, and whether ranks have all of the state."""
        cut, found = self._cut, document["cut"]
        if found["map"] is None:
            cut.begin_anew(found["starts"])
            self._buffers.settle()
            return
        if cut.ownership.map is None:
            cut.begin_anew(found["starts"])
            parameters, buffers = found["map"]
            cut.ownership.map = StageMap({name: tuple(stages) for name, stages in parameters.items()}, buffers)
            self._buffers.settle()
            self._lacks_stages = True
        elif found["is_whole"]:
            self._gathering.gather(everywhere=True)
        else:
            cut.drop()

    def restore(self, groups: TensorGroups, document: Mapping[str, Any], *, source: str) -> None:
        """See `RecoverableState`."""
        if document["cut"]["is_whole"]:
            restore(self._subjects, groups, document, source=source)
        else:
            restore_common(self._subjects, groups, document, source=source)
            if self._lacks_stages:
                self._cut.drop()
                self._commits.return_to_last()
        self._lacks_stages = False

    def complete(self) -> None:
        """Do nothing: new ranks have found the rest in shared memory."""

    def _is_writing(self) -> bool:
        return any(runner.transaction.writing for runner in self._runners.values())
