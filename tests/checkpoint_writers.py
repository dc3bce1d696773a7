"""Which ranks have written a checkpoint, by its manifest."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["writers"]


def writers(checkpoint: Path) -> dict[str, set[int]]:
    """Return the ranks that have written each group of tensors; none where rank 0 has written the whole file."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    return {
        file["name"].removesuffix(".safetensors"): {int(region.split()[2]) for region in file.get("regions", ())}
        for file in files
    }
