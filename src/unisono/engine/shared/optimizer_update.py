"""One rank's part of the update by an optimizer, of which a step may have several."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

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
        state = SharedState(runtime, trained.names, trained.parameters, sharded, guests)
        return cls(optimizer, None if len(numbers) == len(pieces) else numbers, sharded, state)

    def adopt(self) -> bool:
        """Adopt new state of the user's optimizer; see `SharedState.adopt`. Call it before `perform`."""
        return self.state.adopt(self.optimizer)

    def perform(self, gradients: Sequence[Tensor | None], used: Sequence[bool], found_inf: Tensor | None) -> bool:
        """Update the pieces; return True if there may be state that not all ranks see."""
        own = gradients if self.numbers is None else [gradients[k] for k in self.numbers]
        changed = self.sharded.step(self.optimizer.param_groups, own, used, found_inf)
        if changed:
            self.state.publish()
        return changed and not self.state.is_settled()
