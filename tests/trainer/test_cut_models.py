"""Models that are cut over ranks: the bits of one rank, on any number of stages and replicas, by every schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "cut.py"


WAYS = [
    (2, "gpipe", 2, "residual"),
    (4, "eager-1f1b", 4, "fp16"),
    (2, "auto", 4, "u_net"),
    (4, "zero-bubble", 2, "checkpointed"),
    (1, "1f1b", 3, "mlp"),
    (2, "auto", "auto2", "language_model"),
    (4, "zero3", 4, "residual"),
]
"""Each model meets one schedule in make test, with all of schedules, replicas and measured splits among them."""


@pytest.mark.parametrize(
    ("ranks", "schedule", "stages", "model"),
    [*WAYS, pytest.param(2, "1f1b", 2, "bf16", marks=pytest.mark.soak)],  # the model of "residual"
)
def test_stages_replicas_and_schedules_change_no_bit(fork_ranks, fork_python, ranks, schedule, stages, model):
    job = fork_ranks(ranks, PROGRAM, schedule, stages, model)
    expected = fork_python(PROGRAM, "1f1b", 1, model)
    assert [line.partition(":")[0] for line in expected] == [model]
    assert [job.lines(rank) for rank in range(ranks)] == [expected] * ranks


@pytest.fixture(scope="module")
def whole(fork_python):
    return fork_python(PROGRAM, "1f1b", 1)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("ranks", "schedule", "stages"),
    [
        *(way[:3] for way in WAYS),
        (2, "1f1b", 2),
        (4, "1f1b", 2),
        (4, "zero-bubble", 4),
        (4, "interleaved", "auto4"),
        (4, "zero3", 2),
        (4, "zero3", "auto4"),
        (3, "auto", "auto3"),
    ],
)
def test_all_models_in_all_ways(fork_ranks, whole, ranks, schedule, stages):
    job = fork_ranks(ranks, PROGRAM, schedule, stages)
    assert len(whole) == 7
    assert [job.lines(rank) for rank in range(ranks)] == [whole] * ranks


RESUMABLE = PROGRAM.with_name("cut_resumable.py")


@pytest.fixture(scope="module")
def undisturbed(fork_python, tmp_path_factory):
    return fork_python(RESUMABLE, tmp_path_factory.mktemp("undisturbed"), "")[-1].removeprefix("from 0 ")


def test_a_run_goes_on_with_another_number_of_stages(fork_ranks, tmp_path, undisturbed):
    """From one that cuts nothing; the next two tests go on from stages without any."""
    for ranks, stages, steps in [(1, "", 2), (4, "2", 5)]:
        fork_ranks(ranks, RESUMABLE, tmp_path, stages, f"max_steps={steps}")
    job = fork_ranks(3, RESUMABLE, tmp_path, "1,3")
    assert [job.lines(rank)[-1] for rank in range(3)] == [f"from 5 {undisturbed}"] * 3


def test_rank_0_has_all_stages_when_it_saves_by_time_and_the_best(fork_ranks, fork_python, tmp_path, undisturbed):
    fork_ranks(2, RESUMABLE, tmp_path, "2", "by_time", "best", "max_steps=5")
    assert fork_python(RESUMABLE, tmp_path, "", "by_time", "best")[-1] == f"from 5 {undisturbed}"


def test_sigterm_saves_the_parts_of_all_ranks(run_ranks, fork_python, tmp_path, undisturbed):
    job = run_ranks(2, RESUMABLE, tmp_path, "2", "term=5", code=143)
    assert not job.out
    last = fork_python(RESUMABLE, tmp_path, "")[-1]
    assert last in {f"from {step} {undisturbed}" for step in (5, 6, 7, 8)}


@pytest.mark.parametrize("option", ["die=5", "die=5 reset=4"])
def test_all_ranks_start_again_when_nobody_else_has_the_part_of_one_that_dies(run_ranks, tmp_path, undisturbed, option):
    flags = ["--max-restarts", "1", *(["--recover", "off"] if option == "die=5" else [])]
    job = run_ranks(2, RESUMABLE, tmp_path, "2", *option.split(), flags=flags)
    assert "starting all 2 ranks again" in job.said
    if option == "die=5":
        assert [job.lines(rank)[-1] for rank in range(2)] == [f"from 3 {undisturbed}"] * 2
    else:
        assert "no rank can be replaced alone: weights or buffers of a part of the model were changed" in job.said


LONG_PASSES = """
import sys
import torch, unisono
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(4)))
chosen = []
trainer = unisono.Trainer(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    virtual_ranks=2,
    progress=False,
    parallel=unisono.parallel.Pipeline(stages=2, schedule=sys.argv[1]),
    listeners=[lambda event: chosen.append(event["schedule"]) if event["event"] == "pipeline" else None],
)
data = torch.utils.data.TensorDataset(torch.randn(384, 512))
for _ in trainer.epochs(1):
    for batch in trainer.batches(data, batch_size=192):
        trainer.step(lambda model, rows: model(rows[0]).square().mean(1), batch)
print(*chosen, trainer.digest())
"""


def test_auto_says_its_schedule_and_changes_no_bit(fork_ranks):
    """It chooses by measured times, so which one depends on the machine: see test_pipeline_expectation.py."""
    found, expected = (
        fork_ranks(*way).lines()[-1].split() for way in [(2, LONG_PASSES, "auto"), (1, LONG_PASSES, "1f1b")]
    )
    assert found[0] in ("1f1b", "eager-1f1b", "zero-bubble")
    assert found[-1] == expected[-1]
