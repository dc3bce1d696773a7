"""The manifest of a checkpoint: its files with their hashes, and a hash of the manifest.

The content of a manifest is checked before it is used. Start reading at `parse_manifest`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from unisono.errors import CorruptCheckpointError
from unisono.state.codec import Json
from unisono.state.durable_files import read_file
from unisono.state.increments import base_name, is_sound
from unisono.state.regions import FileEntry, entry_of, render_entry
from unisono.text import a_type

__all__ = [
    "GROUP",
    "MANIFEST",
    "STATE",
    "SUFFIX",
    "Manifest",
    "manifest_of",
    "parse_manifest",
    "read_manifest",
    "render_manifest",
]

MANIFEST = "manifest.json"
"""Name of the file."""
STATE = "state.json"
"""Name of the file with everything that is not a tensor."""
SUFFIX = ".safetensors"
"""Suffix of the file names of groups."""
GROUP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
"""Pattern of valid group names."""

_FORMAT, _FORMAT_OF_REGIONS, _FORMAT_OF_INCREMENTS = 1, 2, 3
"""The second has hashes of regions, for files that several ranks have written, or that are larger than one region. The
third has groups of which changed rows are stored, beside an earlier file."""
_LIMIT = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of a manifest, checked."""

    step: int
    files: list[FileEntry]
    groups: dict[str, dict[str, Any]]
    """By name, the argument `described` of `safetensors_format.read_tensors`."""


def render_manifest(step: int, entries: list[FileEntry], groups: dict[str, Json]) -> bytes:
    """Return the manifest of a checkpoint as bytes; `groups` are the descriptions that `plan_file` returned."""
    try:
        version = importlib.metadata.version("unisono")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        version = "unknown"
    files = [render_entry(entry) for entry in entries]
    form = _FORMAT if all("sha256" in each for each in files) else _FORMAT_OF_REGIONS
    if any(isinstance(group, dict) and "base" in group for group in groups.values()):
        form = _FORMAT_OF_INCREMENTS
    return _seal(
        {
            "format": form,
            "unisono": version,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "step": step,
            "files": files,
            "groups": groups,
        }
    )


def _seal(content: dict[str, Any]) -> bytes:
    """Return a manifest as bytes with its own hash at the end: it has the files' hashes, and no other file has its."""
    body = json.dumps(content, indent=1).encode()
    return json.dumps({**content, "sha256": hashlib.sha256(body).hexdigest()}, indent=1).encode() + b"\n"


def manifest_of(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint's folder; CorruptCheckpointError if it is missing or damaged."""
    return parse_manifest(read_manifest(folder), str(folder), folder.name)


def read_manifest(folder: Path) -> bytes:
    """Return the bytes of a manifest; CorruptCheckpointError if it cannot be read or is larger than 64 MiB."""
    return read_file(folder / MANIFEST, lambda size: size <= _LIMIT, f"a manifest of up to {_LIMIT:,} bytes")


def parse_manifest(data: bytes, where: str, folder_name: str) -> Manifest:
    """Check a manifest of a folder and return its content; `where` names it in errors.

    Raises:
        CorruptCheckpointError: The manifest is damaged, has an unknown format, or is of another folder.
    """

    def corrupt(what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{where}: {MANIFEST} {what}. Take an older checkpoint.")

    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise corrupt(f"is not JSON ({len(data):,} bytes: {error}): it was cut off or changed") from error
    if not isinstance(content, dict):
        raise corrupt(f"holds {a_type(content)}, expected an object")
    if content.get("format") not in (_FORMAT, _FORMAT_OF_REGIONS, _FORMAT_OF_INCREMENTS):
        raise corrupt(
            f"has format {content.get('format')!r}, and this unisono reads {_FORMAT} to {_FORMAT_OF_INCREMENTS}: it is "
            "damaged, or comes from a newer unisono (upgrade to read it)"
        )
    claimed = content.pop("sha256", None)
    # Rendered again and compared to the byte: this finds a change in white space or in the case of a digit, too.
    if _seal(content) != data:
        found = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
        raise corrupt(f"was changed after it was written: expected sha256 {claimed}, found {found}")
    try:
        entries = [entry_of(entry) for entry in content["files"]]
        manifest = Manifest(step=content["step"], files=entries, groups=content["groups"])
        expected = {*(f"{group}{SUFFIX}" for group in manifest.groups), STATE}
        expected |= {f"{base_name(group)}{SUFFIX}" for group, each in manifest.groups.items() if "base" in each}
        sound = all(
            isinstance(group["names"], list)
            and isinstance(group["aliases"], dict)
            and isinstance(group["dtypes"], dict)
            and ("base" not in group or is_sound(group["base"]))
            for group in manifest.groups.values()
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise corrupt(f"lacks what it must say: {type(error).__name__}: {error}") from error
    names = [entry.name for entry in entries]
    # A file's name comes from the file: it must not lead out of the folder.
    bad = [name for name in names if name != STATE and not (isinstance(name, str) and _is_group_file(name))]
    if bad:
        raise corrupt(f"names {bad[0]!r}, which is not a file of a checkpoint; nothing was read from there")
    if not sound or len(names) != len(expected) or set(names) != expected:
        raise corrupt(f"lists the files {names}, expected {sorted(expected)} with a size and a hash each")
    # A checkpoint with a tag, or a copy under a name that states no step, may have any name.
    if folder_name.startswith("step-") and folder_name != f"step-{manifest.step:09d}":
        raise corrupt(f"is of step {manifest.step}, but the folder is {folder_name}: it was renamed or copied")
    return manifest


def _is_group_file(name: str) -> bool:
    return name.endswith(SUFFIX) and GROUP.fullmatch(name.removesuffix(SUFFIX)) is not None
