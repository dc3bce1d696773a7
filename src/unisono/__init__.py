"""unisono: distributed training for PyTorch in which the number of ranks is a resource, not a hyperparameter.

Start reading at `unisono.trainer.trainer.Trainer`, or at docs/architecture.md for the layers. Names are loaded on first
use, so that the launcher, which is part of this package, starts without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono import comm as comm
    from unisono import data as data
    from unisono import embedding as embedding
    from unisono import loggers as loggers
    from unisono import metrics as metrics
    from unisono import parallel as parallel
    from unisono.data.seeding import seed_everything
    from unisono.engine.local_steps.sync_settings import DiLoCo, LocalSGD
    from unisono.job.current import Job
    from unisono.job.initialize import init
    from unisono.job.ranks import is_main, local_rank, local_world_size, node_rank, rank, world_size
    from unisono.job.subgroups import split, subgroup
    from unisono.launch.spawn.caller import spawn
    from unisono.metrics.average import Average
    from unisono.parallel.losses import Sum
    from unisono.rank_zero.image import Image
    from unisono.rank_zero.main_first import main_first
    from unisono.rank_zero.printing import print0
    from unisono.rank_zero.progress_bar import progress
    from unisono.rank_zero.rank_logger import get_logger
    from unisono.rank_zero.run_log import RunLog
    from unisono.state.policy import Checkpoints
    from unisono.trainer.carried import Carried
    from unisono.trainer.trainer import Trainer

__all__ = [
    "Average",
    "Carried",
    "Checkpoints",
    "DiLoCo",
    "Image",
    "Job",
    "LocalSGD",
    "RunLog",
    "Sum",
    "Trainer",
    "get_logger",
    "init",
    "is_main",
    "local_rank",
    "local_world_size",
    "main_first",
    "node_rank",
    "print0",
    "progress",
    "rank",
    "seed_everything",
    "spawn",
    "split",
    "subgroup",
    "world_size",
]

_HOMES = {
    "Carried": "unisono.trainer.carried",
    "Checkpoints": "unisono.state.policy",
    "DiLoCo": "unisono.engine.local_steps.sync_settings",
    "Image": "unisono.rank_zero.image",
    "Job": "unisono.job.current",
    "LocalSGD": "unisono.engine.local_steps.sync_settings",
    "Average": "unisono.metrics.average",
    "RunLog": "unisono.rank_zero.run_log",
    "Sum": "unisono.parallel.losses",
    "Trainer": "unisono.trainer.trainer",
    "get_logger": "unisono.rank_zero.rank_logger",
    "init": "unisono.job.initialize",
    "is_main": "unisono.job.ranks",
    "local_rank": "unisono.job.ranks",
    "local_world_size": "unisono.job.ranks",
    "main_first": "unisono.rank_zero.main_first",
    "node_rank": "unisono.job.ranks",
    "print0": "unisono.rank_zero.printing",
    "progress": "unisono.rank_zero.progress_bar",
    "rank": "unisono.job.ranks",
    "seed_everything": "unisono.data.seeding",
    "spawn": "unisono.launch.spawn.caller",
    "split": "unisono.job.subgroups",
    "subgroup": "unisono.job.subgroups",
    "world_size": "unisono.job.ranks",
}

_PACKAGES = frozenset({"comm", "data", "embedding", "loggers", "metrics", "parallel"})
"""Packages that `import unisono` makes available; each is imported on first use."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"unisono.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
