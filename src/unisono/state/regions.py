"""The hashes of a file: of its regions, so that one process can write or check a part of it without reading the rest.

Regions follow each other without gaps, from the first byte of a file to its last. A file of up to 1 MiB that one
process has written is one region. Pure: no files. Start reading at `RegionHashes`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from unisono.state.codec import Json

__all__ = ["CHUNK", "FileEntry", "Region", "RegionHashes", "chunks", "entry_of", "region_nbytes", "render_entry"]

CHUNK = 1 << 20
"""Bytes that are written or read, and hashed, at a time: they stay in the CPU's cache in between."""
_MOST_REGIONS = 1 << 16
"""The most regions of a file that one process writes: the manifest has about 110 bytes for each."""


class Region(NamedTuple):
    """A range of a file: start <= byte < stop."""

    start: int
    stop: int
    sha256: str
    rank: int | None = None
    """The rank that wrote it; None if one process wrote the whole file."""

    def told(self) -> str:
        """Return its place in words."""
        by = "" if self.rank is None else f", which rank {self.rank} wrote"
        return f"bytes {self.start:,} to {self.stop:,}{by}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """The expected name, size and hashes of a file."""

    name: str
    nbytes: int
    regions: tuple[Region, ...]


def region_nbytes(nbytes: int) -> int:
    """Return the size of regions of a file of some size: 1 MiB, and more for files above 64 GiB.

    >>> region_nbytes(5), region_nbytes(1 << 40)
    (1048576, 16777216)
    """
    return max(1, -(-nbytes // (_MOST_REGIONS * CHUNK))) * CHUNK


class RegionHashes:
    """Hashes bytes that are written one after the other, and divides them into regions.

    Args:
        size: The size of a region.
        start: Position of the first byte in the file.
        rank: See `Region`.
    """

    def __init__(self, size: int, *, start: int = 0, rank: int | None = None) -> None:
        self._size, self._rank = size, rank
        self._sha, self._start, self._stop = hashlib.sha256(), start, start
        self._regions: list[Region] = []

    @property
    def room(self) -> int:
        """The number of bytes until the end of the region: no more may be added at once."""
        return self._size - (self._stop - self._start)

    def add(self, chunk: memoryview) -> None:
        """Hash further bytes."""
        self._sha.update(chunk)
        self._stop += len(chunk)
        if not self.room:
            self._close()

    def finish(self) -> tuple[Region, ...]:
        """Return the regions. Of no bytes there is one, which is empty."""
        if self._stop > self._start or not self._regions:
            self._close()
        return tuple(self._regions)

    def _close(self) -> None:
        self._regions.append(Region(self._start, self._stop, self._sha.hexdigest(), self._rank))
        self._sha, self._start = hashlib.sha256(), self._stop


def chunks(view: memoryview, hashes: RegionHashes) -> Iterator[memoryview]:
    """Divide bytes into chunks, each of which lies in one region."""
    start = 0
    while start < len(view):
        chunk = view[start : start + min(CHUNK, hashes.room)]
        yield chunk
        start += len(chunk)


def render_entry(entry: FileEntry) -> dict[str, Json]:
    """Return an entry as it stands in a manifest."""
    head: dict[str, Json] = {"name": entry.name, "nbytes": entry.nbytes}
    if len(entry.regions) == 1 and entry.regions[0].rank is None:
        return {**head, "sha256": entry.regions[0].sha256}
    return {**head, "regions": [f"{each.stop} {each.sha256}" + _rank(each) for each in entry.regions]}


def _rank(region: Region) -> str:
    return "" if region.rank is None else f" {region.rank}"


def entry_of(content: dict[str, Any]) -> FileEntry:
    """Return the entry that `render_entry` rendered.

    Raises:
        KeyError, TypeError, ValueError or AttributeError: It did not render this.
    """
    name, nbytes = content["name"], content["nbytes"]
    if type(nbytes) is not int:
        raise TypeError(f"nbytes is {nbytes!r}")
    if "sha256" in content:
        if content.keys() != {"name", "nbytes", "sha256"} or type(content["sha256"]) is not str:
            raise TypeError(f"{name!r} is described by {sorted(content)}")
        return FileEntry(name=name, nbytes=nbytes, regions=(Region(0, nbytes, content["sha256"]),))
    return FileEntry(name=name, nbytes=nbytes, regions=_regions_of(content["regions"], nbytes))


def _regions_of(texts: Sequence[str], nbytes: int) -> tuple[Region, ...]:
    regions: list[Region] = []
    start = 0
    for text in texts:
        stop, sha256, *rank = text.split(" ")
        regions.append(Region(start, int(stop), sha256, int(rank[0]) if rank else None))
        if regions[-1].stop < start:
            raise ValueError(f"a region ends at {stop} and begins at {start}")
        start = regions[-1].stop
    if start != nbytes or not regions:
        raise ValueError(f"the regions end at {start:,}, and the file has {nbytes:,} bytes")
    return tuple(regions)
