"""The progress display: one reader of events with two renderers, one for terminals and one for files.

The reader tracks the progress of the epoch and decides what to show and when; a `renderer.Renderer` decides how.
Durations and rates are computed from the times in the events, so a log that is read later shows the same as the live
display; the clock only paces the drawing. Start reading at `Progress.handle`.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from unisono.text import clip
from unisono.watch.event_fields import number_in, whole_in
from unisono.watch.event_texts import describe_over, describe_pipeline, describe_result, describe_resume
from unisono.watch.figures import format_elapsed, format_rate, format_value, plural
from unisono.watch.plain_renderer import PlainRenderer
from unisono.watch.renderer import EpochView, Renderer, RunningSum

if TYPE_CHECKING:
    from typing_extensions import Self

    from unisono.watch.event_kinds import Event

__all__ = ["Progress"]

_LONGEST_NAME = 20
"""Characters of a name in the table; as many at both ends are kept of longer ones."""


class Progress:
    """Draws the progress of a run, or of several in sequence, from its events.

    `handle` takes events of this process (as a listener of `EventLog`) as well as parsed lines of a log or a pipe. It
    ignores unknown kinds and tolerates missing fields. Any thread may call any method.
    Cost: about 2 µs per event, at most seven redraws per second of under 1 ms each, and no thread.
    When the stream fails (closed pipe, full disk, lost terminal), the display stops without an error.

    Args:
        stream: The stream to write to.
        interactive: Draw for a terminal. None: True for a terminal that is not dumb, outside CI.
        clock: Returns seconds; paces the drawing.
    """

    def __init__(
        self, stream: TextIO, *, interactive: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lock = threading.RLock()
        self._stream = stream
        self._look: Renderer | None = _look(stream, interactive=interactive, clock=clock, lock=self._lock)
        self._latest_s = 0.0
        self._bars: dict[int, EpochView] = {}
        self._reset()

    def handle(self, event: Event) -> None:
        """Process one event."""
        handler = _HANDLERS.get(event.get("event", ""))
        if handler is None:
            return
        with self._lock:
            time_s = number_in(event, "time")
            if time_s is not None:
                self._latest_s = time_s
            self._draw(lambda look: handler(self, look, event))

    def print(self, text: str) -> None:
        """Write a line, or several, above the live bar, exactly as given."""
        with self._lock:
            self._draw(lambda look: look.write(self._sayable(text.removesuffix("\n"))))

    def close(self) -> None:
        """Write the state of an unfinished epoch and restore the stream. May be called again."""
        with self._lock:
            self._draw(self._stand)
            for view in self._bars.values():
                self._draw(lambda look, view=view: look.stood(view))  # type: ignore[misc]
            self._bars.clear()
            self._draw(lambda look: look.close())
            self._look = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draw(self, action: Callable[[Renderer], None]) -> None:
        if self._look is None or self._stream.closed:
            return
        try:
            action(self._look)
        except OSError:
            # Nobody sees the display any more, which must not end hours of training.
            look, self._look = self._look, None
            with suppress(OSError):
                look.close()

    def _sayable(self, text: str) -> str:
        """Escape characters that the stream's encoding lacks, such as the undecodable bytes of a path."""
        if text.isascii():
            return text
        encoding = self._stream.encoding or "utf-8"
        return text.encode(encoding, "backslashreplace").decode(encoding)

    def _label_of(self, name: object) -> str:
        """Return a name as it stands in the table: clipped, and on one line."""
        label = clip("".join(sign if sign.isprintable() else " " for sign in str(name)), _LONGEST_NAME, at="middle")
        if not label.isascii() and self._sayable("…") != "…":
            label = label.replace("…", "~")
        return self._sayable(label)

    def _advance(self, look: Renderer, event: Event) -> None:
        """Display the progress of a user loop; see `unisono.progress`."""
        bar = whole_in(event, "bar") or 0
        view = self._bars.get(bar)
        if view is None:
            unit = self._sayable(str(event.get("unit", "steps")))
            view = self._bars[bar] = EpochView(
                label=self._sayable(str(event.get("name", ""))),
                number=-1 - bar,
                steps=None,
                done=0,
                started_s=self._latest_s,
                latest_s=self._latest_s,
                counted=unit,
                unit=unit,
            )
        view.done = whole_in(event, "done") or 0
        view.items = view.done
        view.steps, view.latest_s, view.told = whole_in(event, "total"), self._latest_s, False
        values = event.get("values")
        if isinstance(values, Mapping):
            numbers = {str(name): number_in(values, name) for name in values}
            view.note = self._sayable(
                "  ".join(f"{name} {format_value(number)}" for name, number in numbers.items() if number is not None)
            )
        if event.get("ended"):
            del self._bars[bar]
            look.stood(view)
            look.rest()
        else:
            look.moved(view)

    def _reset(self) -> None:
        self._epoch: EpochView | None = None
        self._epochs: int | None = None
        self._started_s = self._latest_s
        self._epochs_seen = 0
        self._items, self._unit = 0.0, "samples"
        self._trained_s = 0.0
        self._ended_s: float | None = None
        self._pauses: list[float] = []
        self._memory: int | None = None

    def _run(self, look: Renderer, event: Event) -> None:
        self._stand(look)  # a run that ended without `end`: its process was replaced
        look.rest()
        self._reset()
        parts = [plural(count, "rank")] if (count := whole_in(event, "world_size")) else []
        if count := whole_in(event, "virtual_ranks"):
            parts.append(plural(count, "virtual rank"))
        if (count := whole_in(event, "parameters")) is not None:
            parts.append(plural(count, "parameter"))
        parts += [self._sayable(str(event[key])) for key in ("device", "directory") if event.get(key)]
        look.header(parts)

    def _resume(self, look: Renderer, event: Event) -> None:
        look.remark(self._sayable(describe_resume(event)))

    def _pipeline(self, look: Renderer, event: Event) -> None:
        for text in describe_pipeline(event):
            look.remark(self._sayable(text))

    def _begin(self, look: Renderer, event: Event) -> None:
        self._leave(look)
        self._epochs = whole_in(event, "epochs")
        self._enter(look, event, first=whole_in(event, "first_step") or 0, started_s=self._latest_s)

    def _step(self, look: Renderer, event: Event) -> None:
        view = self._epoch
        number, step = whole_in(event, "epoch"), whole_in(event, "step")
        if view is None or (number is not None and number != view.number):
            # The display joined late, or the event `epoch` was lost.
            self._leave(look)
            view = self._enter(
                look, event, first=step or 0, started_s=self._latest_s - (number_in(event, "step_s") or 0)
            )
        samples, loss = whole_in(event, "samples") or 0, number_in(event, "loss")
        optimizer = event.get("optimizer", "")
        done = view.done + 1 if step is None else step + 1
        if done != view.done:  # not the step of another optimizer on the same batch
            view.done = done
            _count(view, samples, number_in(event, "weight"))
        if loss is not None:
            so_far = view.losses.get(optimizer) or RunningSum(self._label_of(optimizer or "loss"))
            view.losses = {**view.losses, optimizer: so_far.plus(loss, samples)}
        values = event.get("values")
        if isinstance(values, Mapping):
            view.values = self._with_values(view, values, samples, f"{optimizer}/" if optimizer else "")
        view.lr, view.grad_norm = number_in(event, "lr"), number_in(event, "grad_norm")
        if (memory := whole_in(event, "memory")) is not None:  # only in some events
            view.memory = self._memory = memory
        view.latest_s = self._latest_s
        view.told = False
        if view.done == view.steps and view.losses.keys() <= {""}:  # with several optimizers more steps may follow
            self._stand(look)
            look.rest()
        else:
            look.moved(view)

    def _with_values(
        self, view: EpochView, values: Mapping[str, Any], samples: int, prefix: str
    ) -> dict[str, RunningSum]:
        sums = dict(view.values)
        for key in values:
            mean = number_in(values, key)
            if mean is not None:
                name = f"{prefix}{key}"
                so_far = sums.get(name) or RunningSum(self._label_of(name))
                # The mean of no samples is NaN, as of the tokens of one kind in a batch without any.
                sums[name] = so_far if math.isnan(mean) else so_far.plus(mean, samples)
        return sums

    def _evaluation(self, look: Renderer, event: Event) -> None:
        # The step line first: results belong to a place in the run.
        self._stand(look)
        number = whole_in(event, "epoch")
        name = event.get("name")
        metrics = [self._sayable(str(name))] if name and name != "evaluation" else []
        values = event.get("values")
        for metric, result in values.items() if isinstance(values, Mapping) else ():
            metrics.append(self._sayable(f"{metric} {describe_result(result)}".rstrip()))
        look.evaluated("" if number is None else self._label(number), metrics)

    def _log(self, look: Renderer, event: Event) -> None:
        """Display logged numbers at the end of the epoch's row, or after it if the row is complete."""
        values = event.get("values")
        if not isinstance(values, Mapping):
            return
        found = {n: (self._label_of(n), value) for n in values if (value := number_in(values, n)) is not None}
        view, number = self._epoch, whole_in(event, "epoch")
        stands = view is None or (view.told and view.done > view.first)
        # Numbers logged in every step also come after the last step of an epoch, where they need no separate line.
        if view is not None and (not stands or found.keys() <= view.logged.keys()):
            view.logged = {**view.logged, **found}
            if not stands:
                look.moved(view)
        elif found:
            texts = [f"{label} {format_value(value)}" for label, value in found.values()]
            look.evaluated("" if number is None else self._label(number), texts)

    def _checkpoint(self, look: Renderer, event: Event) -> None:
        step = whole_in(event, "total_steps")
        look.saved("saved" if step is None else f"saved step {step:,}")

    def _warning(self, look: Renderer, event: Event) -> None:
        look.warning(self._sayable(str(event.get("message", ""))))

    def _over(self, look: Renderer, event: Event) -> None:
        self._leave(look)
        look.remark(describe_over(event))

    def _end(self, look: Renderer, event: Event) -> None:
        self._leave(look)
        look.rest()
        # After a single epoch, its line has already shown all of this.
        steps, seconds = whole_in(event, "total_steps"), number_in(event, "seconds")
        if self._epochs_seen > 1 and steps is not None:
            seconds = max(0.0, self._latest_s - self._started_s) if seconds is None else seconds
            rate = f", {format_rate(self._items / self._trained_s)} {self._unit}/s" if self._trained_s > 0 else ""
            look.remark(f"finished at step {steps:,} after {format_elapsed(seconds)}{rate}")
        epochs = self._epochs
        self._reset()
        self._epochs = epochs  # an evaluation that follows still belongs to this run

    def _enter(self, look: Renderer, event: Event, *, first: int, started_s: float) -> EpochView:
        number = whole_in(event, "epoch") or 0
        self._epochs_seen += 1
        if self._ended_s is not None:
            self._pauses.append(max(0.0, started_s - self._ended_s))
        steps, later = _lengths(event, first)
        view = EpochView(
            label=self._label(number),
            number=number,
            steps=steps,
            first=first,
            done=first,
            started_s=started_s,
            latest_s=started_s,
            later_steps=later,
            memory=self._memory,
        )
        if steps and later and self._pauses:
            view.later_s = -(-later // steps) * sum(self._pauses) / len(self._pauses)
        self._epoch = view
        look.moved(view)
        return view

    def _leave(self, look: Renderer) -> None:
        self._stand(look)
        if self._epoch is not None:
            self._items += self._epoch.items
            self._unit = self._epoch.unit
            self._trained_s += self._epoch.elapsed_s
            self._ended_s = self._epoch.latest_s
            self._epoch = None

    def _stand(self, look: Renderer) -> None:
        """Write the state of the epoch, unless the last line about it shows it."""
        if self._epoch is not None and not self._epoch.told:
            look.stood(self._epoch)
            self._epoch.told = True

    def _label(self, number: int) -> str:
        if self._epochs is None:
            return f"epoch {number + 1}"
        # After the last epoch, the run's cursor is at the start of the next one, which is never run.
        return f"epoch {min(number + 1, self._epochs):>{len(str(self._epochs))}}/{self._epochs}"


_HANDLERS: dict[str, Callable[[Progress, Renderer, Event], None]] = {
    "run": Progress._run,
    "resume": Progress._resume,
    "pipeline": Progress._pipeline,
    "epoch": Progress._begin,
    "step": Progress._step,
    "evaluation": Progress._evaluation,
    "log": Progress._log,
    "checkpoint": Progress._checkpoint,
    "warning": Progress._warning,
    "over": Progress._over,
    "end": Progress._end,
    "progress": Progress._advance,
}


def _look(
    stream: TextIO, *, interactive: bool | None, clock: Callable[[], float], lock: AbstractContextManager[Any]
) -> Renderer:
    if interactive is None:
        in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
        interactive = stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown") and not in_ci
    if not interactive:
        return PlainRenderer(stream, clock=clock)
    from unisono.watch.terminal_renderer import TerminalRenderer  # noqa: PLC0415  a plain run need not pay the import of rich

    return TerminalRenderer(stream, clock=clock, lock=lock)


def _count(view: EpochView, samples: int, weight: float | None) -> None:
    """Count the items that went through the model: tokens, if the loss is divided by their number."""
    # The weights of samples, unlike tokens, hardly ever add up to a whole number above that of the samples.
    if weight is not None and weight > samples and weight == int(weight):
        view.unit = "tokens"
    view.items += samples if weight is None or view.unit == "samples" else weight


def _lengths(event: Event, first: int) -> tuple[int | None, int]:
    """Return the steps of an epoch (None if not known), and those of the run after it (0 if not known)."""
    steps, done, all_steps = (whole_in(event, key) for key in ("steps", "total_steps", "run_steps"))
    if done is None or all_steps is None:
        return steps, 0
    left = max(0, all_steps - done)  # of the run
    if steps is None or first + left <= steps:
        return first + left, 0
    return steps, left - (steps - first)
