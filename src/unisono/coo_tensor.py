"""Makes sparse tensors without a check of their indices, and without torch's warning about that."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["make_coo"]

_WARNS = torch.__version__ < (2, 13)  # type: ignore[operator]  # torch 2.11 and 2.12 warn in spite of the argument


def make_coo(indices: Tensor, values: Tensor, shape: torch.Size, *, is_coalesced: bool | None = None) -> Tensor:
    """Return a sparse tensor, which has the memory of the arguments.

    Args:
        indices: Of the entries, int64[sparse dimensions, n], all within the shape.
        values: The entries, [n, ...].
        shape: The shape of the tensor.
        is_coalesced: True if entries ascend, and none is repeated. None: not known.
    """
    if not _WARNS:
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=False)
    checks = torch.sparse.check_sparse_tensor_invariants
    with checks(False):  # type: ignore[no-untyped-call]
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=False)
