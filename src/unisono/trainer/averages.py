"""Moving averages of models' weights: their start, their updates and their state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

__all__ = ["AverageUpdates", "start_averages", "update_average"]


def start_averages(modules: Mapping[str, nn.Module], decay: float | None) -> dict[str, AveragedModel]:
    """Start an exponential moving average of each model's weights."""
    if decay is None:
        return {}
    average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    return {prefix: AveragedModel(module, multi_avg_fn=average) for prefix, module in modules.items()}


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
