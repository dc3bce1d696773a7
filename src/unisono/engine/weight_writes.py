"""Writing values into the models between two steps, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["PrivateWeights", "WeightWrites"]


class WeightWrites(Protocol):
    """Writes values into tensors of the models. Where ranks share memory, one of them writes there."""

    def writing(self) -> AbstractContextManager[Callable[[Tensor, Tensor], None]]:
        """Return a context with a function write(tensor, value). After it, all ranks have all values.

        Every rank must enter it, when no rank reads the models, and write equal values.
        """


class PrivateWeights:
    """The weights of ranks that have a copy each."""

    @contextmanager
    def writing(self) -> Iterator[Callable[[Tensor, Tensor], None]]:
        """See `WeightWrites`."""

        def write(tensor: Tensor, value: Tensor) -> None:
            tensor.copy_(value)

        with torch.no_grad():
            yield write
