"""What one rank does for all: printing, logging, downloads, progress."""

from unisono.rank_zero.first import main_first
from unisono.rank_zero.logs import get_logger
from unisono.rank_zero.printing import print0
from unisono.rank_zero.progress import progress

__all__ = ["get_logger", "main_first", "print0", "progress"]
