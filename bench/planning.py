"""`unisono plan --train` against runs: the peak memory of a rank, and the time of a step, of each layout that it knows.

Planned is what the command says, on this machine; trained what it says of the steps that it trains; measured what a job
with the Trainer that it says to type takes in the same step: the peak of the process in some steps, before the parts of
ranks come together at the end of the loop, of the rank that has most, with an equal part of what ranks share; and the
median of its steps. The models are those of the examples, three of them wider. A figure is how far the plan is off, in
per cent of what was measured; memory may be off by 10, and a step by 20. Times need a quiet machine, memory does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.errors import CannotRun
from bench.measure import Effort
from bench.rows import Goal, Row, summarise

__all__ = ["memory_of", "run"]

_SCRIPT = Path(__file__).parent / "scripts" / "planned_training.py"
_UNISONO = [sys.executable, "-m", "unisono"]
_VIRTUAL_RANKS = 8
_MODELS = {"digits": 128, "language_model": 64, "wide_language_model": 16, "resnet50": 16, "llama": 16}
"""The models, and the batch of each."""
_STEPS, _SHARED_STEPS, _MOST_STEPS, _TIME_S = 5, 10, 60, 3.0
"""The least steps of a run, the most, and how long they are to take. In shared memory, copies for recovery are made in
the course of 8; the first steps of small models take longer."""
_TIMEOUT_S = 900
_MEMORY_GOAL, _TIME_GOAL = 10.0, 20.0


def run(effort: Effort) -> Iterator[Row]:
    """Plan and train each model on 2 and 4 ranks. Raises: CannotRun if a model needs a package that is not there."""
    models = {"digits": _MODELS["digits"]} if effort.quick else _MODELS
    for model, batch in models.items():
        for ranks in (2,) if effort.quick else (2, 4):
            yield from _compare(model, batch, ranks, effort)


def _compare(model: str, batch: int, ranks: int, effort: Effort) -> Iterator[Row]:
    sizes = ["--ranks", str(ranks), "--batch", str(batch), "--virtual-ranks", str(_VIRTUAL_RANKS)]
    layouts = json.loads(_output([*_UNISONO, "plan", f"{_SCRIPT}:{model}", *sizes, "--train", "--json"]))["layouts"]
    for layout in layouts:
        if layout["ranks"] == 1 and ranks > 2:  # the same as with 2
            continue
        shares_memory = layout["ranks"] > 1 and not layout["code"]
        steps = 3 if effort.quick else _SHARED_STEPS if shares_memory else _STEPS
        if not effort.quick:
            steps = max(steps, min(round(_TIME_S / layout["step_s"]), _MOST_STEPS))
        found = _train(model, batch, layout["ranks"], layout["code"], steps)
        case = f"{model}, batch {batch}, {layout['name']}"
        nbytes, step_s = memory_of(found), max(each["step_s"] for each in found)
        goals = (None, None) if effort.quick else (_MEMORY_GOAL, _TIME_GOAL)
        told = {"planned": (layout["memory"]["total"], layout["step_s"])}
        if not layout["trial"]["why_not"]:
            told["trained"] = (layout["trial"]["nbytes"], layout["trial"]["step_s"])
        for how, (memory, time_s) in told.items():
            yield _row(f"{case}, memory", memory / 1e6, nbytes / 1e6, f"MB {how}", goals[0])
            yield _row(f"{case}, step", time_s * 1e3, step_s * 1e3, f"ms {how}", goals[1])


def memory_of(ranks: list[dict[str, Any]]) -> float:
    """Return what the rank with the most takes, where shared memory counts in equal parts, as plan counts it.

    The kernel counts a page for those that have touched it, so ranks that write gradients for two have more of it.
    """
    shared: float = sum(each["shared_nbytes"] for each in ranks) / len(ranks)
    own: float = max(each["own_nbytes"] - each["shared_nbytes"] for each in ranks)
    return shared + own


def _train(model: str, batch: int, ranks: int, code: str, steps: int) -> list[dict[str, Any]]:
    """Return what each rank of a job tells."""
    arguments = [model, batch, _VIRTUAL_RANKS, steps, *([code] if code else [])]
    out = _output([*_UNISONO, "run", "-n", str(ranks), str(_SCRIPT), *map(str, arguments)])
    found = [json.loads(line[line.index("{") :]) for line in out.splitlines() if '"own_nbytes"' in line]
    assert len(found) == ranks, out
    return found


def _output(command: list[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S, env={**os.environ})
    if done.returncode and "ModuleNotFoundError" in done.stderr:
        raise CannotRun(done.stderr.strip().splitlines()[-1])
    assert not done.returncode, done.stderr
    return done.stdout


def _row(case: str, planned: float, measured: float, unit: str, allowed: float | None) -> Row:
    off = abs(planned / measured - 1) * 100
    return summarise(
        "planning",
        f"{case}: {planned:,.0f} {unit}, {measured:,.0f} measured",
        ours=[max(off, 0.1)],
        peer=[allowed or 100.0],
        peer_name="what is allowed",
        unit="%",
        goal=None if allowed is None else Goal(of="ours", bound=allowed),
    )
