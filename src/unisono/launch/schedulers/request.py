"""The request of a user to a scheduler. Pure. Start reading at `SchedulerRequest`."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["SchedulerRequest", "name_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerRequest:
    """A job for a scheduler, which starts the command on each machine."""

    name: str
    """The name of the job."""
    command: tuple[str, ...]
    """`unisono run`, its flags without those for the scheduler, and the program with its arguments."""
    min_nodes: int = 1
    """How many machines the job needs at least."""
    max_nodes: int = 1
    """How many machines it takes at most."""
    folder: str = ""
    """The working directory; "" for the scheduler's own."""
    cpus: int | None = None
    """Cores of each machine."""
    gpus: int | None = None
    """GPUs of each machine."""
    memory: str | None = None
    """Main memory of each machine, as the scheduler writes it."""
    save_s: int = 120
    """How long before its end a job gets SIGTERM, so that a Trainer saves its last step."""
    restarts: int = 10
    """How often the job is started again."""


def name_of(program: str) -> str:
    """Return a name for the job of a program, as DNS and schedulers accept it.

    >>> name_of("examples/Train_big.py"), name_of("package.train"), name_of("42.py"), name_of("../..")
    ('train-big', 'package-train', 'job-42', 'job')
    """
    stem = program.rstrip("/").rpartition("/")[2].removesuffix(".py")
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40].strip("-")
    return name if name[:1].isalpha() else f"job-{name}".strip("-")
