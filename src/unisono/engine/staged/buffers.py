"""The buffers of the stages of a rank: a transaction for each, over the ranks that compute the stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from unisono.engine.buffer_transaction import BufferTransaction
from unisono.engine.model_contents import member_name
from unisono.engine.staged.stage_map import StageOwnership
from unisono.engine.staged.stage_ranks import StageRanks
from unisono.engine.step_transaction import StepTransaction
from unisono.engine.tree_all_reduce import MakeAllReduce
from unisono.state.digest import digest

__all__ = ["StagedBuffers"]


class StagedBuffers:
    """Has the methods of `BufferTransaction` that concern a step as a whole.

    Args:
        models: Modules, by the prefix of their names.
        ranks: The place of this rank.
        ownership: Who has which buffer.
        make_all_reduce: Makes the all-reduce of the buffers of a stage.
        virtual_ranks: Shares of a whole batch.
        parameters_move: See `BufferTransaction`.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        ranks: StageRanks,
        ownership: StageOwnership,
        make_all_reduce: Callable[[int], MakeAllReduce],
        *,
        virtual_ranks: int,
        parameters_move: bool = False,
    ) -> None:
        self._models, self._ownership, self._replicas = models, ownership, ranks.replicas
        self.stages = {
            stage: BufferTransaction(
                models,
                column,
                make_all_reduce(stage),
                virtual_ranks=virtual_ranks,
                parameters_move=parameters_move,
            )
            for stage, column in ranks.columns.items()
        }
        """The transaction of each stage of this rank."""
        self._of_others: dict[str, Tensor] = {}

    def settle(self) -> None:
        """Leave each buffer to the stage that has it, once that is known."""
        known = self._ownership.map
        for stage, transaction in self.stages.items():
            names = None if known is None else {name for name, owner in known.buffers.items() if owner == stage}
            transaction.restrict(names)

    def written_outside(self) -> dict[str, str]:
        """See `BufferTransaction`; nothing where no other rank has the same buffers."""
        if self._replicas == 1:
            return {}
        return {path: sha for each in self.stages.values() for path, sha in each.written_outside().items()}

    def describe(self) -> dict[str, str]:
        """Return a digest of each persistent buffer of the stages of this rank, or of all before these are known."""
        known, found = self._ownership.map, {}
        for prefix, root in self._models.items():
            for path, module in root.named_modules():
                for member in module._buffers.keys() - module._non_persistent_buffers_set:
                    name = prefix + member_name(path, member)
                    if known is None or known.buffers.get(name) in self.stages:
                        found[name] = digest({"": module._buffers[member]})[:8]
        return dict(sorted(found.items()))

    def connect(self, make_all_reduce: Callable[[int], MakeAllReduce]) -> None:
        """Sum over the ranks that there are now; see `BufferTransaction`."""
        for stage, transaction in self.stages.items():
            transaction.connect(make_all_reduce(stage))

    def undo(self) -> bool:
        """See `BufferTransaction`."""
        whole = [each.undo() for each in self.stages.values()]
        return all(whole)

    def start(self, *, leaves: int) -> None:
        """See `BufferTransaction`."""
        for each in self.stages.values():
            each.start(leaves=leaves)

    def roll_back(self) -> bool:
        """See `BufferTransaction`."""
        whole = [each.roll_back() for each in self.stages.values()]
        return all(whole)

    def launch(self) -> None:
        """See `BufferTransaction`."""
        for each in self.stages.values():
            each.launch()

    def receive(self, step: StepTransaction) -> None:
        """See `BufferTransaction`."""
        for each in self.stages.values():
            each.receive(step)

    def commit(self, step: StepTransaction, *, new_buffers: bool) -> None:
        """See `BufferTransaction`."""
        for each in self.stages.values():
            each.commit(step, new_buffers=new_buffers)

    def find(self) -> int:
        """See `BufferTransaction`."""
        return max(each.find() for each in self.stages.values())

    def state_dict(self) -> dict[str, Tensor]:
        """See `BufferTransaction`; also what the other stages have told."""
        return {**self._of_others, **self.own_state_dict()}

    def own_state_dict(self) -> dict[str, Tensor]:
        """Return the `state_dict` of this rank's stages."""
        return {name: value for each in self.stages.values() for name, value in each.state_dict().items()}

    def take(self, values: Mapping[str, Tensor]) -> None:
        """Take over what `own_state_dict` of another rank has returned."""
        self._of_others |= values
        for prefix, root in self._models.items():
            for path, module in root.named_modules():
                for name, buffer in module._buffers.items():
                    value = values.get(prefix + member_name(path, name))
                    if value is not None and buffer is not None and buffer.shape == value.shape:
                        buffer.copy_(value)
                    elif value is not None:
                        module._buffers[name] = value

    def check_state_dict(self, state: Mapping[str, Tensor], source: str) -> None:
        """See `BufferTransaction`."""
        known = self._ownership.map
        for stage, each in self.stages.items():
            # Those of other stages are theirs to check, but for names that no stage has.
            own = {name: value for name, value in state.items() if known and known.buffers.get(name, stage) == stage}
            each.check_state_dict(own if known else state, source)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See `BufferTransaction`."""
        known = self._ownership.map
        for each in self.stages.values():
            each.load_state_dict(state)
        if known is not None:
            self.take({name: value for name, value in state.items() if known.buffers[name] not in self.stages})
