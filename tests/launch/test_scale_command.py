"""`unisono scale`, as a user types it: what it says, and which changes it refuses while the run goes on."""

from __future__ import annotations

import time

import pytest
from click.testing import CliRunner

from printed import ranks_of
from unisono.cli.scale import scale
from unisono.errors import LaunchError
from unisono.launch import control

TRAIN = """
    import os, sys, time
    import torch
    import unisono

    rank = int(os.environ["RANK"])
    if rank == 5:
        raise ValueError("no data for this rank")
    model = torch.nn.Linear(4, 1)
    trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=6)
    data = torch.utils.data.TensorDataset(torch.ones(60000, 4))
    for epoch in trainer.epochs(1):
        try:
            for batch in trainer.batches(data, batch_size=6):
                trainer.step(lambda model, x: model(x[0]).square().squeeze(1), batch)
                time.sleep(0.004)
        finally:
            print("left the loop", flush=True)
            if rank == 3:
                time.sleep(60)
"""


def call(*arguments: object) -> str:
    """Run the command in this process. Returns: what it prints, or its complaint."""
    result = CliRunner().invoke(scale, [str(each) for each in arguments])
    if isinstance(result.exception, LaunchError):
        return f"refused: {result.exception}"
    return result.output.strip()


def finds(done, seconds=60.0):
    deadline_s = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return done()


@pytest.fixture
def launcher(warm_launcher):
    """Not a fresh one: that matters to the tests that ask for it."""
    return warm_launcher


@pytest.fixture
def start(launcher):
    jobs = []

    def run(source, *options):
        jobs.append(launcher.start("run", *options, launcher.write(f"job{len(jobs)}.py", source)))
        return jobs[-1]

    yield run
    for job in jobs:
        job.terminate()
        job.communicate(timeout=60)


def test_a_run_gets_as_many_ranks_as_it_can_have(launcher, start):
    job = start(TRAIN, "-n", "2", "--shutdown-timeout", "1")

    def facts():
        return control.ask(job.pid, {"ask": "job"}) or {}

    assert finds(lambda: job.pid in control.running_jobs() and (facts().get("step") or 0) > 2)
    title = f"job {job.pid} (job0.py)"
    assert call(job.pid, 2) == f"{title} has 2 ranks already"
    assert call(job.pid, 7) == (
        f"refused: {title} keeps its 2 ranks: 7 ranks are too many for 6 virtual ranks, of which each rank needs one"
    )
    assert call(job.pid, 0) == f"refused: {title} keeps its 2 ranks: 0 is no number of ranks: a job has at least one"
    assert "give a job and a number of ranks" in call(job.pid, "many")
    assert call("no-such-job", 3).startswith("refused: no running job is called 'no-such-job'")
    # One of those that would come fails, and the others have not noticed.
    assert call(job.pid, 6) == (
        f"refused: {title} keeps its 2 ranks: rank 5 raised ValueError before it had joined the others"
    )
    assert call(job.pid, 4).startswith(f"{title}: 2 -> 4 ranks after step ")
    assert (facts()["ranks"], facts()["running"]) == (4, 4)
    # Rank 3 does not end after it has left, and is killed.
    assert call(job.pid, 1).startswith(f"{title}: 4 -> 1 rank after step ")
    assert (facts()["ranks"], facts()["running"]) == (1, 1)
    assert call(job.pid, 2).startswith(f"{title}: 1 -> 2 ranks after step ")
    job.terminate()
    out, err = (stream.decode() for stream in job.communicate(timeout=60))
    assert {rank for line in out.splitlines() if "left the loop" in line for rank in ranks_of(line)} == {1, 2, 3}
    assert "[5] ValueError: no data for this rank" in err
    assert "rank 3 left the run and did not end within 1 s; killed" in err


def test_a_rank_that_comes_late_to_the_end_of_a_change_waits_for_no_further_one_there(start):
    late = """
    import time
    from unisono.trainer.recoverable_run import RecoverableRun
    def has_joined(self, *given, joined=RecoverableRun.has_joined, **options):
        joined(self, *given, **options)
        time.sleep(1.0 * (self.world.rank >= 2))
    RecoverableRun.has_joined = has_joined
    """
    job = start(late + TRAIN, "-n", "2")
    assert finds(lambda: ((control.ask(job.pid, {"ask": "job"}) or {}).get("step") or 0) > 2)
    assert call(job.pid, 3).startswith(f"job {job.pid} (job0.py): 2 -> 3 ranks after step ")
    assert call(job.pid, 2).startswith(f"job {job.pid} (job0.py): 3 -> 2 ranks after step ")


def test_a_run_whose_ranks_need_a_gpu_each_gets_no_more_ranks_than_gpus(start):
    has_gpus = "    from unisono.trainer.recoverable_run import RecoverableRun as run; run.gpus = 2"
    job = start(has_gpus + TRAIN, "-n", "2")
    assert finds(lambda: ((control.ask(job.pid, {"ask": "job"}) or {}).get("step") or 0) > 2)
    assert call(job.pid, 3).endswith("3 ranks are too many for 2 GPUs, of which each rank needs one with NCCL")


def test_what_is_no_run_of_a_trainer_keeps_its_ranks(start):
    plain = start("import time; time.sleep(60)", "-n", "2")
    kept = start(TRAIN, "-n", "2", "--recover", "off")
    assert finds(lambda: {plain.pid, kept.pid} <= set(control.running_jobs()))
    for job, why in (
        (plain, "its ranks have made no Trainer so far, and the number of ranks is that of a Trainer's run"),
        (kept, "it runs with --recover off, and then its ranks do not change"),
    ):
        assert finds(lambda job=job: (control.ask(job.pid, {"ask": "job"}) or {}).get("running") == 2)
        assert call(job.pid, 3).endswith(f"keeps its 2 ranks: {why}")
