"""A rank's call in 32 bytes, which ranks compare before they read each other's data.

Ranks that call different things would otherwise wait forever, or misinterpret each other's data. A call's header
contains its number and a digest of all calls before it, so a difference that went unnoticed (in a broadcast no rank
reads the headers of all others) is found in the next call.
"""

from __future__ import annotations

import struct
import zlib

import torch

__all__ = ["COMMON_NBYTES", "HEADER_NBYTES", "CollectiveFingerprint", "FingerprintWriter", "own_number", "read_header"]

_HEADER = struct.Struct("<IIBBBxiqq")
HEADER_NBYTES = _HEADER.size
COMMON_NBYTES = HEADER_NBYTES - 8
"""Size of the part of a header that must be the same on all ranks: all but the number `own`."""

_NAMES = (
    "all_reduce", "reduce", "reduce_scatter", "sparse all_reduce", "broadcast", "gather", "scatter", "all_gather",
    "all_to_all", "barrier",
)  # fmt: skip
_OPS = ("", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
_DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
_NAME_CODES = {name: i for i, name in enumerate(_NAMES)}
_OP_CODES = {name: i for i, name in enumerate(_OPS)}
_DTYPE_CODES = {dtype: i for i, dtype in enumerate(_DTYPES)}
_OTHER_DTYPE = 255


class CollectiveFingerprint:
    """One call of a collective, as all ranks should make it.

    Args:
        name: The name of the collective.
        dtype: The dtype of the tensors that every rank passes, or None.
        numel: The number of elements that every rank passes, or 0.
        op: How values are combined, or "".
        root: The root's rank in the group, or -1.
        own: A number that may differ between ranks.
    """

    __slots__ = ("dtype", "name", "number", "numel", "op", "own", "root")

    def __init__(  # noqa: PLR0917  positional, since made for every collective
        self, name: str, dtype: torch.dtype | None, numel: int, op: str = "", root: int = -1, own: int = 0
    ) -> None:
        self.name, self.dtype, self.numel, self.op, self.root, self.own = name, dtype, numel, op, root, own
        self.number = 0
        """The number of the call in the group, from 1; 0 if it has none yet."""

    def __str__(self) -> str:
        text = self.name
        if self.op:
            text += f"({self.op})"
        if self.root >= 0:
            text += f" with root {self.root}"
        if self.dtype is not None:
            text += f" of {self.numel} {str(self.dtype).removeprefix('torch.')}"
        return f"{text} (call {self.number} of the group)" if self.number else text


class FingerprintWriter:
    """Numbers the calls of one rank and writes their headers."""

    __slots__ = ("_digest", "number")

    def __init__(self) -> None:
        self.number = 0
        self._digest = 0

    def header(self, call: CollectiveFingerprint) -> bytes:
        """Number a call and return its header."""
        self.number += 1
        call.number = self.number
        dtype = _OTHER_DTYPE if call.dtype is None else _DTYPE_CODES.get(call.dtype, _OTHER_DTYPE)
        header = _HEADER.pack(
            self.number & 0xFFFFFFFF,
            self._digest,
            _NAME_CODES[call.name],
            _OP_CODES[call.op],
            dtype,
            call.root,
            call.numel,
            call.own,
        )
        self._digest = zlib.crc32(header[:COMMON_NBYTES], self._digest)
        return header


def own_number(header: bytes) -> int:
    """Return the number `own` of a header, which may differ between ranks."""
    return int.from_bytes(header[COMMON_NBYTES:HEADER_NBYTES], "little", signed=True)


def read_header(header: bytes) -> CollectiveFingerprint:
    """Return the call that a header describes.

    >>> print(read_header(FingerprintWriter().header(CollectiveFingerprint("all_reduce", torch.float32, 10, "SUM"))))
    all_reduce(SUM) of 10 float32 (call 1 of the group)
    """
    number, _, name, op, dtype, root, numel, own = _HEADER.unpack(header[:HEADER_NBYTES])
    kind = _DTYPES[dtype] if dtype < len(_DTYPES) else None
    call = CollectiveFingerprint(_NAMES[name % len(_NAMES)], kind, numel, _OPS[op % len(_OPS)], root, own)
    call.number = number
    return call
