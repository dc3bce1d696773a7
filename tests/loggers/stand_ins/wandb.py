"""Stands for wandb 0.2x: the calls that WandbLogger makes, with wandb's own signatures, are noted."""

from __future__ import annotations

from typing import NamedTuple

calls: list[tuple] = []


class Image(NamedTuple):
    """Further arguments of the real one, such as mode, are left out."""

    data_or_path: str
    caption: str | None = None


class _Config:
    def update(self, d, allow_val_change=None):
        calls.append(("config.update", {"allow_val_change": allow_val_change}, d))


class Run:
    def __init__(self):
        self.config = _Config()
        self._step = -1

    def log(self, data, step=None, commit=None):
        assert all(isinstance(value, (int, float, str, Image)) for value in data.values())
        assert step >= self._step, "wandb drops what is logged for a step before the current one"
        self._step = step
        calls.append(("log", step, data))

    def finish(self, exit_code=None, quiet=None):
        calls.append(("finish", {"exit_code": exit_code}))


_INIT = {
    "entity",
    "project",
    "dir",
    "id",
    "name",
    "notes",
    "tags",
    "config",
    "config_exclude_keys",
    "config_include_keys",
    "allow_val_change",
    "group",
    "job_type",
    "mode",
    "force",
    "reinit",
    "resume",
    "resume_from",
    "fork_from",
    "save_code",
    "tensorboard",
    "sync_tensorboard",
    "monitor_gym",
    "settings",
}
"""The names of wandb.init's arguments, all of which are optional."""


def init(**arguments):
    assert arguments.keys() <= _INIT
    calls.append(("init", arguments))
    return Run()
