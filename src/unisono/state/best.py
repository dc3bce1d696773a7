"""The record of a run's best checkpoint: a small file beside the checkpoints, and a link to the folder it names.

    best.json               the step, the metric and its value; the truth
    best -> step-000000120  for people and other programs, where the file system has links

Both are replaced by a rename, after the checkpoint that they name is on the disk: at any moment they name a complete
checkpoint. `CheckpointStore.prune` keeps the one that best.json names. Start reading at `write_best`.
"""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from unisono.errors import CorruptCheckpointError
from unisono.state.durable_files import failing_with_remedy, flush_folder, read_file

__all__ = ["BEST_LEFTOVERS", "Best", "forget_best", "read_best", "step_folder", "write_best"]

_RECORD, _LINK = "best.json", "best"
BEST_LEFTOVERS = (f".tmp-{_RECORD}", f".tmp-{_LINK}")
"""Names of files that a writer may leave when it is killed."""
_LIMIT = 1 << 16
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best checkpoint of a run, and why it is."""

    step: int
    """The step at which it was made."""
    metric: str
    """The metric by which checkpoints are compared."""
    mode: str
    """"max" or "min": which values are better."""
    value: float
    """The metric's value at that step; not NaN."""


def step_folder(step: int) -> str:
    """Return the name of the folder of a step's checkpoint.

    >>> step_folder(120)
    'step-000000120'
    """
    return f"step-{step:09d}"


def read_best(folder: Path) -> Best | None:
    """Return the record in a folder of checkpoints, or None if there is none.

    Raises:
        CorruptCheckpointError: The record is damaged.
    """
    path = folder / _RECORD
    if not path.exists():
        return None
    data = read_file(path, lambda size: size <= _LIMIT, f"a record of up to {_LIMIT:,} bytes")
    try:
        content = json.loads(data)
        best = Best(step=content["step"], metric=content["metric"], mode=content["mode"], value=float(content["value"]))
        sound = type(best.step) is int and type(best.metric) is str and best.mode in ("max", "min")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is no record of a best checkpoint ({error!r}): remove it.") from error
    if not sound or math.isnan(best.value):
        raise CorruptCheckpointError(f"{path} is no record of a best checkpoint ({content}): remove it.")
    return best


def write_best(folder: Path, best: Best) -> None:
    """Record the best checkpoint, which must be on the disk; return when the record is there, too.

    Raises:
        CheckpointError: The record cannot be written. The one before it stays.
    """
    name = step_folder(best.step)
    record, link = (folder / leftover for leftover in BEST_LEFTOVERS)
    what = f"{folder / name} is the best checkpoint now ({best.metric}={best.value}), which cannot be recorded"
    with failing_with_remedy(folder, what):
        with record.open("wb") as file:
            file.write(json.dumps({**asdict(best), "checkpoint": name}, indent=1).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        record.replace(folder / _RECORD)
        link.unlink(missing_ok=True)
        try:
            link.symlink_to(name)
        except OSError as error:
            if error.errno not in _NO_LINKS:  # without links there is the record
                raise
        else:
            link.replace(folder / _LINK)
        flush_folder(folder)


def forget_best(folder: Path) -> None:
    """Remove the record and the link, if there are any.

    Raises:
        CheckpointError: They cannot be removed.
    """
    with failing_with_remedy(folder, f"{folder / _RECORD} cannot be removed"):
        for name in (_RECORD, _LINK):
            if name == _RECORD or (folder / name).is_symlink():
                (folder / name).unlink(missing_ok=True)
