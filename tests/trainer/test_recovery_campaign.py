"""Random deaths: 200 runs, and 80 of pipelines, drawn from seeds, come to the bits of undisturbed ones.

The seed of each is told, with what it stands for. To run one alone: `pytest -m soak
"tests/trainer/test_recovery_campaign.py::test_random_deaths_change_no_bit[17]"`.
"""

from __future__ import annotations

import json
import random
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PROGRAM = Path(__file__).parent / "programs" / "recovering.py"
SEEDS, PIPELINE_SEEDS = range(200), range(80)
STAGES = ["repair", "rejoin", "connect", "send_state", "has_joined"]
MOMENTS = ["begin", "end", "commit"]
STEPS = {"plain": 5, "joined": 5, "sampled": 4, "gan": 5}
"""Steps of an epoch."""


class Case(NamedTuple):
    ranks: int
    asked: dict[str, Any]
    """What the program does, also undisturbed."""
    disturbance: dict[str, Any]


def drawn(seed: int) -> Case:
    """Draw a program and its deaths."""
    rng = random.Random(seed)
    ranks, kind = rng.choice([2, 2, 3, 4]), rng.choice(["plain", "plain", "plain", "gan", "sampled", "joined"])
    asked: dict[str, Any] = {"engine": rng.choice(["shared", "shared", "collective"]), "kind": kind}
    asked["optimizer"] = rng.choice(["sgd", "adamw"])
    if rng.random() < 0.3:
        asked["clip"] = 0.5
    if rng.random() < 0.3:
        asked["width"] = rng.choice([600, 2048])
    if rng.random() < 0.3:
        asked["workers"] = rng.choice([1, 2])
    victim = rng.randrange(ranks)
    if rng.random() < 0.5:
        asked |= {"epochs": 8}
        fuses = [(victim, round(rng.uniform(0, 0.6), 4), False)]
        if rng.random() < 0.4 and ranks > 2:
            fuses.append(((victim + 1) % ranks, round(rng.uniform(0, 0.6), 4), False))
        disturbance: dict[str, Any] = {"fuses": fuses, "pause_s": 0.02}  # nobody is replaced once a rank has finished
    else:
        step = rng.randrange(2 * STEPS[kind])
        loss = "judge" if kind == "gan" else "loss"
        places = [(loss, step), (f"backward of {loss}", step), ("stepped", step + 1), ("body", step + 1)]
        places += [("batch", step), ("evaluation", 4), ("epoch", rng.randrange(2)), ("end", rng.randrange(2))]
        if asked["engine"] == "shared":
            places += [(f"{when} {each}", step) for when in ("before", "after") for each in MOMENTS]
        deaths = [(victim, *rng.choice(places), "SIGKILL")]
        if rng.random() < 0.4:
            stage = f"{rng.choice(['before', 'after'])} {rng.choice(STAGES)}"
            deaths.append(((victim + 1) % ranks if ranks > 2 else victim, stage, None, "SIGKILL"))
        disturbance = {"deaths": deaths}
    return Case(ranks, asked, {**disturbance, "with_directory": rng.random() < 0.4})


PIPELINES = [(2, ["blocks.2"]), (2, 2), (2, 4), (3, ["blocks.1", "blocks.3"]), (4, ["blocks.2"]), (4, 4)]
"""Ranks, and their stages: with 2 stages on 4 ranks there are two replicas."""
PASSES = [
    "begin_forward",
    "begin_backward",
    "end_backward",
    "_unscale",
    "update",
    "send",
    "commit",
    "write",
    "end",
    "gather",
]


def drawn_pipeline(seed: int) -> Case:
    """Draw a pipeline and its deaths."""
    rng = random.Random(f"pipeline {seed}")
    ranks, stages = rng.choice(PIPELINES)
    asked: dict[str, Any] = {"engine": "auto", "stages": stages, "optimizer": rng.choice(["sgd", "adamw"])}
    if rng.random() < 0.5:
        asked["clip"] = 0.5
    if rng.random() < 0.3:
        asked["autocast"] = rng.choice(["fp16", "bf16"])
    victim = rng.randrange(ranks)
    if rng.random() < 0.4:
        asked |= {"epochs": 8}
        others = [rank for rank in range(ranks) if rank != victim]
        victims = [victim, *rng.sample(others, rng.choice([0, ranks - 2]))]  # all but one at most
        fuses = [(each, round(rng.uniform(0, 0.8), 4), False) for each in victims]
        disturbance: dict[str, Any] = {"fuses": fuses, "pause_s": 0.02}
    else:
        step = rng.randrange(10)
        places = [(f"{when} {each}", step) for when in ("before", "after") for each in PASSES]
        places += [("loss", step), ("stepped", step + 1), ("body", step + 1), ("evaluation", 4), ("end", step % 2)]
        deaths = [(victim, *rng.choice(places), "SIGKILL")]
        if rng.random() < 0.5:
            place, when = rng.choice(places) if rng.random() < 0.5 else (f"before {rng.choice(STAGES)}", None)
            deaths.append(((victim + 1) % ranks if ranks > 2 else victim, place, when, "SIGKILL"))
        disturbance = {"deaths": deaths}
    return Case(ranks, asked, {**disturbance, "with_directory": rng.random() < 0.5})


@pytest.fixture(scope="module")
def waits_s(request):
    """How long ranks waited in each recovery; the median is shown at the end."""
    found: list[float] = []
    yield found
    if found:
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            median = statistics.median(found)
            print(f"\n{len(found)} recoveries: median {median:.2f} s, longest {max(found):.2f} s", flush=True)


@pytest.fixture
def survive(run_ranks, undisturbed, waits_s, tmp_path, capsys) -> Callable[[str, Case], None]:
    """Run a case, and compare what its ranks come to with what one rank does that nobody disturbs."""

    def run(name: str, case: Case) -> None:
        ranks, asked, disturbance = case
        with capsys.disabled():
            print(f"\n{name}: {ranks} ranks, {asked}, {disturbance}", flush=True)
        options = {**asked, **disturbance, "folder": str(tmp_path)}
        if disturbance["with_directory"]:
            options["directory"] = str(tmp_path / "run")
        job = run_ranks(ranks, PROGRAM, json.dumps(options), code=None)
        if len(options.get("fuses", ())) > 2 and "this is the third death at step" in job.err:
            del options["fuses"]  # the job has ended, as it is to, and is started again
            job = run_ranks(ranks, PROGRAM, json.dumps(options), code=None)
        assert job.code == 0, job.err
        assert [job.lines(rank)[-1] for rank in range(ranks)] == [undisturbed(**asked)] * ranks, job.err
        waits_s.extend(float(wait) for wait in re.findall(r"replaced, ([\d.]+) s", job.err))

    return run


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_random_deaths_change_no_bit(survive, seed):
    survive(f"seed {seed}", drawn(seed))


@pytest.mark.soak
@pytest.mark.parametrize("seed", PIPELINE_SEEDS)
def test_random_deaths_in_pipelines_change_no_bit(survive, seed):
    survive(f"seed {seed}", drawn_pipeline(seed))
