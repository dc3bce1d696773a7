"""The complete state of a run as named tensors and one document, and its restoration. No file is read or written here.

A snapshot holds nothing that depends on the number of ranks, and uses the plain names of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.engine import BufferTransaction
from unisono.engine.model_contents import member_name
from unisono.engine.norm import dense_strides
from unisono.errors import CheckpointError
from unisono.state.codec import decode, encode
from unisono.state.digest import same_memory
from unisono.state.stateful import Stateful
from unisono.trainer.hyperparameters import Hyperparameters, given_by, overruled, settings_of
from unisono.trainer.modules import foreign_parameter, named_parameters, parameter_names, plain_name

__all__ = [
    "Cursor",
    "Subjects",
    "capture",
    "check_same_data",
    "check_storable_models",
    "empty_buffers",
    "extra_state",
    "facts_of",
    "listed",
    "model_tensors",
    "optimizer_state",
    "restore",
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
    buffers: BufferTransaction | None = None
    """Has the buffers that the run has written and that are in no state_dict."""
    given: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The script's settings of optimizers and schedulers at the first start of the run."""


def model_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return all parameters and persistent buffers by name; the tensors share memory with the models.

    They are read from the modules themselves: an overridden `state_dict` may omit some, or return copies.
    """
    return {
        prefix + plain_name(f"{path}.{name}" if path else name): value.detach()
        for prefix, root in modules.items()
        for path, module in root.named_modules(remove_duplicate=False)
        for tensors, left_out in ((module._parameters, ()), (module._buffers, module._non_persistent_buffers_set))
        for name, value in tensors.items()
        if value is not None and name not in left_out
    }


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
    state = {_name(names, p): dict(values) for p, values in optimizer.state.items() if isinstance(p, Tensor)}
    return dict(sorted(state.items()))


def capture(
    subjects: Subjects, facts: Mapping[str, Any], settings: Hyperparameters | None = None
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Return groups of tensors, which share memory with the run, and a JSON document that describe the run.

    Args:
        subjects: The objects of the run.
        facts: The run's constants and its cursor.
        settings: The settings to store, from an earlier moment. None: the current ones.

    Raises:
        CheckpointError: The state of an object holds something that cannot be written without pickle.
        ValueError: An optimizer has a parameter that belongs to no model.
    """
    names = parameter_names(subjects.modules)
    settings = settings or settings_of(subjects.optimizers, subjects.others)
    optimizers, hyperparameters = {}, {}
    for key, optimizer in subjects.optimizers.items():
        optimizers[key] = optimizer_state(subjects.modules, optimizer)
        hyperparameters[key] = [
            {**numbers, "params": [_name(names, p) for p in group["params"]]}
            for numbers, group in zip(settings.hyperparameters[key], optimizer.param_groups, strict=True)
        ]
    single = [*optimizers] == [""]
    optimizer_document, optimizer_tensors = encode(optimizers[""] if single else optimizers)
    others = {
        "hyperparameters": hyperparameters,
        "kinds": {key: type(optimizer).__name__ for key, optimizer in subjects.optimizers.items()},
        "extra": extra_state(subjects.modules),
        "others": {
            name: settings.schedulers.get(name) or other.state_dict() for name, other in subjects.others.items()
        },
        "given": {where: dict(values) for where, values in subjects.given.items()},
    }
    if subjects.buffers is not None and (transient := subjects.buffers.state_dict()):
        others["buffers"] = transient
    other_document, other_tensors = encode(others)
    groups = {"model": model_tensors(subjects.modules), "optimizer": optimizer_tensors, "other": other_tensors}
    if subjects.averages:
        groups["ema"] = model_tensors(subjects.averages)
    return groups, {"facts": dict(facts), "optimizer": optimizer_document, "other": other_document}


def restore(
    subjects: Subjects, groups: Mapping[str, Mapping[str, Tensor]], document: Mapping[str, Any], *, source: str
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Restore the state that `capture` described.

    Everything is compared before anything is changed.

    Returns:
        The script's settings of optimizers and schedulers at the first start, and descriptions of its present settings
        that have no effect.

    Raises:
        CheckpointError: The checkpoint is of another model, optimizer or set of objects, or an object refuses its
            state; the message then says that others may have taken theirs.
        ValueError: An optimizer has a parameter that belongs to no model.
    """
    own = model_tensors(subjects.modules)
    empty = empty_buffers(subjects.modules)
    unfilled = {name: groups["model"][name] for name in empty if name in groups["model"]}
    _compare({**own, **unfilled}, groups["model"], source, "model")
    averages = model_tensors(subjects.averages)
    if averages:
        if "ema" not in groups:
            raise CheckpointError(
                f"{source} holds no averaged weights, but Trainer was given ema_decay: leave ema_decay out, or start "
                "anew in another directory."
            )
        _compare(averages, groups["ema"], source, "averaged model")
    others = decode(document["other"], groups["other"])
    single = [*subjects.optimizers] == [""]
    state = decode(document["optimizer"], groups["optimizer"])
    states: dict[str, Any] = {"": state} if single else state
    _compare_optimizers(subjects, others["kinds"], others["hyperparameters"], source)
    missing = sorted(subjects.others.keys() ^ others["others"].keys())
    if missing:
        raise CheckpointError(
            f"{source} holds the state of {listed(others['others'])}, but Trainer was given "
            f"{listed(subjects.others)}: give it the same scheduler, autocast and stateful objects, or start "
            "anew in another directory."
        )
    transient = others.get("buffers", {})
    if subjects.buffers is not None:
        subjects.buffers.check_state_dict(transient, source)

    here = settings_of(subjects.optimizers, subjects.others)
    _restore_objects(subjects, others, source)
    with torch.no_grad():
        for name, tensor in unfilled.items():
            module, buffer, device = empty[name]
            module._buffers[buffer] = tensor.to(device, copy=True)
        for name, tensor in own.items():
            tensor.copy_(groups["model"][name])
        for name, tensor in averages.items():
            tensor.copy_(groups["ema"][name])
    if subjects.buffers is not None:
        subjects.buffers.load_state_dict(transient)
    for key, optimizer in subjects.optimizers.items():
        _restore_optimizer(subjects.modules, optimizer, states[key], others["hyperparameters"][key])
    began = others.get("given", {})  # an older version has not stored it
    goes_on = settings_of(subjects.optimizers, subjects.others)
    return began, overruled(began, given_by(goes_on), given_by(here))


def _restore_objects(subjects: Subjects, others: Mapping[str, Any], source: str) -> None:
    """Restore all objects other than the trainer's own. This comes first: only here the code of others can fail."""
    takers: list[tuple[str, Callable[[Any], Any], Any]] = [
        (
            f"{type(module).__name__}.set_extra_state of {prefix + path!r}",
            module.get_submodule(path).set_extra_state,
            value,
        )
        for prefix, module in subjects.modules.items()
        for path, value in others["extra"].get(prefix, {}).items()
    ]
    takers += [
        (f"load_state_dict of {name!r}", other.load_state_dict, others["others"][name])
        for name, other in subjects.others.items()
    ]
    for name, take, state in takers:
        try:
            take(state)
        except Exception as error:
            raise CheckpointError(
                f"{name} refused what {source} holds ({type(error).__name__}: {error}). Weights and optimizers are as "
                "they were, but other such objects may have taken their state: build them anew before they are used."
            ) from error


def facts_of(run_constants: Mapping[str, Any], cursor: Cursor) -> dict[str, Any]:
    """Return the facts that a checkpoint stores about its run."""
    return {**run_constants, "cursor": asdict(cursor)}


def _name(names: Mapping[int, str], parameter: Tensor) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise foreign_parameter(parameter)
    return name


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


def _compare(own: Mapping[str, Tensor], saved: Mapping[str, Tensor], source: str, what: str) -> None:
    missing, unknown = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    differing = [
        f"{name} is {_kind(saved[name])} there and {_kind(own[name])} here"
        for name in sorted(own.keys() & saved.keys())
        if _kind(own[name]) != _kind(saved[name])
    ]
    if not (missing or unknown or differing):
        return
    found = []
    if missing:
        found.append(f"{len(missing)} tensors of this {what} are not in it ({listed(missing)})")
    if unknown:
        found.append(f"{len(unknown)} of its tensors are not in this {what} ({listed(unknown)})")
    if differing:
        found.append(f"{len(differing)} differ ({listed(differing)})")
    raise CheckpointError(
        f"{source} is a checkpoint of another {what}: {'; '.join(found)}. Build the model as it was, or start anew in "
        "another directory."
    )


def _compare_optimizers(
    subjects: Subjects, kinds: Mapping[str, str], saved: Mapping[str, list[dict[str, Any]]], source: str
) -> None:
    here = {key: type(optimizer).__name__ for key, optimizer in subjects.optimizers.items()}
    if here != kinds:
        raise CheckpointError(
            f"{source} was made with another optimizer: {', '.join(kinds.values())} there, {', '.join(here.values())} "
            "here. Build the optimizer as it was, or start anew in another directory."
        )
    names = parameter_names(subjects.modules)
    own = {
        key: [[_name(names, p) for p in group["params"]] for group in optimizer.param_groups]
        for key, optimizer in subjects.optimizers.items()
    }
    there = {key: [group["params"] for group in groups] for key, groups in saved.items()}
    if own != there:
        raise CheckpointError(
            f"{source} was made with other optimizers or parameter groups: {_shape(there)} there, {_shape(own)} here. "
            "Build the optimizer as it was, or start anew in another directory."
        )


def _restore_optimizer(
    modules: Mapping[str, nn.Module], optimizer: Optimizer, state: dict[str, Any], hyperparameters: list[dict[str, Any]]
) -> None:
    # load_state_dict would cast the state to the parameters' dtype and so lose bits.
    parameters = named_parameters(modules)
    options = {name: group for group in hyperparameters for name in group["params"]}
    optimizer.state.clear()
    for name, values in state.items():
        p, group = parameters[name], options.get(name, {})
        optimizer.state[p] = {
            key: _placed(key, value, p, group) if isinstance(value, Tensor) else value for key, value in values.items()
        }
    for group, saved in zip(optimizer.param_groups, hyperparameters, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


def _placed(key: str, value: Tensor, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return a tensor of an optimizer's state in the layout and on the device that the optimizer would choose."""
    if value.dim() and value.shape == parameter.shape:
        # torch's fused kernels read parameter, gradient and state in the order of memory.
        strides = dense_strides(parameter)
        if value.stride() == strides and value.device == parameter.device:
            return value
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=parameter.device).copy_(value)
    # As in Optimizer.load_state_dict: `step` stays on the CPU unless a kernel reads it.
    if key == "step" and not (group.get("fused") or group.get("capturable")):
        return value
    return value.to(parameter.device)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def listed(names: Any, *, most: int = 3) -> str:
    """Return the first of some names as text, and how many more there are."""
    names = list(names)
    return (
        ", ".join(map(str, names[:most])) + (f", … {len(names) - most} more" if len(names) > most else "") or "nothing"
    )


def _shape(groups: Mapping[str, list[list[str]]]) -> str:
    return ", ".join(
        (f"{key!r}: " if key else "") + "+".join(str(len(names)) for names in lists) + " parameters"
        for key, lists in groups.items()
    )
