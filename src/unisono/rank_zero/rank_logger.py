"""A logger with the rank in every line, and with a level that depends on the rank."""

from __future__ import annotations

import logging
import sys

from unisono.job.ranks import rank, world_size

__all__ = ["get_logger"]

_FORMAT = "%(asctime)s [rank %(rank)s/%(world_size)s] %(levelname)s %(name)s: %(message)s"


def get_logger(name: str = "train", *, level: int | str = "INFO", others: int | str = "WARNING") -> logging.Logger:
    """Return the logger of this name, which writes to standard error with the rank in each line.

    The rank is looked up when a message is logged, so a module may call this before `unisono.init`. A second call for
    a name adds no second handler; the levels are those of the last call. No rank waits for another.

    Args:
        name: The name of the logger.
        level: The lowest level that rank 0 writes.
        others: The lowest level that the other ranks write.

    Raises:
        ValueError: A level does not exist.
        TypeError: A level is neither a name nor a number.
    """
    thresholds = _number(level), _number(others)
    logger = logging.getLogger(name)
    for handler in logger.handlers:
        if isinstance(handler, _RankHandler):
            break
    else:
        handler = _RankHandler()
        logger.addHandler(handler)
        logger.propagate = False  # otherwise the root's handler writes each line again, without a rank
    handler.thresholds = thresholds
    logger.setLevel(min(thresholds))
    return logger


class _RankHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes records with the rank, if their level is high enough for it."""

    def __init__(self) -> None:
        super().__init__()
        self.thresholds = (logging.INFO, logging.WARNING)
        self.setFormatter(logging.Formatter(_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record if its level is high enough for this rank."""
        own = rank()
        if record.levelno >= self.thresholds[own != 0]:
            record.rank, record.world_size = own, world_size()
            self.stream = sys.stderr  # as it is now: notebooks and tests replace it
            super().emit(record)


def _number(level: int | str) -> int:
    if isinstance(level, int):
        return level
    if not isinstance(level, str):
        raise TypeError(f'level={level!r} must be a name such as "INFO", or a number of logging')
    found = logging.getLevelName(level.upper())
    if not isinstance(found, int):
        raise ValueError(  # noqa: TRY004  it is a text, as asked
            f'level={level!r} is none of "DEBUG", "INFO", "WARNING", "ERROR" and "CRITICAL"'
        )
    return found
