"""Larger memory for dynamic tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unisono.embedding.row_map import RowMap
from unisono.embedding.row_memory import resized
from unisono.embedding.row_sums import row_gradient, rows_of
from unisono.machine import available_bytes

__all__ = ["resize"]


@torch.no_grad()
def resize(weight: Tensor, rows: RowMap, length: int, state: dict[str, Any] | None = None) -> None:
    """Give a dynamic table memory for another number of rows. What it has stays where it is; new memory is zeros.

    The old and the new memory are there together until the end.

    Args:
        weight: The table.
        rows: Its rows, of which all that are taken must be below `length`.
        length: The number of rows, below 2**31.
        state: The state of its optimizer.

    Raises:
        MemoryError: There is not enough memory. Nothing has been changed.
    """
    of_rows = {} if state is None else {k: v for k, v in state.items() if _has_rows(v, weight)}
    row_nbytes = sum(t[:1].numel() * t.element_size() for t in (weight, *of_rows.values()))
    available = available_bytes() if weight.device.type == "cpu" else None
    if available is not None and length > len(weight) and length * row_nbytes > available:
        raise MemoryError(
            f"table {rows.name!r} is full and cannot grow from {len(weight)} to {length} rows: they take "
            f"{length * row_nbytes / 1e9:.3g} GB, and {available / 1e9:.3g} GB of memory are available. Give it "
            'when_full="evict_oldest", or a machine with more memory.'
        )
    gradient, weight.grad = weight.grad, None
    weight.data = resized(weight, length)
    if gradient is not None:
        weight.grad = row_gradient(rows_of(gradient), weight.shape) if gradient.is_sparse else gradient
    rows.resize(length)
    if state is not None:
        state.update({key: resized(value, length) for key, value in of_rows.items()})


def _has_rows(value: Any, weight: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == len(weight)
