"""Which submodules are blocks, and how their calls are seen.

A block is the largest submodule that holds parameters and does not contain the beginning of a stage. What contains one
is a container: its own code runs on every stage. A submodule without parameters is part of that code.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, cast

from torch import nn

__all__ = ["CALL", "calls_seen_by", "find_blocks", "is_called", "nearest_name"]

CALL = "_unisono_pipeline_call"


def find_blocks(model: nn.Module, starts: Sequence[str]) -> dict[str, nn.Module]:
    """Return the blocks of a model by name.

    Args:
        model: The whole model.
        starts: The names of the submodules whose first call begins a stage, from the second stage on.

    Raises:
        ValueError: A name is not that of a submodule, comes twice, or contains another one.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    >>> list(find_blocks(model, ["2"])), list(find_blocks(model, ["2.1"]))
    (['0', '2'], ['0', '2.0', '2.1'])
    """
    modules = dict(model.named_modules())
    for name in starts:
        if name not in modules or not name:
            hint = nearest_name(name, modules)
            raise ValueError(f"a stage is to begin with {name!r}, which is not a submodule of the model{hint}")
        if starts.count(name) > 1:
            raise ValueError(f"{starts.count(name)} stages are to begin with {name!r}: name each submodule once")
    containers = {""}
    for name in starts:
        parts = name.split(".")
        containers.update(".".join(parts[:depth]) for depth in range(1, len(parts)))
    for name in starts:
        if name in containers:
            inner = next(other for other in starts if other.startswith(f"{name}."))
            raise ValueError(f"stages are to begin with {name!r} and with {inner!r} inside it: name one of them")
    found: dict[int, str] = {}
    blocks = {}
    for name, module in _outermost(model, "", containers, frozenset(starts)):
        if id(module) not in found:
            found[id(module)] = name
            blocks[name] = module
    return blocks


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name, with the nearest known one if there is one.

    >>> nearest_name("layer.0", ["layers.0", "head"]), nearest_name("x", ["head"])
    ("; did you mean 'layers.0'?", '')
    """
    near = difflib.get_close_matches(name, [each for each in known if each], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _outermost(
    module: nn.Module, name: str, containers: set[str], starts: frozenset[str]
) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if full in containers or not is_called(child):
            yield from _outermost(child, full, containers, starts)
        elif full in starts or next(child.parameters(), None) is not None:
            yield full, child


def is_called(module: nn.Module) -> bool:
    """Return True if a module has a forward pass of its own."""
    # ModuleList and its like are never called. torch.compile's wrapper has its forward in the object.
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


@contextmanager
def calls_seen_by(
    blocks: Mapping[str, nn.Module], call: Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
) -> Iterator[None]:
    """Pass all calls of the blocks through a function for the length of a `with` block.

    The class of each block is exchanged for a subclass, not its `forward`: so hooks, compiled calls and layers that
    wrap their own `__call__` are inside the block. While its own call runs, a block has its own class again.

    Args:
        blocks: The modules by name.
        call: Called with the name, the module's own call, and the arguments, instead of the module.
    """
    classes = [(module, type(module)) for module in blocks.values()]
    try:
        for (name, module), (_, cls) in zip(blocks.items(), classes, strict=True):
            module.__dict__[CALL] = partial(call, name, partial(_own_call, module, cls))
            _set_class(module, _seen(cls))  # type: ignore[arg-type]
        yield
    finally:
        for module, cls in classes:
            _set_class(module, cls)
            module.__dict__.pop(CALL, None)


def _own_call(module: nn.Module, cls: type[nn.Module], *args: Any, **kwargs: Any) -> Any:
    _set_class(module, cls)
    try:
        return module(*args, **kwargs)
    finally:
        _set_class(module, _seen(cls))  # type: ignore[arg-type]


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    object.__setattr__(module, "__class__", cls)  # nn.Module's takes some 3 µs


class _Seen:
    def __init_subclass__(cls) -> None:
        pass  # not that of the block's class: it may wrap methods or register the subclass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[CALL](args, kwargs)


@cache
def _seen(cls: type[nn.Module]) -> type[nn.Module]:
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return cast(type[nn.Module], type(cls.__name__, (_Seen, cls), namespace))
