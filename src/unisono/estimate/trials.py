"""Trials of layouts: each is trained for some steps on this machine, in processes of its own.

Start reading at `try_layout`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from unisono.estimate.costs import LayoutCost, Trial
from unisono.machine import available_bytes
from unisono.watch.figures import format_bytes

__all__ = ["try_layout"]

_TIME_S = 4.0
"""Seconds for which a layout is trained, by what is planned; a step takes longer or shorter."""
_LEAST_STEPS, _MOST_STEPS = 5, 40
_SHARED_STEPS = 12
"""At least so many with shared memory: copies for recovery are made in the course of 8."""
_PATIENCE_S = 180.0


def try_layout(
    cost: LayoutCost,
    *,
    target: str,
    virtual_ranks: int,
    batch_size: int,
    micro_batch_size: int,
) -> Trial:
    """Train some steps in a layout, and return what they took, or why there are none.

    Args:
        cost: The layout, with its planned costs.
        target: The build function; see `find_build`. It is called in each rank.
        virtual_ranks: As in the Trainer.
        batch_size: Samples of a step. All of them are the first sample of the data.
        micro_batch_size: The samples that are computed at once.
    """
    free, needed = available_bytes(), cost.memory.total * cost.ranks
    if free is not None and needed > free:
        return Trial(why_not=f"{format_bytes(needed)} are needed, {format_bytes(free)} are free here")
    shares_memory = cost.ranks > 1 and not cost.code
    least = _SHARED_STEPS if shares_memory else _LEAST_STEPS
    steps = min(max(round(_TIME_S / cost.step_s), least), _MOST_STEPS)
    request = {
        "target": target,
        "code": cost.code,
        "virtual_ranks": virtual_ranks,
        "steps": steps,
        "batch_size": batch_size,
        "micro_batch_size": micro_batch_size,
    }
    # Also one process, whose pages of torch's files are then counted as those of several.
    command = [sys.executable, "-m", "unisono", "run", "-n", str(cost.ranks), "-m", "unisono.estimate.layout_trial"]
    with tempfile.TemporaryDirectory(prefix="unisono-plan-") as name:
        folder = Path(name)
        (folder / "trial.json").write_text(json.dumps(request))
        patience_s = _PATIENCE_S + 10 * steps * cost.step_s
        try:
            done = subprocess.run(
                [*command, name], check=False, capture_output=True, text=True, timeout=patience_s, errors="replace"
            )
        except subprocess.TimeoutExpired:
            return Trial(why_not=f"{steps} steps took more than {patience_s:.0f} s", has_failed=True)
        ranks = [json.loads(file.read_text()) for file in folder.glob("rank-*.json")]
    if done.returncode or len(ranks) != cost.ranks:
        return Trial(why_not=_reason(done.stderr), has_failed=True)
    shared = sum(each["shared_nbytes"] for each in ranks) / len(ranks)
    return Trial(
        nbytes=round(max(each["own_nbytes"] for each in ranks) + shared),
        step_s=max(each["step_s"] for each in ranks),
        steps=steps,
    )


def _reason(errors: str) -> str:
    """Return the line of an error output that says most.

    >>> _reason("warning\\nunisono: rank 1 failed: ValueError: no\\n\\n  exit code 1")
    'rank 1 failed: ValueError: no'
    """
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    told = [line.removeprefix("unisono: ") for line in lines if line.startswith("unisono: rank ")]
    return (told or lines[-1:] or ["the program ended with an error"])[0]
