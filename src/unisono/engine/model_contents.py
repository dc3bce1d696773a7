"""The modules, parameters and buffers of models by name, and detection of changes to them.

A loop may replace a layer, or load weights with assign=True. The Trainer then has to find anew what it trains and which
buffers it tracks. A check compares identities only: about 20 ns for each module and parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn

__all__ = ["ModelContents", "member_name", "named_buffers", "named_parameters", "parameter_names", "plain_name"]


def member_name(path: str, name: str) -> str:
    """Return the plain name of a module's parameter or buffer: without what torch.compile adds.

    >>> member_name("layers.0._orig_mod", "weight")
    'layers.0.weight'
    """
    return f"{path}.{name}".replace("_orig_mod.", "") if path else name


def plain_name(name: str) -> str:
    """Remove the prefixes that torch.compile adds to the names of parameters and buffers.

    >>> plain_name("_orig_mod.layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return name.replace("_orig_mod.", "")


def named_parameters(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return the models' parameters by name."""
    return {prefix + plain_name(name): p for prefix, module in modules.items() for name, p in module.named_parameters()}


def named_buffers(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the models' buffers by name."""
    return {prefix + plain_name(name): b for prefix, module in modules.items() for name, b in module.named_buffers()}


def parameter_names(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return the names of the models' parameters by id."""
    return {id(p): name for name, p in named_parameters(modules).items()}


class ModelContents:
    """The modules of some models, which may be replaced between steps.

    Args:
        models: Modules, by the prefix of their names.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = models
        self._version = 0
        self._take_stock()

    def version(self) -> int:
        """Return how often modules, parameters or buffers have been found to have changed.

        Of buffers only the names are compared, not their tensors or values.
        """
        if not self._is_as_it_was():
            self._version += 1
            self._take_stock()
        return self._version

    def has_new_buffers(self) -> bool:
        """Return True if the modules have more or fewer buffers in total than at the last check."""
        return any(self._without_buffers) or sum(map(len, self._with_buffers)) != self._num_buffers

    def modules(self) -> dict[str, nn.Module]:
        """Return all modules by name. A module that occurs twice has its first name."""
        return dict(self._modules)

    def parameters(self) -> list[Tensor]:
        """Return all parameters, each once."""
        return [*{id(p): p for module in self._modules.values() for p in module.parameters(recurse=False)}.values()]

    def _is_as_it_was(self) -> bool:
        present = [*chain.from_iterable(map(dict.values, self._members))]
        if len(present) != len(self._present) or not all(map(is_, present, self._present)) or any(self._empty):
            return False
        return not self._with_buffers or (
            [*map(tuple, self._named_buffers)] == self._buffer_names and not self.has_new_buffers()
        )

    def _take_stock(self) -> None:
        seen: dict[int, str] = {}
        self._modules: dict[str, nn.Module] = {}
        for prefix, root in self._models.items():
            for name, module in root.named_modules():
                path = prefix + name if name else prefix.removesuffix(".")
                if seen.setdefault(id(module), path) == path:
                    self._modules[path] = module
        # A scripted module has no dicts there, and its members cannot be replaced.
        members = [
            members
            for module in self._modules.values()
            for members in (module._modules, module._parameters)
            if isinstance(members, dict)
        ]
        self._members: list[dict[str, Any]] = [each for each in members if each]
        self._present = [*chain.from_iterable(map(dict.values, self._members))]
        buffers = [module._buffers for module in self._modules.values()]
        self._with_buffers = [each for each in buffers if each]
        self._without_buffers = [each for each in buffers if not each]
        self._empty = [*self._without_buffers, *(each for each in members if not each)]
        self._num_buffers = sum(map(len, self._with_buffers))
        self._named_buffers = [each for each in self._with_buffers if isinstance(each, dict)]
        self._buffer_names = [*map(tuple, self._named_buffers)]
