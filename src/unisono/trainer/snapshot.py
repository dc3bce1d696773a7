"""The complete state of a run as named tensors and one document. `restoration` restores it; no file is written here.

A snapshot holds nothing that depends on the number of ranks, and uses the plain names of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.embedding.tables import settle
from unisono.engine import BufferTransaction
from unisono.engine.model_contents import member_name, parameter_names, plain_name
from unisono.engine.staged import StagedBuffers
from unisono.errors import CheckpointError
from unisono.state.codec import encode
from unisono.state.digest import same_memory
from unisono.state.stateful import Stateful
from unisono.trainer.hyperparameters import Hyperparameters, settings_of
from unisono.trainer.modules import name_of_parameter

__all__ = [
    "Cursor",
    "Subjects",
    "capture",
    "capture_common",
    "capture_trained",
    "check_same_data",
    "check_storable_models",
    "empty_buffers",
    "extra_state",
    "facts_of",
    "model_tensors",
    "optimizer_state",
    "tied_members",
]

_EXTRA_STATE = "_extra_state"


@dataclass(kw_only=True, slots=True)
class Cursor:
    """The progress of a run."""

    epoch: int = 0
    """The current epoch, or the next one between two epochs."""
    step: int = 0
    """The next step of that epoch."""
    total_steps: int = 0
    """Steps done since the start of the run."""
    batch_size: int | None = None
    """Global batch size of the current epoch."""
    num_samples: int | None = None
    """Number of samples of the current epoch."""
    shuffle: bool | None = None
    """True if that epoch's samples are shuffled. None: not known yet."""
    drop_last: bool | None = None
    """True if that epoch leaves out a smaller last batch. None: not known yet."""
    order: str | None = None
    """The source of that epoch's order: a hash of the indices that a sampler yielded, or "shards". None: neither."""

    loss_sum: float = 0.0
    """Sum of the losses of the current epoch's samples so far."""
    loss_weight: float = 0.0
    """Number of these samples."""
    results: list[dict[str, Any]] = field(default_factory=list)
    """Results of the epochs that `Trainer.fit` has done; see `EpochResult.state`."""

    @property
    def place(self) -> tuple[int, int, int]:
        """Epoch, step and total steps: a different place means a different state."""
        return self.epoch, self.step, self.total_steps

    def values(self) -> tuple[Any, ...]:
        """Return the values of all fields, for `of`. Takes a tenth of the time of a copy.

        >>> Cursor.of(Cursor(step=3).values()).step
        3
        """
        return _values_of(self)

    @classmethod
    def of(cls, values: tuple[Any, ...]) -> Cursor:
        """Return the cursor that had these values."""
        return cls(**dict(zip(_FIELDS, values, strict=True)))


_FIELDS = tuple(each.name for each in fields(Cursor))
_values_of = attrgetter(*_FIELDS)


def check_same_data(cursor: Cursor, data: Mapping[str, Any]) -> None:
    """Check that an epoch goes on with the data with which it began.

    Args:
        cursor: The place in the middle of an epoch, with its data.
        data: The data with which it is to go on, by the same names.

    Raises:
        ValueError: They differ, so that samples would be missed or seen twice.
    """
    before = {key: getattr(cursor, key) for key in data}
    # A value that an older version has not stored is None.
    unknown = [key for key in ("shuffle", "drop_last") if before[key] is None]
    changed = [key for key, value in data.items() if before[key] != value and key not in unknown]
    if not changed:
        return
    was, now = (
        "rollouts"
        if values["batch_size"] is None is values["order"]
        else ", ".join(f"{key}={values[key]}" for key in changed)
        for values in (before, data)
    )
    raise ValueError(
        f"the run stopped in epoch {cursor.epoch} before step {cursor.step}, with {was}; the epoch cannot go "
        f"on with {now}, or samples would be missed or seen twice. Give the same as before until it ends."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Subjects:
    """The objects whose state makes up a run."""

    modules: Mapping[str, nn.Module]
    """Models by the prefix of their names."""
    optimizers: Mapping[str, Optimizer]
    """Optimizers by name; "" for a single one."""
    averages: Mapping[str, nn.Module] = field(default_factory=dict)
    """Averaged models by prefix."""
    others: Mapping[str, Stateful] = field(default_factory=dict)
    """Everything else by name."""
    buffers: BufferTransaction | StagedBuffers | None = None
    """Has the buffers that the run has written and that are in no state_dict."""
    given: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The script's settings of optimizers and schedulers at the first start of the run."""
    put_whole: Callable[[dict[str, dict[str, Tensor]]], None] | None = None
    """Puts whole tensors into the groups of a checkpoint in the place of those that are divided over ranks."""

    @property
    def weights(self) -> dict[str, Mapping[str, nn.Module]]:
        """The models by the group of a checkpoint that has their tensors: "model", and "ema" if there are averages."""
        return {"model": self.modules} | ({"ema": self.averages} if self.averages else {})


def model_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return all parameters and persistent buffers by name; the tensors share memory with the models.

    They are read from the modules themselves: an overridden `state_dict` may omit some, or return copies.
    """
    return {name: value.detach() for name, value in _members(modules)}


def tied_members(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return, for each name of `model_tensors` whose parameter or buffer has an earlier name, that name."""
    first: dict[int, str] = {}
    owners = {name: first.setdefault(id(value), name) for name, value in _members(modules)}
    return {name: owner for name, owner in owners.items() if owner != name}


def _members(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for prefix, root in modules.items():
        for path, module in root.named_modules(remove_duplicate=False):
            for tensors, left_out in ((module._parameters, ()), (module._buffers, module._non_persistent_buffers_set)):
                for name, value in tensors.items():
                    if value is not None and name not in left_out:
                        yield prefix + plain_name(f"{path}.{name}" if path else name), value


def check_storable_models(modules: Mapping[str, nn.Module]) -> None:
    """Raise CheckpointError for state that only a module's `state_dict` has, so that it could not be restored."""
    names = model_tensors(modules)
    own = {same_memory(tensor) for tensor in names.values()}
    for prefix, module in modules.items():
        for name, value in module.state_dict().items():
            known = isinstance(value, Tensor) and (prefix + plain_name(name) in names or same_memory(value) in own)
            if not known and name.rpartition(".")[2] != _EXTRA_STATE:
                what = f"tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise CheckpointError(
                    f"state_dict() of the model holds {prefix + name!r}, a {what} that is no parameter and no "
                    "persistent buffer, so a resume could not put it back. Register it as a buffer, return it from "
                    "get_extra_state, or give its owner to Trainer as stateful={...}."
                )


def optimizer_state(modules: Mapping[str, nn.Module], optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return the optimizer's state by parameter name: {"layer.weight": {"exp_avg": tensor, …}}.

    Raises:
        ValueError: A parameter with state belongs to no model.
    """
    names = parameter_names(modules)
    state = {
        name_of_parameter(names, p): dict(values) for p, values in optimizer.state.items() if isinstance(p, Tensor)
    }
    return dict(sorted(state.items()))


def capture(
    subjects: Subjects,
    facts: Mapping[str, Any],
    settings: Hyperparameters | None = None,
    optimizers: Mapping[str, dict[str, dict[str, Any]]] | None = None,
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Return groups of tensors, which share memory with the run, and a JSON document that describe the run.

    Args:
        subjects: The objects of the run.
        facts: The run's constants and its cursor.
        settings: The settings to store, from an earlier moment. None: the current ones.
        optimizers: The state of optimizers by parameter name, where it is divided over ranks. None: what they have.

    Raises:
        CheckpointError: The state of an object holds something that cannot be written without pickle.
        ValueError: An optimizer has a parameter that belongs to no model.
    """
    settle(subjects.modules.values())
    others = _others(subjects, settings or settings_of(subjects.optimizers, subjects.others))
    trained, optimizer_document = capture_trained(subjects, optimizers)
    if subjects.buffers is not None and (transient := subjects.buffers.state_dict()):
        others["buffers"] = transient
    other_document, other_tensors = encode(others)
    groups = {**trained, "other": other_tensors}
    if subjects.put_whole is not None:
        subjects.put_whole(groups)
    return groups, {"facts": dict(facts), "optimizer": optimizer_document, "other": other_document}


def capture_trained(
    subjects: Subjects, optimizers: Mapping[str, dict[str, dict[str, Any]]] | None = None
) -> tuple[dict[str, dict[str, Tensor]], Any]:
    """Return the groups of `capture` that every rank has which has the whole model, and the optimizers' document.

    Args:
        subjects: The objects of the run.
        optimizers: See `capture`.

    Raises:
        ValueError: An optimizer has a parameter that belongs to no model.
    """
    if optimizers is None:
        optimizers = {key: optimizer_state(subjects.modules, each) for key, each in subjects.optimizers.items()}
    document, tensors = encode(optimizers[""] if [*optimizers] == [""] else optimizers)
    groups = {"model": model_tensors(subjects.modules), "optimizer": tensors}
    if subjects.averages:
        groups["ema"] = model_tensors(subjects.averages)
    return groups, document


def capture_common(subjects: Subjects, facts: Mapping[str, Any]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Return what `capture` does without the state of modules, and of parameters in optimizers."""
    others = _others(subjects, settings_of(subjects.optimizers, subjects.others))
    document, tensors = encode({**others, "extra": {}})
    return {"other": tensors}, {"facts": dict(facts), "other": document}


def _others(subjects: Subjects, settings: Hyperparameters) -> dict[str, Any]:
    """Return hyperparameters, and the state of all objects beside the models."""
    names = parameter_names(subjects.modules)
    hyperparameters = {
        key: [
            {**numbers, "params": [name_of_parameter(names, p) for p in group["params"]]}
            for numbers, group in zip(settings.hyperparameters[key], optimizer.param_groups, strict=True)
        ]
        for key, optimizer in subjects.optimizers.items()
    }
    return {
        "hyperparameters": hyperparameters,
        "kinds": {key: type(optimizer).__name__ for key, optimizer in subjects.optimizers.items()},
        "extra": extra_state(subjects.modules),
        "others": {
            name: settings.schedulers.get(name) or other.state_dict() for name, other in subjects.others.items()
        },
        "given": {where: dict(values) for where, values in subjects.given.items()},
    }


def facts_of(run_constants: Mapping[str, Any], cursor: Cursor) -> dict[str, Any]:
    """Return the facts that a checkpoint stores about its run."""
    return {**run_constants, "cursor": asdict(cursor)}


def empty_buffers(modules: Mapping[str, nn.Module]) -> dict[str, tuple[nn.Module, str, torch.device]]:
    """Return the module, the name in it and the device of the model for each buffer that is None."""
    return {
        prefix + member_name(path, name): (module, name, device)
        for prefix, root in modules.items()
        for device in [next((p.device for p in root.parameters()), torch.device("cpu"))]
        for path, module in root.named_modules()
        for name, value in module._buffers.items()
        if value is None and name not in module._non_persistent_buffers_set
    }


def extra_state(modules: Mapping[str, nn.Module]) -> dict[str, dict[str, Any]]:
    """Return what modules return from get_extra_state, by the prefix of the model and the path of the module."""
    return {
        prefix: {
            path: module.get_extra_state()
            for path, module in root.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        for prefix, root in modules.items()
    }
