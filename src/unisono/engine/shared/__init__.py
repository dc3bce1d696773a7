"""Training on one host with one copy of the weights for all ranks."""

from unisono.engine.shared.comparison import SharedComparison
from unisono.engine.shared.engine import SharedEngine
from unisono.engine.shared.exchange import SharedExchange
from unisono.engine.shared.hall import Hall
from unisono.engine.shared.optimizers import is_divisible
from unisono.engine.shared.weights import Loads, Weights

__all__ = ["Hall", "Loads", "SharedComparison", "SharedEngine", "SharedExchange", "Weights", "is_divisible"]
