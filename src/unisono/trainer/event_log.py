"""The destinations of a run's events, and the first events: the figures of the run and the place of a resume.

Events go to the run's directory, and to the launcher if it passed a pipe, otherwise to the display of this process.
Later events are emitted by other modules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from unisono.data.loader_workers import warn_on_stderr
from unisono.trainer.provenance import describe_settings
from unisono.trainer.run_context import RunContext
from unisono.trainer.trainer_parts import TrainerParts
from unisono.watch import Event, EventLog, Progress
from unisono.watch.event_kinds import RunFields
from unisono.watch.origin import describe_machine, git_state, program_arguments
from unisono.watch.pipe import launcher_pipe

__all__ = ["announce", "announce_to_listeners", "open_log", "warn_of_rank"]


def open_log(
    path: Path | None,
    *,
    is_main: bool,
    progress: bool,
    listeners: Sequence[Callable[[Event], None]] = (),
    continues: bool = True,
    at_once: bool = False,
) -> EventLog:
    """Open the event log of a run on rank 0; on other ranks, one that drops everything.

    The launcher draws the progress if it passed a pipe (UNISONO_EVENTS_FD), otherwise this process does, on standard
    error. Without progress, only warnings are written there.

    Args:
        path: The file of the run's events; None for none.
        is_main: True on rank 0.
        progress: True to show the run.
        listeners: Functions that get each event.
        continues: True if another rank may go on with the log, in the place of one that died.
        at_once: True to write each event at once: a drill waits for single steps.

    Raises:
        OSError: The file cannot be opened.
    """
    if not is_main:
        return EventLog(continues=continues)
    if not progress:
        return EventLog(path, listeners=listeners, warned=_write_warning, continues=continues, at_once=at_once)
    fd = launcher_pipe()
    if fd is not None:
        return EventLog(path, fd=fd, listeners=listeners, continues=continues, at_once=at_once)
    shown = [Progress(sys.stderr).handle, *listeners]
    return EventLog(path, listeners=shown, continues=continues, at_once=at_once)


def _write_warning(event: Event) -> None:
    if event["event"] == "warning":
        warn_on_stderr(event["message"])


def warn_of_rank(log: EventLog, run: RunContext, message: str) -> None:
    """Report a warning of one rank: on rank 0 as an event, on another rank on its own standard error."""
    if run.world.size > 1:
        message = f"rank {run.world.rank}: {message}"
    if run.world.rank == 0:
        log.emit("warning", message=message)
    else:
        warn_on_stderr(message)


def announce(log: EventLog, parts: TrainerParts) -> None:
    """Emit the events at the start of a run, or of its continuation from a checkpoint."""
    log.emit("run", **_facts(parts))
    for message in parts.warnings:
        log.emit("warning", message=message)
    cursor = parts.cursor
    if parts.source is not None:
        log.emit("resume", path=parts.source, epoch=cursor.epoch, step=cursor.step, total_steps=cursor.total_steps)


def announce_to_listeners(log: EventLog, parts: TrainerParts) -> None:
    """Send the same events to the listeners of a new rank 0, for a run that others have announced."""
    cursor = parts.cursor
    log.tell_listeners("run", **_facts(parts))
    log.tell_listeners("resume", path="", epoch=cursor.epoch, step=cursor.step, total_steps=cursor.total_steps)


def _facts(parts: TrainerParts) -> RunFields:
    run, directory = parts.run, parts.settings.directory
    facts: RunFields = {
        "version": version("unisono"),
        "world_size": run.world.size,
        "virtual_ranks": run.virtual_ranks,
        "seed": run.seed,
        "parameters": sum(p.numel() for module in parts.modules.values() for p in module.parameters()),
        "device": str(run.device),
        "threads": torch.get_num_threads(),
        "directory": None if directory is None else str(directory),
        "torch": str(torch.__version__),
        "arguments": program_arguments(),
        "machine": describe_machine(gpu=torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else None),
        "settings": describe_settings(parts.settings, parts.subjects.optimizers),
    }
    if (git := git_state(Path.cwd())) is not None:
        facts["git"] = git
    return facts
