"""Makes sparse tensors without a check of their indices, and without torch's warning about that."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["make_coo"]


def make_coo(indices: Tensor, values: Tensor, shape: torch.Size, *, is_coalesced: bool | None = None) -> Tensor:
    """Return a sparse tensor, which has the memory of the arguments.

    Args:
        indices: Of the entries, int64[sparse dimensions, n], all within the shape.
        values: The entries, [n, ...].
        shape: The shape of the tensor.
        is_coalesced: True if entries ascend, and none is repeated. None: not known.
    """
    checks = torch.sparse.check_sparse_tensor_invariants
    with checks(False):  # type: ignore[no-untyped-call]  # torch 2.11 and 2.12 warn in spite of the argument
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=False)
