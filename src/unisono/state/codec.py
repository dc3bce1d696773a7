"""Conversion of values to JSON and back, exactly and without pickle; tensors are named, and stored in separate files.

JSON has no tuples, no integer keys, no infinities. Values that JSON has represent themselves; any other value is an
object with a tag: `{"~": "tuple", "items": [...]}`. Types are restored too: a tuple is a tuple, the key 0 is an int,
-0.0 keeps its sign. Nothing in a document can name code: decoding makes the types listed here and no others.
`safetensors_format` stores the tensors. Pure: no files, no clock. Start reading at `encode`.
"""

from __future__ import annotations

import base64
import json
import math
import pathlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from unisono.errors import CheckpointError, CorruptCheckpointError
from unisono.text import a_type

__all__ = ["Json", "decode", "decode_dtype", "encode", "to_json"]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_TAG = "~"
# Levels of nesting: above any real state and below Python's own limit, so that a cycle is an error and not a crash.
_MAX_DEPTH = 60
# Other readers of JSON store numbers as float64. Greater integers are tagged and in hexadecimal, which also avoids
# Python's limit of 4,300 decimal digits.
_EXACT_IN_ALL_READERS = 2**53

_PATHS: dict[str, Callable[[str], pathlib.PurePath]] = {
    "Path": pathlib.Path,
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}


def encode(value: object) -> tuple[Json, dict[str, Tensor]]:
    """Split a nested value into a JSON document and the tensors in it.

    Accepts dict, OrderedDict, Counter, list, tuple, set, frozenset, str, int, float, bool, None, bytes, complex,
    torch.dtype, torch.device, torch.Size, pathlib paths, tensors, and scalars of NumPy, which become plain numbers.
    Subclasses of these are refused: their type would be lost. Tensors are detached, not copied; their names are their
    paths ("param_groups.0.lr"), made unique by a suffix if two paths have the same text.

    Raises:
        CheckpointError: A value has another type, a tensor is a key or an element of a set, or the nesting is too deep;
            the message names the path.

    >>> encode({"betas": (0.9, 0.999), "step": 3})
    ({'betas': {'~': 'tuple', 'items': [0.9, 0.999]}, 'step': 3}, {})
    """
    tensors: dict[str, Tensor] = {}
    return _encode(value, (), tensors), tensors


def to_json(document: Json) -> bytes:
    """Return a document as JSON text that reads back equal.

    Raises:
        TypeError: It would not: the document has types that JSON lacks, tuples, keys that are not strings, infinities.
    """
    try:
        text = json.dumps(document, indent=1, allow_nan=False)
        same = json.loads(text) == document
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"the document is not JSON: {error}. Pass it through encode.") from error
    if not same:
        # json.dumps silently turns tuples into lists, and other keys into strings.
        raise TypeError(
            "the document would not come back equal: it holds tuples, or keys that are not strings. Pass it through "
            "encode."
        )
    return text.encode() + b"\n"


def decode(document: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `encode` split. Its tensors are those of `tensors`, without a copy.

    Raises:
        CorruptCheckpointError: `encode` does not make such a document; the message names the path.

    >>> decode(*encode([{0: float("-inf")}, {1, 2}, b"ab"]))
    [{0: -inf}, {1, 2}, b'ab']
    """
    return _decode(document, (), tensors)


def _name(path: tuple[object, ...]) -> str:
    return ".".join(str(part) for part in path) or "value"


def _encode(value: object, path: tuple[object, ...], tensors: dict[str, Tensor]) -> Json:
    if len(path) > _MAX_DEPTH:
        raise CheckpointError(
            f"{_name(path[:6])}… is nested more than {_MAX_DEPTH} levels deep: it may contain itself. Store "
            f"flat values."
        )
    # By exact type: a subclass (Enum, namedtuple, TorchVersion) would come back as another type.
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value  # type: ignore[return-value]
    if isinstance(value, Tensor):
        return _encode_tensor(value, path, tensors)
    if kind in _ENCODERS:
        return _ENCODERS[kind](value, path, tensors)
    if isinstance(value, pathlib.PurePath):
        plain = "Path" if isinstance(value, pathlib.Path) else kind.__name__
        if plain in _PATHS:
            return {_TAG: "path", "kind": plain, "path": str(value)}
    # NumPy's scalars, without importing NumPy: float64 is a subclass of float, so exact types are tested first.
    item = getattr(value, "item", None)
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == () and callable(item):
        plain_value = item()
        if type(plain_value) in (bool, int, float, complex, str, bytes):
            return _encode(plain_value, path, tensors)
    raise CheckpointError(f"{_name(path)} is a {kind}, which a checkpoint cannot hold. {_remedy(value)}")


def _remedy(value: object) -> str:
    if callable(getattr(value, "state_dict", None)):
        return "Put its state_dict() here instead of the object."
    if callable(value):
        return "Code is never stored: leave it out, or give its owner a state_dict() that skips it."
    if isinstance(value, (str, int, float, dict, list, tuple)):
        base = next(base for base in (str, int, float, dict, list, tuple) if isinstance(value, base))
        return f"Convert it with {base.__name__}(...)."
    if callable(getattr(value, "tolist", None)):
        return "Convert it with torch.as_tensor(...) or .tolist()."
    return "Convert it to numbers, strings, tensors, or lists and dicts of them."


def _encode_tensor(value: Tensor, path: tuple[object, ...], tensors: dict[str, Tensor]) -> Json:
    name = _name(path)
    suffix = 2
    while name in tensors:  # {"a.b": t, "a": {"b": t}}
        name = f"{_name(path)}~{suffix}"
        suffix += 1
    tensors[name] = value.detach()
    return {_TAG: "tensor", "name": name}


def _encode_float(value: float) -> Json:
    if not math.isfinite(value):  # JSON has no such numbers, and a NaN has a sign and a payload
        return {_TAG: "float", "bits": struct.pack(">d", value).hex(), "reads": repr(value)}
    return value


def _encode_int(value: int) -> Json:
    return value if abs(value) <= _EXACT_IN_ALL_READERS else {_TAG: "int", "hex": hex(value)}


def _encode_items(values: Iterable[object], path: tuple[object, ...], tensors: dict[str, Tensor]) -> list[Json]:
    return [_encode(value, (*path, index), tensors) for index, value in enumerate(values)]


def _encode_key(value: object, path: tuple[object, ...]) -> Json:
    """Encode a dict's key or a set's element: hashable values only, and no tensors, which hash by identity."""
    found: dict[str, Tensor] = {}
    document = _encode(value, path, found)
    if found:
        raise CheckpointError(
            f"{_name(path)} has a tensor as a key or as an element of a set. Tensors hash by identity, which a "
            f"checkpoint cannot keep: use names or numbers as keys, and a list in place of the set."
        )
    return document


def _encode_dict(value: dict[Any, Any], path: tuple[object, ...], tensors: dict[str, Tensor]) -> Json:
    if all(type(key) is str for key in value) and _TAG not in value:
        return {key: _encode(item, (*path, key), tensors) for key, item in value.items()}
    return {_TAG: "dict", "items": _encode_pairs(value, path, tensors)}


def _encode_pairs(value: dict[Any, Any], path: tuple[object, ...], tensors: dict[str, Tensor]) -> list[Json]:
    return [
        [_encode_key(key, (*path, f"key {index}")), _encode(item, (*path, key), tensors)]
        for index, (key, item) in enumerate(value.items())
    ]


def _encode_set(tag: str, value: Iterable[object], path: tuple[object, ...]) -> Json:
    # The order of a set of strings differs between processes; sorted, equal states give equal files.
    elements = [_encode_key(element, (*path, "element")) for element in value]
    return {_TAG: tag, "items": sorted(elements, key=repr)}


_ENCODERS: dict[type, Callable[[Any, tuple[object, ...], dict[str, Tensor]], Json]] = {
    int: lambda value, path, tensors: _encode_int(value),
    float: lambda value, path, tensors: _encode_float(value),
    complex: lambda value, path, tensors: {
        _TAG: "complex",
        "parts": [_encode_float(value.real), _encode_float(value.imag)],
    },
    bytes: lambda value, path, tensors: {_TAG: "bytes", "base64": base64.b64encode(value).decode()},
    list: _encode_items,
    tuple: lambda value, path, tensors: {_TAG: "tuple", "items": _encode_items(value, path, tensors)},
    dict: _encode_dict,
    OrderedDict: lambda value, path, tensors: {_TAG: "OrderedDict", "items": _encode_pairs(value, path, tensors)},
    # MultiStepLR.state_dict() has its milestones in a Counter.
    Counter: lambda value, path, tensors: {_TAG: "Counter", "items": _encode_pairs(value, path, tensors)},
    set: lambda value, path, tensors: _encode_set("set", value, path),
    frozenset: lambda value, path, tensors: _encode_set("frozenset", value, path),
    torch.Size: lambda value, path, tensors: {_TAG: "size", "items": list(value)},
    torch.dtype: lambda value, path, tensors: {_TAG: "dtype", "name": str(value).removeprefix("torch.")},
    torch.device: lambda value, path, tensors: {_TAG: "device", "name": str(value)},
}


def _decode(document: Json, path: tuple[object, ...], tensors: Mapping[str, Tensor]) -> Any:
    if len(path) > 3 * _MAX_DEPTH:
        raise CorruptCheckpointError(f"{_name(path[:6])}… of the stored state is nested more than {_MAX_DEPTH} levels.")
    if isinstance(document, list):
        return [_decode(item, (*path, index), tensors) for index, item in enumerate(document)]
    if not isinstance(document, dict):
        return document
    if _TAG not in document:
        return {key: _decode(item, (*path, key), tensors) for key, item in document.items()}
    tag = document[_TAG]
    decoder = _DECODERS.get(tag) if isinstance(tag, str) else None
    if decoder is None:
        raise CorruptCheckpointError(
            f"{_name(path)} of the stored state has the tag {tag!r}, and this unisono knows {sorted(_DECODERS)}. The "
            f"checkpoint is damaged or comes from a newer unisono: take an older checkpoint, or upgrade."
        )
    try:
        return decoder(document, path, tensors)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, struct.error) as error:
        raise CorruptCheckpointError(
            f"{_name(path)} of the stored state is not a valid {tag!r}: {type(error).__name__}: {error}. The "
            f"checkpoint is damaged: take an older one."
        ) from error


def _items(document: dict[str, Any], path: tuple[object, ...], tensors: Mapping[str, Tensor]) -> list[Any]:
    if not isinstance(document["items"], list):
        raise TypeError(f"items is {a_type(document['items'])}, not a list")
    return [_decode(item, (*path, index), tensors) for index, item in enumerate(document["items"])]


def _pairs(document: dict[str, Any], path: tuple[object, ...], tensors: Mapping[str, Tensor]) -> list[tuple[Any, Any]]:
    return [(key, value) for key, value in _items(document, path, tensors)]


def _decode_tensor(document: dict[str, Any], path: tuple[object, ...], tensors: Mapping[str, Tensor]) -> Tensor:
    name = document["name"]
    if name not in tensors:
        raise KeyError(f"no tensor {name!r} among the {len(tensors)} stored")
    return tensors[name]


def _decode_float(bits: str) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    return float(value)


def _decode_complex(document: dict[str, Any]) -> complex:
    real, imag = (_decode(part, (), {}) for part in document["parts"])
    return complex(real, imag)


def decode_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name such as "float32"."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is not a dtype")
    return dtype


_DECODERS: dict[str, Callable[[Any, tuple[object, ...], Mapping[str, Tensor]], Any]] = {
    "int": lambda document, path, tensors: int(document["hex"], 16),
    "float": lambda document, path, tensors: _decode_float(document["bits"]),
    "complex": lambda document, path, tensors: _decode_complex(document),
    "bytes": lambda document, path, tensors: base64.b64decode(document["base64"], validate=True),
    "tuple": lambda document, path, tensors: tuple(_items(document, path, tensors)),
    "dict": lambda document, path, tensors: dict(_pairs(document, path, tensors)),
    "OrderedDict": lambda document, path, tensors: OrderedDict(_pairs(document, path, tensors)),
    "Counter": lambda document, path, tensors: Counter(dict(_pairs(document, path, tensors))),
    "set": lambda document, path, tensors: set(_items(document, path, tensors)),
    "frozenset": lambda document, path, tensors: frozenset(_items(document, path, tensors)),
    "size": lambda document, path, tensors: torch.Size(document["items"]),
    "dtype": lambda document, path, tensors: decode_dtype(document["name"]),
    "device": lambda document, path, tensors: torch.device(document["name"]),
    "path": lambda document, path, tensors: _PATHS[document["kind"]](document["path"]),
    "tensor": _decode_tensor,
}
