"""The images of a report, as data: URLs that stand in its page. Start reading at `read_thumbnails`."""

from __future__ import annotations

import base64
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unisono.report.summary import Document

__all__ = ["read_thumbnails"]

_PATH = re.compile(r"images/\w[\w.-]*\.png", re.ASCII)
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MOST_BYTES = 120_000
"""Of one image. 160 x 160 pixels with four channels that cannot be compressed take 103,000."""
_MOST_OF_ALL = 600_000


def read_thumbnails(document: Document, folder: Path) -> Mapping[str, str]:
    """Return the data: URLs of a run's images, by path, up to 600 kB of files.

    The latest images of all names come first, then those before them. A file that is missing, is no PNG, or does not
    stand in the folder `images` of the run is left out.

    Args:
        document: The document of the run.
        folder: The directory of the run.
    """
    found: dict[str, str] = {}
    left = _MOST_OF_ALL
    for entry in _latest_first(document):
        path = entry.get("thumbnail", entry["path"])
        content = _read(folder, path)
        if content is not None and len(content) <= left:
            left -= len(content)
            found[entry["path"]] = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return found


def _latest_first(document: Document) -> Iterator[Mapping[str, Any]]:
    names = [*document["images"].values()]
    for place in range(1, max(map(len, names), default=0) + 1):
        yield from (entries[-place] for entries in names if place <= len(entries))


def _read(folder: Path, path: str) -> bytes | None:
    """Return the content of an image; None if the path, which anybody may have written, is not one of ours."""
    if not _PATH.fullmatch(path):
        return None
    try:
        if not stat.S_ISREG((folder / path).stat().st_mode):
            return None
        with (folder / path).open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError:
        return None
    return content if content.startswith(_SIGNATURE) and len(content) <= _MOST_BYTES else None
