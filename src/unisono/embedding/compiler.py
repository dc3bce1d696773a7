"""Machine code from the text of functions, by LLVM, if the package llvmlite is there."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

__all__ = ["CompiledFunction", "has_compiler"]

_LEAST = (0, 45)
"""The first version whose LLVM has one type of pointers."""


@cache
def _llvm() -> Any:
    """Return the module llvmlite.binding, ready to compile for this machine; None if it is not there."""
    try:
        import llvmlite  # noqa: PLC0415  not before a table is updated: it takes 0.1 s
        from llvmlite import binding  # noqa: PLC0415
    except ImportError:
        return None
    if tuple(int(part) for part in llvmlite.__version__.split(".")[:2]) < _LEAST:
        return None
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding


@cache
def has_compiler() -> bool:
    """Return True if functions can be compiled. The first call imports llvmlite."""
    return _llvm() is not None


class CompiledFunction:
    """A function of integers and addresses, that returns an integer. A call lets other threads run.

    Args:
        name: The name of the function in the text.
        text: A module of LLVM.
        arguments: The number of arguments, of 64 bits each.
    """

    def __init__(self, name: str, text: str, *, arguments: int) -> None:
        llvm = _llvm()
        target = llvm.Target.from_default_triple()
        # Vectors are in the text already, and there is nothing left for passes over it.
        machine = target.create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True
        )
        module = llvm.parse_assembly(text)
        module.verify()
        self._engine = llvm.create_mcjit_compiler(module, machine)  # the code lives as long as this
        self._engine.finalize_object()
        kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * arguments)
        self.call = kind(self._engine.get_function_address(name))
        """The function."""
