"""The latest numbers of a run in Prometheus' text format. Start reading at `LatestNumbers`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from unisono.loggers.rows import Row

__all__ = ["LatestNumbers", "metric"]


@dataclass(eq=False, slots=True)
class LatestNumbers:
    """The latest numbers of one run."""

    run: str
    """The value of the label "run"."""
    ranks: int | None = None
    """Ranks at the start of the process."""
    step: int = 0
    epoch: int = 0
    time: float = 0.0
    """When the latest numbers came, in Unix seconds."""
    values: dict[str, float] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Note the numbers of a step, an evaluation or a log."""
        self.step, self.epoch, self.time = row.step, row.epoch, row.time
        self.values.update(row.values)

    def text(self, *, state: int) -> str:
        """Return the numbers in the text format, version 0.0.4.

        Args:
            state: 0 while the run goes on, 1 if it has ended, 2 if it has failed.
        """
        return "".join(f"{line}\n" for line in self._lines(state))

    def _lines(self, state: int) -> Iterator[str]:
        run = {"run": self.run}
        yield from metric("unisono_state", "0: the run goes on. 1: it has ended. 2: it has failed.", state, run)
        yield from metric("unisono_steps", "Steps of the run that are done.", self.step, run)
        yield from metric("unisono_epoch", "The epoch, from 0.", self.epoch, run)
        if self.ranks is not None:
            yield from metric("unisono_start_ranks", "Ranks at the start of the process.", self.ranks, run)
        yield from metric("unisono_step_timestamp_seconds", "When the latest numbers came.", self.time, run)
        yield "# HELP unisono_value The latest value of a number of the run, by its name."
        yield "# TYPE unisono_value gauge"
        for name, value in self.values.items():
            yield _sample("unisono_value", value, {**run, "name": name})


def metric(name: str, told: str, value: float, labels: dict[str, str]) -> Iterator[str]:
    """Yield the lines of a gauge.

    >>> list(metric("up", "Always.", 1, {"run": "a"}))
    ['# HELP up Always.', '# TYPE up gauge', 'up{run="a"} 1.0']
    """
    yield f"# HELP {name} {told}"
    yield f"# TYPE {name} gauge"
    yield _sample(name, value, labels)


def _sample(name: str, value: float, labels: dict[str, str]) -> str:
    told = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{told}}} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "+Inf" if number > 0 else "-Inf"
    return repr(number)
