"""Comparison of the orders that the samplers of the ranks give an epoch, before its first step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from unisono.collectives.construction import construct_on_all
from unisono.collectives.group import known_group
from unisono.collectives.world import World
from unisono.data.sampled_order import SampledOrder
from unisono.errors import RankMismatchError
from unisono.mismatch import by_value

__all__ = ["agree_on_order"]

_CALL = "trainer.batches comparing samplers"
_REMEDY = (
    "Every rank must get the same order: let the sampler draw from the generators of torch, Python or NumPy, which are "
    "seeded from seed and epoch here, or seed its own generator with the same number on every rank."
)


def agree_on_order(world: World, draw: Callable[[], SampledOrder]) -> SampledOrder:
    """Return the order that `draw` returns, once it is known to be the same on all ranks. Every rank must call it.

    Traffic: 1 KB from each rank.

    Raises:
        RankMismatchError: The orders differ; the message says where.
        PeerError: Another rank's `draw` failed; that rank raises the error itself.
    """
    if world.group is None:
        return draw()
    order, everyone = construct_on_all(
        known_group(world.group),
        _CALL,
        draw,
        lambda own: (len(own.indices), len(own.ends), own.fingerprint),
        errors=(Exception,),  # the sampler is the user's
    )
    if len({*everyone}) == 1:
        return order
    lengths = {rank: f"{indices} indices in {batches} batches" for rank, (indices, batches, _) in enumerate(everyone)}
    if len({*lengths.values()}) > 1:
        raise RankMismatchError(f"the sampler's order of epoch {order.epoch} differs: {by_value(lengths)}. {_REMEDY}")
    raise RankMismatchError(f"{_first_difference(world, order)}. {_REMEDY}")


def _first_difference(world: World, order: SampledOrder) -> str:
    """Return the first position at which orders of one length differ, by halving. Every rank must call it."""
    same, differs = 0, len(order.indices)  # lengths of beginnings that are the same and that are not
    while differs - same > 1:
        middle = (same + differs) // 2
        found = world.gather(hashlib.sha256(order.indices[:middle].tobytes()).digest(), _CALL)
        same, differs = (middle, differs) if len({*found}) == 1 else (same, middle)
    values = {rank: f"sample {index}" for rank, index in enumerate(world.gather(order.indices[same], _CALL))}
    if len({*values.values()}) > 1:
        return f"the sampler's order of epoch {order.epoch} differs at position {same}: {by_value(values)}"
    ends = world.gather(list(order.ends), _CALL)
    batch = next(number for number, each in enumerate(zip(*ends, strict=True)) if len({*each}) > 1)
    cuts = {rank: f"at position {theirs[batch]}" for rank, theirs in enumerate(ends)}
    return f"batch {batch} of the sampler's epoch {order.epoch} ends {by_value(cuts)}"
