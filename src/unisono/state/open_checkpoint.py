"""A checkpoint of which parts are read. Start reading at `OpenCheckpoint.group`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.errors import CorruptCheckpointError
from unisono.state.codec import Json
from unisono.state.durable_files import CheckedFile
from unisono.state.increment_file import IncrementFile
from unisono.state.increments import base_name
from unisono.state.manifest import STATE, SUFFIX, parse_manifest, read_manifest
from unisono.state.safetensors_format import read_bytes
from unisono.state.tensor_file import TensorFile, TensorSource, check_regions

__all__ = ["OpenCheckpoint"]


class OpenCheckpoint:
    """A checkpoint, whose manifest has been read and checked. No file stays open.

    Args:
        path: Its folder.

    Raises:
        CorruptCheckpointError: The manifest is damaged.
    """

    def __init__(self, path: Path) -> None:
        data = read_manifest(path)
        self.path, self._manifest = path, parse_manifest(data, str(path), path.name)
        self.digest = hashlib.sha256(data).hexdigest()
        """A hash of the manifest, and so of the whole content."""
        self._entries = {entry.name: entry for entry in self._manifest.files}
        self._opened: dict[str, TensorSource] = {}

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self._manifest.step

    @property
    def groups(self) -> list[str]:
        """The names of the groups of tensors."""
        return [*self._manifest.groups]

    def group(self, name: str) -> TensorSource:
        """Return the tensors of a group, of which parts can be read.

        Raises:
            CorruptCheckpointError: The header of its file is damaged, or what it has of changed rows.
        """
        if name not in self._opened:
            self._opened[name] = self._open(name, self._manifest.groups[name])
        return self._opened[name]

    def _open(self, name: str, described: Mapping[str, Any]) -> TensorSource:
        stored = self._file(name, described)
        if "base" not in described:
            return stored
        notes = described["base"]
        return IncrementFile(stored, self._file(base_name(name), notes["described"]), notes)

    def _file(self, name: str, described: Mapping[str, Any]) -> TensorFile:
        file = name + SUFFIX
        return TensorFile(self.path / file, entry=self._entries[file], described=described)

    def document(self) -> Json:
        """Return everything that is no tensor.

        Raises:
            CorruptCheckpointError: It is damaged.
        """
        entry = self._entries[STATE]
        with CheckedFile(self.path / STATE, entry) as file:
            data = read_bytes(file.read, entry.nbytes)
            file.finish()
        try:
            document: Json = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpointError(
                f"{self.path / STATE} does not hold the state as JSON: {error}. It was not written by unisono, or by a "
                "newer one. Take an older checkpoint, or upgrade."
            ) from error
        return document

    def verify(self, *, part: int = 0, parts: int = 1) -> None:
        """Compare a part of all bytes with their hashes; constant memory.

        Args:
            part: The number of the part: each of several ranks checks one.
            parts: The number of parts, which together are everything.

        Raises:
            CorruptCheckpointError: A file is damaged; the message names it, and the place.
        """
        total = sum(entry.nbytes for entry in self._manifest.files)
        low, high = total * part // parts, total * (part + 1) // parts
        before = 0
        for entry in self._manifest.files:
            first, before = before, before + entry.nbytes
            own = [each for each in entry.regions if low <= first + each.start < high]
            check_regions(self.path / entry.name, entry, own)
