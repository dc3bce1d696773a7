"""Collectives over memory that the ranks of one host share, and what they are made of."""

from unisono.shm.segment_layout import Options

__all__ = ["Options"]
