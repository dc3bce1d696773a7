"""Settings of the backend `shm`: collectives over memory that the ranks of one host share."""

from unisono.shm.segment_layout import Options

__all__ = ["Options"]
