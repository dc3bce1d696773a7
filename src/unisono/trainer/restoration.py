"""The restoration of a run from a snapshot: what it holds is compared with the run before anything is changed.

Start reading at `restore`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.engine.model_contents import named_parameters, parameter_names
from unisono.engine.optimizer_placement import placed
from unisono.errors import CheckpointError
from unisono.state.codec import decode
from unisono.state.digest import same_memory
from unisono.trainer.hyperparameters import given_by, overruled, settings_of
from unisono.trainer.modules import name_of_parameter
from unisono.trainer.snapshot import Subjects, empty_buffers, model_tensors
from unisono.trainer.table_optimizers import match_lengths

__all__ = ["Comparison", "listed", "put_optimizer_state", "restore", "restore_common"]


def restore(
    subjects: Subjects, groups: Mapping[str, Mapping[str, Tensor]], document: Mapping[str, Any], *, source: str
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Restore the state that `snapshot.capture` described.

    Everything is compared before anything is changed.

    Returns:
        The script's settings of optimizers and schedulers at the first start, and descriptions of its present settings
        that have no effect.

    Raises:
        CheckpointError: The checkpoint is of another model, optimizer or set of objects, or an object refuses its
            state; the message then says that others may have taken theirs.
        ValueError: An optimizer has a parameter that belongs to no model.
    """
    comparison = Comparison(subjects, groups, document, source=source)
    with comparison.restoring():
        with torch.no_grad():
            for name, (module, buffer, device) in comparison.unfilled.items():
                module._buffers[buffer] = groups["model"][name].to(device, copy=True)
            for name, tensor in comparison.own.items():
                if same_memory(tensor) != same_memory(groups["model"][name]):  # a table in a file is read into it
                    tensor.copy_(groups["model"][name])
            for name, tensor in comparison.averages.items():
                tensor.copy_(groups["ema"][name])
        for key, optimizer in subjects.optimizers.items():
            optimizer.state.clear()
            put_optimizer_state(subjects.modules, optimizer, comparison.states[key])
    return comparison.began, comparison.overruled


class Comparison:
    """A checkpoint that is one of this run: names, dtypes and shapes are equal. Nothing has been changed.

    Args:
        subjects: The objects of the run.
        groups: The tensors; of the groups "model", "ema" and "optimizer", they need no values.
        document: The document.
        source: The path of the checkpoint, for messages.

    Raises:
        CheckpointError, ValueError: See `restore`.
    """

    def __init__(
        self,
        subjects: Subjects,
        groups: Mapping[str, Mapping[str, Tensor]],
        document: Mapping[str, Any],
        *,
        source: str,
    ) -> None:
        self._subjects, self._source = subjects, source
        match_lengths(subjects.modules, groups["model"])
        self.own = model_tensors(subjects.modules)
        """The tensors of the models, to which values are to be written."""
        self.unfilled = {
            name: place for name, place in empty_buffers(subjects.modules).items() if name in groups["model"]
        }
        """Buffers that are None here and have values there; see `snapshot.empty_buffers`."""
        unfilled = {name: groups["model"][name] for name in self.unfilled}
        _compare({**self.own, **unfilled}, groups["model"], source, "model")
        self.averages = model_tensors(subjects.averages)
        """The same of averaged models."""
        if self.averages:
            if "ema" not in groups:
                raise CheckpointError(
                    f"{source} holds no averaged weights, but Trainer was given ema_decay: leave ema_decay out, or "
                    "start anew in another directory."
                )
            _compare(self.averages, groups["ema"], source, "averaged model")
        self._others = decode(document["other"], groups["other"])
        state = decode(document["optimizer"], groups["optimizer"])
        self.states: dict[str, dict[str, dict[str, Any]]] = {"": state} if [*subjects.optimizers] == [""] else state
        """The state of each optimizer by parameter name."""
        _check_others(subjects, self._others, source)
        if subjects.buffers is not None:
            subjects.buffers.check_state_dict(self._others.get("buffers", {}), source)
        self.began: dict[str, dict[str, Any]] = self._others.get("given", {})  # an older version has not stored it
        """The script's settings of optimizers and schedulers at the first start."""
        self.overruled: list[str] = []
        """After `restoring`: descriptions of the present settings that have no effect."""

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Restore all objects, then what the `with` block writes: models and the state of optimizers, then the rest.

        Raises:
            CheckpointError: An object refuses its state.
        """
        subjects, others = self._subjects, self._others
        here = settings_of(subjects.optimizers, subjects.others)
        _restore_objects(subjects, others, self._source)
        yield
        if subjects.buffers is not None:
            subjects.buffers.load_state_dict(others.get("buffers", {}))
        for key, optimizer in subjects.optimizers.items():
            _restore_hyperparameters(optimizer, others["hyperparameters"][key])
        goes_on = settings_of(subjects.optimizers, subjects.others)
        self.overruled = overruled(self.began, given_by(goes_on), given_by(here))


def restore_common(
    subjects: Subjects, groups: Mapping[str, Mapping[str, Tensor]], document: Mapping[str, Any], *, source: str
) -> None:
    """Restore the state that `snapshot.capture_common` described.

    Raises:
        CheckpointError, ValueError: See `restore`.
    """
    others = decode(document["other"], groups["other"])
    _check_others(subjects, others, source)
    _restore_objects(subjects, others, source)
    for key, optimizer in subjects.optimizers.items():
        _restore_hyperparameters(optimizer, others["hyperparameters"][key])


def _check_others(subjects: Subjects, others: Mapping[str, Any], source: str) -> None:
    """Raise CheckpointError if there are other optimizers or objects here."""
    _compare_optimizers(subjects, others["kinds"], others["hyperparameters"], source)
    missing = sorted(subjects.others.keys() ^ others["others"].keys())
    if missing:
        raise CheckpointError(
            f"{source} holds the state of {listed(others['others'])}, but Trainer was given "
            f"{listed(subjects.others)}: give it the same scheduler, autocast and stateful objects, or start "
            "anew in another directory."
        )


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


def _restore_hyperparameters(optimizer: Optimizer, hyperparameters: list[dict[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, hyperparameters, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


def put_optimizer_state(modules: Mapping[str, nn.Module], optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Replace the state of some parameters, by name."""
    # load_state_dict would cast the state to the parameters' dtype and so lose bits.
    parameters = named_parameters(modules)
    options = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, values in state.items():
        p = parameters[name]
        group = options.get(id(p), {})
        optimizer.state[p] = {
            key: placed(key, value, p, group) if isinstance(value, Tensor) else value for key, value in values.items()
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
        key: [[name_of_parameter(names, p) for p in group["params"]] for group in optimizer.param_groups]
        for key, optimizer in subjects.optimizers.items()
    }
    there = {key: [group["params"] for group in groups] for key, groups in saved.items()}
    if own != there:
        raise CheckpointError(
            f"{source} was made with other optimizers or parameter groups: {_shape(there)} there, {_shape(own)} here. "
            "Build the optimizer as it was, or start anew in another directory."
        )


def _shape(groups: Mapping[str, list[list[str]]]) -> str:
    return ", ".join(
        (f"{key!r}: " if key else "") + "+".join(str(len(names)) for names in lists) + " parameters"
        for key, lists in groups.items()
    )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def listed(names: Any, *, most: int = 3) -> str:
    """Return the first of some names as text, and how many more there are."""
    names = list(names)
    return (
        ", ".join(map(str, names[:most])) + (f", … {len(names) - most} more" if len(names) > most else "") or "nothing"
    )
