"""`OpenTelemetryLogger`: the latest numbers of a run as gauges of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.loggers.logger import Logger, import_library
from unisono.loggers.rows import Row
from unisono.watch.event_kinds import Event

__all__ = ["OpenTelemetryLogger"]


class OpenTelemetryLogger(Logger):
    """Records the latest numbers of a run as gauges of OpenTelemetry. Needs the package opentelemetry-api.

    Where they go is decided by your MeterProvider, which you set up before as in any program, or by
    `opentelemetry-instrument`; without one they go nowhere. The gauges are those of `PrometheusLogger`: "unisono.value"
    with the attributes "run" and "name", "unisono.steps", "unisono.epoch", and "unisono.state": 0 while the run goes
    on, 1 when it has ended, 2 when it has failed. A gauge keeps the latest value only, and the exporter decides how
    often it is read.

    Args:
        run: The attribute "run". None: the name of the run's directory, or "unisono" without one.
        meter_provider: The MeterProvider to use. None: the global one.

    Raises:
        ModuleNotFoundError: opentelemetry-api is not installed.
    """

    def __init__(self, *, run: str | None = None, meter_provider: Any = None) -> None:
        super().__init__()
        metrics = import_library(
            "opentelemetry.metrics",
            package="opentelemetry",
            logger="OpenTelemetryLogger",
            distribution="opentelemetry-api",
        )
        self._given, self._run = run, run or "unisono"
        meter = metrics.get_meter("unisono", meter_provider=meter_provider)
        self._values = meter.create_gauge("unisono.value", description="The latest value of a number of the run.")
        self._steps = meter.create_gauge("unisono.steps", description="Steps of the run that are done.")
        self._epoch = meter.create_gauge("unisono.epoch", description="The epoch, from 0.")
        self._state = meter.create_gauge(
            "unisono.state", description="0: the run goes on. 1: it has ended. 2: it has failed."
        )

    def begin(self, facts: Event) -> None:
        """See `Logger`."""
        directory = facts.get("directory")
        self._run = self._given or (Path(directory).name if directory else "unisono")
        self._state.set(0, {"run": self._run})

    def write(self, rows: Sequence[Row]) -> None:
        """See `Logger`."""
        # A gauge keeps the last value alone, so earlier ones need not be set.
        latest = {name: value for row in rows for name, value in row.values.items()}
        for name, value in latest.items():
            self._values.set(float(value), {"run": self._run, "name": name})
        if rows:
            self._steps.set(rows[-1].step, {"run": self._run})
            self._epoch.set(rows[-1].epoch, {"run": self._run})

    def finish(self, *, failed: bool) -> None:
        """See `Logger`."""
        self._state.set(2 if failed else 1, {"run": self._run})
