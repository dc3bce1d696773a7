"""The state of a run: checkpoints, digests and random generators."""

from unisono.state.policy import Checkpoints

__all__ = ["Checkpoints"]
