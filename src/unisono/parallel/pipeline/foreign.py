"""The parameters of other stages: a rank gives their memory back, and keeps their names, shapes and types."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from unisono.engine.sharded.unit import are_kept, fill_of
from unisono.parallel.pipeline.placeholder import TensorLayout

__all__ = ["ForeignParameters"]


class ForeignParameters:
    """The parameters of a model that this rank does not use.

    Without memory, a parameter is one NaN that is expanded to its shape, or 0 if it has whole numbers: it can be looked
    at, and a write to it is an error of torch, but for `fill_` and `zero_`.

    Args:
        model: The model, whole.

    >>> model = nn.Linear(1000, 1000)
    >>> foreign = ForeignParameters(model)
    >>> foreign.release({"bias"})
    >>> model.weight.shape, model.weight.untyped_storage().nbytes()
    (torch.Size([1000, 1000]), 4)
    >>> foreign.restore()
    >>> model.weight.untyped_storage().nbytes()
    4000000
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self._layouts: dict[str, TensorLayout] = {}
        self._numbers: dict[str, tuple[Tensor, int]] = {}
        """The number of which each parameter without memory consists, and the parameter's version when it lost it."""

    @property
    def layouts(self) -> Mapping[str, TensorLayout]:
        """The layouts of the parameters without memory, by name."""
        return self._layouts

    def release(self, own: Collection[str]) -> None:
        """Give back the memory of all parameters but the rank's own, unless that was done before."""
        for name, parameter in self._parameters.items():
            if name not in own and name not in self._layouts:
                self._layouts[name] = TensorLayout.of(parameter)
                number = torch.full((), fill_of(parameter), dtype=parameter.dtype, device=parameter.device)
                parameter.data = number.expand(parameter.shape)
                self._numbers[name] = number, parameter._version

    def restore(self) -> None:
        """Give parameters memory again, with any values."""
        for name, layout in self._layouts.items():
            self._parameters[name].data = layout.allocate()
        self._layouts.clear()
        self._numbers.clear()

    def written(self) -> str | None:
        """Return the name of a parameter without memory that was written to, and drop all such values; or None."""
        found = None
        parameters = [self._parameters[name] for name in self._numbers]
        fills = [fill_of(p) for p in parameters]
        kept = are_kept([number for number, _ in self._numbers.values()], fills)
        for name, p, fill, is_kept in zip([*self._numbers], parameters, fills, kept, strict=True):
            number, version = self._numbers[name]
            if not is_kept or p._version != version:
                number.fill_(fill)
                self._numbers[name] = number, p._version
                found = found or name
        return found
