"""Sends the state of a run, as `snapshot.capture` describes it, from one rank to the others.

Tensors are sent one at a time into their final memory, so no rank holds the state twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unisono.collectives.world import World
from unisono.state.codec import decode_dtype

__all__ = ["Groups", "broadcast_groups"]

Groups = dict[str, dict[str, Tensor]]
"""Tensors by group and name, such as "model" and "layer.weight"."""


def broadcast_groups(
    world: World, make: Callable[[], tuple[dict[str, Any], Groups]], *, source: int = 0, wanted: bool = True
) -> tuple[dict[str, Any], Groups]:
    """Return on every rank the document and the tensors that `make` returns on one rank. Every rank must call it.

    Memory: the tensors, once on each rank that wants them. Traffic: a broadcast of the document and of each tensor.

    Args:
        world: The ranks.
        make: Called on the rank `source` alone. The document must be JSON. A tensor that has several names is sent
            once.
        source: That rank.
        wanted: False on a rank that needs no tensors; it gets none.
    """
    groups: Groups = {}

    def describe() -> bytes:
        nonlocal groups
        document, groups = make()
        tables = {group: _table(tensors) for group, tensors in groups.items()}
        return json.dumps({"document": document, "tensors": tables}).encode()

    head = json.loads(world.broadcast_bytes(describe, source=source))
    is_source = world.group is None or world.rank == source
    received: Groups = {}
    for group, table in head["tensors"].items():
        own = received.setdefault(group, {})
        for name, owner, dtype, shape in table:
            if owner != name:
                if owner in own:
                    own[name] = own[owner]
                continue
            if is_source:
                tensor = groups[group][name]
                world.broadcast_tensor(tensor.detach().cpu().contiguous(), source=source)
            else:
                tensor = torch.empty(shape, dtype=decode_dtype(dtype))
                world.broadcast_tensor(tensor, source=source)
            if wanted:
                own[name] = tensor
    return head["document"], received


def _table(tensors: dict[str, Tensor]) -> list[tuple[str, str, str, list[int]]]:
    """Return the name of each tensor, the name under which it is sent, dtype and shape."""
    owners: dict[int, str] = {}
    return [
        (name, owners.setdefault(id(t), name), str(t.dtype).removeprefix("torch."), list(t.shape))
        for name, t in tensors.items()
    ]
