"""How the gradient of a step is summed over virtual ranks, and with it what else a forward pass changes."""

from unisono.engine.base import Engine, Trained
from unisono.engine.buffers import BufferTransaction
from unisono.engine.checks import check_trained
from unisono.engine.choose import EngineKind, Engines, choose_engines
from unisono.engine.comparison import Comparison, Intent
from unisono.engine.totals import Totals

__all__ = [
    "BufferTransaction",
    "Comparison",
    "Engine",
    "EngineKind",
    "Engines",
    "Intent",
    "Totals",
    "Trained",
    "check_trained",
    "choose_engines",
]
