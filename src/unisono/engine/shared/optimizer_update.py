"""One rank's part of the update by an optimizer, of which a step may have several."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from unisono.embedding.row_optimizers import rule_named
from unisono.embedding.table_optimizer import TableOptimizer
from unisono.engine.base import Trained
from unisono.engine.joint_optimizer import trained_by
from unisono.engine.shared.optimizer_state import SharedState
from unisono.engine.shared.partition import Piece
from unisono.engine.shared.sharded_optimizer import ShardedOptimizer
from unisono.engine.shared.shared_runtime import SharedRuntime

__all__ = ["OptimizerUpdate"]


class OptimizerUpdate(NamedTuple):
    """This rank's part of the update by one of the optimizers."""

    optimizer: Optimizer
    numbers: list[int] | None
    """The pieces whose parameters belong to it, by number; None: all."""
    sharded: ShardedOptimizer
    state: SharedState

    @classmethod
    def make(
        cls,
        runtime: SharedRuntime,
        optimizer: Optimizer,
        trained: Trained,
        pieces: Sequence[Piece],
        places: Sequence[Tensor],
        *,
        guests: Collection[int] = (),
    ) -> OptimizerUpdate:
        """Find the pieces of an optimizer among all of this rank. For guests, see `SharedState`."""
        own = {id(p) for p in trained_by(optimizer, trained).parameters}
        numbers = [k for k, piece in enumerate(pieces) if id(trained.parameters[piece.parameter]) in own]
        sharded = ShardedOptimizer(
            optimizer, trained.parameters, [pieces[k] for k in numbers], [places[k] for k in numbers]
        )
        in_files = {}
        if isinstance(optimizer, TableOptimizer):
            numbered = {p: i for i, p in enumerate(trained.parameters)}
            in_files = {numbered[p]: file.state for p, file in optimizer.files.items() if p in numbered}
        state = SharedState(runtime, trained.names, trained.parameters, sharded, guests, in_files=in_files)
        return cls(optimizer, None if len(numbers) == len(pieces) else numbers, sharded, state)

    def adopt(self) -> bool:
        """Adopt new state of the user's optimizer; see `SharedState.adopt`. Call it before `perform`."""
        return self.state.adopt(self.optimizer)

    def share_files(self) -> bool:
        """Make the state of tables in files, unless there is some, and share it. Return True if there are such tables.

        Every rank must call it, and pass a barrier before a step. So their state is never in memory of one rank alone.

        Raises:
            UnisonoError: The disk has no room for it.
        """
        optimizer = self.optimizer
        if not isinstance(optimizer, TableOptimizer) or not optimizer.files:
            return False
        rules = {p: rule_named(group["rule"]) for group in optimizer.param_groups for p in group["params"]}
        for p in optimizer.files:
            if p.requires_grad:
                optimizer.make_state(p, rules[p])
        self.adopt()
        self.state.settle(optimizer)
        return True

    def perform(self, gradients: Sequence[Tensor | None], used: Sequence[bool], found_inf: Tensor | None) -> bool:
        """Update the pieces; return True if there may be state that not all ranks see."""
        own = gradients if self.numbers is None else [gradients[k] for k in self.numbers]
        changed = self.sharded.step(self.optimizer.param_groups, own, used, found_inf)
        if changed:
            self.state.publish()
        return changed and not self.state.is_settled()
