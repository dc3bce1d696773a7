"""A process that is as a rank before it has a model: what it takes, and what its heap makes of a step.

Start reading at `BareRank`.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
from torch import nn

from unisono.errors import EstimateError
from unisono.estimate.heap_replay import HeapPeak, MemoryOperation, replay
from unisono.machine import resident_bytes

__all__ = ["BareRank"]

_PATIENCE_S = 600
"""Seconds after which a child that builds a model is given up."""
_LENGTH = struct.Struct("<Q")


class BareRank:
    """A child of this process, of which further ones are forked for replays. Use it in a `with` block.

    The child builds the model without memory and trains a tiny one. So what the build function imports counts, and what
    only this estimate needs does not. It should be made before this process has used much memory.

    Args:
        build: Returns model, optimizer, loss function and data.
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        (given, self._ask), (self._answers, answer) = os.pipe(), os.pipe()
        self._child = os.fork()
        if self._child == 0:
            # Whatever happens here, the child must not go on as its parent would.
            try:
                os.close(self._ask)
                os.close(self._answers)
                _serve(build, given, answer)
            finally:
                os._exit(0)
        os.close(given)
        os.close(answer)
        self.base_nbytes: int = _receive(self._answers) or resident_bytes() or 0
        """The memory of a rank before it has a model, in bytes, with what torch loads for a first step."""

    def __enter__(self) -> BareRank:
        """Return this."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """End the child."""
        os.close(self._ask)
        os.close(self._answers)
        os.waitpid(self._child, 0)

    def replay(self, operations: Sequence[MemoryOperation]) -> HeapPeak:
        """Return when a rank that does some operations takes most memory above `base_nbytes`.

        Raises:
            EstimateError: It could not do them.
        """
        with suppress(BrokenPipeError):
            _send(self._ask, [tuple(each) for each in operations])
        found = _receive(self._answers)
        if found is None:
            raise EstimateError(
                f"the process that replays a step's memory ended after {len(operations)} operations had been given to "
                "it: the system may have refused addresses (ulimit -v, vm.overcommit_memory) or have ended it"
            )
        return HeapPeak(*found)


def _send(descriptor: int, value: Any) -> None:
    data = memoryview(pickle.dumps(value))
    for left in (memoryview(_LENGTH.pack(len(data))), data):
        sent = 0
        while sent < len(left):
            sent += os.write(descriptor, left[sent:])


def _receive(descriptor: int) -> Any:
    """Return what the other side has sent; None if it has ended."""
    if (head := _read(descriptor, _LENGTH.size)) is None:
        return None
    data = _read(descriptor, *_LENGTH.unpack(head))
    return None if data is None else pickle.loads(data)


def _read(descriptor: int, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = os.read(descriptor, min(count - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


def _serve(build: Callable[[], Any], given: int, answer: int) -> None:
    """Tell the memory of a rank; then replay what comes, each in a process of its own."""
    signal.alarm(_PATIENCE_S)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    torch.set_num_threads(1)  # threads of the parent's OpenMP are not here
    importlib.import_module("unisono.trainer.trainer")
    # A failure is found, and told, when the model is built for its profile.
    with suppress(Exception), torch.device("meta"):
        build()
    layer = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.zeros(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    _send(answer, resident_bytes() or 0)
    signal.alarm(0)
    while True:
        # A child receives what it replays: here, nothing may use the heap.
        child = os.fork()
        if child == 0:
            operations = _receive(given)
            if operations is None:
                os._exit(1)
            gc.disable()
            _send(answer, tuple(replay(operations)))
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            return
