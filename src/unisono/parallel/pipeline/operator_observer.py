"""The effects of a call, seen at the operators that it runs: the tensors it reads and modifies, and if it draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unisono.parallel.pipeline.placeholder import METADATA_OPERATORS

__all__ = ["OperatorObserver"]


_BATCH_NORMS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit"})


class OperatorObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the tensors that operators read and modify while it is active. The order of `read` is that of first use."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: dict[int, Tensor] = {}
        self.written: dict[int, Tensor] = {}
        self.draws = False
        self.has_hooks = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note one operator and run it."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws = True
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            self.has_hooks = True
        if func not in METADATA_OPERATORS:
            for position, declared in enumerate(func._schema.arguments):
                given = args[position] if position < len(args) else kwargs.get(declared.name)
                if given is None:
                    continue
                # batch_norm's schema does not say that it updates its running statistics.
                modified = (declared.alias_info is not None and declared.alias_info.is_write) or (
                    declared.name in ("running_mean", "running_var") and func.__name__.partition(".")[0] in _BATCH_NORMS
                )
                for leaf in tree_leaves(given):
                    if isinstance(leaf, Tensor):
                        self.read[id(leaf)] = leaf
                        if modified:
                            self.written[id(leaf)] = leaf
        return func(*args, **kwargs)
