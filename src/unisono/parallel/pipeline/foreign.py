"""The parameters of other stages: a rank gives their memory back, and keeps their names, shapes and types."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from unisono.parallel.pipeline.placeholder import TensorLayout

__all__ = ["ForeignParameters"]


class ForeignParameters:
    """The parameters of a model that this rank does not use.

    Without memory, a parameter is one zero that is expanded to its shape: it can be looked at, and a write to it is an
    error of torch.

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

    @property
    def layouts(self) -> Mapping[str, TensorLayout]:
        """The layouts of the parameters without memory, by name."""
        return self._layouts

    def release(self, own: Collection[str]) -> None:
        """Give back the memory of all parameters but the rank's own, unless that was done before."""
        for name, parameter in self._parameters.items():
            if name not in own and name not in self._layouts:
                self._layouts[name] = TensorLayout.of(parameter)
                parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)

    def restore(self) -> None:
        """Give parameters memory again, with any values."""
        for name, layout in self._layouts.items():
            self._parameters[name].data = layout.allocate()
        self._layouts.clear()
