"""Conversion of any object to bytes and back, with its tensors beside the pickle.

A `Payload` has a body (a pickle, in which numbers stand for tensors) and the tensors themselves, which travel as bytes
on the group's device and never through pickle. `collectives.object_transport` sends it. Start reading at `serialize`
and `deserialize`.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.collectives.group import own_device
from unisono.collectives.structure import children, step_into
from unisono.errors import PeerError
from unisono.plan.alignment import WIRE_NBYTES, align_up

__all__ = ["Payload", "TensorMeta", "copy_tensors", "deserialize", "read_tensor_metas", "serialize", "split_tensors"]

NOT_FOLLOWED, FOLLOWABLE, FOLLOWED = 0, 1, 2
_LONGEST_PLACE = 200
_LENGTH = struct.Struct("<I")


class TensorMeta(NamedTuple):
    """The description of a tensor that its receiver needs before the bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    """The type of its device; a receiver puts the tensor on its own device of that type."""
    follow: int = NOT_FOLLOWED
    """`FOLLOWED` if it requires a gradient, in grad mode; `FOLLOWABLE` if it could; otherwise `NOT_FOLLOWED`."""
    strides: tuple[int, ...] | None = None
    """Its strides on the receiver; None if it is contiguous there."""

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True)
class Payload:
    """A value in the form in which it travels."""

    body: bytes
    metas: list[TensorMeta]
    tensors: list[Tensor]
    """The sender's own tensors, not copies."""

    @property
    def data_nbytes(self) -> int:
        """Bytes of all tensors, with the gaps that align them."""
        return sum(align_up(meta.nbytes, WIRE_NBYTES) for meta in self.metas)

    @property
    def accelerated(self) -> bool:
        """True if a tensor is on another device than the CPU."""
        return any(meta.device != "cpu" for meta in self.metas)

    @property
    def followed(self) -> bool:
        """True if a tensor requires a gradient."""
        return any(meta.follow == FOLLOWED for meta in self.metas)

    def data(self, device: torch.device) -> Tensor:
        """Return the bytes of all tensors in one buffer; for a single tensor, possibly its own memory."""
        flats = [bytes_of(tensor) for tensor in self.tensors]
        if len(flats) == 1 and self.data_nbytes == flats[0].numel():
            return flats[0].to(device)
        packed = torch.empty(self.data_nbytes, dtype=torch.uint8, device=device)
        start = 0
        for flat in flats:
            packed[start : start + flat.numel()].copy_(flat)
            start += align_up(flat.numel(), WIRE_NBYTES)
        return packed


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as bytes, without a copy if it is contiguous."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if dense.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=dense.device)
    # Not view(-1): the stride of a single element may be anything, and view(uint8) wants it to be 1.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def serialize(value: Any, *, strides: bool = False) -> Payload:
    """Return the payload of any object.

    Args:
        value: The object.
        strides: True if its tensors are to have the same strides on the receiver, where that is possible, and not to be
            contiguous: sums over a tensor of other strides may round differently.

    Raises:
        TypeError: A part of it cannot be pickled; the message names the part.
    """
    buffer = io.BytesIO()
    pickler = _PayloadPickler(buffer, value)
    try:
        pickler.dump(value)
    except Exception as error:  # pickling runs code of the user's classes
        raise TypeError(_why_not(value, error)) from error
    if strides:
        found = zip(pickler.metas, pickler.tensors, strict=True)
        pickler.metas = [meta._replace(strides=_strides_to_keep(tensor)) for meta, tensor in found]
    metas = pickle.dumps([tuple(meta) if meta.strides else tuple(meta)[:-1] for meta in pickler.metas], protocol=5)
    return Payload(_LENGTH.pack(len(metas)) + metas + buffer.getvalue(), pickler.metas, pickler.tensors)


def read_tensor_metas(body: bytes) -> list[TensorMeta]:
    """Read the dtypes, shapes and devices of the tensors of a payload."""
    (length,) = _LENGTH.unpack_from(body)
    return [TensorMeta(*meta) for meta in pickle.loads(body[_LENGTH.size : _LENGTH.size + length])]


def deserialize(body: bytes, tensors: Sequence[Tensor]) -> Any:
    """Return the value of a payload's body, with these tensors in it.

    Raises:
        PeerError: A class of the value cannot be imported here.
        Exception: Any error from unpickling the sender's objects.
    """
    (length,) = _LENGTH.unpack_from(body)
    try:
        return _Unpickler(io.BytesIO(body[_LENGTH.size + length :]), tensors).load()
    except (AttributeError, ImportError) as error:
        raise PeerError(
            f"a value of another rank cannot be unpickled here: {error}: define its class in a module that all ranks "
            "import"
        ) from error


def copy_tensors(payload: Payload) -> list[Tensor]:
    """Copy the tensors of a payload as a receiver on another rank would get them."""
    return [
        _with_strides(
            tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format), meta.strides
        )
        for tensor, meta in zip(payload.tensors, payload.metas, strict=True)
    ]


def split_tensors(data: Tensor | None, metas: Sequence[TensorMeta]) -> list[Tensor]:
    """Return the tensors in the bytes received, each in its own memory and on its device."""
    tensors, start = [], 0
    for each in metas:
        device = local_device(each.device)
        if each.nbytes == 0:
            tensors.append(torch.empty(each.shape, dtype=each.dtype, device=device))
            continue
        assert data is not None
        flat = data[start : start + each.nbytes]
        start += align_up(each.nbytes, WIRE_NBYTES)
        if flat.device.type != device.type:
            flat = flat.to(device)
        elif flat.numel() != flat.untyped_storage().nbytes():
            flat = flat.clone()  # a view would keep all the bytes, and torch.save would write them
        tensors.append(_with_strides(flat.view(each.dtype).view(each.shape), each.strides))
    return tensors


def _strides_to_keep(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor that a copy of it can have; None if a contiguous one has them.

    >>> _strides_to_keep(torch.ones(2, 3).T), _strides_to_keep(torch.ones(2, 1).expand(2, 3))
    ((1, 3), (1, 0))
    >>> _strides_to_keep(torch.ones(2, 3)), _strides_to_keep(torch.ones(9)[::3])
    (None, None)
    """
    if tensor.is_contiguous() or not tensor.numel():
        return None
    dims = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if stride and size > 1]
    dense, expected = True, 1
    for stride, size in sorted(dims):
        dense, expected = dense and stride == expected, stride * size
    if dense:
        return tuple(tensor.stride())
    kept = torch.empty_like(tensor, device="meta")
    return None if kept.is_contiguous() else tuple(kept.stride())


def _with_strides(tensor: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """Return a tensor of these strides with the values of a contiguous one."""
    if strides is None:
        return tensor
    once = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
    made = torch.empty_strided(once.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(once).expand(tensor.shape)


def local_device(kind: str) -> torch.device:
    """Return this rank's device of a type that another rank has; the CPU if this rank has none."""
    if kind != "cpu" and not torch.get_device_module(kind).is_available():
        kind = "cpu"
    return own_device(kind)


def _take(index: int) -> Tensor:
    raise AssertionError(f"tensor {index} of a payload was looked for outside of one")


def _take_parameter(index: int, requires_grad: bool) -> torch.nn.Parameter:
    raise AssertionError(f"parameter {index} of a payload was looked for outside of one, {requires_grad=}")


class _PayloadPickler(pickle.Pickler):
    """Pickles a value with numbers in place of tensors."""

    def __init__(self, file: io.BytesIO, value: Any) -> None:
        super().__init__(file, protocol=5)
        self._value = value
        self._in_structure: set[int] | None = None
        self.tensors: list[Tensor] = []
        self.metas: list[TensorMeta] = []

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if (kind is not Tensor and kind is not torch.nn.Parameter) or not travels_as_bytes(obj):
            return NotImplemented
        index = len(self.tensors)
        self.tensors.append(obj)
        follow = NOT_FOLLOWED
        if (obj.is_floating_point() or obj.is_complex()) and self._is_in_structure(obj):
            follow = FOLLOWED if obj.requires_grad and torch.is_grad_enabled() else FOLLOWABLE
        self.metas.append(TensorMeta(obj.dtype, tuple(obj.shape), obj.device.type, follow))
        if kind is torch.nn.Parameter and not self._is_in_structure(obj):
            return _take_parameter, (index, obj.requires_grad)  # such as a parameter of a module, which must stay one
        return _take, (index,)

    def _is_in_structure(self, tensor: Tensor) -> bool:
        """Return True if a tensor is reachable through dicts, lists, tuples and dataclasses alone."""
        if self._in_structure is None:
            self._in_structure = {id(found) for found in _tensors_in(self._value)}
        return id(tensor) in self._in_structure


class _Unpickler(pickle.Unpickler):
    """Unpickles a value with tensors in place of numbers."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == __name__:
            return {"_take": self._give, "_take_parameter": self._give_parameter}[global_name]
        return super().find_class(module_name, global_name)

    def _give(self, index: int) -> Tensor:
        return self._tensors[index]

    def _give_parameter(self, index: int, requires_grad: bool) -> torch.nn.Parameter:
        return torch.nn.Parameter(self._tensors[index], requires_grad=requires_grad)


def travels_as_bytes(tensor: Tensor) -> bool:
    """Return True if the elements describe the whole tensor. Other layouts are pickled as torch does it."""
    return tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a structure, which may contain itself."""
    found, seen, waiting = [], set(), [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Tensor):
            found.append(each)
        elif id(each) not in seen:
            seen.add(id(each))
            waiting += [child for _, child in children(each) or ()]
    return found


def _why_not(value: Any, error: Exception) -> str:
    """Return the message that names the part of a value that cannot be pickled."""
    part, where = value, "value"
    while len(where) < _LONGEST_PLACE:
        for key, child in children(part) or ():
            try:
                _PayloadPickler(io.BytesIO(), child).dump(child)
            except Exception as found:
                part, where, error = child, step_into(where, key), found
                break
        else:
            break
    kind = type(part).__qualname__
    return f"{where} is of type {kind}, which cannot be pickled ({error}): send the values in it instead"
