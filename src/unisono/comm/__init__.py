"""Process groups: where a process stands in a job, how it meets the others, and the collectives."""

from unisono.comm.job import Job
from unisono.comm.messages import barrier, recv, send
from unisono.comm.moving import all_gather, all_to_all, broadcast, gather, scatter
from unisono.comm.placement import Placement, detect_placement, own_placement
from unisono.comm.reducing import all_reduce, reduce, reduce_scatter
from unisono.comm.world import World

__all__ = [
    "Job",
    "Placement",
    "World",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "detect_placement",
    "gather",
    "own_placement",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]
