"""Data parallelism for your own training loops, and models over several ranks; nothing here depends on the Trainer."""

from unisono.parallel.data_parallel import DataParallel
from unisono.parallel.pipeline import Pipeline, PipelineStages, cut
from unisono.parallel.placed import PlacedModel, place
from unisono.parallel.remote_module import RemoteModule, remote
from unisono.parallel.replicas import Replicas, replicate
from unisono.parallel.scatter_gather import Whole
from unisono.parallel.sharding import Shard, build
from unisono.parallel.sharding.loop_handle import Sharded
from unisono.parallel.sharding.own_loop import shard
from unisono.parallel.shared_tables import SharedTables, share_tables
from unisono.parallel.sync_batch_norm import (
    BatchNormNd,
    SyncBatchNorm,
    convert_sync_batchnorm,
    revert_sync_batchnorm,
)

__all__ = [
    "BatchNormNd",
    "DataParallel",
    "Pipeline",
    "PipelineStages",
    "PlacedModel",
    "RemoteModule",
    "Replicas",
    "Shard",
    "Sharded",
    "SharedTables",
    "SyncBatchNorm",
    "Whole",
    "build",
    "convert_sync_batchnorm",
    "cut",
    "place",
    "remote",
    "replicate",
    "revert_sync_batchnorm",
    "shard",
    "share_tables",
]
