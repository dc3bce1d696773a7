"""The ranks that read a dataset together: which of them this process is, and a check that all have the same data.

`data.sampler` and `data.rank_loader` divide the samples between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from unisono.arguments import whole
from unisono.errors import RankMismatchError
from unisono.job.placement import own_placement
from unisono.mismatch import by_value

__all__ = ["check_data_of_ranks", "find_rank"]


def find_rank(
    rank: int | None, ranks: int | None, *, group: dist.ProcessGroup | None = None, name: str = "world_size"
) -> tuple[int, int]:
    """Return a rank and the number of ranks, checked, with defaults for None.

    Defaults come from the group, otherwise from the default group of torch.distributed, otherwise from the launcher's
    environment variables. `name` is the caller's name of the argument `ranks`, for messages.

    Raises:
        ValueError: The numbers are impossible, or a variable of the launcher is invalid.
        TypeError: An argument is not a whole number.
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


def check_data_of_ranks(everyone: Sequence[Mapping[str, Any]]) -> None:
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
