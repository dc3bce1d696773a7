"""Digests of a run's state: of all of it, and of each tensor, to find where two runs begin to differ."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from hashlib import sha256

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.embedding.tables import settle
from unisono.errors import CheckpointError
from unisono.state.digest import digest, exact, memory
from unisono.state.row_column import RowColumn
from unisono.trainer.divided_tables import DividedTables
from unisono.trainer.snapshot import model_tensors, optimizer_state
from unisono.trainer.trainer_parts import TrainerParts
from unisono.watch import EventLog

__all__ = ["RegularDigests", "digest_at_end", "digest_of"]

_SMALL_NBYTES = 64 << 20
"""The size of weights up to which a digest is made at the end, which takes up to 0.2 s then with an optimizer of two
averages."""


def digest_of(modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> str:
    """Return the SHA-256 of all parameters, buffers and optimizer state; see `Trainer.digest`."""
    settle(modules.values())
    states = {name: optimizer_state(modules, optimizer) for name, optimizer in optimizers.items()}
    return digest({"model": model_tensors(modules), "optimizer": states})


def digest_at_end(modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> str | None:
    """Return the same for a state of usual kinds that is not large; otherwise None."""
    if sum(tensor.numel() * tensor.element_size() for tensor in model_tensors(modules).values()) > _SMALL_NBYTES:
        return None
    try:
        return digest_of(modules, optimizers)
    except (CheckpointError, TypeError, ValueError):  # a state that has no digest does not end a run that is done
        return None


class RegularDigests:
    """Emits the digests of the weights after every so many steps.

    Args:
        parts: The parts of the run.
        log: Gets the events.
    """

    def __init__(self, parts: TrainerParts, log: EventLog) -> None:
        self._modules, self._log, self._every = parts.modules, log, parts.settings.digest_every
        self._latest = parts.cursor.total_steps
        self._gathering = parts.gathering

    def tell_if_due(self, total_steps: int) -> None:
        """Emit the digests of the present weights, once after each number of steps at which they are due.

        Every rank must call it where tables are divided over ranks; otherwise it is local.

        Raises:
            CheckpointError: A tensor has no plain memory, such as a sparse one.
        """
        if self._every is None or total_steps == self._latest or total_steps % self._every:
            return
        self._latest = total_steps
        if isinstance(self._gathering, DividedTables):
            self._gathering.read_weights(partial(self._tell, total_steps), call="digest_every=")
        elif self._log.hears("digest"):
            settle(self._modules.values())
            self._tell(total_steps, model_tensors(self._modules))

    def _tell(self, total_steps: int, tensors: Mapping[str, Tensor | RowColumn]) -> None:
        if self._log.hears("digest"):
            found = {name: _short(tensor, name) for name, tensor in tensors.items()}
            self._log.emit("digest", total_steps=total_steps, tensors=found)


def _short(tensor: Tensor | RowColumn, name: str) -> str:
    """Return 16 hexadecimal digits of the bits of a tensor, equal where they are.

    Cost: one pass over the memory, at some 1.4 GB/s.

    Raises:
        CheckpointError: It has no plain memory.
    """
    form = tensor.form if isinstance(tensor, RowColumn) else exact(tensor, name)
    hashed = sha256(f"{form.dtype} {list(form.shape)} ".encode())  # twice as fast as BLAKE2 where the CPU has it
    for chunk in tensor.chunks() if isinstance(tensor, RowColumn) else [form]:
        hashed.update(memory(chunk))
    return hashed.hexdigest()[:16]
