"""Calling a function at the end of the backward pass that is running, from a hook on a parameter.

Autograd has a queue for that, but a nested backward, such as that of activation checkpointing with use_reentrant=True,
has its own. Its end is no end: the call is handed on to the backward around it. The functions of torch used here are
private to it; torch's own DistributedDataParallel and FSDP live by the first of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["BackwardEnd"]


class BackwardEnd:
    """One call at the end of the outermost backward, or one other call if that fails before.

    Make it inside a hook. It is in a queue of autograd's and needs no other reference.
    Args: then runs in the thread that ends the backward; what it raises, backward() raises. abandoned runs if backward
        raised something else before: it must not raise.
    """

    def __init__(self, then: Callable[[], None], abandoned: Callable[[], None]) -> None:
        self._then, self._abandoned = then, abandoned
        self._over = False
        self._prehooks: list[Any] = []
        _queue(self)

    def __call__(self) -> None:
        """Note the end of a backward; autograd calls it."""
        if self._over:
            return
        around = torch._C._current_autograd_node()
        followers = [] if around is None else [node for node, _ in around.next_functions if node is not None]
        if not followers:
            self._over = True
            self._then()
            return
        # This was a nested backward, called from the node `around`. Whatever of its followers runs first runs in the
        # backward outside, where the queue is that one's.
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
