"""The user's loop: epochs, batches, step, evaluate, save."""

from unisono.metrics.metric import Metric
from unisono.trainer.trainer import Trainer

__all__ = ["Metric", "Trainer"]
