"""Process groups: where a process stands in a job, and how it meets the others."""

from unisono.comm.placement import Placement, detect_placement
from unisono.comm.world import World, own_placement

__all__ = ["Placement", "World", "detect_placement", "own_placement"]
