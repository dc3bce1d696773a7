"""Process groups: where a process stands in a job, how it meets the others, and the collectives."""

from unisono.collectives.object_collectives import all_gather, all_to_all, broadcast, gather, scatter
from unisono.collectives.reductions import all_reduce, reduce, reduce_scatter
from unisono.collectives.send_recv import barrier, recv, send
from unisono.collectives.world import World
from unisono.job.current import Job
from unisono.job.placement import Placement, detect_placement, own_placement

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
