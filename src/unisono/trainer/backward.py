"""Running backward from a micro-batch's loss.

`Tensor.backward` makes many checks that a loss from `read_loss` always passes: for a small model they take longer than
some of its layers. So the autograd engine is called directly unless something is unusual.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import has_torch_function_unary

__all__ = ["Backward"]


class Backward:
    """Runs backward from `loss.sum() / samples`, without the sum, the division and their backwards."""

    def __init__(self) -> None:
        self._key: tuple[int, torch.dtype, torch.device, torch.Size] | None = None
        self._seed = torch.ones(())

    def run(self, loss: Tensor, *, samples: int, inputs: Sequence[Tensor] | None) -> None:
        """Accumulate the gradients of a loss in its parameters, or only in `inputs` if there are any.

        Args:
            loss: A scalar, or one loss per sample.
            samples: The divisor.
            inputs: The tensors that get gradients; None: all parameters.
        """
        seed = self.seed_for(loss, samples)
        if inputs is None and not has_torch_function_unary(loss) and not torch._C._are_functorch_transforms_active():
            # 12 µs less than by `loss.backward`. (retain_graph, create_graph and inputs are positional.)
            _engine_run_backward((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        else:
            loss.backward(seed, inputs=inputs)  # type: ignore[no-untyped-call]

    def seed_for(self, loss: Tensor, samples: int) -> Tensor:
        """Return the gradient of `loss.sum() / samples` with respect to the losses."""
        key = (samples, loss.dtype, loss.device, loss.shape)
        # Otherwise a backward that writes to the gradient it gets would corrupt all later steps.
        if key != self._key or self._seed._version:
            seed = torch.ones((), dtype=loss.dtype, device=loss.device) / samples
            self._key, self._seed = key, seed.expand(loss.shape)  # as the backward of a sum does
        return self._seed
