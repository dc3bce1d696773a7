"""Steps of workers that exchange no gradients, and the outer step that brings their weights together.

Start reading at `local_steps_engine.py`, then `workers.py`.
"""

from unisono.engine.local_steps.local_steps_engine import LocalStepsEngine
from unisono.engine.local_steps.sync_settings import DiLoCo, LocalSGD
from unisono.engine.local_steps.workers import Workers

__all__ = ["DiLoCo", "LocalSGD", "LocalStepsEngine", "Workers"]
