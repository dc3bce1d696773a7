"""The description of a job: the script, its arguments and the number of ranks that run it.

Start reading at `LaunchJob`. `check_target` finds errors that every rank would have, before any process is started.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import signal
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from unisono.errors import LaunchError
from unisono.launch.program import read_program
from unisono.server_page import MOST_SERVERS

if TYPE_CHECKING:
    from unisono.launch.hosts.host_settings import HostPlace, HostSettings

__all__ = ["LaunchJob", "Output", "check_target"]

_PORTS = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """Where the output of the ranks goes."""

    directory: Path | None = None
    """Folder for log files. None: no files."""
    redirected: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """By local rank, which of "stdout" and "stderr" go to log files only."""
    teed: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """By local rank, which of them go to log files and to the terminal."""
    shown: frozenset[int] | None = None
    """Local ranks whose output is shown. None: all."""
    prefix: str | None = None
    """What lines begin with, as a template; see `output.streams.Prefixes`. None: the ranks in brackets."""
    stdout_filters: tuple[str, ...] = ()
    """Lines of standard output that contain one of these texts also go to one common file, filtered_stdout.log."""
    stderr_filters: tuple[str, ...] = ()
    """The same for standard error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchJob:
    """One program run by several ranks on this machine."""

    target: str
    """The path of a script or, with `module`, the name of a module; without `python`, a program."""
    arguments: tuple[str, ...] = ()
    """The arguments that the program finds in `sys.argv[1:]`."""
    module: bool = False
    """True if the target is a module, as for `python -m`."""
    python: bool = True
    """True if the target is Python, False if it is a program to execute as it is."""
    ranks: int = 1
    """The number of processes that run the program."""
    run_id: str = ""
    """The name of the job for ranks, log folders and `unisono ps`. Empty: a random one."""
    role: str = "default"
    """ROLE_NAME of the ranks."""
    start_method: Literal["fork", "spawn"] = "fork"
    """How ranks start: "fork" from a process that has imported torch, or "spawn", each with a new interpreter."""
    preload: tuple[str, ...] = ()
    """Modules to import once, before ranks are forked. They must start no thread and touch no GPU."""
    pass_local_rank: bool = False
    """True if the program also gets `--local-rank=N` as its first argument."""
    virtual_local_rank: bool = False
    """True if every rank sees one GPU, as number 0, and LOCAL_RANK 0."""
    master_port: int = 0
    """Port of the job's store on the loopback address. 0: a free one."""
    max_restarts: int = 0
    """The number of times that all ranks, on all hosts, may be restarted after a failure."""
    recover: bool = True
    """True to replace a rank that dies while the others wait, where a Trainer allows it."""
    spares: int = 0
    """The number of processes that wait at the script's Trainer to take the place of a rank that dies."""
    servers: int = 0
    """The number of server processes for embedding tables."""
    shutdown_timeout_s: float = 30.0
    """Seconds between asking a rank to end and killing it: time to save, for ranks that handle the signal."""
    hang_report_s: float = 30.0
    """Seconds after which ranks that wait in a collective for others are reported. 0: never."""
    hang_abort_s: float | None = None
    """Seconds after which the job is ended because of such a wait. None: never."""
    stuck_timeout_s: float | None = None
    """Seconds after which a rank for which others wait is killed, so that it is replaced. None: never."""
    metrics: tuple[str, int] | None = None
    """The address and the port at which Prometheus gets the numbers of the job; None: nowhere."""
    signals: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    """Signals that are passed to ranks, which then have `shutdown_timeout_s` to end."""
    numa_binding: str | None = None
    """How ranks are bound to the cores near their GPU: "node", "socket", "exclusive" or "core-complex"; None: not."""
    cpu_backend: Literal["gloo", "shm"] = "gloo"
    """The backend of process groups for which the program asks for gloo."""
    output: Output = field(default_factory=Output)
    """Where the output of the ranks goes."""
    has_flags: bool = True
    """True if a command with flags started it, which reports may name, and not a call of `unisono.spawn`."""
    stdin: int | None = None
    """The rank that has the standard input of this process. None: it is empty for all."""
    hosts: HostSettings | None = None
    """The other hosts and where all meet. None: this machine is the only one."""
    place: HostPlace | None = None
    """The place of this machine among the hosts, once they have met."""
    files: tuple[int, ...] = ()
    """Open files of this process that ranks keep, by number."""

    @property
    def first_rank(self) -> int:
        """The lowest rank of this machine."""
        return self.place.first_rank if self.place is not None else 0

    @property
    def world_size(self) -> int:
        """The number of ranks on all hosts, as far as it is known."""
        return self.place.world_size if self.place is not None else self.ranks

    @property
    def flags_of_all(self) -> dict[str, str]:
        """The flags that all hosts must be given alike, since any of them may decide for all, with their values."""
        assert self.hosts is not None
        least, most = self.hosts.min_hosts, self.hosts.max_hosts
        return {
            "--nnodes": str(least) if least == most else f"{least}:{most}",
            "--max-restarts": str(self.max_restarts),
            "--recover": "on" if self.recover else "off",
            "--hang-report": f"{self.hang_report_s:g}",
            "--hang-abort": "none" if self.hang_abort_s is None else f"{self.hang_abort_s:g}",
            "--stuck-timeout": "none" if self.stuck_timeout_s is None else f"{self.stuck_timeout_s:g}",
        }

    def __post_init__(self) -> None:  # noqa: PLR0912  each setting in turn
        if self.ranks < 1:
            raise ValueError(f"ranks={self.ranks}: a job has at least one rank")
        if self.stdin is not None and not 0 <= self.stdin < self.ranks:
            raise ValueError(f"stdin={self.stdin} is no rank: there are {self.ranks}, counted from 0")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts={self.max_restarts} must be 0 or more")
        if not 0 <= self.master_port < _PORTS:
            raise ValueError(f"master_port={self.master_port} must lie between 0 (a free one) and {_PORTS - 1}")
        for name in ("shutdown_timeout_s", "hang_report_s"):
            if not (math.isfinite(seconds := getattr(self, name)) and seconds >= 0):
                raise ValueError(f"{name}={seconds} must be a finite number of seconds, 0 or more")
        for name in ("hang_abort_s", "stuck_timeout_s"):
            limit_s: float | None = getattr(self, name)
            if limit_s is not None and not (math.isfinite(limit_s) and limit_s > 0):
                raise ValueError(f"{name}={limit_s} must be a finite number of seconds above 0, or None")
        if self.start_method not in ("fork", "spawn"):
            raise ValueError(f"start_method={self.start_method!r} must be 'fork' or 'spawn'")
        if self.module and not self.python:
            raise ValueError("--module and --no-python exclude each other: a module is Python")
        if self.preload and (self.start_method == "spawn" or not self.python):
            other = "--start-method spawn" if self.python else "--no-python"
            raise ValueError(
                f"--preload imports modules before ranks are forked, and with {other} none is: leave one out"
            )
        if self.cpu_backend not in ("gloo", "shm"):
            raise ValueError(f"cpu_backend={self.cpu_backend!r} must be 'gloo' or 'shm'")
        if self.cpu_backend != "gloo" and not self.python:
            raise ValueError(f"--cpu-backend {self.cpu_backend} changes torch within ranks: leave out --no-python")
        if self.hosts is not None:
            self._check_hosts()
        if self.spares:
            self._check_spares()
        if not 0 <= self.servers <= MOST_SERVERS:
            raise ValueError(f"servers={self.servers} must lie between 0 and {MOST_SERVERS}")
        if self.servers and not self.python:
            raise ValueError(
                f"--servers {self.servers} and --no-python exclude each other: servers update unisono.embedding.Tables "
                "of a Python program"
            )
        if self.output.directory is not None and ("/" in self.run_id or self.run_id in (".", "..")):
            raise ValueError(f"run_id={self.run_id!r} cannot be the name of a log folder: leave out '/', '.' and '..'")

    def _check_hosts(self) -> None:
        """Refuse what this machine's launcher cannot do for ranks of others."""
        for name, is_given, why in (
            (f"--servers {self.servers}", self.servers, "shares no memory with servers of tables: leave it out"),
            ("--cpu-backend shm", self.cpu_backend == "shm", "shares no memory: leave it out, and hosts use gloo"),
        ):
            if is_given:
                raise ValueError(f"{name} is for one machine, and a job on several {why}")

    def _check_spares(self) -> None:
        """Refuse spare processes where none could take the place of a rank."""
        if self.spares < 0:
            raise ValueError(f"spares={self.spares} must be 0 or more")
        names = (
            ("--recover off", not self.recover, "replaces no rank"),
            ("--no-python", not self.python, "runs a program without a Trainer, and nothing in it is replaced"),
            ("--virtual-local-rank", self.virtual_local_rank, "shows a process its GPU before it has a rank"),
            ("--numa-binding", self.numa_binding is not None, "binds a process to its GPU before it has a rank"),
            ("--pass-local-rank", self.pass_local_rank, "tells a process its rank before it has one"),
            (
                "${local_rank}",
                any("${local_rank}" in each for each in self.arguments),
                "is known only once there is a rank",
            ),
        )
        for name, is_given, what in names:
            if is_given:
                raise ValueError(f"--spares {self.spares} and {name} exclude each other, which {what}: leave one out")
        if self.ranks == 1 and self.hosts is None:
            raise ValueError(
                f"--spares {self.spares} is for two ranks or more: a single one has nobody to replace it from"
            )


def check_target(job: LaunchJob) -> None:
    """Check for errors that would stop the program on every rank, so that each is reported once.

    A submodule is not searched for, since that would run code of its package in this process. A program that is not
    Python is not checked.

    Raises:
        LaunchError: The script cannot be found or read, or there is no such module.
        SyntaxError: Python cannot compile the script.
    """
    for name in job.preload:
        _check_module(name, folder=None)
    if not job.python:
        return
    if job.module:
        _check_module(job.target, folder=Path.cwd())
    else:
        _check_script(Path(job.target))


def _check_script(script: Path) -> None:
    try:
        source = read_program(script)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise LaunchError(f"no such file: {str(script)!r} (in {str(Path.cwd())!r}); {_suggestion(script)}") from error
    except (OSError, ValueError) as error:  # a ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise LaunchError(f"cannot read {str(script)!r}: {reason}; make it a file that you may read") from error
    if source is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # every rank shows them, too
        try:
            compile(source, str(script.absolute()), "exec", dont_inherit=True)
        except ValueError as error:  # a NUL byte, for Python before 3.12
            raise LaunchError(f"{str(script)!r} is not Python source: {error}; name a .py file") from error


def _check_module(name: str, *, folder: Path | None) -> None:
    """Search for the package of a module: first in the folder, if one is given, then among installed modules."""
    if folder is not None and Path(name).is_file():
        raise LaunchError(f"{name!r} is a file, not the name of a module; leave out -m to run it as a script")
    top = name.partition(".")[0]
    found = None
    # Raised for a module that was put into sys.modules without a spec, and for an empty name.
    with suppress(ValueError):
        if folder is not None and not getattr(sys.flags, "safe_path", False):
            # This process was started from elsewhere: the folder need not be on its search path.
            found = PathFinder.find_spec(top, [str(folder)]) if top else None
        found = found or importlib.util.find_spec(top)
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
