"""A user's optimizer, applied by each rank to its own part of the parameters only.

An optimizer that treats every element independently gets pieces of parameters, others get whole parameters. The `step`
of the optimizer's class runs on another instance of the same class, which has the pieces as its parameters and separate
state. Hyperparameters are copied from the user's optimizer before each step, since schedulers write there.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, optim
from torch.optim import Optimizer

from unisono.embedding.table_optimizer import TableOptimizer
from unisono.engine.shared.fused_adam import FusedAdam
from unisono.engine.shared.partition import Piece
from unisono.engine.shared.plain_sgd import PlainSGD

__all__ = ["ShardedOptimizer", "is_divisible", "is_elementwise"]

_ELEMENTWISE = frozenset({
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD,
})  # fmt: skip
_PARAMETERWISE = frozenset({
    optim.Adafactor, optim.SparseAdam, TableOptimizer, *([optim.Muon] if hasattr(optim, "Muon") else []),
})  # fmt: skip


def is_divisible(optimizer: Optimizer) -> bool:
    """Return True if an optimizer is known to treat parameters independently, so that ranks can divide them."""
    return is_elementwise(optimizer) or type(optimizer) in _PARAMETERWISE


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return True if an optimizer is known to treat elements independently; not for a subclass, which may differ."""
    return type(optimizer) in _ELEMENTWISE


class ShardedOptimizer:
    """The optimizer of one rank's pieces.

    Args:
        optimizer: The user's optimizer.
        parameters: All parameters that it trains.
        pieces: The pieces of this rank.
        places: The tensor with each piece's values. It is the parameter itself for an optimizer of whole parameters,
            and if the gradient is sparse.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Tensor],
        pieces: Sequence[Piece],
        places: Sequence[Tensor],
    ) -> None:
        group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.pieces, self.places = pieces, places
        self._gradients: Sequence[Tensor | None] = ()
        self._used: list[bool] = []
        self._is_whole = not is_elementwise(optimizer)
        # Not a copy: that would go through the optimizer's own __setstate__, and through pickle.
        self._optimizer: Any = object.__new__(type(optimizer))
        self._optimizer.__dict__.update(optimizer.__dict__)
        self._optimizer.__dict__.pop("step", None)  # a scheduler's wrapper, which counts the user's steps
        if isinstance(optimizer, TableOptimizer):
            self._optimizer.__dict__["maps"] = {}  # ids have become rows before
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(self._optimizer, hooks, OrderedDict())
        self.state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        """The state, by place as in an optimizer."""
        self._optimizer.state = self.state
        members: list[list[int]] = [[] for _ in optimizer.param_groups]
        for k, piece in enumerate(pieces):
            members[group_of[id(parameters[piece.parameter])]].append(k)
        self._groups: list[dict[str, Any]] = [{"params": [places[k] for k in of_group]} for of_group in members]
        self._optimizer.param_groups = self._groups
        step: Any = type(optimizer).step
        # Without torch's wrapper, which calls hooks: those are called once, for the user's optimizer.
        self._step: Any = step.__wrapped__ if getattr(step, "hooked", False) else step
        self._short: FusedAdam | PlainSGD | None = None
        """Does the usual step with less work around it."""
        if FusedAdam.knows(optimizer, self._step):
            self._short = FusedAdam(places, members, self.state)
        elif PlainSGD.knows(optimizer, self._step):
            self._short = PlainSGD(places, members)

    def forget(self) -> None:
        """Drop cached tensors of the state, which have been or will be replaced by others."""
        if self._short is not None:
            self._short.forget()

    def step(
        self,
        groups: Sequence[dict[str, Any]],
        gradients: Sequence[Tensor | None],
        used: Sequence[bool],
        found_inf: Tensor | None,
    ) -> bool:
        """Update the pieces of used parameters. Return True if state may have been created, replaced or deleted.

        Args:
            groups: The parameter groups of the user's optimizer, for their hyperparameters.
            gradients: The gradient of each piece.
            used: For each parameter, True if it is used.
            found_inf: For optimizers that check it and skip a step where it is 1.
        """
        if self._short is not None and found_inf is None:
            of_pieces = [used[piece.parameter] for piece in self.pieces]
            if self._short.step(groups, gradients, of_pieces):
                return False
        self.forget()
        if self._is_whole or gradients is not self._gradients or used != self._used:
            self._gradients, self._used = gradients, list(used)
            for place, gradient, piece in zip(self.places, gradients, self.pieces, strict=True):
                place.grad = gradient if used[piece.parameter] else None
        for own, theirs in zip(self._groups, groups, strict=True):
            params = own["params"]
            own.update(theirs)
            own["params"] = params
        if found_inf is not None:
            self._optimizer.grad_scale, self._optimizer.found_inf = None, found_inf
        self._step(self._optimizer)
        if found_inf is not None:
            del self._optimizer.grad_scale, self._optimizer.found_inf
        if self._is_whole:  # some of these count their steps in the group
            for own, theirs in zip(self._groups, groups, strict=True):
                theirs.update({key: value for key, value in own.items() if key != "params"})
        return True
