"""Finds tensors in plain attributes of modules that the forward pass modifies, which no rank tells another."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.engine.model_contents import member_name

__all__ = ["AttributeWrites"]

_SCANS = 2
"""How often attributes are listed: before the first step, and before the second, as a forward pass may make some."""
_MOST = 100
"""The most elements of a container that is looked into."""
_OWN = frozenset(vars(nn.Module()))
"""The attributes of every module, which hold its parameters, buffers and hooks."""
_SYNCHRONIZED = ("torchmetrics",)
"""Packages whose modules keep what each rank has counted, and add it up over ranks themselves."""


@dataclass(slots=True)
class _Attribute:
    module: nn.Module
    prefix: str
    name: str
    place: str
    """Where it is in a container; "" if it is none."""
    tensor: Tensor
    version: int
    is_from_start: bool
    """True if it was there before the first step: then it is no note of the forward pass."""


class AttributeWrites:
    """Looks at the tensors in attributes, and at the versions that torch counts for them, until one has changed.

    An attribute that gets its first tensor in a forward pass, and then others, is none: most of them are notes for the
    reader, such as attention weights. Nor is one whose shape changes, as that of a cache, nor a buffer, of which steps
    keep one value. A look takes some 0.2 µs for each such tensor; most models have none.

    Args:
        modules: The models by the prefix of their names.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._scans = _SCANS
        self._found: list[_Attribute] = []

    def begin(self) -> None:
        """Note what the attributes are before a step."""
        if self._scans:
            known = {(id(each.module), each.name) for each in self._found if each.is_from_start}
            self._found = _attributes_of(self._modules)
            for each in self._found:
                each.is_from_start = self._scans == _SCANS or (id(each.module), each.name) in known
            self._scans -= 1
        for each in self._found:
            now = each.tensor if each.place else vars(each.module).get(each.name)
            if isinstance(now, Tensor):
                each.tensor, each.version = now, now._version

    def warning(self) -> str | None:
        """Return a warning, once, if the step has changed one; None otherwise."""
        for each in self._found:
            if (how := _change(each)) is not None:
                self._scans, self._found = 0, []
                name = member_name(each.prefix, each.name) + each.place
                return (
                    f"the forward pass {how} the attribute {name!r}, of which each rank has its own: if it is read "
                    "later, the result depends on the number of ranks; and no checkpoint has it. Make it a buffer: "
                    f"self.register_buffer({each.name!r}, ...)."
                )
        return None


def _change(attribute: _Attribute) -> str | None:
    if attribute.tensor._version != attribute.version:
        return "modifies the tensor in"
    now, before = vars(attribute.module).get(attribute.name), attribute.tensor
    if attribute.place or now is before or not attribute.is_from_start:
        return None
    if type(now) is not Tensor or type(before) is not Tensor or now.is_meta:  # its value may be on another stage
        return None
    is_alike = (now.shape, now.dtype, now.device) == (before.shape, before.dtype, before.device)
    return "puts another tensor into" if is_alike and not torch.equal(now, before) else None


def _attributes_of(modules: Mapping[str, nn.Module]) -> list[_Attribute]:
    # The optimizer modifies views of parameters, and steps those of buffers.
    roots = modules.values()
    ours = {_storage(each) for root in roots for each in (*root.parameters(), *root.buffers())}
    found: dict[int, _Attribute] = {}
    for prefix, root in modules.items():
        for path, module in root.named_modules():
            if type(module).__module__.partition(".")[0] in _SYNCHRONIZED:
                continue
            whole = prefix + path if path else prefix.removesuffix(".")
            for name, value in vars(module).items():
                for place, each in _tensors_in(value) if name not in _OWN else ():
                    if not isinstance(each, nn.Parameter) and not each.is_inference() and _storage(each) not in ours:
                        attribute = _Attribute(module, whole, name, place, each, each._version, is_from_start=False)
                        found.setdefault(id(each), attribute)
    return [*found.values()]


def _tensors_in(value: object) -> list[tuple[str, Tensor]]:
    """Return a tensor, or those in a container, each with its place there."""
    if isinstance(value, Tensor):
        return [("", value)]
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict) and len(value) <= _MOST:
        items = value.items()
    elif isinstance(value, list | tuple | deque) and len(value) <= _MOST:
        items = enumerate(value)
    return [(f"[{key!r}]", each) for key, each in items if isinstance(each, Tensor)]


def _storage(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor from that of others; 0 for one that is not in one piece."""
    return 0 if tensor.layout != torch.strided else tensor.untyped_storage()._cdata
