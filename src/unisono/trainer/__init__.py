"""The user's loop: epochs, batches, step, evaluate, save."""

from unisono.metrics.average import Average
from unisono.trainer.trainer import Trainer

__all__ = ["Average", "Trainer"]
