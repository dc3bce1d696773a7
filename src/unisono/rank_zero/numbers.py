"""Numbers that users pass to be shown or logged."""

from __future__ import annotations

from torch import Tensor

__all__ = ["read_number"]


def read_number(name: str, value: object) -> float:
    """Return a number as a float: also a tensor with one element, for which a GPU is waited for.

    Raises:
        TypeError: It is no number.
    """
    if isinstance(value, Tensor):
        value = value.detach()  # otherwise torch warns of a loss that still requires a gradient
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}={value!r} cannot be shown: give a number, or a tensor with one element") from None
