"""The images that a run has logged, as files in its directory. Start reading at `ImageFolder.write`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from unisono.rank_zero.image import Image, reduced
from unisono.rank_zero.png import encode_png
from unisono.watch.loop_fields import ImageFields

__all__ = ["ImageFolder"]

_FOLDER = "images"
_LONGEST = 1024
"""Pixels of the longer side of a file."""
_THUMBNAIL = 160
"""The same of what a report shows."""
_CAPTION = 1000
"""Characters of a caption."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class ImageFolder:
    """Writes images as PNG files. A file that cannot be written ends no run: then no more are written, with a warning.

    Args:
        directory: The directory of the run; None if it has none.
        warn: Called with a warning.
    """

    def __init__(self, directory: Path | None, warn: Callable[[str], None]) -> None:
        self._directory = None if directory is None else directory.absolute()
        self._warn = warn
        self._is_full = self._has_warned = False

    @property
    def exists(self) -> bool:
        """True if images have a place."""
        return self._directory is not None

    def write(self, name: str, image: Image, *, step: int) -> ImageFields | None:
        """Write an image, and return what its event says; None if it cannot be written.

        The file has all of the image when it gets its name. A name has a digest of the content, so that a step that is
        repeated after a resume does not change what other events name.

        Args:
            name: The name that it is logged by.
            image: The image. Above 1024 pixels on a side, it is reduced.
            step: The number of steps done.
        """
        if self._is_full or self._directory is None:
            return None
        pixels, outside = image.read()
        if outside > 1 and not self._has_warned:
            self._has_warned = True
            self._warn(
                f"the image {name!r} has floats up to {outside:.4g} outside of 0 to 1, which are clipped: divide them "
                "by their greatest value, or log uint8 from 0 to 255"
            )
        pixels = reduced(pixels, _LONGEST)
        height, width, _ = pixels.shape
        content = encode_png(pixels)
        stem = f"step-{step:09}-{_UNSAFE.sub('_', name)[:60]}-{hashlib.sha256(content).hexdigest()[:8]}"
        fields: ImageFields = {
            "path": f"{_FOLDER}/{stem}.png",
            "width": width,
            "height": height,
            "nbytes": len(content),
        }
        if image.caption is not None:
            fields["caption"] = image.caption[:_CAPTION].encode(errors="replace").decode()
        files = {fields["path"]: content}
        if max(height, width) > _THUMBNAIL:
            fields["thumbnail"] = f"{_FOLDER}/{stem}.small.png"
            files[fields["thumbnail"]] = encode_png(reduced(pixels, _THUMBNAIL))
        try:
            for path, each in files.items():
                _write(self._directory / path, each)
        except OSError as error:
            self._is_full = True
            self._warn(f"images are not logged from now on: {error.filename} cannot be written: {error.strerror}")
            return None
        return fields


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    part.replace(path)
