"""Removes the files that killed processes leave in /dev/shm and in the temporary folder.

Python's named semaphores and shared memory are removed by a helper that outlives the processes that made them, unless
it is killed, too. The names of torch's shared memory contain process ids. The sockets of multiprocessing are in a
folder that belongs to the job. Start reading at `Leftovers`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from unisono.machine import kernel_text

__all__ = ["Leftovers", "make_scratch", "remove_scratch", "use_scratch"]

_SHARED_MEMORY = Path("/dev/shm")
_LONGEST_SOCKET = 107
"""The longest path of a socket that the kernel accepts, in bytes."""
_TRACKER_S = 0.4
_MANAGER_S = 2.5
"""Torch's helper waits two seconds for another user before it ends."""


class Leftovers:
    """The files that are removed when a job's processes have ended. Create it before the job starts."""

    def __init__(self) -> None:
        self._begin_s = time.time()
        self._pids: set[int] = set()
        self._sockets: set[Path] = set()
        self._named: set[Path] = set()
        self._seen: set[int] = set()

    def look(self, pids: Iterable[int]) -> None:
        """Note the files of processes before they are asked to end, since their helpers may end first."""
        for pid in pids:
            self.note(pid)

    def note(self, pid: int, *, hurry: bool = False) -> float:
        """Note the files of a process that is to be killed or has ended; return for how many seconds to spare it.

        Only helpers should keep running. They wait for the processes that use them to end, remove their files, and end:
        Python's resource tracker, of which joblib has a copy, and torch's manager for the sharing strategy
        "file_system". With `hurry`, there is not enough time for the latter.
        """
        self._pids.add(pid)
        if pid not in self._seen:
            self._seen.add(pid)
            self._named |= _mapped_names(pid)
        command = kernel_text(f"/proc/{pid}/cmdline")
        if command.partition("\0")[0].rpartition("/")[2] == "torch_shm_manager":
            self._sockets |= _bound_sockets(pid)
            return _MANAGER_S if not hurry and self._has_unknown() else 0.0
        return _TRACKER_S if "resource_tracker import main" in command else 0.0

    def remove(self) -> None:
        """Remove the files. Call it after the processes have ended."""
        for path in self._sockets:
            with suppress(OSError):
                path.unlink(missing_ok=True)
                path.parent.rmdir()
        # Includes tensors that a DataLoader worker was about to send: their files have names for a moment.
        for file, maker in _tensor_files():
            if maker in self._pids:
                with suppress(OSError):
                    file.unlink()
        # Python's resource tracker removes these, unless it has ended too soon. A file may be another job's.
        made = [path for path in self._named if _changed_since(path, self._begin_s)]
        if made:
            used = set().union(*map(_mapped_names, _all_pids()))
            for path in set(made) - used:
                with suppress(OSError):
                    path.unlink()

    def _has_unknown(self) -> bool:
        """Return True if there are files of processes that ended unnoticed and may have belonged to this job."""
        for file, maker in _tensor_files():
            if maker not in self._pids and not Path(f"/proc/{maker}").exists():
                with suppress(OSError):
                    if file.stat().st_ctime >= self._begin_s:
                        return True
        return False


def make_scratch() -> str:
    """Create the folder for sockets of multiprocessing and return its path, or "" if it cannot be created."""
    import tempfile  # noqa: PLC0415  only the fork server needs it

    folder = tempfile.gettempdir()
    if len(os.fsencode(f"{folder}/pymp-12345678/listener-12345678")) > _LONGEST_SOCKET:
        folder = "/tmp"  # a DataLoader would wait forever for a worker that cannot open its socket
    try:
        return tempfile.mkdtemp(prefix="pymp-", dir=folder)
    except OSError:
        return ""


def use_scratch(folder: str) -> None:
    """Make multiprocessing use the folder in this process and its children, since each would leave its own behind."""
    from multiprocessing import process  # noqa: PLC0415  only ranks need it

    if folder:
        process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]


def remove_scratch(folder: str) -> None:
    """Remove the folder and everything in it. The folder may be gone already."""
    if folder:
        with suppress(OSError):  # it is empty in most jobs
            Path(folder).rmdir()
    if folder and Path(folder).is_dir():
        import shutil  # noqa: PLC0415  rarely needed

        shutil.rmtree(folder, ignore_errors=True)


def _mapped_names(pid: int) -> set[Path]:
    """Return the files of Python's named shared memory and semaphores that a process has mapped."""
    found, gone = set(), set()
    for number, name, deleted in _MAPPED.findall(kernel_text(f"/proc/{pid}/maps")):
        if deleted:
            gone.add(int(number))
        elif Path(name).name.startswith(_NAMED):
            found.add(Path(name))
    # The C library makes a semaphore under another name, by which its maker has it mapped, and links the file.
    return found | {path for path, number in (_semaphores() if gone else ()) if number in gone}


_MAPPED = re.compile(rf" (\d+) +({_SHARED_MEMORY}/\S+)( \(deleted\))?$", re.MULTILINE)
_SEMAPHORE = "sem.mp-"
_NAMED = ("psm_", _SEMAPHORE)


def _semaphores() -> list[tuple[Path, int]]:
    """List the files of Python's named semaphores, each with the number of its inode."""
    found = []
    with suppress(OSError), os.scandir(_SHARED_MEMORY) as entries:
        found = [(Path(entry.path), entry.inode()) for entry in entries if entry.name.startswith(_SEMAPHORE)]
    return found


def _changed_since(path: Path, time_s: float) -> bool:
    try:
        return path.stat().st_ctime >= time_s
    except OSError:
        return False


def _all_pids() -> list[int]:
    return [int(folder.name) for folder in os.scandir("/proc") if folder.name.isdigit()]


def _tensor_files() -> list[tuple[Path, int]]:
    """List the files of torch's shared memory on this machine, each with the process that made it."""
    try:
        found = [(file, file.name.split("_")[1]) for file in _SHARED_MEMORY.iterdir() if file.name.startswith("torch_")]
    except OSError:
        return []
    return [(file, int(maker)) for file, maker in found if maker.isdigit()]


def _bound_sockets(pid: int) -> set[Path]:
    """Return the files of the Unix sockets that a process has bound."""
    numbers = set()
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = str(file.readlink())
                if target.startswith("socket:["):
                    numbers.add(target[8:-1])
    found = set()
    for line in kernel_text("/proc/net/unix").splitlines():
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[6] in numbers and fields[7].startswith("/"):
            found.add(Path(fields[7]))
    return found
