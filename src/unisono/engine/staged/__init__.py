"""Sums gradients and buffers where a model is cut over the ranks of a pipeline: an engine for each stage of a rank."""

from unisono.engine.staged.buffers import StagedBuffers
from unisono.engine.staged.divided_engine import DividedStagedEngine
from unisono.engine.staged.shared_parameters import SharedParameterCopies
from unisono.engine.staged.stage_divisions import StageDivisions
from unisono.engine.staged.stage_map import StageMap, StageOwnership
from unisono.engine.staged.stage_ranks import StageRanks
from unisono.engine.staged.staged_engine import StagedEngine
from unisono.engine.staged.staged_factory import StagedEngineFactory

__all__ = [
    "DividedStagedEngine",
    "SharedParameterCopies",
    "StageDivisions",
    "StageMap",
    "StageOwnership",
    "StageRanks",
    "StagedBuffers",
    "StagedEngine",
    "StagedEngineFactory",
]
