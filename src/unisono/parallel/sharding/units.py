"""Which parameters come together when: pure functions of a model's modules and their names."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unisono.engine.sharded import ShardGrid
from unisono.parallel.pipeline.blocks import is_called
from unisono.parallel.sharding.shard import Shard

__all__ = [
    "REST",
    "Units",
    "blocks_of",
    "check_replicas",
    "choose_blocks",
    "find_named",
    "grid_of",
    "is_divided",
    "join_small",
    "members_of",
    "members_of_size",
    "units_of",
]

REST = ""
"""The name of the unit with the parameters of no block, or of several."""

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_TABLES = (nn.Embedding, nn.EmbeddingBag)
"""Modules whose parameters models often use elsewhere without a call, as the weights of their heads."""
_LEAST = 0.01
"""The least part of all parameters for which a block that was not named comes and goes."""
_LEAST_NBYTES = 2**20
"""The least size of units, if it is not given: below, an exchange takes as long for fewer bytes. A step of the example
digits.py with by="size" took five times as long with units of 11 KB."""
_UNITS = 16
"""The most units of about equal size, if it is not given."""


def find_named(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Return the submodules with some names.

    Raises:
        ValueError: A name is not that of a submodule with parameters that is called, or contains another one.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    >>> list(find_named(model, ["2"]))
    ['2']
    """
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules or not name:
            near = difflib.get_close_matches(name, [known for known in modules if known], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"by= names {name!r}, which is not a submodule of the model{hint}")
        if not is_called(modules[name]):
            inner = next((f"{name}.{child}" for child, _ in modules[name].named_children()), None)
            hint = f": name its items, such as {inner!r}" if inner else ""
            raise ValueError(f"by= names {name!r}, a {type(modules[name]).__name__}, which is never called{hint}")
        if next(modules[name].parameters(), None) is None:
            raise ValueError(f"by= names {name!r}, a {type(modules[name]).__name__}, which has no parameters")
        inner = next((other for other in names if other.startswith(f"{name}.")), None)
        if inner is not None:
            raise ValueError(f"by= names {name!r} and {inner!r} inside it: name one of them")
    return {name: modules[name] for name in names}


def choose_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that `by="block"` stands for, in the order of their names in the model.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    >>> list(choose_blocks(model))
    ['0', '2']
    """
    total = sum(p.numel() for p in model.parameters())
    seen: set[int] = set()
    blocks = {}
    for name, module in _outermost(model, ""):
        if id(module) not in seen and sum(p.numel() for p in module.parameters()) >= _LEAST * total > 0:
            seen.add(id(module))
            blocks[name] = module
    return blocks


def _outermost(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    is_list = isinstance(module, _LISTS)
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if next(child.parameters(), None) is None:
            continue
        if is_called(child) and (is_list or not _holds_list(child)):
            if not isinstance(child, _TABLES):
                yield full, child
        else:
            yield from _outermost(child, full)


def _holds_list(module: nn.Module) -> bool:
    """Return True if a module is a list of layers with parameters, or holds one."""
    return any(
        isinstance(inner, _LISTS) and sum(next(child.parameters(), None) is not None for child in inner.children()) > 1
        for inner in module.modules()
    )


def members_of(model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, dict[str, Tensor]]:
    """Return the parameters of each block by name, and under `REST` those of no block or of several.

    A parameter that is held by modules of two blocks, or of a block and of what lies outside, belongs to none.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    >>> model[2].weight = model[0].weight
    >>> {name: list(own) for name, own in members_of(model, {"0": model[0], "1": model[1]}).items()}
    {'0': ['0.bias'], '1': ['1.weight', '1.bias'], '': ['0.weight', '2.bias']}
    """
    of_module = {id(inner): name for name, block in blocks.items() for inner in block.modules()}
    owners: dict[int, set[str]] = {}
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None:
                owners.setdefault(id(p), set()).add(of_module.get(id(module), REST))
    found: dict[str, dict[str, Tensor]] = {name: {} for name in (*blocks, REST)}
    for name, p in model.named_parameters():
        (first, *others) = owners[id(p)]
        found[REST if others else first][name] = p
    return {name: own for name, own in found.items() if own}


def join_small(members: Mapping[str, Mapping[str, Tensor]], unit_bytes: int | None) -> dict[str, str]:
    """Return the unit of each block: blocks that follow each other share one, which is named after the first.

    Args:
        members: The parameters of each block; those under `REST` stay alone.
        unit_bytes: The size up to which they share it; None: 1 MiB. A larger block is a unit of its own.

    >>> import torch
    >>> layers = {str(i): {f"{i}.weight": torch.zeros(64)} for i in range(4)}
    >>> join_small(layers, 600)
    {'0': '0', '1': '0', '2': '2', '3': '2'}
    """
    limit, units = unit_bytes or _LEAST_NBYTES, dict[str, str]()
    first, filled = REST, 0
    for name, own in members.items():
        nbytes = sum(p.numel() * p.element_size() for p in own.values())
        if REST in (first, name) or filled + nbytes > limit:
            first, filled = name, 0
        units[name] = first
        filled += nbytes
    return units


def members_of_size(model: nn.Module, unit_bytes: int | None) -> dict[str, dict[str, Tensor]]:
    """Return the parameters of each unit of about equal size, by the name of the unit's first parameter.

    A parameter belongs to the unit in which its middle lies, if units are marked off in all parameters one after the
    other. So units have the given size, more or less half of the parameters at their ends.

    Args:
        model: The model.
        unit_bytes: The size; None: a sixteenth of the model, but at least 1 MiB.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    >>> {name: list(own) for name, own in members_of_size(model, 40).items()}
    {'0.weight': ['0.weight', '0.bias', '1.weight'], '1.bias': ['1.bias', '2.weight', '2.bias']}
    >>> list(members_of_size(model, None))
    ['0.weight']
    """
    named = [(name, p, p.numel() * p.element_size()) for name, p in model.named_parameters()]
    size = unit_bytes or max(_LEAST_NBYTES, -(-sum(nbytes for _, _, nbytes in named) // _UNITS))
    units: dict[int, dict[str, Tensor]] = {}
    end = 0
    for name, p, nbytes in named:
        units.setdefault((2 * end + nbytes) // (2 * size), {})[name] = p
        end += nbytes
    return {next(iter(own)): own for own in units.values()}


def blocks_of(shard: Shard, model: nn.Module) -> dict[str, nn.Module] | None:
    """Return the blocks of a model by name; None where weights come together by operations, or are whole.

    Raises:
        ValueError: A name is not that of a block, or operations of a compiled module would not be seen.
    """
    if shard.names is not None:
        return find_named(model, shard.names)
    if shard.by == "block" and shard.zero != 1:
        return choose_blocks(model)
    compiled = next((name for name, module in model.named_modules() if _is_compiled(module)), None)
    if shard.by == "size" and compiled is not None:
        raise ValueError(
            f'by="size" sees the operations that read parameters, and torch.compile has made one program of '
            f'{compiled!r}: take by="block", or name the compiled modules in by=[...]'
        )
    return None


def _is_compiled(module: nn.Module) -> bool:
    """Return True if torch.compile has made one program of a module."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


class Units(NamedTuple):
    """The units of a model, and when each comes together."""

    blocks: dict[str, nn.Module] | None
    """The blocks with parameters of their own; None where weights come together by operations, or are whole."""
    unit_of: dict[str, str]
    """The unit of each block."""
    members: dict[str, dict[str, Tensor]]
    """The parameters of each unit by its name."""


def units_of(shard: Shard, model: nn.Module) -> Units:
    """Return the units of a model.

    Raises:
        ValueError: See `blocks_of`.
    """
    blocks = blocks_of(shard, model)
    if blocks is None:
        return Units(None, {}, members_of_size(model, shard.unit_bytes))
    of_blocks = members_of(model, blocks)
    unit_of = {name: name for name in of_blocks} if shard.names else join_small(of_blocks, shard.unit_bytes)
    members: dict[str, dict[str, Tensor]] = {}
    for name, own in of_blocks.items():
        members.setdefault(unit_of[name], {}).update(own)
    return Units({name: block for name, block in blocks.items() if name in of_blocks}, unit_of, members)


def grid_of(shard: Shard, device: torch.device, *, rank: int, ranks: int) -> ShardGrid:
    """Return the place of a rank.

    Args:
        shard: The user's settings.
        device: The device on which the model computes.
        rank: The rank.
        ranks: The number of ranks, which can be divided into replicas.

    >>> grid_of(Shard(offload=True), torch.device("cuda"), rank=0, ranks=1).keeps_weights
    False
    """
    replicas = ranks if shard.zero == 1 else min(shard.replicas, ranks)
    stays_apart = shard.zero != 1 and shard.offloads(device)
    return ShardGrid(rank=rank, ranks=ranks, replicas=replicas, stays_apart=stays_apart)


def is_divided(shard: Shard, device: torch.device, *, ranks: int) -> bool:
    """Return True if a model that computes on a device is divided, which is so on one rank for `offload` alone."""
    return ranks > 1 or shard.offloads(device)


def check_replicas(shard: Shard, ranks: int) -> None:
    """Check that ranks can be divided into replicas.

    Raises:
        ValueError: They cannot.
    """
    if ranks > 1 and ranks % shard.replicas:
        nearest = ranks // shard.replicas * shard.replicas
        fewer = f"{nearest} or " if nearest else ""
        raise ValueError(
            f"replicas={shard.replicas} cannot share {ranks} ranks evenly: start "
            f"{fewer}{nearest + shard.replicas}, or leave out replicas="
        )
