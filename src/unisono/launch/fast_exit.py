"""Ends a rank as Python ends a program, but without unloading torch.

The interpreter's own shutdown unloads libraries module by module and object by object. After `import torch` that takes
0.3 s of CPU time in each rank, for nothing, since the system frees everything at once. The steps that matter to the
program are done here, in Python's order: wait for threads, run exit functions, empty the program's own modules (so that
objects are finalized, `__del__` included), close files that are still open, flush C's streams. Functions that C
libraries registered with atexit(3), and destructors of their global objects, do not run. Start reading at `finish`.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from types import ModuleType
from typing import Any, NoReturn, TextIO

from unisono.launch.failure.frames import library_of

__all__ = ["FULL_EXIT_VARIABLE", "Preloaded", "finish", "prepare"]

FULL_EXIT_VARIABLE = "UNISONO_FULL_EXIT"
"""With the value 1, ranks end by the interpreter's own shutdown."""

_WRITTEN_BY_LIBRARIES = ("CPUPROFILE", "CUDA_INJECTION64_PATH", "GCOV_PREFIX", "HEAPPROFILE", "LLVM_PROFILE_FILE")
"""Variables of tools that write their results when C's exit functions run."""

_FAILED_FLUSH = 120
"""Python's exit code where standard output cannot be flushed at the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preloaded:
    """The modules that were imported before the rank was forked."""

    last: str = ""
    """The module that was imported last; empty if none was."""
    programs: tuple[str, ...] = ()
    """The modules of the program among them."""


def finish(code: int, preloaded: Preloaded) -> NoReturn:
    """End this process as Python would at the end of a program.

    Call it in the main thread, at the top level.

    Args:
        code: The exit code.
        preloaded: The result of `prepare` before the fork.

    Raises:
        SystemExit: The interpreter itself must end the process: an environment variable asks for that, or threads of
            the program still run, and only the interpreter can keep them from seeing emptied modules.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    if any(os.environ.get(name) for name in (FULL_EXIT_VARIABLE, *_WRITTEN_BY_LIBRARIES)):
        raise SystemExit(code)
    atexit._run_exitfuncs()
    if _threads_run():
        _write_files(close=False)
        raise SystemExit(code)
    for signum in (signal.SIGINT, signal.SIGTERM):  # their handlers may be in modules that are emptied below
        signal.signal(signum, signal.SIG_IGN)
    code = _flush((sys.stdout, sys.stderr)) or code
    flush_all, end = ctypes.CDLL(None).fflush, os._exit  # replacements by the program may fail once it is emptied
    _empty_modules(preloaded)
    _write_files(close=True)
    code = _flush((sys.__stdout__, sys.__stderr__)) or code
    flush_all(None)
    end(code & 0xFF)


def _threads_run() -> bool:
    """Return True if threads run Python code that is not the launcher's."""
    own = threading.main_thread().ident
    return any(
        ident != own and not _is_launchers(frame.f_code.co_filename) for ident, frame in sys._current_frames().items()
    )


def _is_launchers(file: str) -> bool:
    return file.startswith(os.path.dirname(__file__) + os.sep)  # noqa: PTH120  once per thread, at the end


def _flush(streams: Iterable[TextIO | None]) -> int:
    """Flush standard streams; return the exit code for a failure, 0 if there was none."""
    code = 0
    for stream in streams:
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError):
            code = _FAILED_FLUSH
    return code


def _empty_modules(preloaded: Preloaded) -> None:
    """Empty the program's own modules: first `__main__`, then the others, the latest import first."""
    modules = [sys.modules["__main__"], *_programs_modules(preloaded)]
    if _has_finalizers():
        # The collector finalizes the layers of a file in any order. The content of a buffer is lost if the file under
        # it is finalized first, so files of libraries are kept until they are closed from the outermost layer inwards.
        files = [file for file in _open_files() if not _is_programs(sys.modules.get(type(file).__module__))]
        # As Python does: an object that is collected together with its module still finds all names in it.
        alive = [weakref.ref(module) for module in modules]
        for name in ("__mp_main__", *(module.__name__ for module in modules)):  # the first is `__main__` again
            sys.modules.pop(name, None)
        modules.clear()
        gc.collect()
        del files
        modules = [kept for reference in alive if (kept := reference()) is not None]
    for module in modules:
        names = module.__dict__
        # Python's order: names with a leading underscore first.
        for private in (True, False):
            for name in list(names):
                if (name[:1] == "_" and name[1:2] != "_") is private and name != "__builtins__":
                    names[name] = None


def _programs_modules(preloaded: Preloaded) -> list[ModuleType]:
    """List the modules of the program besides `__main__`, the latest import first."""
    # Merely accessing a preloaded module would copy its page of memory, and there are thousands.
    names = [*takewhile(lambda name: name != preloaded.last, reversed(sys.modules)), *preloaded.programs]
    found = [sys.modules[name] for name in names if name != "__main__"]
    return [module for module in found if _is_programs(module)]


def _is_programs(module: ModuleType | None) -> bool:
    file = module.__dict__.get("__file__") if isinstance(module, ModuleType) else None
    # The `__file__` of torch.ops is not a path.
    return isinstance(file, str) and file.startswith("/") and not library_of(file)


def prepare(*, programs: bool) -> Preloaded:
    """Return the modules imported so far. Call it in the process that forks ranks.

    Also keeps ranks from running the finalizers of torch's operator libraries at exit, which would take 30 ms in each.

    Args:
        programs: True if modules of the program can be among them.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # there is no public list
        alive = finalizer.peek()
        if alive is not None and getattr(alive[1], "__module__", "") == "torch.library":
            finalizer.atexit = False
    return Preloaded(
        last=next(reversed(sys.modules)),
        programs=tuple(name for name in reversed(sys.modules) if programs and _is_programs(sys.modules[name])),
    )


def _has_finalizers() -> bool:
    """Return True if objects in cycles may have a `__del__` that matters; collecting them takes 0.1 s after torch."""
    for kind in set(map(type, gc.get_objects())):
        module = sys.modules.get(getattr(kind, "__module__", ""))
        file = getattr(module, "__file__", None)
        if hasattr(kind, "__del__") and isinstance(file, str) and library_of(file) not in _WITHOUT_NEED:
            return True
    return False


_WITHOUT_NEED = ("python", "torch", "unisono")
"""Libraries whose objects have nothing to finish, now that exit functions have run. Files are handled below."""


def _write_files(*, close: bool) -> None:
    """Flush the buffers of files, outermost layer first, and close the files if asked to."""
    layers = (io.TextIOBase, io.BufferedIOBase, io.IOBase)
    inner = (io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)
    for file in sorted(_open_files(), key=lambda file: (_first(file, layers), isinstance(file, inner))):
        with suppress(Exception):  # from a class of the program; Python is silent here, too
            if not file.closed and file.writable():
                file.close() if close else file.flush()


def _open_files() -> list[Any]:
    """List all file objects, each layer separately, except the standard streams."""
    kept = set()
    for stream in (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__):
        buffer = getattr(stream, "buffer", None)
        kept |= {id(layer) for layer in (stream, buffer, getattr(buffer, "raw", None)) if layer is not None}
    # Not `isinstance`: that asks objects for a class that they may claim to have.
    base = io.IOBase.__base__
    assert base is not None, "the class of all files is written in C"
    return [found for found in gc.get_objects() if issubclass(type(found), base) and id(found) not in kept]


def _first(file: io.IOBase, layers: tuple[type[io.IOBase], ...]) -> int:
    return next(number for number, layer in enumerate(layers) if isinstance(file, layer))
