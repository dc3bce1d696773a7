"""What a job is: the script, its arguments and how many ranks run it.

Start reading at `Job`. `check_target` finds what would fail on every rank before any process is started.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import LaunchError

__all__ = ["Job", "check_target"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One program run by several ranks on this machine."""

    target: str
    """The path of a script or, with `module`, the name of a module."""
    arguments: tuple[str, ...] = ()
    """What the program finds in `sys.argv[1:]`."""
    module: bool = False
    """Whether the target is a module, as for `python -m`."""
    ranks: int = 1
    """How many processes run the program."""
    preload: tuple[str, ...] = ()
    """Modules to import once, before ranks are forked. They must start no thread and touch no GPU."""
    shutdown_timeout_s: float = 5.0
    """Seconds between asking a rank to end and killing it: time to save, for ranks that handle the signal."""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks={self.ranks}: a job has at least one rank")
        if not (math.isfinite(self.shutdown_timeout_s) and self.shutdown_timeout_s >= 0):
            raise ValueError(
                f"shutdown_timeout_s={self.shutdown_timeout_s} must be a finite number of seconds, 0 or more"
            )


def check_target(job: Job) -> None:
    """Raise what would stop the program on every rank, so that it is said once.

    A submodule is not looked for: that would run code of its package in this process.
    Raises: LaunchError if there is no such script or module, SyntaxError if Python cannot compile the script.
    """
    if job.module:
        _check_module(job.target)
    else:
        _check_script(Path(job.target))


def _check_script(script: Path) -> None:
    if script.is_dir():
        inside = script / "__main__.py"
        remedy = f"run {str(inside)!r}" if inside.is_file() else "name a script inside it"
        raise LaunchError(f"{str(script)!r} is a directory, not a script; {remedy}, or a module with -m")
    if not script.exists():
        raise LaunchError(f"no such file: {str(script)!r} (in {str(Path.cwd())!r}); {_suggestion(script)}")
    try:
        source = script.read_bytes()
    except OSError as error:
        raise LaunchError(f"cannot read {str(script)!r}: {error.strerror}; make it a file that you may read") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # every rank gives them too
        try:
            compile(source, str(script.absolute()), "exec", dont_inherit=True)
        except ValueError as error:  # a NUL byte, for Python before 3.12
            raise LaunchError(f"{str(script)!r} is not Python source: {error}; name a .py file") from error


def _check_module(name: str) -> None:
    if Path(name).is_file():
        raise LaunchError(f"{name!r} is a file, not the name of a module; leave out -m to run it as a script")
    top = name.partition(".")[0]
    found = None
    # A module that was put into sys.modules without a spec, or an empty name.
    with suppress(ValueError):
        found = importlib.util.find_spec(top)
    if found is None:
        raise LaunchError(f"no module named {top!r}; install it, or start from the folder that holds it")


def _suggestion(script: Path) -> str:
    siblings = [path.name for path in script.parent.glob("*.py")] if script.parent.is_dir() else []
    near = difflib.get_close_matches(script.name, siblings, n=1)
    if near:
        return f"did you mean {str(script.parent / near[0])!r}?"
    if script.suffix != ".py" and all(part.isidentifier() for part in str(script).split(".")):
        return "check the path, or add -m if this is a module"
    return "check the path"
