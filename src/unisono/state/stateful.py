"""Objects whose state is saved and restored, such as optimizers."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Stateful"]


class Stateful(Protocol):
    """An object with a state, such as an optimizer, a learning-rate scheduler or a GradScaler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Restore a state."""
