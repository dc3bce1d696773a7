"""The part of an all-reduce between hosts that stays within a host, in memory that the ranks of the host share.

All rows are in one segment, so a rank adds up its part of them where they are, and nothing is sent. See
`engine.local_exchange` for the calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.collectives.world import World
from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.shm.segment import aligned

__all__ = ["SharedLocalExchange"]

_WHAT = "waiting for the gradients of the ranks of this host"


class SharedLocalExchange:
    """One vector in shared memory, with the rows of each rank of the host, and a row for the sum.

    Ranks arrive at a barrier twice in a step: when their rows are complete, and when their segment of the sum is. A
    rank that is past the second one may write its rows, since all others have added up by then. Segments of the sum are
    written after the first one, when all others have copied those of the step before.

    Args:
        world: All ranks.
        runtime: The ranks of this host. Each must make it, in the same order.
        ranks: These ranks, in the world.
        counts: The number of rows of each of them.
        numel: The length of the vector, a multiple of the number of ranks of the host.
        dtype: Its type.
    """

    def __init__(
        self,
        world: World,
        runtime: SharedRuntime,
        ranks: Sequence[int],
        counts: Sequence[int],
        numel: int,
        *,
        dtype: torch.dtype,
    ) -> None:
        self._runtime = runtime
        self._seen = {local: world.wait_for(rank) for local, rank in enumerate(ranks) if rank != world.rank}
        width, local = numel // runtime.size, runtime.rank
        barrier_nbytes = aligned(runtime.barrier_nbytes)
        rows_nbytes = (sum(counts) + 1) * numel * dtype.itemsize
        segment = runtime.segment(barrier_nbytes + rows_nbytes, "gradients", prepare=runtime.prepare_barrier)
        self._barrier = runtime.barrier_in(segment)
        *every, self._sum = segment.tensor(barrier_nbytes, (sum(counts) + 1, numel), dtype).unbind()
        mine = slice(local * width, (local + 1) * width)
        firsts = [sum(counts[:rank]) for rank in range(runtime.size)]
        own = [every[first : first + count] for first, count in zip(firsts, counts, strict=True)]
        self.rows: Sequence[Tensor] = own[local]
        """See `LocalExchange`; unused padding stays zero."""
        self._parts = [[row[mine] for row in rows] for rows in own]
        self.total = self._sum[mine]
        """See `LocalExchange`."""

    def rows_of(self, local: int) -> Sequence[Tensor]:
        """See `LocalExchange`."""
        return self._parts[local]

    def send_rows(self, counts: Sequence[int]) -> None:
        """See `LocalExchange`."""
        del counts  # the others read as many as there are
        self._barrier.arrive()

    def wait_for_rows(self) -> None:
        """See `LocalExchange`."""
        self._runtime.wait_at(self._barrier, _WHAT, self._seen)

    def send_total(self) -> None:
        """See `LocalExchange`."""
        self._barrier.arrive()

    def finish(self) -> None:
        """See `LocalExchange`."""
        self._runtime.wait_at(self._barrier, _WHAT, self._seen)
        self.rows[0].copy_(self._sum)
