"""The memory that `unisono plan` expects is that of a run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "scripts" / "planned_training.py"
VIRTUAL_RANKS = 8
STEPS, SHARED_STEPS = 4, 10
"""In shared memory, copies for recovery are made in the course of 8 steps."""
TOLERANCE = 0.1


def unisono(*arguments: object) -> str:
    command = [sys.executable, "-m", "unisono", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("model", "batch"), [("language_model", 64), ("wide_language_model", 16), ("resnet50", 16), ("llama", 16)]
)
def test_planned_memory_is_that_of_a_run(monkeypatch, model, batch, ranks):
    monkeypatch.syspath_prepend(str(ROOT))
    from bench import planning

    sizes = ("--ranks", ranks, "--batch", batch, "--virtual-ranks", VIRTUAL_RANKS)
    layouts = json.loads(unisono("plan", f"{SCRIPT}:{model}", *sizes, "--json"))["layouts"]
    errors = {}
    for layout in layouts:
        steps = SHARED_STEPS if layout["ranks"] > 1 and not layout["code"] else STEPS
        given = [layout["code"]] if layout["code"] else []
        out = unisono("run", "-n", layout["ranks"], SCRIPT, model, batch, VIRTUAL_RANKS, steps, *given)
        lines = [line for line in out.splitlines() if '"own_nbytes"' in line]
        assert len(lines) == layout["ranks"]
        found = [json.loads(line[line.index("{") :]) for line in lines]
        errors[layout["name"]] = layout["memory"]["total"] / planning.memory_of(found) - 1
    assert all(abs(error) <= TOLERANCE for error in errors.values()), errors
