"""Lookups where a model is compiled by `torch.compile`. Imported there alone, as it imports torch's compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["look_up_eagerly"]

_REASON = "a table is looked up between graphs: it finds new ids, and checks all while it reads"


def _call(table: nn.Module, *given: Any) -> Tensor:
    found: Tensor = table(*given)
    return found


look_up_eagerly: Callable[..., Tensor] = torch.compiler.disable(_call, reason=_REASON)  # type: ignore[no-untyped-call]
"""Calls a table, from within a function that is being compiled, as if it were not."""
