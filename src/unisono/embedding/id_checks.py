"""Checks of what a lookup is given, with messages that name the table, the id and its sample."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.text import a_type

__all__ = ["check_ids", "check_offsets"]

_INTEGERS = (torch.int32, torch.int64)


def check_ids(
    name: str, ids: Tensor, *, rows: int | None, begins: Tensor | None = None, are_looked_up: bool = True
) -> None:
    """Check ids of any shape. Takes one pass over them.

    Args:
        name: The table.
        ids: The ids.
        rows: The rows of the table; None: it is dynamic, and has any ids.
        begins: Where bags begin in ids of one dimension.
        are_looked_up: False for a plain list of ids, in messages.

    Raises:
        TypeError: They are no tensor of integers.
        IndexError: One is out of range.
    """
    if not isinstance(ids, Tensor):
        raise TypeError(f"table {name!r}: the ids are {a_type(ids)}; give a tensor of int32 or int64")
    if ids.dtype not in _INTEGERS:
        raise TypeError(f"table {name!r}: the ids are {_short(ids.dtype)}; give int32 or int64, as ids.long() does")
    if rows is None or not ids.numel():
        return
    least, most = torch.aminmax(ids)
    if int(least) >= 0 and int(most) < rows:
        return
    place = ((ids < 0) | (ids >= rows)).nonzero()[0].tolist()
    wrong = int(ids[tuple(place)])
    if begins is not None:
        where = f"position {place[0]}, in bag {int((begins <= place[0]).sum()) - 1}"
    elif not place:
        where = "the only position"
    elif not are_looked_up:
        where = f"position {', '.join(map(str, place))}"
    else:
        where = f"sample {place[0]}" + (f", position {', '.join(map(str, place[1:]))}" if place[1:] else "")
    told = "was looked up" if are_looked_up else "is"
    raise IndexError(
        f"table {name!r} has ids 0 to {rows - 1}, and id {wrong} {told} at {where}. "
        + ("Ids cannot be negative." if wrong < 0 else "Make the table larger, or map such ids into its range.")
    )


def check_offsets(name: str, offsets: Tensor, *, ids: int, includes_last: bool) -> Tensor:
    """Return where bags begin.

    Args:
        name: The table.
        offsets: The offsets.
        ids: The number of ids.
        includes_last: True if the number of ids is the last offset.

    Raises:
        TypeError: They are no tensor of integers.
        ValueError: They have other than one dimension, do not begin with 0, descend, or exceed the number of ids.
    """
    if not isinstance(offsets, Tensor) or offsets.dtype not in _INTEGERS:
        what = _short(offsets.dtype) if isinstance(offsets, Tensor) else a_type(offsets)
        raise TypeError(f"table {name!r}: the offsets are {what}; give a tensor of int32 or int64")
    if offsets.dim() != 1:
        raise ValueError(f"table {name!r}: the offsets have the shape {list(offsets.shape)}; give one dimension")
    if includes_last and not len(offsets):
        raise ValueError(f"table {name!r}: there are no offsets; with include_last_offset=True, give at least [0]")
    if len(offsets) and int(offsets[0]) != 0:
        raise ValueError(f"table {name!r}: the first offset is {int(offsets[0])}, and must be 0")
    falls = (offsets[1:] < offsets[:-1]).nonzero().view(-1)
    if len(falls):
        i = int(falls[0])
        raise ValueError(
            f"table {name!r}: the offsets must ascend, and offset {i + 1} is {int(offsets[i + 1])} after "
            f"{int(offsets[i])}"
        )
    last = int(offsets[-1]) if len(offsets) else 0
    if includes_last and last != ids:
        raise ValueError(
            f"table {name!r}: the last offset is {last} and there are {ids} ids: with include_last_offset=True, the "
            "last offset is the number of ids"
        )
    if last > ids or (ids and not len(offsets)):
        raise ValueError(f"table {name!r}: there are {ids} ids, and the offsets {_told(offsets)}")
    return offsets[:-1] if includes_last else offsets


def _told(offsets: Tensor) -> str:
    return f"go up to {int(offsets[-1])}" if len(offsets) else "name no bag for them"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
