"""Sends the state of a run, as `snapshot.capture` describes it, from one rank to the others.

Large tensors are sent one at a time into their final memory, so no rank holds the state twice. Small ones share
messages, since a message takes longer than their bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.collectives.world import World, as_bytes
from unisono.plan.alignment import WIRE_NBYTES, align_up
from unisono.plan.bucketing import Item, group_by_size
from unisono.state.codec import Json, decode_dtype

__all__ = ["TensorGroups", "broadcast_groups", "exchange_parts", "forms_of", "table_of"]

TensorGroups = dict[str, dict[str, Tensor]]
"""Tensors by group and name, such as "model" and "layer.weight"."""

_MESSAGE_NBYTES = 1 << 20
"""The most bytes of several tensors in one message."""


def broadcast_groups(
    world: World,
    make: Callable[[], tuple[dict[str, Any], TensorGroups]],
    *,
    source: int = 0,
    wanted: bool = True,
    apart: Mapping[tuple[str, str], Tensor] | None = None,
) -> tuple[dict[str, Any], TensorGroups]:
    """Return on every rank the document and the tensors that `make` returns on one rank. Every rank must call it.

    Memory: the tensors, once on each rank that wants them, and a message of up to 1 MB. Traffic: a broadcast of the
    document, of each large tensor and of each message.

    Args:
        world: The ranks.
        make: Called on the rank `source` alone. The document must be JSON. A tensor that has several names is sent
            once.
        source: That rank.
        wanted: False on a rank that needs no tensors; it gets none.
        apart: By group and name, tensors of this rank in memory that all ranks share: those that `make` returns of the
            same names, types and shapes are the same memory. They are not sent.
    """
    apart = apart or {}
    groups: TensorGroups = {}

    def describe() -> bytes:
        nonlocal groups
        document, groups = make()
        tables = {group: table_of(tensors) for group, tensors in groups.items()}
        return json.dumps({"document": document, "tensors": tables}).encode()

    head = json.loads(world.broadcast_bytes(describe, source=source))
    is_source = world.group is None or world.rank == source
    sent = [
        _Sent(group, name, decode_dtype(dtype), shape)
        for group, table in head["tensors"].items()
        for name, owner, dtype, shape in table
        if owner == name
    ]
    received: TensorGroups = {}
    for each in [each for each in sent if _is_like(apart.get((each.group, each.name)), each)]:
        sent.remove(each)
        if wanted:
            received.setdefault(each.group, {})[each.name] = apart[each.group, each.name]
    sizes = [Item(align_up(each.nbytes, WIRE_NBYTES)) for each in sent]
    for numbers in group_by_size(sizes, limit_nbytes=_MESSAGE_NBYTES):
        together = [sent[number] for number in numbers]
        if is_source:
            tensors = [groups[each.group][each.name].detach().cpu().contiguous() for each in together]
        else:
            tensors = [torch.empty(each.shape, dtype=each.dtype) for each in together]
        _broadcast(world, tensors, source=source, is_source=is_source)
        if wanted:
            for each, tensor in zip(together, tensors, strict=True):
                received.setdefault(each.group, {})[each.name] = tensor
    return head["document"], {
        group: {name: received[group][owner] for name, owner, *_ in table if owner in received.get(group, {})}
        for group, table in head["tensors"].items()
    }


def exchange_parts(world: World, parts: Sequence[Sequence[Tensor]]) -> None:
    """Overwrite tensors on every rank with those of the rank that has their values. Every rank must call it.

    Memory: a message of up to 1 MB. Traffic: a broadcast of each large tensor and of each message.

    Args:
        world: The ranks.
        parts: For each rank, the contiguous tensors on the CPU that it has; of the same types and sizes on all ranks.
    """
    for source, tensors in enumerate(parts):
        sizes = [Item(align_up(tensor.numel() * tensor.element_size(), WIRE_NBYTES)) for tensor in tensors]
        for numbers in group_by_size(sizes, limit_nbytes=_MESSAGE_NBYTES):
            _broadcast(world, [tensors[number] for number in numbers], source=source, is_source=world.rank == source)


class _Sent(NamedTuple):
    """A tensor that is sent."""

    group: str
    name: str
    dtype: torch.dtype
    shape: list[int]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def _is_like(tensor: Tensor | None, sent: _Sent) -> bool:
    return tensor is not None and tensor.dtype == sent.dtype and [*tensor.shape] == sent.shape


def _broadcast(world: World, tensors: list[Tensor], *, source: int, is_source: bool) -> None:
    """Overwrite contiguous tensors on the CPU with those of one rank, in one message."""
    if len(tensors) == 1:
        world.broadcast_tensor(tensors[0], source=source)
        return
    parts = [as_bytes(tensor) for tensor in tensors]
    starts = [*accumulate((align_up(part.numel(), WIRE_NBYTES) for part in parts), initial=0)]
    message = torch.empty(starts.pop(), dtype=torch.uint8)
    places = [message[start : start + part.numel()] for start, part in zip(starts, parts, strict=True)]
    if is_source:
        torch._foreach_copy_(places, parts)
    world.broadcast_tensor(message, source=source)
    if not is_source:
        torch._foreach_copy_(parts, places)


def table_of(tensors: Mapping[str, Tensor]) -> list[Json]:
    """Return the name of each tensor, the name under which it is sent, dtype and shape, as JSON."""
    owners: dict[int, str] = {}
    return [
        [name, owners.setdefault(id(t), name), str(t.dtype).removeprefix("torch."), list(t.shape)]
        for name, t in tensors.items()
    ]


def forms_of(table: Iterable[Any]) -> dict[str, Tensor]:
    """Return the tensors of a table without values, on the meta device. Tied names have one.

    >>> forms_of(table_of({"w": torch.empty(2)}))
    {'w': tensor(..., device='meta', size=(2,))}
    """
    forms: dict[str, Tensor] = {}
    for name, owner, dtype, shape in table:
        is_tied = owner != name
        forms[name] = forms[owner] if is_tied else torch.empty(shape, dtype=decode_dtype(dtype), device="meta")
    return forms
