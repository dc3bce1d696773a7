"""The number of ranks changes while a run goes on, which comes to the bits of one rank that nobody disturbs.

To look at a run alone: `unisono run -n 2 tests/trainer/programs/recovering.py JSON`.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "recovering.py"
KILL = "SIGKILL"
Event = tuple[int, str, int | None, str]
Told = tuple[str, list[dict]]


@pytest.fixture
def train(run_ranks, undisturbed, tmp_path):
    """Run the program while its number of ranks changes; return what the launcher said, and the events."""

    def run(before: int, after: int, *events: Event, flags: tuple[str, ...] = (), **asked: object) -> Told:
        options = {"deaths": events, "folder": str(tmp_path), "directory": str(tmp_path / "run"), **asked}
        job = run_ranks(before, PROGRAM, json.dumps(options), flags=flags)
        expected = undisturbed(**asked)
        came_to = {rank: lines[-1] for rank in range(6) if (lines := job.lines(rank))}
        assert [came_to.get(rank) for rank in range(after)] == [expected] * after, job.err
        missing = [i for i in range(len(events)) if not (tmp_path / f"died{i}").exists()]
        assert not missing, f"these did not come: {missing}\n{job.err}"
        return job.err, [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]

    return run


@pytest.mark.parametrize("engine", ["shared", pytest.param("collective", marks=pytest.mark.soak)])
def test_ranks_come_and_go(train, engine):
    changes = [(0, "stepped", 1, "scale 4"), (0, "stepped", 4, "scale 1"), (0, "stepped", 7, "scale 3")]
    said, events = train(2, 3, *changes, engine=engine)
    assert re.findall(r"unisono: (\d -> \d ranks? after step \d+); the run waited [\d.]+ s", said) == [
        "2 -> 4 ranks after step 2",
        "4 -> 1 rank after step 5",
        "1 -> 3 ranks after step 8",
    ]
    told = [event for event in events if event["event"] == "resize"]
    assert [(e["before"], e["ranks"], e["total_steps"]) for e in told] == [(2, 4, 2), (4, 1, 5), (1, 3, 8)]
    steps = [event["total_steps"] for event in events if event["event"] == "step"]
    assert steps == sorted(set(steps)), "a step was done twice"


@pytest.mark.parametrize(
    "kind", ["joined", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("sampled", "gan"))]
)
def test_every_kind_of_batches_is_divided_anew(train, kind):
    """With data workers; the second change comes after the last step of an epoch."""
    epoch = 4 if kind == "sampled" else 5
    changes = [(0, "stepped", 1, "scale 3"), (1, "stepped", epoch - 1, "scale 2")]
    train(1, 2, *changes, engine="collective", kind=kind, workers=1, max_steps=epoch + 2)


@pytest.mark.parametrize(
    ("before", "after", "events"),
    [
        # One of the ranks dies in the step in which all agree, and one of the new ones when it meets the others.
        (2, 4, [(0, "stepped", 2, "scale 4"), (1, "loss", 2, KILL), (3, "before rejoin", None, KILL)]),
        # Rank 0 dies when it has let the others go.
        (3, 2, [(1, "stepped", 2, "scale 2"), (0, "after rejoin", None, KILL)]),
        # A rank that is to leave dies before.
        (3, 1, [(0, "stepped", 2, "scale 1"), (2, "backward of loss", 2, KILL)]),
    ],
    ids=["more", "fewer", "leaving"],
)
def test_deaths_meanwhile_change_no_bit(train, before, after, events):
    train(before, after, *events, engine="shared", max_steps=6)


def test_a_spare_takes_the_place_of_a_rank_that_came_later(train):
    """It also knows of a change that is under way: rank 1 dies in the step in which the ranks agree on the last one."""
    events = [(0, "stepped", 1, "scale 4"), (3, "loss", 4, KILL), (0, "stepped", 7, "scale 3"), (1, "loss", 7, KILL)]
    said, _ = train(2, 3, *events, flags=("--spares", "1"), engine="shared", pause_s=0.15)
    assert "rank 3 was killed by SIGKILL in forward of step 5; replaced" in said


CUT = """
import os, torch, unisono
from unisono.launch.control import ask, running_jobs

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=4, progress=False,
                          parallel=unisono.parallel.Pipeline(stages=["1"]))
for epoch in trainer.epochs(2):  # in the first one, no rank can be about to end yet
    for batch in trainer.batches(torch.utils.data.TensorDataset(torch.randn(8, 4)), batch_size=4):
        trainer.step(lambda model, batch: model(batch[0]).square().sum(1), batch)
    for agent in running_jobs() if not epoch else ():
        if (ask(agent, {"ask": "job"}) or {}).get("run_id") == os.environ["TORCHELASTIC_RUN_ID"]:
            print(ask(agent, {"ask": "scale", "ranks": 2 if trainer.world_size == 1 else 1})["problem"])
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pipeline_keeps_its_number_of_ranks(run_ranks, ranks):
    job = run_ranks(ranks, CUT)
    assert "a model is cut over its ranks, and their number decides which one has what" in job.lines(0)[-1]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(60))
def test_random_changes_and_deaths_change_no_bit(train, seed):
    rng = random.Random(seed)
    before, changes = rng.choice([1, 2, 3, 4]), []
    size = before
    for step in sorted(rng.sample(range(1, 9, 2), rng.choice([1, 2, 3]))):
        if (wanted := rng.choice([1, 2, 3, 4, 5])) == size:
            continue
        changes.append((0, "stepped", step, f"scale {wanted}"))
        if rng.random() < 0.5 and min(size, wanted) > 1:
            places = [("loss", step), ("stepped", step + 1), ("before rejoin", None), ("after connect", None)]
            changes.append((rng.randrange(min(size, wanted)), *rng.choice(places), KILL))
        size = wanted
    train(before, size, *changes, engine=rng.choice(["shared", "collective"]), workers=rng.choice([0, 0, 1]))
