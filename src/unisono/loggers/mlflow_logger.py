"""`MLflowLogger`: the numbers of a run in MLflow, and its texts and images as artifacts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from unisono.loggers.logger import Logger, import_library
from unisono.loggers.rows import Row
from unisono.watch.event_kinds import Event

__all__ = ["MLflowLogger"]

_FIXED = ("virtual_ranks", "seed", "parameters")
"""Facts that never change during a run: MLflow does not allow a parameter to change."""
_CHANGING = ("world_size", "device", "threads", "torch", "directory")
_MOST_METRICS = 1000
"""In one request, by MLflow's limits."""
_NOT_ALLOWED = re.compile(r"[^\w\-. /]", re.ASCII)
_NOT_ALLOWED_IN_PATHS = re.compile(r"[^\w\-]+", re.ASCII)


class MLflowLogger(Logger):
    """Writes a run of MLflow. Needs the package mlflow.

    Facts about the run are its parameters and tags, such as "unisono.seed". The logger has its own client and run:
    MLflow's active run is neither used nor changed. In names, characters that MLflow does not allow become "_". Texts
    and images are artifacts: texts/NAME/step-000000012.txt, and the run's image files in images.

    Args:
        experiment: The name of the experiment, which is created if it is missing.
        run_name: The name of the run. None: MLflow chooses one.
        run_id: A run of MLflow to continue, for resumed runs. MLflow keeps both values of repeated steps, and they are
            equal.
        tracking_uri: The server or folder. None: the one that the environment sets.
        tags: Tags of a new run.

    Raises:
        ModuleNotFoundError: mlflow is not installed.
    """

    def __init__(
        self,
        experiment: str = "Default",
        *,
        run_name: str | None = None,
        run_id: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._mlflow = import_library("mlflow", package="mlflow", logger="MLflowLogger")
        self._entities = import_library("mlflow.entities", package="mlflow", logger="MLflowLogger")
        self._experiment, self._run_name, self._given_id = experiment, run_name, run_id
        self._tracking_uri, self._tags = tracking_uri, dict(tags or {})
        self._client: Any = None
        self._is_running = False
        self.run_id: str | None = run_id
        """The run of MLflow; None until it exists."""

    def begin(self, facts: Event) -> None:
        """See `Logger`."""
        self.finish(failed=False)
        client = self._client = self._mlflow.MlflowClient(tracking_uri=self._tracking_uri)
        if self._given_id is not None:
            client.update_run(self._given_id, status="RUNNING")
        else:
            found = client.get_experiment_by_name(self._experiment)
            experiment_id = client.create_experiment(self._experiment) if found is None else found.experiment_id
            run = client.create_run(experiment_id, tags=self._tags, run_name=self._run_name)
            self.run_id = run.info.run_id
        self._is_running = True
        client.log_batch(
            self.run_id,
            params=[self._entities.Param(f"unisono.{name}", str(facts[name])) for name in _FIXED if name in facts],
            tags=[self._entities.RunTag(f"unisono.{name}", str(facts[name])) for name in _CHANGING if name in facts],
        )

    def write(self, rows: Sequence[Row]) -> None:
        """See `Logger`."""
        metrics = [
            self._entities.Metric(_NOT_ALLOWED.sub("_", name), value, int(row.time * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + _MOST_METRICS])
        for row in rows:
            for name, text in row.texts.items():
                place = f"texts/{_NOT_ALLOWED_IN_PATHS.sub('_', name)}/step-{row.step:09}.txt"
                self._client.log_text(self.run_id, text, place)
            for image in row.images.values():
                self._client.log_artifact(self.run_id, str(image.path), "images")

    def finish(self, *, failed: bool) -> None:
        """See `Logger`."""
        if self._is_running:
            self._is_running = False
            self._client.set_terminated(self.run_id, status="FAILED" if failed else "FINISHED")
