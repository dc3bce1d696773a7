"""The function call that `unisono.spawn` sends to its ranks, and their reports: both ends of each.

A call is a file in memory: its preparation (search path, arguments and so on, as `multiprocessing` passes them), then
the function and its arguments. Names of a script are found by importing the script again, as under `multiprocessing`.
Functions and classes of a notebook or a prompt cannot be imported, so they are sent by value. Start reading at `pack`
and `unpack`.
"""

from __future__ import annotations

import io
import json
import linecache
import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import context, process, resource_tracker, spawn
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

__all__ = ["FunctionCall", "PackedCall", "RankReport", "append_report", "pack", "read_reports", "unpack"]


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function and the arguments with which every rank calls it, after its rank."""

    function: Callable[..., object]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class PackedCall:
    """A call as bytes, and the open files that the process that unpacks it must have under the same numbers."""

    data: bytes
    files: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """A rank's report to its caller: that it has started, or the exception it raised."""

    rank: int
    pid: int
    traceback: str | None = None
    """The text of the traceback, if the function raised."""


def pack(call: FunctionCall) -> PackedCall:
    """Turn a call into bytes. Tensors on the CPU go into shared memory, as with `torch.multiprocessing`.

    Raises:
        RuntimeError: This process is a rank that is importing the script again.
        Exception: An object cannot be sent; the exception is pickle's.
    """
    main = sys.modules["__main__"]
    importable = _is_importable(main)
    preparation = spawn.get_preparation_data("SpawnProcess")
    if not importable:
        for name in ("init_main_from_name", "init_main_from_path"):
            preparation.pop(name, None)
    body, files = io.BytesIO(), _Files()
    standing_in: Any = files
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:  # it removes shared memory when all its users have ended, and ranks are users
        preparation["tracker"] = files.duplicate_for_child(tracker._fd)
    pickler = _CallPickler(body, main=main, importable=importable)
    context.set_spawning_popen(standing_in)
    try:
        head = pickle.dumps(preparation)
        pickler.dump((call.function, call.arguments))
        # With the same pickler, so that these are the very objects of the call, not copies.
        pickler.dump((pickler.defined, pickler.lines))
    finally:
        context.set_spawning_popen(None)
    return PackedCall(len(head).to_bytes(8, "big") + head + body.getvalue(), tuple(files.numbers))


def unpack(data: bytes) -> FunctionCall:
    """Prepare this process as the caller's was, and return the call. Changes the search path and `__main__`."""
    stream = io.BytesIO(data)
    head = stream.read(int.from_bytes(stream.read(8), "big"))
    with _importing_main():
        preparation = pickle.loads(head)
        if not any(name.startswith("init_main") for name in preparation):
            sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
        if "tracker" in preparation:
            resource_tracker._resource_tracker._fd = preparation["tracker"]  # type: ignore[attr-defined]
        spawn.prepare(preparation)
        unpickler = pickle.Unpickler(stream)
        function, arguments = unpickler.load()
        defined, lines = unpickler.load()
    # Objects that a rank pickles, and those sent to it by name, are looked up in `__main__`.
    vars(sys.modules["__main__"]).update(defined)
    for file, text in lines.items():  # for tracebacks; without a time, the cache does not look for the file
        linecache.cache.setdefault(file, (sum(map(len, text)), None, text, file))
    return FunctionCall(function, arguments)


def append_report(file: int, report: RankReport) -> None:
    """Append a report to a file that all ranks have open for appending; one write, so that reports stay whole."""
    os.write(file, json.dumps(asdict(report)).encode() + b"\n")


def read_reports(file: int) -> list[RankReport]:
    """Return the reports so far, in the order of their arrival, without one that is still being written."""
    data = os.pread(file, os.fstat(file).st_size, 0)
    return [RankReport(**json.loads(line)) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]


class _CallPickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles importable objects by name and others by value; records the objects of `__main__` sent by value."""

    def __init__(self, file: io.BytesIO, *, main: ModuleType, importable: bool) -> None:
        # Torch and multiprocessing add to the first table: tensors, connections. Pickle reads the attribute only once.
        shared = ForkingPickler(io.BytesIO()).dispatch_table
        self.dispatch_table = ChainMap(shared, *cloudpickle.Pickler.dispatch_table.maps)
        super().__init__(file)
        self._main, self._importable = main, importable
        self.defined: dict[str, object] = {}
        """Functions and classes of `__main__` that are sent by value."""
        self.lines: dict[str, list[str]] = {}
        """By name of a file that does not exist, as in a notebook, the source of the functions in it."""

    def reducer_override(self, value: Any) -> Any:
        """Decide how an object is sent. Called by pickle for all but basic types."""
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
            top_level = getattr(self._main, value.__qualname__, None) is value
            if self._importable and _find(self._main, value.__qualname__) is value:
                return NotImplemented
            if top_level:
                self.defined[value.__qualname__] = value
        if isinstance(value, FunctionType):
            file = value.__code__.co_filename
            if file not in self.lines and not Path(file).exists() and (lines := linecache.getlines(file)):
                self.lines[file] = lines
        return super().reducer_override(value)


class _InheritedFile:
    """An open file that has the same number in the process that unpickles it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        """Return the number. Called when multiprocessing and torch rebuild objects."""
        return self._number


class _Files:
    """Stands in for the process being started while multiprocessing and torch pickle objects that hold open files."""

    DupFd = _InheritedFile

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def duplicate_for_child(self, number: int) -> int:
        """Record a file and return its number in the other process, which is the same."""
        self.numbers.append(number)
        return number


@contextmanager
def _importing_main() -> Iterator[None]:
    """Mark this process as multiprocessing does, so that a script without a guard gets an error and not a fork bomb."""
    current: Any = process.current_process()
    current._inheriting = True
    try:
        yield
    finally:
        del current._inheriting


def _is_importable(main: ModuleType) -> bool:
    """Return True if `__main__` can be imported again: it is a script or module, and there is no prompt."""
    if hasattr(sys, "ps1"):
        return False
    file = getattr(main, "__file__", None)
    return main.__spec__ is not None or (file is not None and file.endswith(".py") and Path(file).is_file())


def _find(module: ModuleType, qualname: str) -> object:
    found: object = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found
