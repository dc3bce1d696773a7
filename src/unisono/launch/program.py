"""The user's program as the module `__main__`: found, loaded and run as `python` runs it.

A script, a compiled one (`.pyc`), a folder or an archive (`.pyz`) with a `__main__`, or a module as for `python -m`.
Start reading at `run_main`.
"""

from __future__ import annotations

import importlib.util
import stat
import sys
from collections.abc import Sequence
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from pkgutil import get_importer
from types import CodeType, ModuleType, TracebackType
from typing import Any
from zipimport import zipimporter

from unisono.errors import LaunchError

__all__ = ["NoProgramError", "read_program", "run_main", "without_frames"]


class NoProgramError(Exception):
    """Raised if there is no such program, or nothing in it that can be run."""


def run_main(target: str, arguments: Sequence[str], *, module: bool) -> None:
    """Run a program in this process, as `__main__`.

    Args:
        target: Path of a script, of a folder or archive with a `__main__`, or the name of a module.
        arguments: The arguments that the program finds in `sys.argv[1:]`.
        module: True if the target is the name of a module.

    Raises:
        NoProgramError: There is no such module, or nothing in it that can be run.
        BaseException: Any exception of the program.
    """
    sys.argv = [target, *arguments]
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    if module:
        code = _load_module(main, target)
    elif (spec := _find_inside(place := _absolute(target))) is not None:
        sys.path.insert(0, place)  # also under -P, as Python does
        code = _load(main, spec)
    else:
        code = _load_script(main, target)
    # Pickle, and processes that multiprocessing starts afresh, look the program up under the first name. In those
    # processes it has the second one; multiprocessing set that when it was imported, perhaps before the fork.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    exec(code, main.__dict__)


def _find_inside(path: str) -> ModuleSpec | None:
    """Find the `__main__` of a folder or an archive; None if the path is neither, or has none."""
    # Not the cached finder of a folder, which may hold the result of an earlier search.
    importer = FileFinder(path, *_LOADERS) if Path(path).is_dir() else get_importer(path)
    return importer.find_spec("__main__") if isinstance(importer, FileFinder | zipimporter) else None


def _absolute(target: str) -> str:
    """Make a path absolute as Python does, without any other change."""
    return target if target.startswith("/") else f"{str(Path.cwd()).rstrip('/')}/{target}"


_LOADERS = ((SourceFileLoader, [".py"]), (SourcelessFileLoader, [".pyc"]))


def read_program(path: Path) -> bytes | None:
    """Return the source that Python would run for a path.

    Args:
        path: A script, or a folder or archive with a `__main__`.

    Returns:
        The source; None if the program exists in compiled form only.

    Raises:
        LaunchError: The path exists, but cannot be run as a program of every rank.
        OSError: The path does not exist, or cannot be read.
    """
    mode = path.stat().st_mode
    if (spec := _find_inside(_absolute(str(path)))) is not None:
        loader: Any = spec.loader
        source: str | None = loader.get_source("__main__")
        return None if source is None else source.encode()
    if stat.S_ISDIR(mode):
        raise LaunchError(
            f"there is no __main__.py in the directory {str(path)!r}; name a script inside it, or a module with -m"
        )
    if not stat.S_ISREG(mode):
        raise LaunchError(f"{str(path)!r} is not a regular file, and every rank has to read it; save it as a .py file")
    if path.suffix in (".pyz", ".zip"):
        raise LaunchError(
            f"there is no __main__.py in the archive {str(path)!r}; `python -m zipapp` makes one that can be run"
        )
    if not _is_compiled(path):
        return path.read_bytes()
    header = path.read_bytes()[:4]
    if header != importlib.util.MAGIC_NUMBER:
        raise LaunchError(
            f"{str(path)!r} was compiled by another version of Python; compile it again, or name the .py file"
        )
    return None


def _is_compiled(path: Path) -> bool:
    """Return True if a file is a compiled script, by its name or by this Python's magic number at its beginning."""
    if path.suffix == ".pyc":
        return True
    with path.open("rb") as file:
        return file.read(4) == importlib.util.MAGIC_NUMBER


def without_frames(trace: TracebackType | None, *files: str) -> TracebackType | None:
    """Return a traceback without the frames before the user's first one: those of these files and of imports."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file not in (__file__, importlib.util.__file__, *files) and not file.startswith(_IMPORTS):
            break
        trace = trace.tb_next
    return trace


_IMPORTS = ("<frozen importlib", "<frozen zipimport")


def _load_script(main: ModuleType, target: str) -> CodeType:
    path = str(Path(target).absolute())
    _search_first(str(Path(target).resolve().parent))
    main.__file__ = path
    main.__dict__["__cached__"] = None
    if _is_compiled(Path(path)):
        compiled = SourcelessFileLoader("__main__", path)
        main.__loader__ = compiled
        code = compiled.get_code("__main__")
        assert code is not None, "a file always has code"
        return code
    main.__loader__ = SourceFileLoader("__main__", path)
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


def _load_module(main: ModuleType, name: str) -> CodeType:
    _search_first(str(Path.cwd()))
    spec = _find_module(name)
    if spec is None or not hasattr(spec.loader, "get_code"):
        raise NoProgramError(
            f"no module named {name!r} that can be run; check the name, and that a package has a file __main__.py"
        )
    code = _load(main, spec)
    sys.argv[0] = spec.origin or name
    return code


def _load(main: ModuleType, spec: ModuleSpec) -> CodeType:
    loader: Any = spec.loader
    code: CodeType | None = loader.get_code(spec.name)
    if code is None:
        raise NoProgramError(f"module {spec.name!r} ({spec.origin}) has no code that can be run")
    main.__file__ = spec.origin
    main.__loader__ = loader
    main.__package__ = spec.parent
    main.__spec__ = spec
    main.__dict__["__cached__"] = spec.cached
    return code


def _find_module(name: str) -> ModuleSpec | None:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        # The user must see an import that fails inside the package.
        if error.name is None or not f"{name}.__main__".startswith(error.name):
            raise
        return None
    return spec


def _search_first(folder: str) -> None:
    # Python 3.11 and later leave the folder out under -P and PYTHONSAFEPATH.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)
