"""Printing, logging, downloads and progress by one rank on behalf of all."""

from unisono.rank_zero.main_first import main_first
from unisono.rank_zero.printing import print0
from unisono.rank_zero.progress_bar import progress
from unisono.rank_zero.rank_logger import get_logger

__all__ = ["get_logger", "main_first", "print0", "progress"]
