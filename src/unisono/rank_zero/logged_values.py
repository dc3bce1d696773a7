"""The arguments of `trainer.log` and `RunLog.log`: the names and values that they accept, and what their event says.

Start reading at `check_values`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor

from unisono.rank_zero.image import Image
from unisono.rank_zero.image_folder import ImageFolder
from unisono.text import a_type
from unisono.watch.loop_fields import ImageFields, LoggedFields

__all__ = ["Loggable", "check_values", "read_values"]

Loggable: TypeAlias = float | Tensor | str | Image
"""A value that can be logged by a name."""

_LONGEST = 200
_LONGEST_TEXT = 10_000


def check_values(call: str, values: Mapping[str, Any], images: ImageFolder) -> None:
    """Refuse names and values that cannot be logged. Looks at types and shapes only, and so never waits for a GPU.

    Args:
        call: What the user has called, for messages.
        values: What was passed, by name.
        images: Where images go.

    Raises:
        TypeError: There is no value, or one is neither a real number, a text nor an image.
        ValueError: A name is empty, too long or not printable, a tensor or array has several elements, or there is an
            image in a run without a directory.
    """
    if not values:
        raise TypeError(f"{call} was given nothing: give it numbers by name, as {call}(temperature=0.5)")
    for name, value in values.items():
        if not name or len(name) > _LONGEST or not name.isprintable():
            raise ValueError(
                f"{call} was given the name {name[:_LONGEST]!r} of {len(name)} characters: give 1 to {_LONGEST} "
                "printable characters"
            )
        if isinstance(value, str):
            continue
        if isinstance(value, Image):
            if not images.exists:
                raise ValueError(
                    f"{call}({name}=...) is an image, and this run has no directory to keep it in: give directory=..., "
                    "such as directory='runs/first'"
                )
            continue
        size = getattr(value, "shape", None)
        if size is not None and math.prod(size) != 1:
            image = f", or unisono.Image({name}) if it is one" if len(size) in (2, 3) else ""
            raise ValueError(
                f"{call}({name}=...) is {a_type(value)} of shape {list(size)}: log one number for each "
                f"name, such as value.mean(){image}"
            )
        if _is_complex(value) or isinstance(value, bytes) or not hasattr(value, "__float__"):
            raise TypeError(
                f"{call}({name}={value!r}) is {a_type(value)}, which is no real number: log a number, a tensor "
                "with one element, a text, or a unisono.Image"
            )


def read_values(values: Mapping[str, Any], images: ImageFolder, *, step: int) -> LoggedFields | None:
    """Return what the event of values says, and write images; None if nothing is left, since no image can be written.

    Integers stay integers. Waits for a tensor on a GPU.

    Args:
        values: What was passed, by name; it has been checked.
        images: Where images go.
        step: The number of steps done.

    >>> read_values({"depth": 3, "rate": Tensor([0.5]), "found": True}, ImageFolder(None, print), step=1)
    {'values': {'depth': 3, 'rate': 0.5, 'found': 1}}
    """
    numbers: dict[str, float] = {}
    texts: dict[str, str] = {}
    written: dict[str, ImageFields] = {}
    for name, value in values.items():
        if isinstance(value, str):
            texts[name] = _shortened(value)
        elif isinstance(value, Image):
            if (image := images.write(name, value, step=step)) is not None:
                written[name] = image
        else:
            numbers[name] = _read(value)
    fields: LoggedFields = {"values": numbers}
    if texts:
        fields["texts"] = texts
    if written:
        fields["images"] = written
    return fields if numbers or len(fields) > 1 else None


def _read(value: Any) -> float:
    if hasattr(value, "item"):  # of a tensor, an array or a number of NumPy
        value = value.item()
    return int(value) if isinstance(value, int) else float(value)


def _shortened(text: str) -> str:
    """Return at most 10,000 characters, all of which have an encoding.

    >>> _shortened("a" * 10_002)[-26:]
    'aaaaa… (10,002 characters)'
    """
    told = text[:_LONGEST_TEXT].encode(errors="replace").decode()
    return told if len(text) <= _LONGEST_TEXT else f"{told}… ({len(text):,} characters)"


def _is_complex(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_complex()
    return isinstance(value, complex) or getattr(getattr(value, "dtype", None), "kind", "") in ("c", "O", "U", "S")
