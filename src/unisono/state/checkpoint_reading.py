"""Reads a checkpoint whole, and compares every byte's hash with its manifest in the same pass.

`open_checkpoint` reads parts of one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from unisono.errors import CorruptCheckpointError
from unisono.state.codec import Json
from unisono.state.durable_files import CheckedFile
from unisono.state.increments import apply_increment, base_name
from unisono.state.manifest import STATE, SUFFIX, manifest_of
from unisono.state.safetensors_format import read_bytes, read_tensors
from unisono.state.tensor_file import TensorFile

__all__ = ["read_checkpoint"]


def read_checkpoint(
    path: Path, *, groups: Collection[str] | None, into: Mapping[tuple[str, str], Tensor] | None = None
) -> tuple[dict[str, dict[str, Tensor]], Json]:
    """Return the tensors of a checkpoint by group and name, and its document.

    Memory: that of the tensors; each is read directly into its final memory.

    Args:
        path: The folder of the checkpoint.
        groups: The groups of tensors to read, if the checkpoint has them. None: all.
        into: Memory for some tensors; see `CheckpointStore.load`.

    Raises:
        CorruptCheckpointError: A file is damaged; the message names it, with expected and found values.
    """
    manifest = manifest_of(path)
    entries = {entry.name: entry for entry in manifest.files}

    def values(name: str, parse: Callable[[Callable[[memoryview], None], int], Any]) -> Any:
        with CheckedFile(path / name, entries[name]) as file:
            try:
                found = parse(file.read, entries[name].nbytes)
            except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, RecursionError) as error:
                file.finish()  # damage is the better explanation
                what = "the state as JSON" if name == STATE else "the tensors that its manifest describes"
                raise CorruptCheckpointError(
                    f"{path / name} does not hold {what}: {type(error).__name__}: {error}. It was not written "
                    "by unisono, or by a newer one. Take an older checkpoint, or upgrade."
                ) from error
            file.finish()
        return found

    document = values(STATE, lambda read, nbytes: json.loads(read_bytes(read, nbytes)))
    found = {
        group: values(group + SUFFIX, partial(read_tensors, described=described, into=_of_group(into, group)))
        for group, described in manifest.groups.items()
        if groups is None or group in groups
    }
    for group, stored in found.items():
        if "base" in (described := manifest.groups[group]):
            name = base_name(group) + SUFFIX
            base = TensorFile(path / name, entry=entries[name], described=described["base"]["described"])
            try:
                found[group] = apply_increment(stored, described["base"], base, into=_of_group(into, group))
            except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
                raise CorruptCheckpointError(
                    f"{path / name} does not hold the rows that its manifest describes: "
                    f"{type(error).__name__}: {error}. Take an older checkpoint."
                ) from error
    return found, document


def _of_group(tensors: Mapping[tuple[str, str], Tensor] | None, group: str) -> dict[str, Tensor]:
    return {name: tensor for (of, name), tensor in (tensors or {}).items() if of == group}
