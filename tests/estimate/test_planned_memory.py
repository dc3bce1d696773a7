"""The memory that `unisono plan` expects is that of a run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "scripts" / "planned_training.py"
RANKS, VIRTUAL_RANKS, BATCH, STEPS = 2, 8, 16, 10
TOLERANCE = 0.12
TOLERANCE_4 = 0.15
"""On four ranks, where plans are too low."""
KINDS = {
    "one process": "one", "2 ranks, shared memory": "shared", "2 replicas": "replicas", "2 shards": "shards",
    "2 ranks, zero=1": "zero", "4 ranks, zero=1": "zero", "2 x 2 shards": "replicated shards",
}  # fmt: skip


def unisono(*arguments: object) -> str:
    command = [sys.executable, "-m", "unisono", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


@pytest.mark.soak
@pytest.mark.parametrize("model", ["language_model", "wide_language_model", "resnet50", "llama"])
def test_planned_memory_is_that_of_a_run(model):
    errors = errors_of(model, RANKS)
    assert all(abs(error) <= TOLERANCE for error in errors.values()), errors


@pytest.mark.soak
@pytest.mark.parametrize("model", ["wide_language_model", "resnet50"])
def test_planned_memory_on_four_ranks_is_that_of_a_run(model):
    errors = errors_of(model, 4, names=("4 ranks, zero=1", "2 x 2 shards"))
    assert len(errors) == 2
    assert all(abs(error) <= TOLERANCE_4 for error in errors.values()), errors


def errors_of(model, ranks, names=None):
    """Return by how much the planned memory of each layout is off, as a part of that of a run."""
    sizes = ("--ranks", ranks, "--batch", BATCH, "--virtual-ranks", VIRTUAL_RANKS)
    layouts = json.loads(unisono("plan", f"{SCRIPT}:{model}", *sizes, "--json"))["layouts"]
    errors = {}
    for layout in layouts:
        if names is not None and layout["name"] not in names:
            continue
        kind = KINDS.get(layout["name"], "stages")
        stages = re.findall(r'"([\w.]+)"', layout["code"].partition("]")[0])
        schedule = re.findall(r'schedule="(.+?)"', layout["code"]) or ["1f1b"]
        options = [",".join(stages), *schedule] if kind == "stages" else []
        out = unisono("run", "-n", layout["ranks"], SCRIPT, model, kind, BATCH, VIRTUAL_RANKS, STEPS, *options)
        peaks = [
            json.loads(line.partition(" ")[2])["own_nbytes"] for line in out.splitlines() if '"own_nbytes"' in line
        ]
        assert len(peaks) == layout["ranks"]
        errors[layout["name"]] = layout["memory"]["total"] / max(peaks) - 1
    return errors
