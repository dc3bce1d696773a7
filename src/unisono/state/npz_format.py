"""Files of arrays that numpy.load reads, written without NumPy: a zip archive with a file for each array.

The format of arrays: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html (version 1.0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import BinaryIO
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor

from unisono.state.digest import memory

__all__ = ["write_arrays"]

_TYPES = {torch.float32: "<f4", torch.float64: "<f8", torch.int32: "<i4", torch.int64: "<i8"}
_MAGIC, _ALIGNMENT, _LENGTH_NBYTES = b"\x93NUMPY\x01\x00", 64, 2


def write_arrays(
    file: BinaryIO, forms: Mapping[str, Tensor], chunks: Mapping[str, Callable[[], Iterable[Tensor]]]
) -> None:
    """Write tensors by name, uncompressed. Copies nothing.

    Args:
        file: A file that is open for writing.
        forms: Tensors of their types and shapes, which need no values: float32, float64, int32 or int64.
        chunks: By name, a function that returns the rows in order, as contiguous tensors on the CPU.
    """
    with ZipFile(file, "w", ZIP_STORED) as archive:
        for name, form in forms.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                entry.write(array_header(form))
                for chunk in chunks[name]():
                    entry.write(memory(chunk))


def array_header(tensor: Tensor) -> bytes:
    """Return what precedes the values of an array.

    >>> header = array_header(torch.zeros(2, 3))
    >>> len(header), header[10:70].rstrip()
    (128, b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }")
    """
    text = f"{{'descr': '{_TYPES[tensor.dtype]}', 'fortran_order': False, 'shape': {tuple(tensor.shape)}, }}"
    length = len(_MAGIC) + _LENGTH_NBYTES + len(text) + 1
    text += " " * (-length % _ALIGNMENT) + "\n"
    return _MAGIC + len(text).to_bytes(_LENGTH_NBYTES, "little") + text.encode("ascii")
