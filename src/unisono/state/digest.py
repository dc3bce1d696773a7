"""A digest that is equal for two states exactly if their bits are equal.

SHA-256 over names, types, shapes and exact bytes. Each part is preceded by its kind and its length, so two different
states never feed the same bytes. The order of a dict, the strides of a tensor and its device do not matter: only values
do. Memory is hashed in place, without NumPy and without a Python loop over elements. Start reading at `digest`.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from unisono.errors import CheckpointError
from unisono.state.row_column import RowColumn

__all__ = ["Plain", "check_storable", "copy_each", "digest", "exact", "memory", "same_memory"]

Plain = (
    Tensor
    | RowColumn
    | torch.dtype
    | str
    | bytes
    | bool
    | int
    | float
    | complex
    | None
    | list[Any]
    | tuple[Any, ...]
    | dict[Any, Any]
)


def digest(entries: Mapping[str, Plain]) -> str:
    """Return 64 hexadecimal digits that are equal for equal values and different for different ones.

    Tensors are compared by dtype, shape and bits: -0.0 is not 0.0, and a NaN equals itself; scalars by type and bits,
    so 1, 1.0 and True differ. Values may be nested in dict, list and tuple. Cost: one pass of SHA-256 over the memory
    (about 2 GB/s if the CPU has instructions for it), and one copy of each tensor that is not contiguous or not on the
    CPU. Not a collective: each rank digests its own values.

    Raises:
        TypeError: A value has another type; the message names its path.
        CheckpointError: A tensor has no plain memory.

    >>> digest({"w": torch.zeros(2), "step": 1}) == digest({"step": 1, "w": torch.zeros(4)[::2]})
    True
    >>> digest({"w": torch.zeros(2)}) == digest({"w": -torch.zeros(2)})
    False
    """
    sha = hashlib.sha256()
    _feed_dict(sha.update, dict(entries), "")
    return sha.hexdigest()


def check_storable(tensor: Tensor, name: str) -> None:
    """Refuse a tensor whose values are not plain memory; costs nothing.

    Raises:
        CheckpointError: The tensor is sparse, quantized, nested, on the meta device, or distributed over ranks.
    """
    if tensor.layout != torch.strided:
        reason = f"its layout is {tensor.layout}; store to_dense(), or its indices and values"
    elif tensor.is_quantized:
        reason = "it is quantized; store int_repr() and its scales"
    elif tensor.is_nested:
        reason = "it is nested; store its parts"
    elif hasattr(tensor, "full_tensor"):
        reason = "it is distributed over ranks; store full_tensor()"
    elif tensor.is_meta:
        reason = "it is on the meta device and has no values; give it values first"
    else:
        return
    raise CheckpointError(f"tensor {name!r} ({tensor.dtype}, shape {list(tensor.shape)}) cannot be stored: {reason}.")


def exact(tensor: Tensor, name: str) -> Tensor:
    """Return a tensor's values as plain CPU memory in logical order, without a copy if the tensor is that already.

    Raises:
        CheckpointError: `check_storable` refuses the tensor, or its memory has been freed.
    """
    check_storable(tensor, name)
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    if plain.numel() > 0 and plain.data_ptr() == 0:
        raise CheckpointError(
            f"tensor {name!r} ({type(tensor).__name__}, {tensor.dtype}, shape {list(tensor.shape)}) has no memory of "
            f"its own: it is a fake, or its storage was freed. Store it while it has values."
        )
    return plain


def same_memory(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors that view the same memory in the same way, while both are alive."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.numel() == 0:
        return (id(tensor),)
    view = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    return (str(tensor.device), *view, tensor.is_conj(), tensor.is_neg())


def copy_each(
    tensors: Mapping[str, Tensor], copies: dict[tuple[object, ...], Tensor], prefix: str = ""
) -> dict[str, Tensor]:
    """Copy tensors to contiguous CPU memory of their own, once per piece of memory, so that tied tensors stay tied.

    Args:
        tensors: The tensors by name.
        copies: The copies made before, by `same_memory`; new ones are added.
        prefix: What precedes a name in errors.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        key = same_memory(tensor)
        if key not in copies:
            plain = exact(tensor, f"{prefix}{name}")
            # `exact` returns the tensor's own memory if it is plain already.
            shared = plain.data_ptr() == tensor.data_ptr()
            copies[key] = plain.clone(memory_format=torch.contiguous_format) if shared else plain
        result[name] = copies[key]
    return result


def copied_range(tensor: Tensor, start: int, stop: int, name: str) -> Tensor:
    """Return a copy of some elements of a tensor, in the order of indices, as plain CPU memory.

    Args:
        tensor: The tensor.
        start: The first element.
        stop: The one after the last.
        name: Of the tensor, for errors.

    Raises:
        CheckpointError: See `exact`.

    >>> copied_range(torch.arange(6).reshape(2, 3).t(), 1, 4, "w")
    tensor([3, 1, 4])
    """
    check_storable(tensor, name)
    vector = (tensor if tensor.is_contiguous() else exact(tensor, name)).detach().view(-1)
    own = exact(vector[start:stop], name)
    is_shared = own.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return own.clone() if is_shared else own


def memory(tensor: Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous CPU tensor, without a copy. The view keeps the memory alive.

    >>> memory(torch.tensor([1, 258], dtype=torch.int16)).tobytes()
    b'\\x01\\x00\\x02\\x01'
    """
    # Tensor.numpy() would need NumPy, which unisono does not require, and does not support bfloat16.
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(b"")
    array = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    # from_address owns nothing, and a memoryview keeps only its array alive: without this, memory(torch.ones(3)) would
    # read freed memory.
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


_Feed = Callable[[bytes | memoryview], object]


def _part(kind: str, payload: bytes) -> bytes:
    return kind.encode() + struct.pack("<Q", len(payload)) + payload


def _scalar(value: object) -> bytes | None:
    kind = type(value)
    part: bytes | None = None
    if value is None:
        part = _part("N", b"")
    elif isinstance(value, bool):
        part = _part("B", bytes([value]))
    elif kind is int:
        part = _part("I", hex(value).encode())  # type: ignore[arg-type]
    elif kind is float:
        part = _part("F", struct.pack("<d", value))
    elif isinstance(value, complex):
        part = _part("C", struct.pack("<dd", value.real, value.imag))
    elif isinstance(value, str):
        # A name may hold a lone surrogate (a path from the file system); plain UTF-8 refuses it.
        part = _part("S", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes):
        part = _part("Y", value)
    elif isinstance(value, torch.dtype):
        part = _part("D", str(value).encode())
    return part


def _feed(feed: _Feed, value: object, path: str) -> None:
    scalar = _scalar(value)
    if scalar is not None:
        feed(scalar)
    elif isinstance(value, Tensor):
        plain = exact(value, path)
        _feed_form(feed, plain)
        feed(memory(plain))
    elif isinstance(value, RowColumn):
        _feed_form(feed, value.form)
        for chunk in value.chunks():
            feed(memory(chunk))
    elif isinstance(value, (list, tuple)):
        feed(("L" if isinstance(value, list) else "U").encode() + struct.pack("<Q", len(value)))
        for index, item in enumerate(value):
            _feed(feed, item, f"{path}.{index}")
    elif isinstance(value, dict):
        _feed_dict(feed, value, path)
    else:
        raise TypeError(
            f"{path} is a {type(value)}: a digest takes tensors, numbers, strings, bytes and dtypes, nested in dict, "
            f"list and tuple. Convert it, or leave it out."
        )


def _feed_form(feed: _Feed, form: Tensor) -> None:
    shape = ",".join(map(str, form.shape))
    feed(_part("T", f"{form.dtype};{shape}".encode()) + struct.pack("<Q", form.numel() * form.element_size()))


def _feed_dict(feed: _Feed, value: dict[Any, Any], path: str) -> None:
    keys: list[tuple[bytes, Any]] = []
    for key in value:
        parts: list[bytes | memoryview] = []
        if isinstance(key, Tensor):
            raise TypeError(f"{path} has a tensor as a key: use names or numbers as keys")
        _feed(parts.append, key, f"{path}.key {key!r}")
        keys.append((b"".join(parts), key))
    feed(b"M" + struct.pack("<Q", len(keys)))
    for token, key in sorted(keys, key=lambda pair: pair[0]):
        feed(_part("K", token))
        _feed(feed, value[key], f"{path}.{key}" if path else str(key))
