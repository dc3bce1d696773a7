"""The envelope: a message of fixed size before a value, with the value inside if it fits.

Pure: `write_envelope` makes one from a payload, or from the reason why there is none, and `read_envelope` reads it. An
envelope carries the name of the call, so that ranks that make different calls detect it.
`collectives.object_transport` sends it.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.collectives.serialization import Payload
from unisono.errors import RankMismatchError
from unisono.plan.alignment import WIRE_NBYTES, align_up

__all__ = [
    "ENVELOPE_NBYTES",
    "Envelope",
    "FailedSend",
    "Outgoing",
    "read_envelope",
    "to_bytes",
    "write_envelope",
]

ENVELOPE_NBYTES = 1024
"""Bytes of an envelope. Up to some KiB, the time does not depend on the size."""
_HEAD = struct.Struct("<HHBxxxQQQ")
_MAGIC = 0x5E11
_FLAGS = _FAILED, _ACCELERATED, _BODY_HERE, _DATA_HERE, _MORE, _FOLLOWED, _GRAD_MODE, _OFFERED = (
    1, 2, 4, 8, 16, 32, 64, 128,
)  # fmt: skip
LONGEST_CALL = 200
"""Bytes of the name of a call; a longer name is cut."""


@dataclass(frozen=True, slots=True)
class FailedSend:
    """An error in place of a payload: once the other ranks have it, this rank raises it, and they raise PeerError."""

    error: Exception


Outgoing = Payload | FailedSend


@dataclass(slots=True)
class Envelope:
    """An envelope that was read."""

    call: str
    body_nbytes: int
    data_nbytes: int
    padded: int
    """In a scatter: bytes to which all rests are padded; 0 if each is sent separately."""
    body: bytes
    """The body of the payload, or the text of a failure; empty if it follows the envelope."""
    data: bytes
    """The bytes of the tensors; empty if they follow the envelope."""
    failed: bool
    """True if the sender cannot take part."""
    accelerated: bool
    """True if a tensor that is sent is on another device than the CPU."""
    body_here: bool
    """True if the body is in the envelope."""
    data_here: bool
    """True if the bytes of the tensors are in the envelope."""
    more: bool
    """True if a value that the sender has for another rank does not fit into its envelope."""
    followed: bool
    """True if a tensor that the sender has for any rank requires a gradient."""
    in_grad_mode: bool
    """True if the sender is in grad mode."""
    offered: bool
    """True if the sender has a floating-point tensor for every rank."""

    @property
    def rest_nbytes(self) -> int:
        """Bytes that follow the envelope."""
        body = 0 if self.body_here else align_up(self.body_nbytes, WIRE_NBYTES)
        return body + (0 if self.data_here else self.data_nbytes)


def write_envelope(
    call: str,
    sent: Outgoing,
    *,
    padded: int = 0,
    accelerated: bool = False,
    more: bool = False,
    followed: bool = False,
    offered: bool = False,
) -> bytes:
    """Return the bytes of an envelope."""
    name = call.encode()[:LONGEST_CALL]
    room = ENVELOPE_NBYTES - _HEAD.size - len(name)
    flags = _ACCELERATED * accelerated | _MORE * more | _FOLLOWED * followed | _GRAD_MODE * torch.is_grad_enabled()
    flags |= _OFFERED * offered
    if isinstance(sent, FailedSend):
        text = f"{type(sent.error).__name__}: {sent.error}".encode()[:room]
        head = _HEAD.pack(_MAGIC, len(name), flags | _FAILED | _BODY_HERE | _DATA_HERE, len(text), 0, padded)
        return (head + name + text).ljust(ENVELOPE_NBYTES, b"\0")
    body, data_nbytes = sent.body, sent.data_nbytes
    flags |= _ACCELERATED * sent.accelerated | _FOLLOWED * sent.followed
    content, data = b"", b""
    if len(body) <= room:
        flags |= _BODY_HERE
        content = body
        if align_up(len(body), WIRE_NBYTES) + data_nbytes <= room and not sent.accelerated:
            flags |= _DATA_HERE
            data = to_bytes(sent.data(torch.device("cpu"))) if data_nbytes else b""
    if not data_nbytes:
        flags |= _DATA_HERE
    head = _HEAD.pack(_MAGIC, len(name), flags, len(body), data_nbytes, padded)
    return (head + name + content + data).ljust(ENVELOPE_NBYTES, b"\0")


def read_envelope(raw: bytes, call: str, rank: int) -> Envelope:
    """Read an envelope.

    Raises:
        RankMismatchError: The bytes are not an envelope.
    """
    magic, name_nbytes, flags, body_nbytes, data_nbytes, padded = _HEAD.unpack_from(raw)
    if magic != _MAGIC:
        raise RankMismatchError(
            f"{call}: the message from rank {rank} belongs to another call: make all ranks call the same collectives "
            "in the same order; `unisono run --check` finds where they diverge"
        )
    start = _HEAD.size + name_nbytes
    name = raw[_HEAD.size : start].decode(errors="replace")
    body = raw[start : start + body_nbytes] if flags & _BODY_HERE else b""
    start += len(body)
    data = raw[start : start + data_nbytes] if flags & _DATA_HERE else b""
    return Envelope(name, body_nbytes, data_nbytes, padded, body, data, *(bool(flags & bit) for bit in _FLAGS))


def to_bytes(tensor: Tensor) -> bytes:
    """Return the content of a uint8 tensor."""
    here = tensor.cpu()
    return ctypes.string_at(here.data_ptr(), here.numel()) if here.numel() else b""
