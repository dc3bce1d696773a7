"""Counts the GPUs that torch would find, without torch and without waking a driver.

Torch takes a second to import and CUDA must not be initialised before ranks are forked, so the count comes from the
device files, the driver's list, and CUDA_VISIBLE_DEVICES. Only NVIDIA's GPUs are counted. Start reading at
`usable_gpus`.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

__all__ = ["present_gpus", "torch_is_for", "usable_gpus", "visible_gpus"]


def usable_gpus(environment: Mapping[str, str]) -> int | None:
    """Count the GPUs that torch can use in ranks with this environment.

    Returns:
        The number; 0 if torch was built for CPUs, None if it was built for GPUs that are not counted here.
    """
    match _installed_torch():
        case "cuda":
            return visible_gpus(environment.get("CUDA_VISIBLE_DEVICES"), present=present_gpus())
        case "cpu":
            return 0
    return None


def present_gpus(root: Path = Path("/")) -> int:
    """Count the GPUs of this machine or, in a container, those that were passed into it."""
    files = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in (root / "dev").glob("nvidia*"))
    listed = sum(1 for _ in (root / "proc/driver/nvidia/gpus").glob("*"))
    # A container may see the driver's whole list and have the files of a few; without files, the driver creates them.
    return min(files, listed) if files and listed else files or listed


def visible_gpus(setting: str | None, *, present: int) -> int:
    """Count the present GPUs that CUDA shows under a value of CUDA_VISIBLE_DEVICES; None: it is not set.

    As in CUDA, the list ends at the first number that names no GPU, and a list with a repeated entry hides all.

    >>> visible_gpus(None, present=4), visible_gpus("2,3", present=4), visible_gpus("0,9,1", present=4)
    (4, 2, 1)
    >>> visible_gpus("", present=4), visible_gpus("1,1", present=4), visible_gpus("GPU-5ab,GPU-6cd", present=4)
    (0, 0, 2)
    """
    if setting is None:
        return present
    names: list[str] = []
    for name in (part.strip() for part in setting.split(",")):
        number = name.isascii() and name.isdigit() and int(name) < present
        if not (number or (present and name.startswith(("GPU-", "MIG-")))):
            break
        names.append(name)
    return len(names) if len(set(names)) == len(names) else 0


def torch_is_for(version: str) -> Literal["cuda", "cpu", "other"]:
    """Return what torch was built for, from the text of torch/version.py.

    >>> torch_is_for("cuda: Optional[str] = '13.0'\\nhip: Optional[str] = None")
    'cuda'
    >>> torch_is_for("cuda: Optional[str] = None\\nhip: Optional[str] = '7.0'"), torch_is_for("cuda = None")
    ('other', 'cpu')
    """
    built = {
        name
        for name, value in re.findall(r"^(cuda|hip|rocm|xpu)\b.*=\s*(\S+)\s*$", version, re.MULTILINE)
        if value != "None"
    }
    return "cuda" if "cuda" in built else "other" if built else "cpu"


def _installed_torch() -> Literal["cuda", "cpu", "other"]:
    spec = None
    with suppress(ValueError):  # a torch that somebody put into sys.modules without a spec
        spec = importlib.util.find_spec("torch")  # finds it without running it
    if spec is None or spec.origin is None:
        return "cpu"
    try:
        return torch_is_for((Path(spec.origin).parent / "version.py").read_text())
    except OSError:
        return "other"
