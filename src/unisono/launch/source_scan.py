"""Guesses about a program before it runs, from the words in its source.

A wrong guess costs time or memory, or omits a check; it changes no result. Pure, except for reading the file.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import CodeType

from unisono.errors import LaunchError
from unisono.launch.launch_job import LaunchJob
from unisono.launch.program import read_program

__all__ = ["DYNAMO", "TRAINER", "asks_for_nccl", "modules_to_preload", "program_source", "uses_dynamo", "uses_trainer"]

DYNAMO = "torch._dynamo"
"""The module that is preloaded for programs that make an optimizer or wrap a model."""

TRAINER = "unisono.trainer"
"""The module that is preloaded for programs that have a Trainer, with the 300 modules that it imports."""

_USERS_OF_DYNAMO = re.compile(rb"\b(optim|DistributedDataParallel|DDP|fully_shard|FSDP|accelerate|lightning)\b")
_USERS_OF_TRAINER = re.compile(rb"\bunisono\b[\s\S]*\bTrainer\b")


def program_source(job: LaunchJob) -> bytes:
    """Return the source of a job's program; empty if it cannot be found without importing anything."""
    if not job.python:
        return b""
    if job.module:
        place = Path(*job.target.split("."))
        candidates = [place.with_suffix(".py"), place / "__main__.py"]
    else:
        candidates = [Path(job.target)]
    for path in candidates:
        if path.exists():
            try:
                return read_program(path) or b""
            except (OSError, LaunchError):  # reported where the program is run
                return b""
    return b""


def modules_to_preload(job: LaunchJob, source: bytes) -> tuple[str, ...]:
    """List the modules that a fork server imports besides torch: those that all ranks would import, and the user's.

    A single rank gains nothing from the former and would only start later.
    """
    if job.ranks == 1 or job.start_method != "fork":
        return job.preload
    trains = uses_trainer(source)
    shared = {DYNAMO: trains or uses_dynamo(source), TRAINER: trains}
    return (*(name for name, is_used in shared.items() if is_used and name not in job.preload), *job.preload)


def uses_dynamo(source: bytes) -> bool:
    """Guess whether a program makes an optimizer or wraps a model.

    The first one of either imports torch._dynamo: 1.3 s of CPU time and 80 MB in every rank, if each does it.

    >>> uses_dynamo(b"optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"), uses_dynamo(b"print('optimal')")
    (True, False)
    """
    return _USERS_OF_DYNAMO.search(source) is not None


def uses_trainer(source: bytes) -> bool:
    """Guess whether a program trains with unisono.Trainer.

    >>> uses_trainer(b"import unisono\\ntrainer = unisono.Trainer(model)"), uses_trainer(b"Trainer(model).fit(data)")
    (True, False)
    """
    return _USERS_OF_TRAINER.search(source) is not None


def asks_for_nccl(source: bytes, *, gpus: int) -> bool:
    """Guess from a script's source whether it requires NCCL, with which every rank needs its own GPU.

    Only a plain "nccl" counts, and only where "gloo" does not occur. With no GPU at all, a script that asks whether one
    is available decides for itself; so does one that sets NCCL_HOSTID, by which ranks may share a GPU.

    >>> asks_for_nccl(b"init_process_group('nccl')", gpus=0)
    True
    >>> asks_for_nccl(b"init_process_group('nccl' if cuda else 'gloo')", gpus=0)
    False
    """
    if b"gloo" in source.lower() or b"NCCL_HOSTID" in source or b"nccl" not in source.lower():
        return False
    if gpus == 0 and b"is_available" in source:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = compile(source, "script", "exec", dont_inherit=True)
    return not _NCCL.isdisjoint(_strings(code))


_NCCL = frozenset({"nccl", "NCCL", "cuda:nccl"})


def _strings(code: CodeType) -> set[str]:
    found: set[str] = set()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _strings(constant)
        else:
            found |= {
                part for part in (constant if isinstance(constant, tuple) else [constant]) if isinstance(part, str)
            }
    return found
