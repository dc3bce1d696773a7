"""Models divided over ranks: parameters, gradients and optimizer state."""

from unisono.parallel.sharding.building import build
from unisono.parallel.sharding.shard import Shard

__all__ = ["Shard", "build"]
