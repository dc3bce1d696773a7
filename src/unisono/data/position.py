"""The rank of a process in its group, and the position of a run in an epoch, for the sampler and the loader.

Both save and resume in the same way: a place is (epoch, position), and all samples before it are done on all ranks.
`data.sampler` and `data.rank_loader` divide the samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from unisono.arguments import whole
from unisono.errors import RankMismatchError
from unisono.job.placement import own_placement
from unisono.mismatch import by_value

__all__ = ["Position", "check_same_data", "find_rank", "position_state", "read_position"]


class Position(NamedTuple):
    """A place in a run."""

    epoch: int
    """Epoch, from 0."""
    position: int
    """Position in the epoch, over all ranks; the samples before it are done."""


def find_rank(
    rank: int | None, ranks: int | None, *, group: dist.ProcessGroup | None = None, name: str = "world_size"
) -> tuple[int, int]:
    """Return a rank and the number of ranks, checked, with defaults for None.

    Defaults come from the group, otherwise from the default group of torch.distributed, otherwise from the launcher's
    environment variables. `name` is the caller's name of the argument `ranks`, for messages.

    Raises:
        ValueError: The numbers are impossible, or a variable of the launcher is invalid.
        TypeError: An argument is no whole number.
    """
    rank = None if rank is None else whole("rank", rank)
    ranks = None if ranks is None else whole(name, ranks)
    found = "as given"
    if rank is None or ranks is None:
        if group is not None:
            own_rank, own_ranks, found = group.rank(), group.size(), "from the group"
        elif dist.is_available() and dist.is_initialized():
            own_rank, own_ranks, found = dist.get_rank(), dist.get_world_size(), "from torch.distributed"
        else:
            placement = own_placement()
            own_rank, own_ranks = placement.rank, placement.world_size
            found = f"from the launcher {placement.launcher}"
        rank = own_rank if rank is None else rank
        ranks = own_ranks if ranks is None else ranks
    if ranks < 1:
        raise ValueError(f"{name}={ranks} must be at least 1: it is the number of ranks")
    if not 0 <= rank < ranks:
        raise ValueError(
            f"rank={rank} is outside [0, {ranks}) ({found}): ranks count from 0 to {name} - 1. Give both "
            f"rank and {name}, or neither."
        )
    return rank, ranks


def position_state(place: Position, *, seed: int, num_samples: int | None, shuffle: bool) -> dict[str, Any]:
    """Return a place and the settings that decide the order of samples, as plain integers and booleans."""
    return {**place._asdict(), "seed": seed, "num_samples": num_samples, "shuffle": shuffle}


def read_position(
    state: Mapping[str, Any], *, seed: int, num_samples: int | None, shuffle: bool, owner: str
) -> Position:
    """Return the place in a state that `position_state` returned for the same order of samples.

    `owner` names the object that resumes in messages, such as "sampler"; the other arguments are its settings.

    Raises:
        ValueError: The state is damaged, or belongs to a different order.
        TypeError: The epoch or position is no whole number.
    """
    missing = [key for key in ("epoch", "position", "seed", "num_samples", "shuffle") if key not in state]
    if missing:
        raise ValueError(
            f"the state has no {', '.join(missing)}; it has {', '.join(map(str, state)) or 'nothing'}. Pass "
            f"what state_dict() of a unisono {owner} returned"
        )
    if state["num_samples"] != num_samples:
        raise ValueError(
            f"the state is of a dataset of {state['num_samples']} samples, and this one has {num_samples}: "
            "the order is another, so samples would be repeated and left out. Resume with the same data, or start "
            "the epoch anew."
        )
    for key, here in (("shuffle", shuffle), ("seed", seed)):
        # Without shuffling the seed is not used.
        if state[key] != here and (key == "shuffle" or shuffle):
            raise ValueError(
                f"the state was saved with {key}={state[key]}, and this {owner} has {key}={here}: the order "
                f"is another, so samples would be repeated and left out. Make the {owner} with {key}={state[key]}."
            )
    place = Position(whole("epoch", state["epoch"]), whole("position", state["position"]))
    if place.position < 0 or (num_samples is not None and place.position > num_samples):
        raise ValueError(f"the state has position={place.position}, outside [0, {num_samples}]: the state is damaged")
    return place


def check_same_data(everyone: Sequence[Mapping[str, Any]]) -> None:
    """Compare the datasets and settings of ranks, as loaders' `identity` returns them; one a rank, in rank order.

    Raises:
        RankMismatchError: They differ; the message lists all ranks' values of the first setting that differs.
    """
    for key in everyone[0]:
        if any(theirs[key] != everyone[0][key] for theirs in everyone):
            what = "number of samples" if key == "num_samples" else key
            values = by_value({rank: str(theirs[key]) for rank, theirs in enumerate(everyone)})
            raise RankMismatchError(
                f"the dataset's {what} differs between ranks: {values}. Give every rank the whole dataset, the same "
                "one: it is divided here."
            )
