"""A user's optimizer, applied by each rank to its own part of the parameters only.

An optimizer that treats every element by itself gets pieces of parameters, others whole parameters. What runs is
the `step` of the optimizer's class, on an instance of the same class that has the pieces as its parameters and a state
of its own. Hyperparameters are the user's: they are copied before each step, since schedulers write there.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, optim
from torch.optim import Optimizer

from unisono.engine.shared.fused_adam import FusedAdam
from unisono.engine.shared.partition import Shard

__all__ = ["ShardedOptimizer", "is_divisible", "is_elementwise"]

_ELEMENTWISE = frozenset({
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD,
})  # fmt: skip
_PARAMETERWISE = frozenset({optim.Adafactor, optim.SparseAdam, *([optim.Muon] if hasattr(optim, "Muon") else [])})


def is_divisible(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to treat each parameter by itself, so that ranks can divide them among them."""
    return is_elementwise(optimizer) or type(optimizer) in _PARAMETERWISE


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to treat each element by itself. A subclass may do otherwise."""
    return type(optimizer) in _ELEMENTWISE


class ShardedOptimizer:
    """The optimizer of one rank's pieces.

    Args: places[k] is where the k-th piece's values lie: the parameter itself for a whole-parameter optimizer, and
        where the gradient is sparse.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Tensor],
        pieces: Sequence[Shard],
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
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(self._optimizer, hooks, OrderedDict())
        self.state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        """State by place, as in an optimizer."""
        self._optimizer.state = self.state
        members: list[list[int]] = [[] for _ in optimizer.param_groups]
        for k, piece in enumerate(pieces):
            members[group_of[id(parameters[piece.parameter])]].append(k)
        self._groups: list[dict[str, Any]] = [{"params": [places[k] for k in of_group]} for of_group in members]
        self._optimizer.param_groups = self._groups
        step: Any = type(optimizer).step
        # Without torch's wrapper, which calls hooks: those are called once, for the user's optimizer.
        self._step: Any = step.__wrapped__ if getattr(step, "hooked", False) else step
        self._fused = FusedAdam(places, members, self.state) if FusedAdam.knows(optimizer, self._step) else None

    def forget(self) -> None:
        """Note that tensors of the state have been replaced by others, or will be."""
        if self._fused is not None:
            self._fused.forget()

    def step(
        self, optimizer: Optimizer, gradients: Sequence[Tensor | None], used: Sequence[bool], found_inf: Tensor | None
    ) -> bool:
        """Update the pieces of used parameters.

        Args: gradients has one for each piece. found_inf is for optimizers that leave a step out by themselves where
            it is 1.
        Returns: whether state may have come into being, or gone.
        """
        if self._fused is not None and found_inf is None:
            of_pieces = [used[piece.parameter] for piece in self.pieces]
            if self._fused.step(optimizer.param_groups, gradients, of_pieces):
                return False
        self.forget()
        if self._is_whole or gradients is not self._gradients or used != self._used:
            self._gradients, self._used = gradients, list(used)
            for place, gradient, piece in zip(self.places, gradients, self.pieces, strict=True):
                place.grad = gradient if used[piece.parameter] else None
        for own, theirs in zip(self._groups, optimizer.param_groups, strict=True):
            params = own["params"]
            own.update(theirs)
            own["params"] = params
        if found_inf is not None:
            self._optimizer.grad_scale, self._optimizer.found_inf = None, found_inf
        self._step(self._optimizer)
        if found_inf is not None:
            del self._optimizer.grad_scale, self._optimizer.found_inf
        if self._is_whole:  # some of these count their steps in the group
            for own, theirs in zip(self._groups, optimizer.param_groups, strict=True):
                theirs.update({key: value for key, value in own.items() if key != "params"})
        return True
