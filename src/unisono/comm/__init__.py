"""Collectives of any value over a process group, messages between two ranks, and the place of a process in its job.

Every rank of a group must call its collectives, in the same order. The backward of a collective is a collective as
well, which every rank must run; tensors that are reduced alone or passed with `uniform=True` must require a gradient on
all ranks or on none.

Traffic: a tensor that is reduced alone or passed with `uniform=True` takes the backend's own collective. Any other
value travels with an envelope of 1 KiB. It is inside if it fits (some 950 bytes, the pickle and tensors on the CPU
together); otherwise its rest, the tensors or everything, follows in a second transfer. If padding all rests to the
largest one at most doubles the bytes, or makes 64 KiB at most, one collective moves them together. A process without a
group sends nothing.

Memory: results share none with arguments. Besides them, a call holds buffers for the tensors that it receives, at most
doubled by padding, and up to two copies of the tensors that it sends; pickles exist up to four times. Tensors that
autograd needs are kept until the backward.

All collectives, `send` and `recv` raise

- GroupError before `unisono.init` if there are other ranks, after the end of the job, for a group without this rank,
  in a forked process, and in a loss function;
- TypeError if `group` is no group;
- RankMismatchError on all ranks that are found to make different calls: over gloo once a collective has taken a second,
  over any backend where the envelopes show it;
- the backend's error, such as RuntimeError, if a rank dies or the timeout of the group passes; over shm also if ranks
  make different calls.

In check mode (`unisono run --check`), each collective first writes two entries to the job's store and reads those of
all ranks. Then RankMismatchError is raised before anything is sent, and PeerError if a rank does not come.
"""

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
