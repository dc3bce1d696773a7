"""Sums the gradients of a step over virtual ranks, together with the buffers that its forward passes change."""

from unisono.engine.base import Engine, Preparation, Trained
from unisono.engine.buffer_transaction import BufferTransaction
from unisono.engine.consistency import ConsistencyCheck, StepDescription
from unisono.engine.joint_optimizer import JointOptimizer, parts_of, trained_by
from unisono.engine.node_sums import drop
from unisono.engine.selection import EngineFactory, EngineKind, select_engines
from unisono.engine.shared import files_of, share_files
from unisono.engine.step_transaction import STEP_UNDONE, StepTransaction
from unisono.engine.totals import Totals
from unisono.engine.trainable import check_trained
from unisono.engine.weight_writes import WeightWrites

__all__ = [
    "STEP_UNDONE",
    "BufferTransaction",
    "ConsistencyCheck",
    "Engine",
    "EngineFactory",
    "EngineKind",
    "JointOptimizer",
    "Preparation",
    "StepDescription",
    "StepTransaction",
    "Totals",
    "Trained",
    "WeightWrites",
    "check_trained",
    "drop",
    "files_of",
    "parts_of",
    "select_engines",
    "share_files",
    "trained_by",
]
