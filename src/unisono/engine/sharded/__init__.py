"""Divides weights, gradients and optimizer state over ranks, and sums gradients into the parts of ranks."""

from unisono.engine.sharded.division import Division
from unisono.engine.sharded.exchange import UnitExchange
from unisono.engine.sharded.grid import ShardGrid
from unisono.engine.sharded.optimizer_shards import OptimizerPiece, OptimizerShards
from unisono.engine.sharded.sharded_engine import ShardedEngine
from unisono.engine.sharded.sharded_factory import ShardedEngineFactory
from unisono.engine.sharded.unit import ShardedUnit

__all__ = [
    "Division",
    "OptimizerPiece",
    "OptimizerShards",
    "ShardGrid",
    "ShardedEngine",
    "ShardedEngineFactory",
    "ShardedUnit",
    "UnitExchange",
]
