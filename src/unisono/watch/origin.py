"""Where a run comes from: its program and arguments, the git commit and the machine.

Recorded once, at the start of a run, by rank 0. Nothing is executed for it. Start reading at `program_arguments`.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from unisono.machine import kernel_text, usable_cores
from unisono.watch.event_kinds import GitFields, MachineFields

__all__ = ["describe_machine", "git_state", "mask_arguments", "program_arguments"]

_MASK = "***"
_SECRET = frozenset({
    "apikey", "auth", "bearer", "credential", "credentials", "key", "passphrase", "passwd", "password", "pwd", "secret",
    "secrets", "token",
})  # fmt: skip
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_USER_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_FLAG = re.compile(r"-{0,2}[A-Za-z_][\w.\-]*")
_LONGEST = 1000
"""Characters of an argument."""
_MOST_ARGUMENTS = 200
_HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def program_arguments() -> list[str]:
    """Return the program of this process and its arguments, without what looks like a secret."""
    return mask_arguments(sys.argv)


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """Return arguments in which values that look like secrets are replaced by ***. Pure.

    A value is one if its name has a word such as token, password, key or secret, and also the user in an address.

    >>> mask_arguments(["train.py", "--api-key=abc", "--hubToken", "def", "--max-tokens", "8", "https://me:pw@host/x"])
    ['train.py', '--api-key=***', '--hubToken', '***', '--max-tokens', '8', 'https://***@host/x']
    """
    masked: list[str] = []
    is_value = False
    for argument in arguments[:_MOST_ARGUMENTS]:
        name, equals, _ = argument.partition("=")
        if is_value and not (argument.startswith("--") and len(argument) > 2):
            masked.append(_MASK)
            is_value = False
            continue
        is_secret = _FLAG.fullmatch(name) is not None and _is_secret(name)
        is_value = is_secret and not equals and name.startswith("-")
        text = f"{name}={_MASK}" if is_secret and equals else _USER_IN_URL.sub(_MASK, argument)
        masked.append(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")
    if (left := len(arguments) - _MOST_ARGUMENTS) > 0:
        masked.append(f"… and {left} more")
    return masked


def _is_secret(name: str) -> bool:
    return any(word.lower() in _SECRET for word in _WORDS.findall(name))


def git_state(folder: Path) -> GitFields | None:
    """Return the commit and the branch of the working tree that a folder is in; None if it is in none.

    Files of .git are read, and git is not run, so whether files have changed since is not known.

    >>> git_state(Path("/proc")) is None
    True
    """
    for parent in (folder, *folder.parents):
        if (parent / ".git").exists():
            with suppress(OSError, ValueError):  # ValueError: not UTF-8
                return _head(parent / ".git")
            return None
    return None


def _head(git: Path) -> GitFields | None:
    if git.is_file():  # a further working tree, or a submodule
        _, _, path = git.read_text().strip().partition("gitdir: ")
        git = (git.parent / path).resolve()
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return {"commit": head, "branch": None} if _HASH.fullmatch(head) else None
    reference = head.removeprefix("ref: ")
    if ".." in Path(reference).parts or Path(reference).is_absolute():
        return None
    common = git
    if (git / "commondir").is_file():
        common = (git / (git / "commondir").read_text().strip()).resolve()
    branch = reference.removeprefix("refs/heads/")
    for place in (git, common):
        if (place / reference).is_file():
            commit = (place / reference).read_text().strip()
            return {"commit": commit, "branch": branch} if _HASH.fullmatch(commit) else None
    packed = common / "packed-refs"
    for line in packed.read_text().splitlines() if packed.is_file() else ():
        commit, _, name = line.partition(" ")
        if name == reference and _HASH.fullmatch(commit):
            return {"commit": commit, "branch": branch}
    return None


def describe_machine(*, gpu: str | None) -> MachineFields:
    """Return the facts of this host that decide how fast a run is, and which bits it gives.

    Args:
        gpu: The name of the GPU that rank 0 uses; None without.
    """
    system = os.uname()
    found: MachineFields = {
        "host": socket.gethostname(),
        "system": f"{system.sysname} {system.release}",
        "python": platform.python_version(),
        "cores": usable_cores(),
    }
    if total := re.search(r"^MemTotal:\s*(\d+) kB", kernel_text("/proc/meminfo"), re.MULTILINE):
        found["memory"] = 1024 * int(total[1])
    model = re.search(r"^model name\s*:\s*(.+)$", kernel_text("/proc/cpuinfo"), re.MULTILINE)
    found["processor"] = model[1].strip() if model else system.machine
    if gpu is not None:
        found["gpu"] = gpu
    return found
