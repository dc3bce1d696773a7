"""The weights and optimizer state of this rank's workers, between the outer steps. Start reading at `Workers`.

Between steps, the parameters are the outer weights, which are equal on all ranks, and the user's optimizer has no
state: every worker has its own here. During a step, `as_worker` lends the parameters the weights of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from unisono.collectives.world import World
from unisono.engine.local_steps.sync_settings import LocalSGD, workers_of

__all__ = ["Workers"]

_NEVER = -1
"""No number of writes."""


class Workers:
    """This rank's workers.

    Memory: for each of them the weights and the optimizer's state; once, the outer weights and the outer momentum.

    Args:
        sync: The length of a round, and the outer step.
        optimizer: The user's optimizer, the inner one.
        world: The ranks.
        virtual_ranks: Shares of a whole batch.

    Raises:
        ValueError: virtual_ranks is no multiple of the workers, or a worker would be on two ranks.
    """

    def __init__(self, sync: LocalSGD, optimizer: Optimizer, world: World, *, virtual_ranks: int) -> None:
        self.count = count = sync.workers or virtual_ranks
        """The number of workers of all ranks."""
        if virtual_ranks % count:
            raise ValueError(
                f"workers={count} do not divide virtual_ranks={virtual_ranks}: each worker has equally many virtual "
                f"ranks. Give a divisor, or leave workers out for {virtual_ranks}"
            )
        self.leaves = virtual_ranks // count
        """The number of virtual ranks of a worker."""
        self.sync, self.optimizer = sync, optimizer
        own = [
            workers_of(rank, world_size=world.size, virtual_ranks=virtual_ranks, workers=count)
            for rank in range(world.size)
        ]
        self.own = own[world.rank]
        """The workers of this rank."""
        self.owners = {worker: rank for rank, of_rank in enumerate(own) for worker in of_rank}
        """The rank of each worker."""
        self.parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        learning_rate, momentum = sync.rule
        self.outer = SGD(self.parameters, lr=learning_rate, momentum=momentum, nesterov=momentum > 0)
        """The outer optimizer."""
        self.position = 0
        """How many steps of the round are done."""
        self.steps = 0
        """How many steps are done."""
        self._weights: dict[int, list[Tensor]] = {}
        self._states: dict[int, dict[Any, Any]] = {}
        self._seen: int | None = None
        """The number of writes to the parameters at the end of the last step."""

    def begin_step(self) -> None:
        """Begin a round if none is under way, or if weights were loaded into the model since the last step."""
        if not self._weights or self.are_behind:
            self.begin_round()

    @property
    def are_behind(self) -> bool:
        """True if weights were written into the model since the last step, so that the next one begins a round."""
        return self._seen not in (None, self._writes())

    def begin_round(self) -> None:
        """Give all workers the outer weights."""
        self.position = 0
        for worker in self.own:
            if worker in self._weights:
                torch._foreach_copy_(self._weights[worker], [p.detach() for p in self.parameters])
            else:
                self._weights[worker] = [p.detach().clone() for p in self.parameters]

    def end_step(self) -> None:
        """Note that all workers have done a step."""
        self.steps += 1
        self._seen = self._writes()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Return a context in which `lend` may be called; it puts the outer weights back."""
        outer = [p.data for p in self.parameters]
        try:
            yield
        finally:
            self.put_back(outer)

    def lend(self, worker: int) -> None:
        """Let the parameters have the weights of a worker."""
        self.put_back(self._weights[worker])

    def put_back(self, weights: Sequence[Tensor]) -> None:
        """Let the parameters have these weights. No value is copied."""
        for p, weight in zip(self.parameters, weights, strict=True):
            p.data = weight

    def update(self, worker: int) -> None:
        """Let a worker's optimizer apply p.grad to its weights, which the parameters have."""
        state = self.optimizer.state
        state.clear()
        state.update(self._states.get(worker, {}))
        try:
            self.optimizer.step()
            self._states[worker] = dict(state)
        finally:
            state.clear()

    def difference(self, worker: int, index: int) -> Tensor:
        """Return the outer weights less a worker's, of one parameter, in float32 or better."""
        p = self.parameters[index].detach()
        dtype = torch.promote_types(p.dtype, torch.float32)
        return torch.sub(p.to(dtype), self._weights[worker][index].to(dtype))

    @property
    def momentum(self) -> dict[Tensor, Tensor]:
        """The momentum of the outer step by parameter; empty before the first one, and without momentum."""
        found = {p: self.outer.state.get(p, {}).get("momentum_buffer") for p in self.parameters}
        return {p: momentum for p, momentum in found.items() if momentum is not None}

    def of(self, worker: int) -> tuple[Sequence[Tensor], Mapping[Tensor, dict[str, Any]]]:
        """Return the weights of a worker, and its optimizer's state by parameter; no weights before the first step."""
        return self._weights.get(worker, ()), self._states.get(worker, {})

    def restore(self, steps: int, position: int, momentum: Mapping[Tensor, Tensor]) -> None:
        """Go on after so many steps, and at this place of a round, with this momentum of the outer step, copied."""
        self.steps, self.position, self._seen = steps, position, None
        self._weights, self._states = {}, {}
        for p, value in momentum.items():
            self.outer.state[p]["momentum_buffer"] = _like(p, value)

    def note_restored(self, *, are_behind: bool) -> None:
        """Note that the model has the weights of the run that goes on.

        Args:
            are_behind: The value that the property had in that run.
        """
        self._seen = _NEVER if are_behind else self._writes()

    def restore_worker(self, worker: int, weights: Sequence[Tensor], state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Give a worker these weights and this state of its optimizer, after `restore`; tensors are copied."""
        self._weights[worker] = [_like(p, weight) for p, weight in zip(self.parameters, weights, strict=True)]
        self._states[worker] = {
            p: {name: _like(p, value) if isinstance(value, Tensor) else value for name, value in values.items()}
            for p, values in state.items()
        }

    def _writes(self) -> int:
        return sum(p._version for p in self.parameters)


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a copy in the layout and on the device of a parameter, or of a number beside it, such as `step`."""
    if value.shape != parameter.shape or value.ndim == 0:
        return value.clone()
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
