"""The outputs that a function may return for some samples, and how the outputs of many shares become one tensor.

The function returns a tensor whose first dimension is the samples, or a dict or tuple of such tensors, in the same form
for all micro-batches. A `Layout` has the names, types and shapes of a row. Pure: no ranks, no files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from unisono.errors import LossError
from unisono.plan import dealt
from unisono.text import a_type

__all__ = ["Column", "Layout", "Rows", "place_rows", "read_outputs"]

_WHAT = "the function of trainer.predict"


@dataclass(frozen=True, slots=True)
class Column:
    """One tensor of the outputs, without its samples."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of one sample's output."""

    @property
    def row_nbytes(self) -> int:
        """Bytes of one sample's output."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, rows: int) -> Tensor:
        """Return memory for the outputs of some samples."""
        return torch.empty((rows, *self.shape), dtype=self.dtype, device="cpu")

    def __str__(self) -> str:
        sizes = ", ".join(["samples", *map(str, self.shape)])
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}]"


@dataclass(frozen=True, slots=True)
class Layout:
    """The form of the outputs that the function returns."""

    kind: Literal["tensor", "dict", "tuple"]
    columns: tuple[Column, ...]

    @property
    def row_nbytes(self) -> int:
        """Bytes of one sample's outputs."""
        return sum(column.row_nbytes for column in self.columns)

    def rebuild(self, tensors: Mapping[str, Tensor]) -> Any:
        """Return outputs in the form in which the function returns them."""
        if self.kind == "tensor":
            return tensors[self.columns[0].name]
        return dict(tensors) if self.kind == "dict" else tuple(tensors[column.name] for column in self.columns)

    def __str__(self) -> str:
        if self.kind == "tensor":
            return str(self.columns[0])
        if self.kind == "dict":
            return "{" + ", ".join(f"{column.name!r}: {column}" for column in self.columns) + "}"
        return f"({', '.join(map(str, self.columns))})"


Rows = dict[str, Tensor]
"""The outputs of some samples, by the names of a layout's columns."""


def read_outputs(result: Any, *, samples: int) -> tuple[Layout, Rows]:
    """Return the form of what the function returned for some samples, and copies of its tensors on the CPU.

    Args:
        result: A tensor with a row for each sample, or a dict or tuple of such tensors.
        samples: The number of samples that the function was given.

    Raises:
        LossError: The function returned something else.

    >>> layout, rows = read_outputs({"logits": torch.zeros(3, 10), "top": torch.zeros(3).long()}, samples=3)
    >>> print(layout)
    {'logits': float32[samples, 10], 'top': int64[samples]}
    """
    if isinstance(result, Tensor):
        rows = {"outputs": _read(result, samples, "")}
        return Layout("tensor", _columns(rows)), rows
    if isinstance(result, Mapping):
        for name in result:
            if not isinstance(name, str) or not name:
                raise LossError(f"{_WHAT} returned {a_type(result)} with the key {name!r}: use names as keys.")
        rows = {name: _read(value, samples, f" as its entry {name!r}") for name, value in result.items()}
        kind: Literal["dict", "tuple"] = "dict"
    elif isinstance(result, tuple):
        rows = {str(i): _read(value, samples, f" as number {i} of its tuple") for i, value in enumerate(result)}
        kind = "tuple"
    else:
        raise LossError(f"{_WHAT} returned {_describe(result)}; {_expected(result, samples)}")
    if not rows:
        raise LossError(f"{_WHAT} returned an empty {type(result).__name__}; {_expected(result, samples)}")
    return Layout(kind, _columns(rows)), rows


def place_rows(
    column: Column, parts: Sequence[Tensor], *, blocks: Sequence[range], sizes: Sequence[int], virtual_ranks: int
) -> Tensor:
    """Return the outputs of some batches in the order of their samples.

    Args:
        column: The description of the rows.
        parts: One tensor for each rank: batch by batch the rows of its virtual ranks, in their order.
        blocks: Each rank's virtual ranks.
        sizes: The samples of each batch. Virtual rank v of V has the samples v, v + V, v + 2V, … of a batch.
        virtual_ranks: V.

    >>> column = Column("outputs", torch.int64, ())
    >>> parts = torch.tensor([0, 3, 6]), torch.tensor([1, 4, 2, 5, 7, 8])
    >>> place_rows(column, parts, blocks=[range(1), range(1, 3)], sizes=[6, 3], virtual_ranks=3)
    tensor([0, 1, 2, 3, 4, 5, 6, 7, 8])
    """
    placed = column.empty(sum(sizes))
    for part, block in zip(parts, blocks, strict=True):
        start = done = 0
        for size in sizes:
            for virtual_rank in block:
                target = placed[start : start + size][dealt(virtual_rank, virtual_ranks)]
                target.copy_(part[done : done + len(target)])
                done += len(target)
            start += size
    return placed


def _columns(rows: Rows) -> tuple[Column, ...]:
    return tuple(Column(name, rows[name].dtype, tuple(rows[name].shape[1:])) for name in rows)


def _read(value: Any, samples: int, place: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise LossError(f"{_WHAT} returned {_describe(value)}{place}; {_expected(value, samples)}")
    reason = None
    if value.layout != torch.strided:
        reason = f"of layout {value.layout}: return value.to_dense()"
    elif value.is_quantized:
        reason = f"of the quantized type {value.dtype}: return value.dequantize()"
    elif value.is_nested:
        reason = "that is nested: pad it to one length, with value.to_padded_tensor(0)"
    elif value.is_meta:
        reason = "on the meta device, which has no values"
    if reason is not None:
        raise LossError(f"{_WHAT} returned a tensor{place} {reason}.")
    if value.dim() == 0 or len(value) != samples:
        raise LossError(
            f"{_WHAT} returned shape {list(value.shape)}{place} for a micro-batch of {samples} samples; the first "
            f"dimension must be the samples: [{samples}] or [{samples}, ...]. To average over samples, use "
            "trainer.evaluate."
        )
    # A copy: the function may return memory that it writes to again in the next micro-batch.
    return value.detach().to("cpu", copy=True).resolve_conj().resolve_neg().contiguous()


def _describe(value: Any) -> str:
    if type(value).__module__ == "numpy" and hasattr(value, "shape"):
        return f"a numpy array of shape {list(value.shape)}"
    if isinstance(value, list | tuple | Mapping):
        return f"{a_type(value)} of {len(value)} values"
    return "None" if value is None else a_type(value)


def _expected(value: Any, samples: int) -> str:
    if type(value).__module__ == "numpy":
        return "leave out .numpy(), and return the tensor."
    if isinstance(value, list):
        return "put them into one tensor with torch.stack, or return a tuple."
    hint = ""
    if isinstance(value, str | bytes):
        hint = " Texts are no tensors: return numbers, such as the ids of tokens, and decode them in your loop."
    elif isinstance(value, tuple | Mapping) and len(value):
        hint = " Nested values are not taken: name each tensor in one dict."
    return (
        f"return a tensor whose first dimension is the {samples} samples of the micro-batch, or a dict or tuple of "
        f"such tensors.{hint}"
    )
