"""The settings of a Trainer as plain values, for the event at the start of its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch.optim import Optimizer

from unisono.engine.description import hyperparameters, plain
from unisono.state.policy import Checkpoints
from unisono.trainer.settings import TrainerSettings

__all__ = ["describe_settings"]

_LONGEST = 1000
"""Characters of a setting."""


def describe_settings(settings: TrainerSettings, optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """Return the arguments of a Trainer as plain values: those that differ from None, and what its optimizers are.

    Args:
        settings: The arguments.
        optimizers: The optimizers by name, "" for a single one.
    """
    told: dict[str, Any] = {
        name.strip() or "optimizer": _short(_optimizer(optimizer))
        for name, optimizer in ((f"optimizer {key}", each) for key, each in optimizers.items())
    }
    elsewhere = {"directory", "device", "stateful", "checkpoints"}  # in this event already, or below
    left_out = elsewhere | {"digest_every", "resume", "progress", "listeners", "drill"}
    for each in fields(settings):
        value = getattr(settings, each.name)
        if each.name not in left_out and value is not None:
            shown = plain(value) if isinstance(value, bool | int | float | str | Mapping) else _form(value)
            told[each.name] = shown if isinstance(shown, bool | int | float) else _short(str(shown))
    defaults = Checkpoints()
    for each in fields(settings.checkpoints):
        value = getattr(settings.checkpoints, each.name)
        if value != getattr(defaults, each.name):
            told[f"checkpoints.{each.name}"] = value
    if settings.stateful:
        told["stateful"] = _short(", ".join(settings.stateful))
    return told


def _optimizer(optimizer: Optimizer) -> str:
    """Describe an optimizer by its first group, in which later ones often differ by a rate alone."""
    given = {
        key: value
        for key, value in hyperparameters(optimizer.param_groups[0]).items()
        if value not in (None, False) and key != "initial_lr"
    }
    groups = len(optimizer.param_groups)
    more = f", and {groups - 1} further groups" if groups > 1 else ""
    return f"{type(optimizer).__qualname__}({', '.join(f'{key}={value}' for key, value in given.items())}{more})"


def _form(value: Any) -> str:
    """Describe an object: its repr if that is short and says no address, otherwise its type."""
    told = repr(value)
    return told if len(told) < 200 and " at 0x" not in told else type(value).__qualname__


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
