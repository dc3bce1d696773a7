"""The envelope: bytes of a fixed size that go before a value, with the value inside where it fits.

Pure: `write_envelope` makes one of a payload, or of the reason why there is none, and `read_envelope` reads it. An
envelope carries the name of the call, so that ranks which call different things find out. It is sent by
`collectives.object_transport`.
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
"""Bytes of an envelope. Up to some KiB the size does not matter for the time."""
_HEAD = struct.Struct("<HHBxxxQQQ")
_MAGIC = 0x5E11
_FLAGS = _FAILED, _ACCELERATED, _BODY_HERE, _DATA_HERE, _MORE, _FOLLOWED, _GRAD_MODE = 1, 2, 4, 8, 16, 32, 64
LONGEST_CALL = 200
"""Bytes of the name of a call; what is longer is cut."""


@dataclass(frozen=True, slots=True)
class FailedSend:
    """In place of a payload: why this rank cannot take part. It is raised on the other ranks too, then here."""

    error: Exception


Outgoing = Payload | FailedSend


@dataclass(slots=True)
class Envelope:
    """An envelope that was read."""

    call: str
    body_nbytes: int
    data_nbytes: int
    padded: int
    """In a scatter: bytes to which all rests are filled up; 0 if each comes by itself."""
    body: bytes
    """Of the payload, or the text of a failure; empty if it comes after the envelope."""
    data: bytes
    """Those of the tensors; empty if they come after the envelope."""
    failed: bool
    """True if the sender cannot take part."""
    accelerated: bool
    """True if a tensor that is sent lies on another device than the CPU."""
    body_here: bool
    """True if the body is in the envelope."""
    data_here: bool
    """True if the bytes of the tensors are in the envelope."""
    more: bool
    """True if the sender has something for any rank that does not fit into envelopes."""
    followed: bool
    """True if autograd follows a tensor that the sender has for any rank."""
    in_grad_mode: bool
    """True if the sender is in grad mode."""

    @property
    def rest_nbytes(self) -> int:
        """Bytes that come after the envelope."""
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
) -> bytes:
    """Return the bytes of an envelope."""
    name = call.encode()[:LONGEST_CALL]
    room = ENVELOPE_NBYTES - _HEAD.size - len(name)
    flags = _ACCELERATED * accelerated | _MORE * more | _FOLLOWED * followed | _GRAD_MODE * torch.is_grad_enabled()
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
    """Read an envelope. Raises: RankMismatchError if it is none."""
    magic, name_nbytes, flags, body_nbytes, data_nbytes, padded = _HEAD.unpack_from(raw)
    if magic != _MAGIC:
        raise RankMismatchError(
            f"{call}: what came from rank {rank} belongs to another call: make all ranks call the same collectives in "
            "the same order; `unisono run --check` finds where they part"
        )
    start = _HEAD.size + name_nbytes
    name = raw[_HEAD.size : start].decode(errors="replace")
    body = raw[start : start + body_nbytes] if flags & _BODY_HERE else b""
    start += len(body)
    data = raw[start : start + data_nbytes] if flags & _DATA_HERE else b""
    return Envelope(name, body_nbytes, data_nbytes, padded, body, data, *(bool(flags & bit) for bit in _FLAGS))


def to_bytes(tensor: Tensor) -> bytes:
    """Return the content of a tensor of bytes."""
    here = tensor.cpu()
    return ctypes.string_at(here.data_ptr(), here.numel()) if here.numel() else b""
