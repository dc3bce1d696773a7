"""Division of work: the positions of an epoch in a step, the samples of a virtual rank, and a rank's virtual ranks.

All functions are arithmetic on integers. A position is an index into the epoch's order; `plan.permutation` returns the
sample at that position.
"""

from __future__ import annotations

__all__ = ["dealt", "even_range", "even_steps", "num_dealt", "num_steps", "owner", "rank_block"]


def num_steps(num_samples: int, batch_size: int) -> int:
    """Return the number of steps in an epoch; the last one may be smaller.

    >>> num_steps(10, 4)
    3
    """
    return -(-num_samples // batch_size)


def dealt(part: int, parts: int) -> slice:
    """Return the slice of a step's samples, in their order, that belongs to one of several virtual ranks (or ranks).

    Virtual rank v has the samples v, v + V, v + 2V, … of the step. If the batch size is a multiple of V, these are over
    the whole epoch the samples that `torch.utils.data.DistributedSampler` assigns to rank v of V.

    A part is taken modulo their number: for samples from the epoch's position p on, rank r has the part r - p.

    >>> [list(range(8, 16)[dealt(v, 3)]) for v in range(3)]
    [[8, 11, 14], [9, 12, 15], [10, 13]]
    """
    return slice(part % parts, None, parts)


def num_dealt(num_samples: int, part: int, parts: int) -> int:
    """Return the number of a step's samples in the slice that `dealt` returns.

    >>> [num_dealt(8, v, 3) for v in range(3)]
    [3, 3, 2]
    """
    return len(range(num_samples)[dealt(part, parts)])


def owner(place: int, parts: int) -> int:
    """Return the part whose slice has a sample, by the sample's place: the inverse of `dealt`.

    >>> [owner(place, 3) for place in range(8)]
    [0, 1, 2, 0, 1, 2, 0, 1]
    """
    return place % parts


def rank_block(rank: int, *, world_size: int, virtual_ranks: int, in_turn: bool = False) -> range:
    """Return the virtual ranks that one rank computes, in order; ranks differ by at most one in their number.

    Args:
        rank: The rank.
        world_size: The number of ranks.
        virtual_ranks: The number of virtual ranks.
        in_turn: If False, they are a contiguous block, so that a rank can add up most of what it computes. If True,
            virtual rank v is computed by rank v modulo world_size, so that ranks compute neighbours at the same time.

    Raises:
        ValueError: There are more ranks than virtual ranks, or `rank` is outside [0, world_size).

    >>> [rank_block(r, world_size=3, virtual_ranks=8) for r in range(3)]
    [range(0, 2), range(2, 5), range(5, 8)]
    >>> [[*rank_block(r, world_size=3, virtual_ranks=8, in_turn=True)] for r in range(3)]
    [[0, 3, 6], [1, 4, 7], [2, 5]]
    """
    if world_size > virtual_ranks:
        idle = world_size - virtual_ranks
        raise ValueError(
            f"world_size={world_size} exceeds virtual_ranks={virtual_ranks}: {idle} rank{'s' * (idle > 1)} would be "
            f"idle. Start at most {virtual_ranks} ranks, or raise virtual_ranks, which changes the result of the run."
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is outside [0, {world_size})")
    if in_turn:
        return range(rank, virtual_ranks, world_size)
    return range(rank * virtual_ranks // world_size, (rank + 1) * virtual_ranks // world_size)


def even_steps(num_samples: int, batch_size: int, *, ranks: int, start: int = 0) -> int:
    """Return the number of steps into which `even_range` divides an epoch, or the rest of it from `start`.

    >>> even_steps(18, 8, ranks=2)
    3
    """
    left = num_samples - start
    joined = left > batch_size and 0 < left % batch_size < 2 * ranks - batch_size
    return num_steps(left, batch_size) - joined


def even_range(step: int, *, num_samples: int, batch_size: int, ranks: int, start: int = 0) -> range:
    """Return the positions of one step of an epoch, or of the rest of it from `start`, such that every rank has some.

    All steps but the last two have batch_size positions. A last step with fewer than two samples for each rank is
    evened out with the one before, or joined to it if two steps would not have one sample for each rank. If rank r
    reads the positions p with p mod ranks = r, it then has at least one in every step, provided that
    num_samples - start and batch_size are at least `ranks`.

    >>> [even_range(s, num_samples=18, batch_size=8, ranks=2) for s in range(3)]
    [range(0, 8), range(8, 13), range(13, 18)]
    >>> [even_range(s, num_samples=20, batch_size=8, ranks=2) for s in range(3)]
    [range(0, 8), range(8, 16), range(16, 20)]
    """
    left = num_samples - start
    steps, tail = even_steps(num_samples, batch_size, ranks=ranks, start=start), left % batch_size
    first = start + step * batch_size
    if left < batch_size or not 0 < tail < 2 * ranks or step < steps - 2:
        return range(first, min(first + batch_size, num_samples))
    if num_steps(left, batch_size) > steps:  # joined
        return range(first, first + batch_size if step < steps - 1 else num_samples)
    middle = num_samples - (batch_size + tail) // 2
    return range(first, middle) if step < steps - 1 else range(middle, num_samples)
