"""Frees a thread that waits for a message of gloo which will never end.

A connection of gloo that breaks ends the operations that wait for their turn on it, but not a message that is partly
sent or received: `Work.wait` then waits for ever, in C++ (`Pair::signalException` in gloo/transport/tcp/pair.cc, up to
torch 2.13 at least). c10d has functions that end such a wait, `SendWork::abort` and `RecvWork::abort`, and no binding
of them for Python. So they are called as the C++ functions that they are, on an object of which it is certain that it
is of that class: its table of virtual functions says so. Start reading at `abort_message`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["abort_message"]

_CLASSES = ("SendWork", "RecvWork")
_VALUE_OFFSET = object.__basicsize__
"""Where pybind11 keeps the address of a C++ object in the Python object that stands for it."""
_TABLE_OFFSET = 2 * ctypes.sizeof(ctypes.c_void_p)
"""Where the functions begin in a table of the Itanium C++ ABI."""


def abort_message(work: dist.Work) -> bool:
    """Let a thread that waits for a message of gloo go on: `Work.wait` returns False there. Any thread may call it.

    If no thread waits, the next wait for the message returns at once.

    Returns:
        False if this is no such message, or this build of torch does not have the function.
    """
    address = ctypes.c_void_p.from_address(id(work) + _VALUE_OFFSET).value
    if not address:
        return False
    abort = _functions().get(ctypes.c_void_p.from_address(address).value or 0)
    if abort is None:
        return False
    abort(address)
    return True


@cache
def _functions() -> dict[int, Any]:
    """Return the function for each class, by the address that its objects begin with."""
    found = {}
    for name in _CLASSES:
        of_class = f"N4c10d16ProcessGroupGloo{len(name)}{name}"
        try:
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
            table = ctypes.c_char.in_dll(library, f"_ZTV{of_class}E")
            abort = library[f"_Z{of_class}5abortEv"]
        except (OSError, ValueError, AttributeError):  # no such library, table, or function
            continue
        abort.argtypes, abort.restype = [ctypes.c_void_p], None
        found[ctypes.addressof(table) + _TABLE_OFFSET] = abort
    return found
