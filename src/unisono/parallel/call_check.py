"""A hook that lets the owner of a model check each call of it, since ranks lack a part of its weights in mid-run."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import ref

from torch import nn

__all__ = ["CallCheck", "ChecksCalls"]


class ChecksCalls(Protocol):
    """The owner of a model."""

    def check_call(self, module: nn.Module) -> None:
        """Refuse a call at a moment when this rank lacks weights of the module."""


class CallCheck:
    """A forward pre-hook. A copy of it, such as that of a copied or pickled model, checks nothing.

    Args:
        owner: It is not kept alive.
    """

    _owner: ref[ChecksCalls] | None = None

    def __init__(self, owner: ChecksCalls) -> None:
        self._owner = ref(owner)

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: copies belong to nobody."""
        return {}

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Let the owner check a call."""
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            owner.check_call(module)
