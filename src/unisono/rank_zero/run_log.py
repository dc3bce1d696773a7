"""The events of a training loop of your own, without a Trainer: the same file, display, reports and loggers.

Start reading at `RunLog.step`.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unisono.arguments import text, whole
from unisono.job.ranks import is_main, world_size
from unisono.program_end import describe_exception
from unisono.rank_zero.image_folder import ImageFolder
from unisono.rank_zero.logged_values import Loggable, check_values, read_values
from unisono.rank_zero.loop_times import LoopTimes
from unisono.rank_zero.numbers import read_number
from unisono.state.lock import DirectoryLock
from unisono.watch import Event, EventLog, Progress
from unisono.watch.origin import describe_machine, git_state, program_arguments
from unisono.watch.pipe import launcher_pipe

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["RunLog"]


class RunLog:
    """Writes the events of your own training loop, which `unisono report`, `compare` and loggers read.

        with unisono.RunLog("runs/mine", steps=1000, settings={"lr": 0.1}) as log:
            for batch in loader:
                ...
                log.step(loss=loss, samples=len(batch), accuracy=accuracy)

    Every rank makes it and calls it alike, or rank 0 alone does. Only rank 0 reads the values and writes; it does not
    average them, so pass means over all ranks. Ranks do not wait for each other. Cost: 20 µs for a step on rank 0, and
    what `.item()` takes of a tensor on a GPU.

    Args:
        directory: The folder of events.jsonl, which is made if it is missing; later runs go on in the file. None: none
            is written, and only the display and listeners get the events.
        steps: The steps at the end of the run, if it is known.
        first_step: The steps that have been done before, if your loop goes on from a checkpoint. The steps after them,
            which the file may have already, count once.
        settings: What distinguishes the run from others: `unisono compare` names settings that differ.
        progress: True to show the run, as a Trainer does.
        listeners: Functions that get each event on rank 0, such as those of `unisono.loggers`.

    Raises:
        CheckpointError: Another process keeps its run in the directory.
        OSError: The directory cannot be used.
        TypeError: An argument is of another type.
        ValueError: `steps` or `first_step` is negative.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        *,
        steps: int | None = None,
        first_step: int = 0,
        settings: Mapping[str, Any] | None = None,
        progress: bool = True,
        listeners: Sequence[Callable[[Event], None]] = (),
    ) -> None:
        self._steps = None if steps is None else whole("steps", steps, least=0)
        self._done = whole("first_step", first_step, least=0)
        self._epoch: int | None = None
        self._in_epoch = 0
        self._is_open = True
        self._lock: DirectoryLock | None = None
        self._log = EventLog(continues=False)
        folder = None if directory is None else Path(os.path.expandvars(directory)).expanduser()
        self._images = ImageFolder(folder, self._warn)
        self._writes = is_main()  # once, since finding that out takes 0.1 ms without a process group
        if self._writes:
            self._open(folder, progress=progress, listeners=listeners)
            self._tell_run(folder, dict(settings or {}))
        self._times = LoopTimes() if self._log.hears("times") else None
        self._started_s = self._ended_s = time.monotonic()

    @property
    def steps_done(self) -> int:
        """Steps since the start of the run, with those before `first_step`."""
        return self._done

    def step(
        self,
        *,
        loss: float | torch.Tensor,
        samples: int | None = None,
        lr: float | None = None,
        grad_norm: float | torch.Tensor | None = None,
        epoch: int = 0,
        **values: float | torch.Tensor,
    ) -> None:
        """Record a step that has been done now, of all ranks together.

        Args:
            loss: The mean loss of the step over all ranks: a number, or a tensor with one element.
            samples: The samples in it, over all ranks, for samples per second.
            lr: The learning rate.
            grad_norm: The norm of the gradient before it was clipped.
            epoch: The epoch, from 0.
            values: Further numbers of the step, by name.

        Raises:
            RuntimeError: The log is closed.
            TypeError: A value is not a number.
            ValueError: epoch or samples is negative.
        """
        self._check_open()
        self._done += 1
        if not self._writes:
            return
        now_s = time.monotonic()
        if whole("epoch", epoch, least=0) != self._epoch:
            self._begin_epoch(int(epoch))
        others: dict[str, Any] = {}
        if grad_norm is not None:
            others["grad_norm"] = read_number("grad_norm", grad_norm)
        if values:
            others["values"] = {name: read_number(name, value) for name, value in values.items()}
        fields: dict[str, Any] = {
            "epoch": int(epoch),
            "step": self._in_epoch,
            "total_steps": self._done,
            "loss": read_number("loss", loss),
            **({} if samples is None else {"samples": whole("samples", samples, least=0)}),
            **({} if lr is None else {"lr": read_number("lr", lr)}),
            "step_s": now_s - self._ended_s,
            **others,
        }
        self._log.emit("step", **fields)
        self._in_epoch, self._ended_s = self._in_epoch + 1, now_s
        if self._times is not None and (times := self._times.end_step(now_s, self._done)) is not None:
            self._log.emit("times", **times)

    def evaluation(self, name: str = "test", /, *, seconds: float = 0.0, **values: float | torch.Tensor) -> None:
        """Record an evaluation that has ended now.

        Args:
            name: Its name.
            seconds: How long it took, which does not count as time of the next step.
            values: Means over all samples, by name.

        Raises:
            RuntimeError: The log is closed.
            TypeError: A value is not a number, or there is none.
        """
        self._check_open()
        text("name", name)
        if not values:
            raise TypeError('an evaluation needs a value: log.evaluation("test", accuracy=0.5)')
        if self._writes:
            found = {key: {"value": read_number(key, value)} for key, value in values.items()}
            took_s = read_number("seconds", seconds)
            self._log.emit("evaluation", epoch=self._epoch or 0, name=name, values=found, seconds=took_s)
            if self._times is not None:
                self._times.leave_out()

    def log(self, **values: Loggable) -> None:
        """Record numbers, texts and images of rank 0, at the present place in the run.

        Args:
            values: As those of `Trainer.log`, by name.

        Raises:
            RuntimeError: The log is closed.
            TypeError: No value is given, or one is neither a real number, a text nor an image.
            ValueError: A name is empty, too long or not printable, a tensor has several elements, or there is an image
                and no directory.
        """
        self._check_open()
        check_values("log.log", values, self._images)
        if self._writes and (fields := read_values(values, self._images, step=self._done)) is not None:
            self._log.emit("log", epoch=self._epoch or 0, total_steps=self._done, **fields)

    def close(self) -> None:
        """Record that the run has ended well, and close the file. May be called again."""
        if self._is_open:
            seconds = round(time.monotonic() - self._started_s, 3)
            self._tell_times()
            self._log.emit("end", total_steps=self._done, seconds=seconds)
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._is_open and error is not None and not isinstance(error, GeneratorExit):
            end = describe_exception(error)
            self._tell_times()
            self._log.emit("failure", type=end.kind, message=end.message, total_steps=self._done)
            self._release()
        self.close()

    def _open(self, folder: Path | None, *, progress: bool, listeners: Sequence[Callable[[Event], None]]) -> None:
        warning = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = DirectoryLock(folder)
            warning = self._lock.acquire()
        fd = launcher_pipe() if progress else None
        shown = [Progress(sys.stderr).handle] if progress and fd is None else []
        path = None if folder is None else folder / "events.jsonl"
        self._log = EventLog(path, fd=fd, listeners=[*shown, *listeners], continues=False)
        if warning is not None:
            self._log.emit("warning", message=warning)

    def _tell_run(self, folder: Path | None, settings: Mapping[str, Any]) -> None:
        facts: dict[str, Any] = {
            "version": version("unisono"),
            "world_size": world_size(),
            "threads": torch.get_num_threads(),
            "directory": None if folder is None else str(folder),
            "torch": str(torch.__version__),
            "arguments": program_arguments(),
            "machine": describe_machine(gpu=None),
            "settings": {str(name): _plain(value) for name, value in settings.items()},
        }
        if (git := git_state(Path.cwd())) is not None:
            facts["git"] = git
        self._log.emit("run", **facts)
        if self._done:
            self._log.emit("resume", path="", epoch=0, step=0, total_steps=self._done)

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._in_epoch = epoch, 0
        self._log.emit(
            "epoch",
            epoch=epoch,
            epochs=None,
            steps=None,
            first_step=0,
            num_samples=None,
            total_steps=self._done - 1,
            run_steps=self._steps,
        )

    def _tell_times(self) -> None:
        """Tell the times of the last steps."""
        if self._times is not None:
            self._times.stop()
            if (times := self._times.take()) is not None:
                self._log.emit("times", **times)

    def _warn(self, message: str) -> None:
        self._log.emit("warning", message=message)

    def _check_open(self) -> None:
        if not self._is_open:
            raise RuntimeError("this RunLog is closed: make another one for another run")

    def _release(self) -> None:
        self._is_open = False
        self._log.close()
        if self._lock is not None:
            self._lock.release()


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)[:1000]
