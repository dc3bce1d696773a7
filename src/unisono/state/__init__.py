"""What a run is, apart from its plan: checkpoints, digests and random state."""

from unisono.state.policy import Checkpoints

__all__ = ["Checkpoints"]
