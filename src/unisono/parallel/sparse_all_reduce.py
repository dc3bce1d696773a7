"""The sum over ranks of sparse gradients, such as those of Embedding(sparse=True): rows and values are exchanged."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.coo_tensor import make_coo
from unisono.errors import UnisonoError
from unisono.parallel.gradient_state import GradientState
from unisono.parallel.gradient_transport import GradientTransport

__all__ = ["reduce_sparse"]


def reduce_sparse(i: int, gradients: GradientState, gradient_transport: GradientTransport, *, scale: float) -> None:
    """Reduce the gradient of one parameter, and set p.grad to the sum, coalesced. Every rank must call it.

    The gradient is in COO layout, with the first dimension sparse. Traffic: every rank sends as many rows as the rank
    with the most rows has.

    Args:
        i: The index of the parameter.
        gradients: This rank's gradients.
        gradient_transport: The ranks.
        scale: The factor for each rank's gradient.

    Raises:
        UnisonoError: The gradient is dense.
    """
    parameter, gradient = gradients.parameters[i], gradients.own(i)
    tensor = parameter.tensor
    if gradient is not None and gradient.layout == torch.strided:
        raise UnisonoError(
            f"parameter {parameter.name!r} has a dense gradient, and its module has sparse=True: use it by its module "
            "alone, or make the module with sparse=False"
        )
    row = tensor.shape[1:]
    if gradient is None:
        indices = torch.empty(0, dtype=torch.int64, device=tensor.device)
        values = torch.empty((0, *row), dtype=tensor.dtype, device=tensor.device)
    else:
        own = gradient.detach().coalesce()
        indices, values = own.indices()[0].contiguous(), own.values().contiguous() * scale
    counts = [torch.zeros(1, dtype=torch.int64, device=tensor.device) for _ in range(gradient_transport.size)]
    dist.all_gather(counts, torch.tensor([len(indices)], device=tensor.device), group=gradient_transport.group)
    found = [int(count) for count in counts]
    longest = max(found)
    all_indices, all_values = (_gather_padded(part, longest, gradient_transport) for part in (indices, values))
    total = make_coo(
        torch.cat([part[:n] for part, n in zip(all_indices, found, strict=True)]).view(1, -1),
        torch.cat([part[:n] for part, n in zip(all_values, found, strict=True)]),
        tensor.shape,
    ).coalesce()
    gradients.give(i, total)


def _gather_padded(part: Tensor, length: int, gradient_transport: GradientTransport) -> list[Tensor]:
    """Return each rank's tensor, padded with zeros to the same length."""
    padded = part.new_zeros((length, *part.shape[1:]))
    padded[: len(part)] = part
    gathered = [torch.empty_like(padded) for _ in range(gradient_transport.size)]
    if length:
        dist.all_gather(gathered, padded, group=gradient_transport.group)
    return gathered
