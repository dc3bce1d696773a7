"""Stands for mlflow 3: the calls that MLflowLogger makes, with MlflowClient's own signatures, are noted."""

from __future__ import annotations

from types import SimpleNamespace

calls: list[tuple] = []


class MlflowClient:
    def __init__(self, tracking_uri=None, registry_uri=None):
        calls.append(("MlflowClient", tracking_uri))

    def get_experiment_by_name(self, name):
        calls.append(("get_experiment_by_name", name))

    def create_experiment(self, name, artifact_location=None, tags=None):
        calls.append(("create_experiment", name))
        return "17"

    def create_run(self, experiment_id, start_time=None, tags=None, run_name=None):
        calls.append(("create_run", experiment_id, tags, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def update_run(self, run_id, status=None, name=None):
        calls.append(("update_run", run_id, status))

    def log_batch(self, run_id, metrics=(), params=(), tags=(), synchronous=None):
        calls.append(("log_batch", run_id, metrics, params, tags))

    def log_text(self, run_id, text, artifact_file):
        calls.append(("log_text", run_id, text, artifact_file))

    def log_artifact(self, run_id, local_path, artifact_path=None):
        calls.append(("log_artifact", run_id, local_path, artifact_path))

    def set_terminated(self, run_id, status=None, end_time=None):
        calls.append(("set_terminated", run_id, status))
