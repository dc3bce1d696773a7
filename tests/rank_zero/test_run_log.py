"""A loop without a Trainer writes the events that reports, comparisons and loggers read."""

import math
import textwrap
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import unisono
from unisono.cli.compare import compare
from unisono.report.source import open_run
from unisono.report.verdict import parts_of_time
from unisono.watch import read_events


def events_in(folder, kind):
    return [event for event in read_events(Path(folder) / "events.jsonl") if event["event"] == kind]


def train(folder, losses, **options):
    with unisono.RunLog(folder, progress=False, **options) as log:
        for number, loss in enumerate(losses):
            log.step(loss=torch.tensor([loss], requires_grad=True), samples=8, lr=0.1, epoch=number // 2, accuracy=0.5)
            log.log(temperature=number)
            if number % 2:
                log.evaluation("test", accuracy=0.75, seconds=0.01)
    return log


def test_a_loop_of_ones_own_has_a_report(tmp_path):
    log = train(tmp_path, [4.0, 2.0, math.nan, 1.0], steps=4, settings={"lr": 0.1, "model": Path("a.pt")})
    assert log.steps_done == 4
    document = open_run(tmp_path)
    assert document["state"] == "finished"
    assert document["facts"]["settings"] == {"lr": 0.1, "model": "a.pt"}
    assert document["totals"]["steps_done"] == 4
    assert document["totals"]["samples"] == 32
    assert {"loss", "lr", "samples/s", "train/accuracy", "test/accuracy", "log/temperature"} == set(document["curves"])
    steps = events_in(tmp_path, "step")
    assert [(each["epoch"], each["step"], each["loss"]) for each in steps] == [
        (0, 0, 4.0), (0, 1, 2.0), (1, 0, "nan"), (1, 1, 1.0)
    ]  # fmt: skip


def test_two_loops_are_compared_and_their_settings(tmp_path):
    train(tmp_path / "a", [4.0, 2.0, 1.0], settings={"lr": 0.1})
    train(tmp_path / "b", [4.0, 2.5, 1.0], settings={"lr": 0.2})
    result = CliRunner().invoke(compare, [str(tmp_path / "a"), str(tmp_path / "b")], standalone_mode=False)
    assert result.return_value == 1
    assert "the first loss that differs is that of step 2" in " ".join(result.stdout.split())
    assert "0.2" in result.stdout


def test_steps_that_are_made_again_after_a_checkpoint_count_once(tmp_path):
    train(tmp_path, [4.0, 2.0, 1.0])
    train(tmp_path, [1.0, 0.5], first_step=2)
    totals = open_run(tmp_path)["totals"]
    assert (totals["steps_done"], totals["repeated"], totals["starts"]) == (4, 1, 2)


def test_an_exception_is_a_failure_and_a_log_that_is_closed_refuses_more(tmp_path):
    with pytest.raises(ZeroDivisionError), unisono.RunLog(tmp_path, progress=False) as log:
        log.step(loss=1.0)
        1 / 0  # noqa: B018
    (failure,) = events_in(tmp_path, "failure")
    assert (failure["type"], failure["total_steps"]) == ("ZeroDivisionError", 1)
    assert open_run(tmp_path)["state"] == "failed"
    assert not events_in(tmp_path, "end")
    with pytest.raises(RuntimeError, match="this RunLog is closed"):
        log.step(loss=1.0)
    log.close()


def test_listeners_get_the_events_also_without_a_directory():
    seen = []
    with unisono.RunLog(None, progress=False, listeners=[seen.append]) as log:
        log.step(loss=1.0)
    assert [event["event"] for event in seen] == ["run", "epoch", "step", "end"]
    assert "lr" not in seen[2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda log: log.step(loss="low"), "loss='low' cannot be shown"),
        (lambda log: log.step(loss=torch.ones(2)), "cannot be shown: give a number, or a tensor with one element"),
        (lambda log: log.step(loss=1.0, epoch=-1), "epoch=-1 must be at least 0"),
        (lambda log: log.step(loss=1.0, samples=1.5), "samples=1.5 must be a whole number"),
        (lambda log: log.evaluation("test"), "an evaluation needs a value"),
        (lambda log: log.log(), "log.log was given nothing"),
    ],
)
def test_what_is_no_number_is_refused(call, message):
    with unisono.RunLog(None, progress=False) as log, pytest.raises((TypeError, ValueError), match=message):
        call(log)


def test_two_processes_do_not_share_a_directory(tmp_path, run_ranks):
    code = f"""
        import unisono
        from unisono.errors import CheckpointError
        try:
            unisono.RunLog({str(tmp_path)!r}, progress=False)
        except CheckpointError as error:
            print(error)
    """
    with unisono.RunLog(tmp_path, progress=False):
        assert "is in use: process" in run_ranks(1, textwrap.dedent(code)).lines()[-1]


def test_ranks_call_it_alike_and_rank_0_writes(tmp_path, run_ranks):
    code = f"""
        import torch, unisono
        unisono.init()
        with unisono.RunLog({str(tmp_path)!r}) as log:
            for step in range(50):
                log.step(loss=1.0 / (1 + step + 100 * unisono.rank()))
        assert log.steps_done == 50
    """
    run_ranks(2, textwrap.dedent(code))
    steps = events_in(tmp_path, "step")
    assert [event["loss"] for event in steps] == [1.0 / (1 + step) for step in range(50)]
    (run,) = events_in(tmp_path, "run")
    (end,) = events_in(tmp_path, "end")
    assert (run["world_size"], end["total_steps"]) == (2, 50)


class Slow(torch.utils.data.Dataset):
    """Numbers that take 4 ms each to read."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        time.sleep(0.004)
        return float(index)


def test_the_time_of_steps_is_told_with_that_in_the_loader(tmp_path):
    batches = unisono.data.loader(Slow(), batch_size=1)
    with unisono.RunLog(tmp_path, progress=False) as log:
        for epoch in range(2):
            for _ in batches:
                time.sleep(0.002)
                log.step(loss=1.0, epoch=epoch)
            log.evaluation(accuracy=0.5)
    (event,) = events_in(tmp_path, "times")  # those of the last second too
    # Neither the first step, which begins with the script, nor the one with an evaluation in it.
    assert (event["steps"], event["of_steps"], event["total_steps"]) == (8, 10, 10)
    assert event["data"][0] >= 8 * 0.004
    assert event["compute"][0] >= 8 * 0.002
    assert event["data"][0] + event["compute"][0] == pytest.approx(event["seconds"], abs=1e-5)
    assert "waiting" not in event
    assert event["last"]["data"][0] >= 0.004
    told = {name: explanation for name, _, explanation in parts_of_time(open_run(tmp_path))}
    assert told["compute"] == "everything else in your loop, on rank 0"


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_waits_for_a_late_rank_are_told(tmp_path, run_ranks, backend):
    code = f"""
        import time, torch, unisono
        unisono.init(backend={backend!r})
        model = torch.nn.Linear(2, 1)
        unisono.parallel.replicate(model)
        def exchange():
            unisono.comm.all_reduce(torch.ones(3))
        def train():
            model(torch.ones(1, 2)).sum().backward()
        for name, call in (("comm", exchange), ("replicate", train)):
            with unisono.RunLog({str(tmp_path)!r} + "/" + name, progress=False) as log:
                for _ in range(6):
                    if unisono.rank():
                        time.sleep(0.02)
                    call()
                    log.step(loss=1.0)
    """
    run_ranks(2, textwrap.dedent(code))
    for name in ("comm", "replicate"):
        (event,) = events_in(tmp_path / name, "times")
        assert event["steps"] == 5
        assert 0.02 < event["waiting"][0] <= event["seconds"]
