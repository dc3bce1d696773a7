"""Training on one host with one copy of the weights for all ranks."""

from unisono.engine.shared.optimizer_state import copy_state
from unisono.engine.shared.parameter_arena import LoadStateDictHook, SharedParameters
from unisono.engine.shared.sharded_optimizer import is_divisible, is_elementwise
from unisono.engine.shared.shared_all_reduce import SharedAllReduce
from unisono.engine.shared.shared_consistency import SharedConsistencyCheck
from unisono.engine.shared.shared_engine import SharedEngine
from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.engine.shared.table_files import files_of, share_files

__all__ = [
    "LoadStateDictHook",
    "SharedAllReduce",
    "SharedConsistencyCheck",
    "SharedEngine",
    "SharedParameters",
    "SharedRuntime",
    "copy_state",
    "files_of",
    "is_divisible",
    "is_elementwise",
    "share_files",
]
