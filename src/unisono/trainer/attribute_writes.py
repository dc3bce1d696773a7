"""Finds tensors in plain attributes of modules that the forward pass modifies, which no rank tells another."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from unisono.engine.model_contents import member_name

__all__ = ["AttributeWrites"]

_SCANS = 2
"""How often attributes are listed: before the first step, and before the second, as a forward pass may make some."""
_SYNCHRONIZED = ("torchmetrics",)
"""Packages whose modules keep what each rank has counted, and add it up over ranks themselves."""


class AttributeWrites:
    """Looks at the versions that torch counts for the tensors in attributes, until it has found one.

    An attribute that gets another tensor is none: most of them are notes for the reader, such as attention weights. Nor
    is a buffer, of which steps keep one value. A look takes 0.1 µs for each such tensor; most models have none.

    Args:
        modules: The models by the prefix of their names.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._scans = _SCANS
        self._found: list[tuple[str, Tensor]] = []
        self._versions: list[int] = []

    def begin(self) -> None:
        """Note what the attributes are before a step."""
        if self._scans:
            self._scans -= 1
            self._found = _tensors_in(self._modules)
        if self._found:
            self._versions = [tensor._version for _, tensor in self._found]

    def warning(self) -> str | None:
        """Return a warning, once, if the step has modified one; None otherwise."""
        for (name, tensor), version in zip(self._found, self._versions, strict=False):
            if tensor._version != version:
                self._scans, self._found = 0, []
                attribute = name.rpartition(".")[2]
                return (
                    f"the forward pass modifies the tensor in the attribute {name!r}, of which each rank has its own: "
                    "if it is read later, the result depends on the number of ranks; and no checkpoint has it. Make "
                    f"it a buffer: self.register_buffer({attribute!r}, ...)."
                )
        return None


def _tensors_in(modules: Mapping[str, nn.Module]) -> list[tuple[str, Tensor]]:
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, root in modules.items():
        for path, module in root.named_modules():
            if type(module).__module__.partition(".")[0] in _SYNCHRONIZED:
                continue
            whole = prefix + path if path else prefix.removesuffix(".")
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_inference():
                    found.setdefault(id(value), (member_name(whole, name), value))
    return [*found.values()]
