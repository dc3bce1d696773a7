"""Options of the backend shm, whose ranks communicate through shared memory of one host."""

from unisono.shm.segment_layout import Options

__all__ = ["Options"]
