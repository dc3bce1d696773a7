"""The description of a training as a document that must be equal on all ranks, and its comparison at the start.

The ranks of a run evaluate one function, so everything that the function depends on is described: arguments, models,
optimizers, schedulers, versions. `setup.check_equal_values` compares the values of tensors, if no checkpoint replaces
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unisono.collectives.world import World
from unisono.embedding.compiled_rows import row_kernel_name
from unisono.embedding.tables import tables_in
from unisono.engine.model_contents import named_buffers, named_parameters, plain_name
from unisono.errors import RankMismatchError
from unisono.mismatch import Document, tell_differences
from unisono.state.digest import digest

__all__ = [
    "PLAIN",
    "check_equal_documents",
    "describe_groups",
    "describe_models",
    "describe_modes",
    "describe_optimizers",
    "describe_row_updates",
    "describe_schedulers",
    "describe_settings",
    "describe_system",
    "describe_trained",
    "hyperparameters",
    "plain",
    "settings_of",
]

_SETTINGS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.modules.dropout._DropoutNd: ("p",),
    nn.modules.batchnorm._NormBase: ("momentum", "eps"),
    nn.MultiheadAttention: ("dropout",),
    nn.RNNBase: ("dropout",),
}
"""The attributes of torch's modules that loops change in mid-run."""

PLAIN = frozenset({bool, int, float, str, type(None)})
"""The types of values whose `repr` says all."""


def check_equal_documents(world: World, document: Document, *, given_to: str = "the Trainer") -> None:
    """Compare the documents of all ranks. Every rank must call it.

    Ranks exchange a hash, and the whole document only if hashes differ.

    Args:
        world: The ranks.
        document: What this rank was given.
        given_to: What it was given to, for messages.

    Raises:
        RankMismatchError: On all ranks, naming the entries that differ and their ranks.
    """
    if world.group is None:
        return
    call = f"{given_to.removeprefix('the ')} comparing arguments"
    hashes = world.gather(digest({"": repr(list(document.items()))}), call)
    if len(set(hashes)) == 1:
        return
    everyone = world.gather(dict(document), call)
    told = tell_differences(everyone) or "the order in which things are listed"
    raise RankMismatchError(
        f"{given_to} was given different things on different ranks: {told}. Give it the same on every rank: nothing "
        "that it is built from may depend on the rank."
    )


def describe_models(modules: Mapping[str, nn.Module]) -> Document:
    """Describe parameters, buffers and modes, but not values, of modules by the prefix of their names."""
    buffers = named_buffers(modules)
    parameters = named_parameters(modules)
    tables = {
        id(module.weight)
        for root in modules.values()
        for module in root.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    return {
        "the names of the models": list(modules),
        "the names of the model's parameters": list(parameters),
        **{f"parameter {name!r}": _form(p) for name, p in parameters.items()},
        **describe_trained(modules),
        "the names of parameters with sparse gradients": [n for n, p in parameters.items() if id(p) in tables],
        "the names of the model's buffers": list(buffers),
        **{f"buffer {name!r}": _form(buffer) for name, buffer in buffers.items()},
        **describe_modes(modules),
        **describe_settings(modules),
        **_describe_other_settings(modules),
        **describe_row_updates(modules),
    }


def describe_row_updates(modules: Mapping[str, nn.Module]) -> Document:
    """Describe what updates the rows of tables, if there are any."""
    return {"what updates the rows of tables": row_kernel_name()} if tables_in(modules.values()) else {}


def describe_trained(modules: Mapping[str, nn.Module]) -> Document:
    """Describe which parameters are frozen."""
    return {f"requires_grad of {name!r}": p.requires_grad for name, p in named_parameters(modules).items()}


def describe_modes(modules: Mapping[str, nn.Module]) -> Document:
    """Describe which modules are in training mode."""
    return {f"the mode of {name}": "training" if m.training else "evaluation" for name, m in _named(modules)}


def settings_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's attributes that `describe_settings` describes."""
    return next((names for kind, names in _SETTINGS.items() if isinstance(module, kind)), ())


def describe_settings(modules: Mapping[str, nn.Module]) -> Document:
    """Describe the settings of torch's modules that loops change, such as the rate of a Dropout."""
    return {f"{key} of {name}": plain(vars(m).get(key)) for name, m in _named(modules) for key in settings_of(m)}


def _describe_other_settings(modules: Mapping[str, nn.Module]) -> Document:
    """Describe all other modules of torch as they print themselves."""
    of_torch = [(name, m) for name, m in _named(modules) if type(m).__module__.startswith("torch.nn.modules.")]
    told = {f"what {name} was made with": m.extra_repr() for name, m in of_torch if not settings_of(m)}
    return {key: value for key, value in told.items() if value}


def _named(modules: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return all modules, each with its name and class."""
    return [
        (f"{(prefix + plain_name(name)).rstrip('.') or 'the model'!r} ({type(module).__name__})", module)
        for prefix, root in modules.items()
        for name, module in root.named_modules()
    ]


def describe_optimizers(optimizers: Mapping[str, Optimizer], names: Mapping[int, str]) -> Document:
    """Describe optimizers by name, "" for a single one; `names` has the names of parameters by id."""
    document: dict[str, Any] = {"the names of the optimizers": list(optimizers)}
    for key, optimizer in optimizers.items():
        document[f"the class of the optimizer{_of(key)}"] = type(optimizer).__qualname__
        document.update(describe_groups(optimizer, names, of=key))
    return document


def describe_groups(optimizer: Optimizer, names: Mapping[int, str], *, of: str) -> Document:
    """Describe the parameter groups of an optimizer, of the name `of`, "" for a single one."""
    groups = optimizer.param_groups
    document: dict[str, Any] = {f"the number of parameter groups{_of(of)}": len(groups)}
    for i, group in enumerate(groups):
        where = f"of parameter group {i}{_of(of)}"
        document.update({f"{key} {where}": value for key, value in hyperparameters(group).items()})
        document[f"the parameters {where}"] = [names.get(id(p), "a parameter of no model") for p in group["params"]]
    return document


def describe_schedulers(schedulers: Mapping[str, LRScheduler]) -> Document:
    """Describe schedulers by the names of their optimizers."""
    document: dict[str, Any] = {"the names of the schedulers": list(schedulers)}
    for key, scheduler in schedulers.items():
        document[f"the class of the scheduler{_of(key)}"] = type(scheduler).__qualname__
        state = plain(scheduler.state_dict())
        document.update({f"{entry} of the scheduler{_of(key)}": value for entry, value in state.items()})
    return document


def describe_system() -> Document:
    """Describe versions and global settings of the software."""
    return {
        "the version of unisono": version("unisono"),
        "the version of torch": str(torch.__version__),
        "torch.get_default_dtype()": str(torch.get_default_dtype()),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
    }


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a parameter group as plain values."""
    return {key: plain(value) for key, value in group.items() if key != "params"}


def plain(value: Any) -> Any:
    """Convert a value to one whose `repr` is equal on ranks where the value is equal.

    >>> plain((torch.tensor(0.5), {"f": len}))
    (0.5, {'f': 'len'})
    """
    if type(value) in PLAIN or isinstance(value, str | bytes | complex):  # nearly all values
        return value
    if isinstance(value, Tensor):
        return f"{_form(value)} {digest({'': value.detach()})[:16]}" if value.dim() else plain(value.item())
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return tuple(map(plain, value))
    if isinstance(value, Real):  # also those of NumPy, which have another repr
        return int(value) if isinstance(value, Integral) else float(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _form(tensor: Tensor) -> str:
    """Describe a tensor except for its values."""
    if nn.parameter.is_lazy(tensor):
        return "without a shape yet"
    dtype = str(tensor.dtype).removeprefix("torch.")
    told = f"{dtype} {list(tensor.shape)}"
    if tensor.layout is not torch.strided:
        return f"{told} {tensor.layout}"
    return told if tensor.is_contiguous() else f"{told} with strides {list(tensor.stride())}"


def _of(key: str) -> str:
    return f" of optimizer {key!r}" if key else ""
