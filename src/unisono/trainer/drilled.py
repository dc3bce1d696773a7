"""The part of a Trainer in `unisono drill`, which runs a script several times and compares the results.

The launcher's side names a folder in the environment. The Trainer keeps there all that it would keep in the user's
directory, also its events, and each rank tells its state at the end of the loop over epochs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from unisono.state.digest import digest
from unisono.trainer.snapshot import Subjects, capture
from unisono.variables import DRILL_VARIABLE

__all__ = ["own_drill", "tell_end"]


def own_drill() -> Path | None:
    """Return the folder of the drill that this process takes part in; None if it takes part in none."""
    folder = os.environ.get(DRILL_VARIABLE)
    return Path(folder) if folder else None


def tell_end(folder: Path, subjects: Subjects, *, rank: int, total_steps: int) -> None:
    """Write digests of the state of this rank, as a checkpoint would hold it, to the folder of the drill.

    Raises:
        CheckpointError: The state of an object holds something that a checkpoint could not hold either.
        ValueError: An optimizer has a parameter that belongs to no model.
    """
    groups, document = capture(subjects, {})
    digests = {
        "model": digest({"": groups["model"]}),
        "optimizer": digest({"tensors": groups["optimizer"], "document": document["optimizer"]}),
        "objects": digest({"tensors": groups["other"], "document": document["other"]}),
    }
    if "ema" in groups:
        digests["average"] = digest({"": groups["ema"]})
    line = json.dumps({"total_steps": total_steps, "digests": digests})
    with (folder / f"end-{rank}.jsonl").open("a") as file:
        file.write(f"{line}\n")
