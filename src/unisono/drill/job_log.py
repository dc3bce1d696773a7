"""The records of a run of a drill, read from its folder: events, recoveries, and the state of each rank at the end.

It can be read while the run goes on. Start reading at `JobLog`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["EVENTS", "REPLACED", "JobLog"]

EVENTS, REPLACED = "events.jsonl", "replaced.jsonl"
"""The files with the events of the Trainer, and with what the launcher tells about replaced ranks."""

_COMPARED = ("loss", "lr", "grad_norm", "values", "weight", "samples")
"""The fields of a step that are equal in equal runs."""

Step = tuple[tuple[str, str], ...]
"""These fields of a step with their values as JSON, which has all digits."""


class JobLog:
    """The log of one run.

    Args:
        folder: The folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._events, self._replaced = _Tail(folder / EVENTS), _Tail(folder / REPLACED)
        self._joined: list[int] = []  # numbers of recoveries after which no step has been done yet
        self._durations_s: list[float] = []
        self.has_trainer = False
        """True if the script has made a Trainer."""
        self.virtual_ranks = 0
        """The largest number of ranks."""
        self.latest = 0
        """The number of the latest step."""
        self.latest_s = 0.0
        """When it was done, in Unix seconds."""
        self.run_steps: int | None = None
        """The steps of the whole run, where they are known before."""
        self.steps: dict[int, dict[str, set[Step]]] = {}
        """By number and name of the optimizer, what is told about the step: more than one if it was done twice."""
        self.evaluations: list[tuple[int, str, str]] = []
        """Epoch, name and values as JSON."""
        self.recoveries: list[dict[str, Any]] = []
        """The launcher's records of replaced ranks."""
        self.calls: dict[int, str] = {}
        """By number of the recovery, the call that was made again after it."""
        self.resumed_s: dict[int, float] = {}
        """By number of the recovery, when the first step after it was done, in Unix seconds."""

    @property
    def step_s(self) -> float:
        """The median duration of a step."""
        return median(self._durations_s) if self._durations_s else 0.0

    @property
    def longest_s(self) -> float:
        """The longest time from one step to the next of an epoch."""
        return max(self._durations_s, default=0.0)

    def read(self) -> None:
        """Read what has been written since the last time."""
        for event in self._events.read():
            self._add(event)
        self.recoveries += self._replaced.read()

    def ends(self) -> dict[int, dict[str, str]]:
        """Return the digests of the parts of the state at the end of the last loop over epochs, by rank."""
        found = {}
        for path in sorted(self.folder.glob("end-*.jsonl")):
            entries = [*_Tail(path).read()]
            if entries:
                found[int(path.stem.removeprefix("end-"))] = entries[-1]["digests"]
        return dict(sorted(found.items()))

    def _add(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "step":
            self.latest, self.latest_s = event["total_steps"], event["time"]
            told = tuple((name, json.dumps(event[name], sort_keys=True)) for name in _COMPARED if name in event)
            self.steps.setdefault(self.latest, {}).setdefault(event.get("optimizer", ""), set()).add(told)
            self._durations_s.append(event["step_s"])
            for number in self._joined:
                self.resumed_s[number] = event["time"]
            self._joined.clear()
        elif kind == "run":
            self.has_trainer, self.virtual_ranks = True, event["virtual_ranks"]
        elif kind == "epoch":
            self.run_steps = event["run_steps"]
        elif kind == "evaluation":
            values = json.dumps(event["values"], sort_keys=True)
            self.evaluations.append((event["epoch"], event["name"], values))
        elif kind == "recovery":
            self._joined.append(event["number"])
            self.calls[event["number"]] = event["call"]


class _Tail:
    """Reads the lines of JSON that are appended to a file, which may not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the values of the lines that are new. A line that a killed process left incomplete is skipped."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue
