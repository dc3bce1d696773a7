"""What a forked process does to become a rank: its own place in the system, then the user's program as `__main__`.

`settle` runs right after the fork; `run_program` is called from the top level of the interpreter, so that the program
ends as any Python program does: exit handlers, threads, flushed streams. Start reading at `run_program`.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from unisono.launch.linux import set_parent_death_signal

__all__ = ["Program", "RankProcess", "run_program", "settle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """The user's program, as all ranks run it."""

    target: str
    """The path of a script or the name of a module."""
    module: bool
    """Whether the target is a module."""
    arguments: tuple[str, ...]
    """What follows in `sys.argv`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProcess:
    """What a rank needs to know about itself after the fork."""

    rank: int
    program: Program
    report: int
    """An open pipe to the fork server: one line `rank code nanoseconds` when the program fails."""


def settle(*, parent: int, stdout: int, stderr: int, environment: Mapping[str, str]) -> None:
    """Turn this copy of the fork server into a process of its own. Closes the given files after use.

    Ends the process at once if its parent is already gone.
    """
    os.setpgid(0, 0)  # a rank gets signals together with what it starts; the server does this as well
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for source, target in ((stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    # A pipe is block-buffered by default: what a rank prints would appear late, and be lost when it is killed.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(environment)
    # Python's own generator reseeds itself in a forked process; numpy's global one would be equal on all ranks.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def run_program(process: RankProcess) -> None:
    """Run the program as `__main__` and end the interpreter as Python would.

    Raises: SystemExit, always unless the program came to its end.
    """
    program = process.program
    try:
        try:
            _execute(program)
        except SystemExit as end:
            _report(process, _exit_code(end))
            raise
        except KeyboardInterrupt:
            raise
        # This is the top level of the user's program: whatever it did not catch is shown here, as Python does.
        except BaseException as error:
            _report(process, 1)
            trace = _without_frames(error.__traceback__)
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            raise SystemExit(1) from None
    except KeyboardInterrupt:
        # Also while the failure of a peer, interrupted a moment earlier, was being shown.
        raise SystemExit(128 + signal.SIGINT) from None


def _execute(program: Program) -> None:
    sys.argv = [program.target, *program.arguments]
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    code = _load_module(main, program) if program.module else _load_script(main, program)
    # Pickle, and processes that multiprocessing starts afresh, look the program up under this name.
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _load_script(main: ModuleType, program: Program) -> CodeType:
    path = str(Path(program.target).absolute())
    _search_first(str(Path(program.target).resolve().parent))
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    main.__dict__["__cached__"] = None
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


def _load_module(main: ModuleType, program: Program) -> CodeType:
    _search_first(str(Path.cwd()))
    spec = _find_module(program.target)
    if spec is None or (code := _code_of(spec)) is None:
        _refuse(
            f"unisono: no module named {program.target!r} that can be run; check the name, and that a package has a "
            "file __main__.py"
        )
    main.__file__ = spec.origin
    main.__loader__ = spec.loader
    main.__package__ = spec.parent
    main.__spec__ = spec
    main.__dict__["__cached__"] = spec.cached
    sys.argv[0] = spec.origin or program.target
    return code


def _find_module(name: str) -> ModuleSpec | None:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        # An import inside the package that fails is the user's to see.
        if error.name is None or not f"{name}.__main__".startswith(error.name):
            raise
        return None
    return spec


def _code_of(spec: ModuleSpec) -> CodeType | None:
    loader: Any = spec.loader
    code: CodeType | None = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
    return code


def _search_first(folder: str) -> None:
    # Python 3.11 and later leave the folder out under -P and PYTHONSAFEPATH.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def _refuse(message: str) -> NoReturn:
    # All ranks find the same; one of them says it.
    if os.environ["RANK"] == "0":
        print(message, file=sys.stderr)
    raise SystemExit(2)


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    return end.code & 0xFF if isinstance(end.code, int) else 1


def _report(process: RankProcess, code: int) -> None:
    """Tell the fork server now. Until the interpreter has shut down, peers that fail because of us may end first."""
    if code != 0:
        os.write(process.report, f"{process.rank} {code} {time.monotonic_ns()}\n".encode())


def _without_frames(trace: TracebackType | None) -> TracebackType | None:
    """Drop what lies between the interpreter and the user's first frame: this file's frames and the import system's."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file not in (__file__, importlib.util.__file__) and not file.startswith("<frozen importlib"):
            break
        trace = trace.tb_next
    return trace
