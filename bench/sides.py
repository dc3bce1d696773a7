"""The two sides of every benchmark of steps: a Trainer that takes its own batches, and a loop written by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unisono
from bench.models import Subject, classify, optimizer_of
from unisono.data.batch import Batch

__all__ = ["ByHand", "OneMicroBatch", "TrainerSide", "check_equal"]

# A few batches, so that an epoch's data stay in the cache: what is measured is the step.
_STEPS_PER_EPOCH = 8


class TrainerSide:
    """Times Trainer.step and nothing else: batches are taken off the clock, one for many steps.

    A rank that takes one between two steps lets the others wait at the next step, on the clock.
    """

    def __init__(
        self, subject: Subject, *, virtual_ranks: int, shares: int, directory: Path | None = None, **options: Any
    ) -> None:
        """Build model, data and trainer. A batch has `shares` times the subject's batch_size."""
        torch.manual_seed(0)
        model = subject.build()
        size = shares * subject.batch_size
        self._dataset, self._batch_size = subject.dataset(_STEPS_PER_EPOCH * size), size
        self.trainer = unisono.Trainer(
            model,
            optimizer_of(model),
            virtual_ranks=virtual_ranks,
            directory=directory,
            checkpoints=unisono.Checkpoints(every_minutes=None, every_epoch=False),
            **{"progress": False, **options},
        )
        self._batches = self._endless()
        self.batch = next(self._batches)
        """What steps are taken on."""

    def take(self) -> None:
        """Take the next batch."""
        self.batch = next(self._batches)

    def step(self) -> tuple[float, float]:
        """Take a step; give its loss and its seconds."""
        start = time.perf_counter()
        loss = self.trainer.step(classify, self.batch)
        return loss, time.perf_counter() - start

    def _endless(self) -> Iterator[Batch]:
        while True:
            yield from self.trainer.batches(self._dataset, batch_size=self._batch_size)


class OneMicroBatch(NamedTuple):
    """What this rank has of a batch that no Trainer has made."""

    micro_batches: list[list[Tensor]]


class ByHand:
    """Times a plain step: forward, zero_grad, backward, optimizer; several micro-batches are accumulated."""

    def __init__(self, subject: Subject, *, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> None:
        """Build the model with the same weights as the other side; `wrap` makes it distributed."""
        torch.manual_seed(0)
        module = subject.build()
        self._model, self._optimizer = wrap(module), optimizer_of(module)

    def step(self, batch: Batch | OneMicroBatch) -> tuple[float, float]:
        """Take a step on what this rank has of a batch; give the loss and the seconds."""
        micro_batches: list[list[Tensor]] = list(batch.micro_batches)
        samples = sum(len(y) for _, y in micro_batches)
        start = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        mean = 0.0
        for x, y in micro_batches:
            loss = F.cross_entropy(self._model(x).flatten(0, -2), y.flatten())
            if len(micro_batches) > 1:
                loss = loss * (len(y) / samples)
            loss.backward()  # type: ignore[no-untyped-call]
            mean += loss.item()
        self._optimizer.step()
        return mean, time.perf_counter() - start


def check_equal(ours: float, peer: float, *, what: str) -> None:
    """Make sure that both sides computed the same. Raises: ArithmeticError if their losses differ."""
    if abs(ours - peer) > 1e-4 * abs(peer):
        raise ArithmeticError(f"{what}: our loss is {ours:.7g}, the peer's {peer:.7g}: they compute different things")
