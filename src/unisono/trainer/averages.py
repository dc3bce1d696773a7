"""Moving averages of models' weights: their start, their updates and their state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from unisono.parallel.sharding.built_parts import built_parts, copy_built
from unisono.parallel.sharding.divided_model import DividedModel

__all__ = ["AverageUpdates", "DividedAverage", "start_averages", "update_average"]


def start_averages(modules: Mapping[str, nn.Module], decay: float | None) -> dict[str, AveragedModel]:
    """Start an exponential moving average of each model's weights."""
    if decay is None:
        return {}
    average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    return {prefix: _average_of(module, average) for prefix, module in modules.items()}


def _average_of(module: nn.Module, function: Any) -> AveragedModel:
    built = built_parts(module)
    if built is None:
        return AveragedModel(module, multi_avg_fn=function)
    average = AveragedModel(nn.Module(), multi_avg_fn=function)  # which would copy the module as a whole
    average.module = copy_built(module, built)
    return average


class DividedAverage:
    """The average of a model that is divided over ranks, in the same parts.

    Args:
        divided: The model.
        averaged: The averaged model, which comes together and apart with it from now on.
    """

    def __init__(self, divided: DividedModel, averaged: nn.Module) -> None:
        self.model = divided.copied(averaged)
        """Brings the blocks of the averaged model together."""
        divided.division.beside.append(self.model.division)
        self._pairs = [
            (average, own)
            for of_average, unit in zip(self.model.division.units, divided.division.units, strict=True)
            for (_, average), (_, own) in zip(of_average.held_places(), unit.held_places(), strict=True)
        ]

    def update(self, average: AveragedModel, module: nn.Module) -> None:
        """Update this rank's parts, in mid-run. Local."""
        update_average(average, module, self._pairs)


class AverageUpdates:
    """The number of updates of an averaged model, on which its first update depends, as state to save."""

    def __init__(self, average: AveragedModel) -> None:
        self._average = average

    def state_dict(self) -> dict[str, Any]:
        """Return the count."""
        return {"updates": int(self._average.n_averaged)}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Set the count."""
        self._average.n_averaged.fill_(state["updates"])


def update_average(average: AveragedModel, module: nn.Module, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Update some parameters of an average, and its buffers, as its own `update_parameters` does with all.

    Args:
        average: The averaged model.
        module: The model.
        pairs: Parameters of the average, each with that of the model.
    """
    assert average.multi_avg_fn is not None
    with torch.no_grad():
        if not average.n_averaged:
            for averaged, parameter in pairs:
                averaged.copy_(parameter)
        else:
            by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = {}
            for averaged, parameter in pairs:
                kind = averaged.dtype, averaged.device
                by_kind.setdefault(kind, []).append((averaged.detach(), parameter.detach()))
            for of_kind in by_kind.values():
                averages, parameters = map(list, zip(*of_kind, strict=True))
                average.multi_avg_fn(averages, parameters, average.n_averaged)
        for averaged, buffer in zip(average.module.buffers(), module.buffers(), strict=True):
            averaged.copy_(buffer)
        average.n_averaged += 1
