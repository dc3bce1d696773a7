"""What a report tells of runs that were: finished, failed, stopped and resumed, left, and recovered."""

from pathlib import Path

import pytest

from unisono.report.page import render_page
from unisono.report.source import open_run
from unisono.report.verdict import sentence
from unisono.watch import read_events

PROGRAM = Path(__file__).parent / "real_run.py"


def kinds(folder: Path) -> list[str]:
    return [event["event"] for event in read_events(folder / "events.jsonl")]


def test_a_run_tells_where_it_comes_from_and_hides_secrets(fork_ranks, tmp_path):
    fork_ranks(2, PROGRAM, "ends", tmp_path / "run", "--hub-token", "hunter2", "--lr=0.1", "url=https://me:hunter2@x/")
    document = open_run(tmp_path / "run")
    facts = document["facts"]
    assert document["state"] == "finished"
    assert len(document["totals"]["digest"]) == 64
    assert facts["arguments"][3:] == ["--hub-token", "***", "--lr=0.1", "url=https://***@x/"]
    assert "hunter2" not in (tmp_path / "run" / "events.jsonl").read_text()
    assert facts["settings"]["optimizer"].startswith("AdamW(lr=0.01, ")
    assert (facts["settings"]["clip_grad_norm"], facts["settings"]["checkpoints.every_steps"]) == (1.0, 4)
    assert facts["machine"]["cores"] >= 1
    page = render_page(document)
    for said in (document["totals"]["digest"], facts["machine"]["host"], "--hub-token", "AdamW(lr=0.01"):
        assert said in page


@pytest.mark.parametrize(
    ("how", "state", "said"),
    [
        ("raises", "failed", "ValueError: five is bad"),
        ("is asked to end", "stopped", "SIGTERM: asked to end, as by a batch system"),
        ("breaks", "stopped", None),
        ("breaks and raises", "stopped", None),
    ],
)
def test_a_run_without_an_end_tells_why_and_goes_on_after_it(fork_ranks, tmp_path, how, state, said):
    fork_ranks(1, PROGRAM, how, tmp_path / "run", code=None)
    document = open_run(tmp_path / "run")
    assert (document["state"], document["error"], document["totals"]["steps_done"]) == (state, said, 20)
    fork_ranks(1, PROGRAM, "ends", tmp_path / "run")
    document = open_run(tmp_path / "run")
    assert (document["state"], document["error"], document["totals"]["starts"]) == ("finished", None, 2)
    assert sentence(document).startswith("2 epochs, 32 steps in")


def test_a_run_tells_its_failure_under_the_launcher_and_survives_the_loss_of_a_rank(run_ranks, tmp_path):
    run_ranks(2, PROGRAM, "raises", tmp_path / "failed", code=1)
    assert open_run(tmp_path / "failed")["error"] == "ValueError: five is bad"
    run_ranks(2, PROGRAM, "loses rank 0", tmp_path / "lost")
    document = open_run(tmp_path / "lost")
    assert kinds(tmp_path / "lost").count("failure") == 1  # of rank 0, which told it before it was replaced
    assert (document["state"], document["totals"]["recoveries"], document["error"]) == ("finished", 1, None)
    assert (document["totals"]["steps_done"], document["totals"]["repeated"]) == (32, 0)
    assert kinds(tmp_path / "lost").count("end") == 1
