"""Files of tensors in the open safetensors format: planned before they are written, and read as a whole or in parts.

The format (https://huggingface.co/docs/safetensors): 8 bytes with the header's length, the header as JSON, the data. It
is written and read here, without the library. Its save_file needs NumPy; its serialize_file copies all data before
version 0.8, and reports a full disk without an errno; its loaders hold a file's bytes in addition to the tensors, or
map a file that may change after it was checked.

The layout of a file is a function of names, dtypes and shapes (`lay_out`), so several processes can write parts of it.
Pure: no files. Start reading at `plan_file` and `read_tensors`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from unisono.errors import CheckpointError
from unisono.state.codec import Json, decode_dtype
from unisono.state.digest import check_storable, memory, same_memory

__all__ = [
    "FileLayout",
    "FilePart",
    "StoredTensor",
    "encode_header",
    "lay_out",
    "memory_for",
    "original_types",
    "parse_header",
    "plan_file",
    "read_bytes",
    "read_tensors",
    "tied_names",
    "type_name",
]

FilePart: TypeAlias = bytes | tuple[str, Tensor]
"""A part of a file: bytes, or a tensor by name, whose memory is the part."""

# Types that every supported version of safetensors reads. Others are stored as a type of the same width, and complex
# numbers as pairs; the manifest has their types.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
# Types that only other writers use.
_READABLE = {name: dtype for dtype, name in _DTYPES.items()} | {
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_LENGTH_NBYTES = 8


class FileLayout(NamedTuple):
    """The place of each tensor in a file."""

    header: bytes
    """The beginning of the file."""
    starts: dict[str, int]
    """Position in the file of the first byte of each stored tensor, in the order of the file."""
    nbytes: int
    """The size of the file."""
    described: dict[str, Json]
    """A description for `read_tensors`."""


def lay_out(forms: Mapping[str, Tensor], aliases: Mapping[str, str], group: str) -> FileLayout:
    """Return the layout of a file. It depends on names, dtypes and shapes alone.

    Args:
        forms: A tensor of the dtype and shape of each one in the file, by name; it needs no values.
        aliases: For each name that is not stored, the stored one of the same values.
        group: What precedes a name in errors.

    Raises:
        CheckpointError: The format cannot hold a name.

    >>> lay_out({"a": torch.empty(2, device="meta"), "b": torch.empty(1, dtype=torch.float64)}, {}, "model").starts
    {'b': 152, 'a': 160}
    """
    dtypes: dict[str, str] = {}
    kept: list[tuple[int, str, Json]] = []
    for name, form in forms.items():
        if name == "__metadata__" or not _is_text(name):
            raise CheckpointError(f"{group} has a tensor named {name!r}, which safetensors cannot hold. Rename it.")
        if name in aliases:
            continue
        dtype, shape = form.dtype, [*form.shape]
        if dtype.is_complex:
            dtype, shape = dtype.to_real(), [*shape, 2]
        elif dtype not in _DTYPES:
            dtype = _CARRIERS[dtype.itemsize]
        if dtype != form.dtype:
            dtypes[name] = str(form.dtype).removeprefix("torch.")
        kept.append((-dtype.itemsize, name, {"dtype": _DTYPES[dtype], "shape": [*shape]}))
    # Wide types first, as in the library: every tensor is then aligned in the file, and can be mapped.
    kept.sort(key=lambda entry: entry[:2])
    # Tied names for other readers, where the library's save_model puts them; unisono reads those of the manifest.
    entries: dict[str, Json] = {"__metadata__": {**aliases, "format": "pt"}}
    offset = 0
    offsets: dict[str, int] = {}
    for _, name, described in kept:
        end = offset + forms[name].numel() * forms[name].element_size()
        entries[name] = {**described, "data_offsets": [offset, end]}  # type: ignore[dict-item]
        offsets[name], offset = offset, end
    header = encode_header(entries)
    return FileLayout(
        header,
        {name: len(header) + start for name, start in offsets.items()},
        len(header) + offset,
        {"names": [*forms], "aliases": {**aliases}, "dtypes": {**dtypes}},
    )


def tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return, for each name whose memory an earlier name views in the same way, that name."""
    first: dict[tuple[object, ...], str] = {}
    owners = {name: first.setdefault(same_memory(tensor), name) for name, tensor in tensors.items()}
    return {name: owner for name, owner in owners.items() if owner != name}


def plan_file(tensors: Mapping[str, Tensor], group: str) -> tuple[list[FilePart], dict[str, Json]]:
    """Return the parts of a safetensors file in order, and a description for `read_tensors`. Copies nothing.

    Names of the same memory are stored once. A part that is a tensor stands for the bytes of `digest.exact` of it.

    Raises:
        CheckpointError: A tensor cannot be stored; the message has its group and name.
    """
    for name, tensor in tensors.items():
        check_storable(tensor, f"{group}.{name}")
    layout = lay_out(tensors, tied_names(tensors), group)
    return [layout.header, *((name, tensors[name]) for name in layout.starts)], layout.described


def encode_header(header: Mapping[str, Json], *, room: int = 0) -> bytes:
    """Return a header as it stands in a file, with its length before it, padded with spaces to at least `room` bytes.

    >>> encode_header({"a": {}}, room=20)
    b'\\x10\\x00\\x00\\x00\\x00\\x00\\x00\\x00{"a":{}}        '
    """
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(room - _LENGTH_NBYTES)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_NBYTES, "little") + text


def type_name(dtype: torch.dtype) -> str | None:
    """Return the name of a type that safetensors files can hold, None for other types.

    >>> type_name(torch.bfloat16), type_name(torch.complex64)
    ('BF16', None)
    """
    return _DTYPES.get(dtype)


def read_tensors(
    read: Callable[[memoryview], None],
    nbytes: int,
    described: Mapping[str, Any] | None,
    *,
    into: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the tensors of a file by name; of one that `plan_file` planned, in the order of `plan_file`'s argument.

    They are read in sequence, each into newly allocated CPU memory. Tied names share a tensor again. The header is
    checked against the file's size before memory is allocated.

    Args:
        read: Fills a view with the next bytes of the file.
        nbytes: The size of the file.
        described: The description that `plan_file` returned with the parts. None: the file may have another writer.
        into: Memory for some of them by name, which is used if its type and shape are right.

    Raises:
        ValueError, KeyError, TypeError or AttributeError: The bytes are not such a file.
    """
    stored, notes = parse_header(read, nbytes, ordered=described is None)
    tensors: dict[str, Tensor] = {}
    for name, each in stored.items():
        tensors[name] = memory_for(name, each.shape, each.dtype, into)
        read(memory(tensors[name]))
    return original_types(tensors, notes, described)


def memory_for(name: str, shape: Sequence[int], dtype: torch.dtype, into: Mapping[str, Tensor] | None) -> Tensor:
    """Return the memory that a tensor is to be read into, if it is right for it, and otherwise new memory."""
    given = None if into is None else into.get(name)
    if given is not None and given.dtype == dtype and [*given.shape] == [*shape] and given.is_contiguous():
        return given
    return torch.empty(shape, dtype=dtype)


class StoredTensor(NamedTuple):
    """A tensor as it is stored in a file."""

    dtype: torch.dtype
    shape: list[int]
    start: int
    """Position of its first byte in the file."""


def parse_header(
    read: Callable[[memoryview], None], nbytes: int, *, ordered: bool
) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Return the tensors of a file in its order, and the notes in its header.

    Args:
        read: See `read_tensors`.
        nbytes: The size of the file.
        ordered: True to put the header's entries in the order of the data.

    Raises:
        ValueError, KeyError, TypeError or AttributeError: See `read_tensors`.
    """
    if nbytes < _LENGTH_NBYTES:
        raise ValueError(f"{nbytes} bytes are too few for a header")
    length = int.from_bytes(read_bytes(read, _LENGTH_NBYTES), "little")
    if length > nbytes - _LENGTH_NBYTES:
        raise ValueError(f"the header should have {length:,} bytes, and the file has {nbytes:,}")
    header = json.loads(read_bytes(read, length))
    entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    if ordered:
        entries.sort(key=lambda item: (item[1]["data_offsets"], item[0]))
    found: dict[str, StoredTensor] = {}
    offset = 0
    for name, entry in entries:
        start, end = entry["data_offsets"]
        if entry["dtype"] not in _READABLE:
            raise ValueError(f"{name!r} is of type {entry['dtype']}, which torch does not have")
        dtype, shape = _READABLE[entry["dtype"]], entry["shape"]
        if start != offset or end - start != math.prod(shape) * dtype.itemsize or min(shape, default=0) < 0:
            raise ValueError(f"{name!r} should have shape {shape} and lie at {start}:{end}, behind {offset}")
        found[name] = StoredTensor(dtype, shape, _LENGTH_NBYTES + length + start)
        offset = end
    if offset != nbytes - _LENGTH_NBYTES - length:
        raise ValueError(f"the tensors end at {offset:,}, and {nbytes - _LENGTH_NBYTES - length:,} bytes are there")
    return found, dict(header.get("__metadata__", {}))


def original_types(
    tensors: dict[str, Tensor], notes: Mapping[str, Any], described: Mapping[str, Any] | None
) -> dict[str, Tensor]:
    """Return stored tensors by all of their names, and with the dtypes that they had. Copies nothing.

    Args:
        tensors: The tensors as they are stored.
        notes: Those in the file's header.
        described: See `read_tensors`.
    """
    if described is None:
        # Where the library's save_model notes tied names, among other notes such as the format.
        tied = {name: owner for name, owner in notes.items() if owner in tensors and name != "format"}
        return {**{name: tensors[owner] for name, owner in tied.items()}, **tensors}
    for name, kind in described["dtypes"].items():
        stored, wanted = tensors[name], decode_dtype(kind)
        tensors[name] = torch.view_as_complex(stored) if wanted.is_complex else stored.view(wanted)
    return {name: tensors[described["aliases"].get(name, name)] for name in described["names"]}


def read_bytes(read: Callable[[memoryview], None], nbytes: int) -> bytearray:
    """Return the next bytes of a file."""
    data = bytearray(nbytes)
    read(memoryview(data))
    return data


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
