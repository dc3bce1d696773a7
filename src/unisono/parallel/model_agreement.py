"""Checks that all ranks have the same model and arguments, and makes their values the same at the beginning.

A difference in structure is an error: ranks with different models would add up unrelated numbers. Values are taken from
the first rank, since most programs do not seed the initialisation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.errors import RankMismatchError
from unisono.mismatch import by_value
from unisono.parallel.gradient_transport import GradientTransport
from unisono.plan.bucketing import Item, group_by_size
from unisono.state.digest import digest

__all__ = ["broadcast_values", "check_given", "check_same_model", "check_same_values"]

_TOGETHER_NBYTES = 25 * 1024 * 1024
"""The size of a message in bytes; smaller tensors travel together up to it."""


def check_given(everyone: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> None:
    """Compare the arguments that ranks gave, each by name.

    Raises:
        RankMismatchError: An argument differs; the message has the first one.
    """
    for what in everyone[0]:
        values = {rank: f"{what}={given[what]!r}" for rank, given in zip(ranks, everyone, strict=True)}
        if len({*values.values()}) > 1:
            raise RankMismatchError(
                f"replicate() got other arguments on some ranks: {by_value(values)}. Give all ranks the same"
            )


def check_same_model(tensors: Mapping[str, Tensor], gradient_transport: GradientTransport) -> None:
    """Check that the tensors have the same names, order, shapes and types on all ranks. Every rank must call it.

    Raises:
        RankMismatchError: The models differ; the message has the first difference. Raised on all ranks.
    """
    own = [(name, f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}") for name, t in tensors.items()]
    everyone = gradient_transport.gather(own, "replicate() comparing models")
    for rank, found in enumerate(everyone):
        if found != everyone[0]:
            raise RankMismatchError(
                f"the model of rank {rank} differs from that of rank 0: {_first_difference(everyone[0], found, rank)}. "
                "Build the same model on every rank, before replicate()"
            )


def check_same_values(tensors: Mapping[str, Tensor], gradient_transport: GradientTransport) -> None:
    """Check that the tensors have the same bits on all ranks. Every rank must call it.

    Raises:
        RankMismatchError: Tensors differ; the message has their names. Raised on all ranks.
    """
    own = {name: digest({name: tensor}) for name, tensor in tensors.items()}
    everyone = gradient_transport.gather(own, "replicas.check()")
    for rank, found in enumerate(everyone):
        differing = [name for name in everyone[0] if found.get(name) != everyone[0][name]]
        if differing:
            named = ", ".join(repr(name) for name in differing[:4]) + (", ..." if len(differing) > 4 else "")
            raise RankMismatchError(
                f"{len(differing)} of {len(own)} tensors of rank {rank} differ from those of rank 0: {named}. "
                "Something changed them on one rank only, such as an optimizer step without a reduced gradient"
            )


def broadcast_values(tensors: Iterable[Tensor], gradient_transport: GradientTransport, source: int = 0) -> None:
    """Set the tensors on all ranks to the values of one rank, in few messages. Every rank must call it."""
    chosen = [tensor for tensor in tensors if tensor.numel()]
    items = [Item(tensor.nbytes, tensor.device) for tensor in chosen]
    for bucket in group_by_size(items, limit_nbytes=_TOGETHER_NBYTES):
        together = [chosen[i] for i in bucket]
        # As bytes, so that a message may hold any types; a broadcast does no arithmetic.
        plain = [t.detach().contiguous().view(-1) for t in together]
        message = torch.cat([p.view(torch.uint8) for p in plain]) if len(plain) > 1 else plain[0].view(torch.uint8)
        gradient_transport.broadcast(message, source)
        if gradient_transport.rank == source:
            continue
        with torch.no_grad():
            parts = torch.split(message, [p.numel() * p.itemsize for p in plain])
            for tensor, part in zip(together, parts, strict=True):
                # A part may begin at any byte; its copy is aligned as its type requires.
                value = part.clone() if len(plain) > 1 else part
                tensor.copy_(value.view(tensor.dtype).view(tensor.shape))


def _first_difference(zero: Sequence[tuple[str, str]], other: Sequence[tuple[str, str]], rank: int) -> str:
    """Return a description of the first difference between two lists of names and types.

    >>> _first_difference([("a", "float32 [2]")], [("a", "float32 [3]")], 1)
    "'a' is float32 [2] on rank 0 and float32 [3] on rank 1"
    >>> _first_difference([("a", "float32 [2]")], [], 1)
    "rank 0 has 'a' (1 in all), which rank 1 has not (0 in all)"
    """
    for (name, kind), (their_name, their_kind) in zip(zero, other, strict=False):
        if name != their_name:
            return f"rank 0 has {name!r} where rank {rank} has {their_name!r}"
        if kind != their_kind:
            return f"{name!r} is {kind} on rank 0 and {their_kind} on rank {rank}"
    more, fewer, a, b = (zero, other, 0, rank) if len(zero) > len(other) else (other, zero, rank, 0)
    return f"rank {a} has {more[len(fewer)][0]!r} ({len(more)} in all), which rank {b} has not ({len(fewer)} in all)"
