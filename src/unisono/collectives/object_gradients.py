"""The backward of collectives of any value: gradients go back to the ranks whose tensors they belong to.

A payload has several tensors, of which some require a gradient. Those that may get one are attached to the graph by
their places in it (`collectives.differentiable.attach`). Start reading at `open_with_gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.collectives import object_transport
from unisono.collectives import tensor_collectives as tensors
from unisono.collectives.differentiable import SendBack, attach
from unisono.collectives.group import Group
from unisono.collectives.object_transport import FailedSend
from unisono.collectives.received import Received
from unisono.collectives.serialization import NOT_FOLLOWED, Payload, serialize
from unisono.errors import RankMismatchError
from unisono.text import name_ranks

__all__ = [
    "attach_each",
    "check_parts_in_backward",
    "divided",
    "open_with_gradients",
    "places_of",
    "reduce_gradients",
    "replaced",
    "scatter_gradients",
]


def open_with_gradients(
    group: Group, call: str, arrived: Sequence[Received], sent: Sequence[Payload | FailedSend]
) -> list[Any]:
    """Return the values received from all ranks, with gradients that go back to those ranks.

    `sent` has the payload for each rank. If all are one payload, the gradients of all ranks are added.
    """
    received = [one.unpack() for one in arrived]
    if any(one.followed for one in arrived) and torch.is_grad_enabled():
        places = [places_of(one) for one in arrived]
        payloads = [one for one in sent if isinstance(one, Payload)]
        same = all(one is payloads[0] for one in payloads)
        own = [places_of(payload) for payload in payloads]
        of_each = [[payload.tensors[i] for i in its] for payload, its in zip(payloads, own, strict=True)]
        sources = of_each[0] if same else [tensor for those in of_each for tensor in those]

        def send_back(grads: Sequence[Tensor]) -> Sequence[Tensor]:
            leaving = [serialize(those) for those in divided(grads, places)]
            coming = [one.open() for one in object_transport.all_to_all(group, "the backward of " + call, leaving)]
            if same:
                return [sum(those[1:], those[0]) for those in zip(*coming, strict=True)]
            return [grad for those in coming for grad in those]

        received = attach_each(sources, received, places, send_back)
    return [one.open(its) for one, its in zip(arrived, received, strict=True)]


def check_parts_in_backward(group: Group, call: str, arrived: Sequence[Received]) -> None:
    """Raise RankMismatchError on all ranks if one gets no tensor from which a backward could begin.

    One more exchange, where a gradient is required and no rank sends floating-point tensors to every rank.
    """
    if not any(one.followed for one in arrived) or not torch.is_grad_enabled() or any(one.offered for one in arrived):
        return
    has_part = any(places_of(one) for one in arrived)
    everyone = object_transport.all_gather(group, f"{call}, its backward", serialize(has_part))
    lacking = [rank for rank, one in zip(group.ranks, everyone, strict=True) if not one.open()]
    if lacking:
        raise RankMismatchError(
            f"{call}: some values require a gradient, and {name_ranks(lacking)} got no floating-point tensor, so that "
            "the others would wait for ever in the backward: detach() them"
        )


def scatter_gradients(group: Group, grads: Sequence[Sequence[Tensor]] | None, root: int) -> Sequence[Tensor]:
    """Send each rank the gradients of the values that it has sent to one. `grads` is None on the others."""
    sent = None if grads is None else [serialize(list(those)) for those in grads]
    back: Sequence[Tensor] = object_transport.scatter(group, "the backward of gather", sent, root).open()
    return back


def reduce_gradients(group: Group, root: int, grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the sums of the gradients of all ranks on one; an empty list on the others."""
    totals = [tensors.reduce(group, grad, "sum", root) for grad in grads]
    return [total for total in totals if total is not None]


def attach_each(
    sources: Sequence[Tensor], received: Sequence[Sequence[Tensor]], places: Sequence[Sequence[int]], back: SendBack
) -> list[list[Tensor]]:
    """Attach those tensors of each list that could require a gradient. `places` has their indices in it."""
    flat = [tensors[i] for tensors, its in zip(received, places, strict=True) for i in its]
    new = divided(attach(sources, flat, back), places)
    return [replaced(tensors, its, those) for tensors, its, those in zip(received, places, new, strict=True)]


def places_of(one: Payload | Received) -> list[int]:
    """Return the indices of the tensors that could require a gradient."""
    return [i for i, meta in enumerate(one.metas) if meta.follow != NOT_FOLLOWED]


def replaced(received: Sequence[Tensor], places: Sequence[int], new: Sequence[Tensor]) -> list[Tensor]:
    """Return a list of tensors with the new ones at their places."""
    result = list(received)
    for place, tensor in zip(places, new, strict=True):
        result[place] = tensor
    return result


def divided(flat: Sequence[Tensor], places: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """Divide a list into lists of the lengths of `places`."""
    parts = iter(flat)
    return [[next(parts) for _ in its] for its in places]
