"""unisono: distributed training for PyTorch in which the number of ranks is a resource, not a hyperparameter.

Start reading at `unisono.trainer.trainer.Trainer`, or at docs/architecture.md for the layers. Names are loaded on first
use, so that the launcher, which lives in this package too, starts without importing torch. The backend "shm" of
torch.distributed is known from here on, too: see `unisono.backend`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unisono.backend import register

if TYPE_CHECKING:
    from unisono.launch.spawn.caller import spawn
    from unisono.state.policy import Checkpoints
    from unisono.trainer.metric import Metric
    from unisono.trainer.trainer import Trainer

__all__ = ["Checkpoints", "Metric", "Trainer", "spawn"]

_HOMES = {
    "Checkpoints": "unisono.state.policy",
    "Metric": "unisono.trainer.metric",
    "Trainer": "unisono.trainer.trainer",
    "spawn": "unisono.launch.spawn.caller",
}

register()  # init_process_group("shm")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
