"""The contents of received envelopes: failures and different calls become errors, and payloads become values.

Start reading at `read_payload`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.collectives.framing import (
    LONGEST_CALL,
    Envelope,
    FailedSend,
    Outgoing,
    to_bytes,
)
from unisono.collectives.group import Group
from unisono.collectives.serialization import (
    TensorMeta,
    copy_tensors,
    deserialize,
    read_tensor_metas,
    split_tensors,
)
from unisono.errors import PeerError, RankMismatchError
from unisono.job.current import confirm_group
from unisono.mismatch import CallDescription, describe_mismatch
from unisono.plan.alignment import WIRE_NBYTES, align_up
from unisono.text import name_ranks

__all__ = ["Received", "arrived_bytes", "check_grad_modes", "own_payload", "raise_failures", "read_payload"]


@dataclass(slots=True)
class Received:
    """A payload received from one rank."""

    body: bytes
    data: Tensor | None = None
    tensors: list[Tensor] | None = None
    """For this rank's own payload: copies of its tensors, which did not travel."""
    followed: bool = False
    """True if a tensor that the rank has sent, to any rank, requires a gradient."""
    offered: bool = False
    """True if the sender is known to have a floating-point tensor for every rank."""

    @property
    def metas(self) -> list[TensorMeta]:
        """Descriptions of the tensors."""
        return read_tensor_metas(self.body)

    def unpack(self) -> list[Tensor]:
        """Return the tensors, in the order of `metas`."""
        return split_tensors(self.data, self.metas) if self.tensors is None else self.tensors

    def open(self, tensors: Sequence[Tensor] | None = None) -> Any:
        """Return the value, with these tensors in place of those of `unpack`."""
        return deserialize(self.body, self.unpack() if tensors is None else tensors)


def raise_failures(group: Group, call: str, envelopes: dict[int, Envelope], sent: Outgoing | None) -> None:
    """Raise for this rank's failure, a different call or another's failure. `envelopes` is by number in the group."""
    if isinstance(sent, FailedSend):
        raise sent.error
    name = call.encode()[:LONGEST_CALL].decode(errors="replace")
    if any(envelope.call != name for envelope in envelopes.values()):
        calls = {group.own: name} | {group.ranks[index]: envelope.call for index, envelope in envelopes.items()}
        raise RankMismatchError(describe_mismatch({rank: CallDescription(call) for rank, call in calls.items()}))
    for index, envelope in envelopes.items():
        if envelope.failed:
            text = envelope.body.decode(errors="replace")
            raise PeerError(f"{call} was not done, for it failed on rank {group.ranks[index]}, with {text}")


def check_grad_modes(group: Group, call: str, followed: Sequence[bool], in_grad_mode: Sequence[bool]) -> None:
    """Raise RankMismatchError if a rank requires gradients that another would not pass on.

    Args:
        group: The group.
        call: The call, for the message.
        followed: For each rank, whether its tensors require a gradient.
        in_grad_mode: For each rank, whether it calls in grad mode.
    """
    if any(followed) and not all(in_grad_mode):
        asking = [rank for rank, follows in zip(group.ranks, followed, strict=True) if follows]
        without = [rank for rank, enabled in zip(group.ranks, in_grad_mode, strict=True) if not enabled]
        raise RankMismatchError(
            f"{call}: tensors of {name_ranks(asking)} require a gradient and {name_ranks(without)} called it under "
            "no_grad(), so that a backward would wait for ever: call it in the same mode everywhere, or detach() them"
        )


def own_payload(sent: Outgoing, *, followed: bool = False, offered: bool = False) -> Received:
    """Return this rank's own payload, which does not travel, or raise its failure."""
    if isinstance(sent, FailedSend):
        raise sent.error
    return Received(sent.body, tensors=copy_tensors(sent), followed=sent.followed or followed, offered=offered)


def read_payload(envelope: Envelope, rest: Tensor | None, sent: Outgoing | None, own: bool) -> Received:
    """Return the payload in an envelope and the rest after it."""
    followed = envelope.followed
    if own:
        assert sent is not None
        return own_payload(sent, followed=followed, offered=envelope.offered)
    body, start = envelope.body, 0
    if not envelope.body_here:
        assert rest is not None
        body, start = arrived_bytes(rest[: envelope.body_nbytes]), align_up(envelope.body_nbytes, WIRE_NBYTES)
    data = None
    if envelope.data_nbytes and envelope.data_here:
        data = torch.frombuffer(bytearray(envelope.data), dtype=torch.uint8)
    elif envelope.data_nbytes:
        assert rest is not None
        confirm_group()
        data = rest[start : start + envelope.data_nbytes]
    return Received(body, data, followed=followed, offered=envelope.offered)


def arrived_bytes(raw: Tensor) -> bytes:
    """Return what has come over a group, as bytes."""
    confirm_group()
    return to_bytes(raw)
