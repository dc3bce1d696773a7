"""Where a run comes from: its program and arguments, the git commit, the machine, and the settings of its Trainer.

Recorded once, at the start of a run, by rank 0. Nothing is executed for it. Start reading at `describe_provenance`.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from unisono.machine import kernel_text, usable_cores
from unisono.state.policy import Checkpoints
from unisono.trainer.description import hyperparameters, plain
from unisono.trainer.settings import TrainerSettings
from unisono.watch.event_kinds import GitFields, MachineFields

__all__ = ["describe_machine", "describe_settings", "git_state", "mask_arguments", "program_arguments"]

_MASK = "***"
_SECRET = frozenset({
    "apikey", "auth", "bearer", "credential", "credentials", "key", "passphrase", "passwd", "password", "pwd", "secret",
    "secrets", "token",
})  # fmt: skip
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_USER_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_FLAG = re.compile(r"-{0,2}[A-Za-z_][\w.\-]*")
_LONGEST = 1000
"""Characters of an argument, and of a setting."""
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


def describe_machine(device: torch.device) -> MachineFields:
    """Return the facts of this host that decide how fast a run is, and which bits it gives."""
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
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def describe_settings(settings: TrainerSettings, optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """Return the arguments of a Trainer as plain values: those that differ from None, and what its optimizers are.

    Args:
        settings: The arguments.
        optimizers: The optimizers by name, "" for a single one.
    """
    told: dict[str, Any] = {
        name.strip() or "optimizer": _short(_optimizer(optimizer))
        for name, optimizer in ((f"optimizer {key}", each) for key, each in optimizers.items())
    }
    elsewhere = {"directory", "device", "stateful", "checkpoints"}  # in this event already, or below
    left_out = elsewhere | {"digest_every", "resume", "progress", "listeners", "drill"}
    for each in fields(settings):
        value = getattr(settings, each.name)
        if each.name not in left_out and value is not None:
            shown = plain(value) if isinstance(value, bool | int | float | str | Mapping) else _form(value)
            told[each.name] = shown if isinstance(shown, bool | int | float) else _short(str(shown))
    defaults = Checkpoints()
    for each in fields(settings.checkpoints):
        value = getattr(settings.checkpoints, each.name)
        if value != getattr(defaults, each.name):
            told[f"checkpoints.{each.name}"] = value
    if settings.stateful:
        told["stateful"] = _short(", ".join(settings.stateful))
    return told


def _optimizer(optimizer: Optimizer) -> str:
    """Describe an optimizer by its first group, in which later ones often differ by a rate alone."""
    given = {
        key: value
        for key, value in hyperparameters(optimizer.param_groups[0]).items()
        if value not in (None, False) and key != "initial_lr"
    }
    groups = len(optimizer.param_groups)
    more = f", and {groups - 1} further groups" if groups > 1 else ""
    return f"{type(optimizer).__qualname__}({', '.join(f'{key}={value}' for key, value in given.items())}{more})"


def _form(value: Any) -> str:
    """Describe an object: its repr if that is short and says no address, otherwise its type."""
    told = repr(value)
    return told if len(told) < 200 and " at 0x" not in told else type(value).__qualname__


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
