"""The numbers that control a run: hyperparameters of optimizers and the state of learning-rate schedulers.

They are small, and the user's code may change them at any time. Start reading at `settings_of` and `overruled`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

__all__ = ["Hyperparameters", "SettingsReader", "given_by", "is_scheduler", "overruled", "put_settings", "settings_of"]

_FIXED = frozenset({bool, int, float, str, type(None)})
"""Types of values that cannot be written to."""


_groups_of = attrgetter("param_groups")


class Hyperparameters(NamedTuple):
    """The settings of a run at one moment, independent of the objects from which they were read."""

    hyperparameters: dict[str, list[dict[str, Any]]]
    """The options of each optimizer's parameter groups, without the parameters."""
    schedulers: dict[str, dict[str, Any]]
    """States by name."""


def is_scheduler(value: object) -> bool:
    """Return True for a learning-rate scheduler of torch, whose state is a few numbers."""
    return isinstance(value, LRScheduler | ReduceLROnPlateau)  # the latter is not an LRScheduler in every torch


def settings_of(optimizers: Mapping[str, Optimizer], others: Mapping[str, Any]) -> Hyperparameters:
    """Return a copy of the current settings. About 3 µs for each optimizer and each scheduler."""
    return Hyperparameters(
        {
            name: [
                {key: _copied(value) for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ]
            for name, optimizer in optimizers.items()
        },
        {
            name: {key: _copied(value) for key, value in other.state_dict().items()}
            for name, other in others.items()
            if is_scheduler(other)
        },
    )


class SettingsReader:
    """Reads the settings of a run again and again, and copies them only if they may have changed.

    That is recognized by the identity of the values, in 1 µs. Settings that may change while they are the same object,
    such as a learning rate that is a tensor, are copied each time, and so are the states of schedulers.

    Args:
        optimizers: The optimizers by name.
        others: All other objects with a state, by name.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer], others: Mapping[str, Any]) -> None:
        self._optimizers, self._others = optimizers, others
        self._values: list[Any] = []
        """The values of all parameter groups, including the lists of their parameters, when they were last copied."""
        self._settings: Hyperparameters | None = None
        """The settings since then; None if they have to be copied."""

    def read(self) -> Hyperparameters:
        """Return the current settings. Do not write to them."""
        groups = chain.from_iterable(map(_groups_of, self._optimizers.values()))
        values = [*chain.from_iterable(map(dict.values, groups))]
        settings = self._settings
        if settings is None or len(values) != len(self._values) or not all(map(is_, values, self._values)):
            settings = settings_of(self._optimizers, self._others)
            self._values = values
            self._settings = settings if not settings.schedulers and _are_fixed(settings.hyperparameters) else None
        return settings


def _are_fixed(hyperparameters: Mapping[str, list[dict[str, Any]]]) -> bool:
    """Return True if no hyperparameter can be written to."""
    values = [value for groups in hyperparameters.values() for group in groups for value in group.values()]
    return all(type(each) in _FIXED for value in values for each in (value if type(value) is tuple else (value,)))


def put_settings(settings: Hyperparameters, optimizers: Mapping[str, Optimizer], others: Mapping[str, Any]) -> None:
    """Take over settings, but for the states of schedulers that the loop itself steps, in `stateful`."""
    for name, groups in settings.hyperparameters.items():
        for group, values in zip(optimizers[name].param_groups, groups, strict=True):
            group.update({key: _copied(value) for key, value in values.items()})
    for name, state in settings.schedulers.items():
        if not name.startswith("stateful/"):
            others[name].load_state_dict({key: _copied(value) for key, value in state.items()})


def given_by(settings: Hyperparameters) -> dict[str, dict[str, Any]]:
    """Return the plain values among settings, for each optimizer and scheduler by its name in messages."""
    found: dict[str, dict[str, Any]] = {}
    for name, groups in settings.hyperparameters.items():
        for index, group in enumerate(groups):
            where = (f" of {name}" if name else "") + (f" of group {index}" if len(groups) > 1 else "")
            found[f"optimizer{where}"] = {key: value for key, value in group.items() if _is_plain(value)}
    for name, state in settings.schedulers.items():
        found[name] = {key: value for key, value in state.items() if _is_plain(value) and not key.startswith("_")}
    return found


def overruled(
    began: Mapping[str, Mapping[str, Any]],
    goes_on: Mapping[str, Mapping[str, Any]],
    script: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Return descriptions of the script's settings that a resumed run does not use.

    Args:
        began: The script's settings at the first start, as `given_by` returns them.
        goes_on: The settings in the checkpoint.
        script: The script's present settings.

    >>> overruled({"optimizer": {"lr": 0.1}}, {"optimizer": {"lr": 0.01}}, {"optimizer": {"lr": 0.5}})
    ['lr 0.01, at first 0.1 (the script says 0.5)']
    """
    found = []
    for where, first in began.items():
        for key, value in first.items():
            says = script.get(where, {}).get(key, value)
            # A scheduler leaves `initial_lr` in the group: the same number under another name.
            if says == value or (key == "initial_lr" and "lr" in first):
                continue
            now = goes_on.get(where, {}).get(key, value)
            name = key if where == "optimizer" else f"{key} of {where.removeprefix('optimizer of ')}"
            found.append(f"{name} {now}{'' if now == value else f', at first {value}'} (the script says {says})")
    return found


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if type(value) is list else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
