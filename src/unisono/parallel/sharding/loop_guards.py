"""Refuses what would go wrong silently in a loop of a user whose model is divided: calls that see a part alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from unisono.engine.gradient_hooks import on_gradient
from unisono.errors import UnisonoError

__all__ = ["Guarded", "LoopGuards"]


class Guarded(Protocol):
    """The state of a loop."""

    @property
    def runs_backward(self) -> bool:
        """True while sharded.backward runs."""

    @property
    def updates(self) -> bool:
        """True while the end of a step updates the weights."""

    @property
    def has_weights(self) -> bool:
        """True if this rank has the values of all parameters."""

    @property
    def has_optimizer_state(self) -> bool:
        """True if this rank has the optimizer's whole state."""


class _ModelState:
    """Checks each call of a model's state_dict and load_state_dict; a copy of it, in a copied model, checks nothing."""

    _guarded: ref[Guarded] | None = None

    def __init__(self, guarded: Guarded) -> None:
        self._guarded = ref(guarded)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __call__(self, module: nn.Module, *_: Any) -> None:
        guarded = None if self._guarded is None else self._guarded()
        if guarded is not None and not guarded.has_weights:
            raise UnisonoError(
                f"the weights of {type(module).__name__} are divided over ranks, so that this one has a part alone: "
                "call state_dict and load_state_dict in `with sharded.whole():`, which brings them together (with "
                "everywhere=False on rank 0 alone)"
            )


class LoopGuards:
    """Watches a model and its optimizers.

    Args:
        guarded: Says what the loop is doing. It stays alive as long as the optimizers.
        model: The model.
        optimizers: The optimizers.
    """

    def __init__(self, guarded: Guarded, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._guarded = guarded
        self._of_parameters: list[RemovableHandle] = []
        state = _ModelState(guarded)
        model.register_state_dict_pre_hook(state)  # type: ignore[no-untyped-call]
        model.register_load_state_dict_pre_hook(state)  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_state_dict_pre_hook(self._before_state)
            optimizer.register_load_state_dict_pre_hook(self._before_state)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Watch the gradients of these parameters, and of no others."""
        for handle in self._of_parameters:
            handle.remove()
        self._of_parameters = [on_gradient(p, self._on_gradient, 0) for p in parameters]

    def _on_gradient(self, _: int, parameter: Tensor) -> None:
        if not self._guarded.runs_backward:
            parameter.grad = None
            raise UnisonoError(
                "loss.backward() reached a model that unisono.parallel.shard has divided, whose gradients ranks sum "
                "while sharded.backward(loss) runs: call that instead, in `with sharded.step():`"
            )

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._guarded.updates:
            raise UnisonoError(
                f"{type(optimizer).__name__}.step() was called, and with unisono.parallel.shard the end of `with "
                "sharded.step():` updates the weights: leave it out"
            )

    def _before_state(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._guarded.has_optimizer_state:
            raise UnisonoError(
                f"the state of {type(optimizer).__name__} is divided over ranks, so that this one has a part alone: "
                "call state_dict and load_state_dict in `with sharded.whole():`, which brings them together (with "
                "everywhere=False on rank 0 alone)"
            )
