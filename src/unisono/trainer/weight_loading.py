"""Weights alone from a checkpoint or a file: rank 0 reads, all ranks compare names and shapes, then all get the values.

The file is read and checked as a whole before a weight is changed. Tensors are then sent one at a time, so only rank 0
holds all of them, and only rank 0 needs the disk. For a divided run, rank 0 reads each tensor a second time when it is
sent, so it holds one at a time, too. Start reading at `load_weights`; `match` is the pure part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.collectives.rank_errors import raised_on_all
from unisono.collectives.world import World
from unisono.engine import WeightWrites
from unisono.engine.model_contents import plain_name
from unisono.errors import CheckpointError, CorruptCheckpointError
from unisono.state.checkpoint_store import CheckpointInfo, CheckpointStore
from unisono.state.digest import same_memory
from unisono.state.manifest import MANIFEST
from unisono.state.tensor_file import TensorRange, TensorSource
from unisono.state.tensor_groups import forms_of, table_of
from unisono.state.weight_files import open_weights, read_weights
from unisono.trainer.divided_tables import DividedTables
from unisono.trainer.restoration import listed
from unisono.trainer.snapshot import Subjects, empty_buffers, model_tensors

__all__ = ["LoadedWeights", "load_weights", "match", "read_source"]

_WRAPPED = "module."
"""The prefix that DistributedDataParallel and DataParallel add to all names."""
_MOST = 5


class LoadedWeights(NamedTuple):
    """The result of `Trainer.load`."""

    source: str
    """The path that was read."""
    missing_keys: list[str]
    """Names of the models that are not in the file; these tensors keep their values."""
    unexpected_keys: list[str]
    """Names in the file that no model has."""


class Source(NamedTuple):
    """Weights that rank 0 has read, or will read one at a time."""

    path: str
    weights: Weights
    averages: Weights
    """Averaged weights, if the source has them."""
    warnings: list[str]


class Weights:
    """Tensors by name.

    Args:
        tensors: The tensors.
        file: Has their values, if they are on the meta device.
        names: Their names in the file.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], file: TensorSource | None = None, names: Mapping[str, str] | None = None
    ) -> None:
        self.forms = tensors
        """Tensors of which dtypes and shapes count."""
        self._file, self._names = file, names or {}

    def value(self, name: str) -> Tensor:
        """Return a tensor with its values."""
        return self.forms[name] if self._file is None else self._file.read_tensor(self._names[name])

    def rows(self, name: str, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Return rows start <= row < stop of a tensor with their values, as another type."""
        form = self.forms[name]
        if self._file is None:
            return form[start:stop].to(dtype).contiguous()
        rows = torch.empty((stop - start, *form.shape[1:]), dtype=form.dtype)
        self._file.read([TensorRange(self._names[name], start * form[:1].numel(), rows)])
        return rows.to(dtype)


def read_source(
    path: Path,
    *,
    ema: bool,
    key: str | None,
    one_by_one: bool = False,
) -> Source:
    """Read the weights in a file, a checkpoint, or the newest good checkpoint of a run's directory.

    Args:
        path: The file or folder.
        ema: Read averaged weights as the weights.
        key: See `read_weights`.
        one_by_one: Only check the content, and read each tensor when it is asked for. A file of torch.save is read as a
            whole.

    Raises:
        CheckpointError: There is nothing to read, it is damaged, or it has no averaged weights.
    """
    if not path.is_dir():
        if ema:
            raise CheckpointError(f"ema=True is for checkpoints, which may have averaged weights, and {path} is a file")
        file = open_weights(path) if one_by_one and key is None else None
        return Source(
            str(path), _named(read_weights(path, key=key)) if file is None else _of_file(file), Weights({}), []
        )
    if key is not None:
        raise CheckpointError(f"key={key!r} is for files of torch.save, and {path} is a folder: leave key out")
    where, groups, warnings = _read_checkpoint(path, ["model", "ema"], one_by_one=one_by_one)
    if "model" not in groups:
        raise CheckpointError(f"{where} holds no weights of models; it has {listed(groups)}")
    if ema and "ema" not in groups:
        raise CheckpointError(f"{where} holds no averaged weights: its run had no ema_decay. Leave ema=True out.")
    averages = groups.get("ema", Weights({}))
    return Source(where, averages if ema else groups["model"], averages, warnings)


def _read_checkpoint(
    path: Path, groups: Sequence[str], *, one_by_one: bool
) -> tuple[str, dict[str, Weights], list[str]]:
    resolved = path.resolve()  # a link, such as that to the best one
    is_one = (resolved / MANIFEST).exists()
    folder = resolved / "checkpoints" if (resolved / "checkpoints").is_dir() else resolved
    store = CheckpointStore(resolved.parent if is_one else folder)
    listed = [CheckpointInfo(path=resolved, step=0, nbytes=0)] if is_one else store.list()
    damaged: list[str] = []
    for info in listed:
        try:
            found = _read_groups(store, info, groups, one_by_one=one_by_one)
        except CorruptCheckpointError as error:
            if is_one:
                raise
            damaged.append(str(error))
        else:
            return str(info.path), found, [f"{error} Loading from step {info.step} instead." for error in damaged]
    if damaged:
        raise CheckpointError(f"all {len(damaged)} checkpoints in {path} are damaged; the newest: {damaged[0]}")
    raise CheckpointError(
        f"{path} holds no checkpoint: give the directory of a run, one of its checkpoints, a safetensors file or "
        "one of torch.save"
    )


def _read_groups(
    store: CheckpointStore, info: CheckpointInfo, groups: Sequence[str], *, one_by_one: bool
) -> dict[str, Weights]:
    if not one_by_one:
        return {name: Weights(tensors) for name, tensors in store.load(info, groups=groups).groups.items()}
    checkpoint = store.open(info)
    checkpoint.verify()
    return {name: _of_file(checkpoint.group(name), named=False) for name in groups if name in checkpoint.groups}


def _of_file(file: TensorSource, *, named: bool = True) -> Weights:
    names = _plain_names(file.forms) if named else {name: name for name in file.forms}
    return Weights({plain: file.forms[name] for name, plain in names.items()}, file, {p: n for n, p in names.items()})


def _named(tensors: Mapping[str, Tensor]) -> Weights:
    """Return tensors by the names in plain models."""
    return Weights({plain: tensors[name] for name, plain in _plain_names(tensors).items()})


def _plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return the name in a plain model for each name: without what torch.compile and DDP put there."""
    plain = {name: plain_name(name) for name in names}
    if plain and all(name.startswith(_WRAPPED) for name in plain.values()):
        plain = {name: each.removeprefix(_WRAPPED) for name, each in plain.items()}
    return plain


def match(
    own: Mapping[str, Tensor], found: Mapping[str, Tensor], *, strict: bool, where: str
) -> tuple[list[str], list[str], list[str]]:
    """Return the names that are to be written, those that are missing, and those that are unexpected. Pure.

    A name whose memory is written under another name, as with tied weights, is not missing. Only the shapes and dtypes
    of `found` matter.

    Raises:
        CheckpointError: A shape differs, or a dtype so that values would be lost; or, with strict=True, a name.
    """
    common = [name for name in own if name in found]
    differing = [
        f"{name} is {_form(found[name])} there and {_form(own[name])} here"
        for name in common
        if found[name].shape != own[name].shape or not torch.can_cast(found[name].dtype, own[name].dtype)
    ]
    if differing:
        raise CheckpointError(
            f"{where} is of another model: {len(differing)} of {len(common)} tensors differ "
            f"({listed(differing, most=_MOST)}). Nothing was changed. Build the model as it was, or leave these "
            "tensors out of the file and give strict=False."
        )
    written = {same_memory(own[name]) for name in common}
    missing = [name for name in own if name not in found and same_memory(own[name]) not in written]
    unexpected = [name for name in found if name not in own]
    if not common and own:
        raise CheckpointError(
            f"{where} has none of the model's {len(own)} tensors: it has {listed(found, most=_MOST)}, and the model "
            f"has {listed(own, most=_MOST)}. Nothing was changed. Names in the file must be those of "
            "model.state_dict(), with several models behind their key, as in generator.weight."
        )
    if strict and (missing or unexpected):
        kinds = (("are not in it", missing), ("are in it only", unexpected))
        told = "; ".join(f"{len(names)} {what} ({listed(names, most=_MOST)})" for what, names in kinds if names)
        raise CheckpointError(
            f"{where} is of another model: of its tensors and the model's, {told}. Nothing was changed. Give "
            "strict=False to load the rest, which returns these names."
        )
    return common, missing, unexpected


def load_weights(
    world: World,
    subjects: Subjects,
    writes: WeightWrites,
    read: Callable[[], Source | None],
    *,
    strict: bool,
    warn: Callable[[str], None],
    tables: DividedTables | None = None,
) -> LoadedWeights | None:
    """Replace the values of models, and of their averages, by those that rank 0 reads. Every rank must call it.

    Averaged weights become those of the source, or its weights if it has none.

    Args:
        world: The ranks.
        subjects: The models, among others.
        writes: Writes into them.
        read: Reads the source, on rank 0; None stands for the weights that the models have.
        strict: True to refuse a source that does not have exactly the names of the models.
        warn: Called with sentences for the user.
        tables: Tables that are divided over ranks, whose rows go to their owners in chunks.

    Returns:
        The result, or None if nothing was read.

    Raises:
        CheckpointError: On all ranks, if the source cannot be read or is of another model. Nothing has been changed.
    """
    source: Source | None = None
    failure: Exception | None = None

    def describe() -> bytes:
        """Read on rank 0, and return a description of the source, or of the error."""
        nonlocal source, failure
        try:
            source = read()
        except Exception as error:  # raised below, once the others know
            failure = error
            told = str(error) if isinstance(error, CheckpointError) else f"rank 0: {error!r}"
            return json.dumps({"error": told}).encode()
        if source is None:
            return json.dumps({"present": True}).encode()
        tables = {name: table_of(each.forms) for name, each in (("model", source.weights), ("ema", source.averages))}
        return json.dumps({"path": source.path, "warnings": source.warnings, **tables}).encode()

    head: dict[str, Any] = json.loads(world.broadcast_bytes(describe))
    if failure is not None:
        raise failure
    if "error" in head:
        raise CheckpointError(head["error"])
    if "present" in head:
        return None
    weights, averages = forms_of(head["model"]), forms_of(head["ema"])
    own, of_averages = model_tensors(subjects.modules), model_tensors(subjects.averages)
    empty = empty_buffers(subjects.modules)
    # A buffer that is None takes whatever the file has for it.
    unfilled = [name for name in empty if name in weights]
    with raised_on_all(world, "trainer.load comparing names"):
        taken = own | {name: weights[name] for name in unfilled}
        common, *rest = match(taken, weights, strict=strict, where=head["path"])
        result = LoadedWeights(head["path"], *rest)
    for message in head["warnings"]:
        warn(message)
    with writes.writing() as write:
        for name in common:
            if tables is not None and name in tables.names:
                rows = None if source is None else partial(source.weights.rows, name, own[name].dtype)
                tables.load(name, rows)
                continue
            value = _received(world, weights[name], None if source is None else source.weights.value(name))
            if name in own:
                write(own[name], value)
            else:
                module, buffer, device = empty[name]
                module._buffers[buffer] = value.to(device, copy=True)
            if name in of_averages and name not in averages:
                write(of_averages[name], value)
        for name in of_averages:
            if name in averages and averages[name].shape == of_averages[name].shape:
                value = _received(world, averages[name], None if source is None else source.averages.value(name))
                write(of_averages[name], value)
    if tables is not None:
        world.gather_numbers([0])  # no rank ends the call before all have their rows, which it could not send to others
    return result


def _received(world: World, like: Tensor, value: Tensor | None) -> Tensor:
    """Return a tensor of rank 0 on every rank."""
    plain = torch.empty(like.shape, dtype=like.dtype) if value is None else value.contiguous()
    world.broadcast_tensor(plain)
    return plain


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
