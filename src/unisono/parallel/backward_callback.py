"""Calls a function at the end of the running backward pass, registered from a hook on a parameter.

Autograd has a queue of callbacks for this, but a nested backward, such as that of activation checkpointing with
use_reentrant=True, has a separate one. At the end of a nested backward, the call moves to the queue of the enclosing
one. The functions of torch used here are private; torch's DistributedDataParallel and FSDP rely on `queue_callback`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["BackwardEnd"]


class BackwardEnd:
    """One call at the end of the outermost backward, or another call if the backward fails before.

    Create it inside a hook. A queue of autograd holds it, so it needs no other reference.

    Args:
        then: Runs in the thread that ends the backward. backward() raises the errors that it raises.
        abandoned: Runs if the backward failed before its end. It must not raise.
    """

    def __init__(self, then: Callable[[], None], abandoned: Callable[[], None]) -> None:
        self._then, self._abandoned = then, abandoned
        self._over = False
        self._prehooks: list[Any] = []
        _queue(self)

    def __call__(self) -> None:
        """Handle the end of a backward; autograd calls this."""
        if self._over:
            return
        around = torch._C._current_autograd_node()
        followers = [] if around is None else [node for node, _ in around.next_functions if node is not None]
        if not followers:
            self._over = True
            self._then()
            return
        # This was a nested backward, called from the node `around`. The first of its followers to run does so in the
        # enclosing backward, so a call queued there is in the enclosing one's queue.
        self._prehooks = [node.register_prehook(self._outside) for node in followers]

    def _outside(self, _: Any) -> None:
        for hook in self._prehooks:
            hook.remove()
        self._prehooks = []
        _queue(self)

    def __del__(self) -> None:
        # Autograd drops its queue without calling it when a backward fails.
        if not self._over:
            self._abandoned()


def _queue(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)
