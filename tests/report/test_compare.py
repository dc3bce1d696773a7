"""`unisono compare`: runs on other numbers of ranks are equal, and others differ from a step and a parameter on."""

import json
from pathlib import Path

import pytest
import torch
from browser import CHROMIUM, Browser
from click.testing import CliRunner

import unisono
import unisono.parallel
from unisono.cli.main import cli
from unisono.errors import ReportError
from unisono.report.comparison import compare_runs, traces_of

PROGRAM = Path(__file__).parent / "real_run.py"


def compare(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["compare", *map(str, arguments)], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.return_value, done.stdout


def write(folder: Path, *events: dict) -> Path:
    folder.mkdir()
    lines = (json.dumps({"time": 1785225600.0 + i, **event}) for i, event in enumerate(events))
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def step(number: int, loss: object, **others: object) -> dict:
    return {"event": "step", "total_steps": number, "loss": loss, "samples": 8, "step_s": 0.1, **others}


def test_runs_on_one_and_on_three_ranks_are_equal(fork_ranks, tmp_path):
    fork_ranks(1, PROGRAM, "ends", tmp_path / "one")
    fork_ranks(3, PROGRAM, "ends", tmp_path / "three", "--lr", "0.1")
    code, said = compare(tmp_path / "one", tmp_path / "three")
    assert code == 0
    assert said.splitlines()[0] == (
        "one and three are equal: the losses of 32 steps, the weights at 16 places and the digest at the end."
    )
    rows = {line.split("  ")[0]: line.split()[-2:] for line in said.splitlines()[2:]}
    assert (rows["ranks"], rows["--lr"]) == (["1", "3"], ["-", "0.1"])


def test_the_first_step_and_parameter_that_differ_are_found(fork_ranks, tmp_path):
    """A weight is changed after step 7: the step itself is equal, and what differs after step 8 has that in it."""
    fork_ranks(1, PROGRAM, "ends", tmp_path / "a")
    fork_ranks(1, PROGRAM, "changes a weight", tmp_path / "b")
    (pair,) = compare_runs([tmp_path / "a", tmp_path / "b"])["pairs"]
    assert (pair["loss_step"], pair["equal_step"], pair["digest_step"]) == (8, 6, 8)
    assert "2.bias" in pair["tensors"]
    code, said = compare(tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert "the first loss that differs is that of step 8; weights differ after step 8: " in said


def test_other_learning_rates_are_named(fork_ranks, tmp_path):
    fork_ranks(1, PROGRAM, "ends", tmp_path / "a")
    fork_ranks(1, PROGRAM, "other", tmp_path / "b")
    code, said = compare(tmp_path / "a", tmp_path / "b", "-o", tmp_path / "page.html")
    assert code == 1
    (line,) = [line for line in said.splitlines() if line.startswith("optimizer")]
    assert line.index("AdamW(lr=0.01,") < line.index("AdamW(lr=0.02,")
    page = (tmp_path / "page.html").read_text()
    assert "AdamW(lr=0.02," in page
    assert page.count("<title>a and b - unisono compare</title>") == 1


def test_a_resumed_run_is_compared_by_the_steps_that_count(tmp_path):
    first = [{"event": "run"}, {"event": "epoch", "total_steps": 0}, step(1, 1.0), step(2, 0.5), step(3, 7.0)]
    again = [{"event": "run"}, {"event": "epoch", "total_steps": 2}, step(3, 0.25)]
    write(tmp_path / "resumed", *first, *again)
    write(tmp_path / "whole", *first[:-1], step(3, 0.25))
    assert compare(tmp_path / "whole", tmp_path / "resumed")[0] == 0


def test_several_optimizers_of_a_step_and_losses_that_are_no_numbers_are_compared():
    a = traces_of([step(1, 1.0, optimizer="g"), step(1, 2.0, optimizer="d"), step(2, "nan")])
    b = traces_of([step(1, 1.0, optimizer="g"), step(1, 3.0, optimizer="d"), step(2, "nan")])
    assert [number for number in a.losses if a.losses[number] != b.losses[number]] == [1]


def test_what_cannot_be_compared_is_an_error(tmp_path):
    a = write(tmp_path / "a", {"event": "run"}, step(1, 1.0))
    b = write(tmp_path / "b", {"event": "run"}, step(9, 1.0))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReportError, match="have no step in common: one has steps 1 to 1, and one has steps 9 to 9"):
        compare(a, b)
    with pytest.raises(ReportError, match="is no run"):
        compare(a, tmp_path / "empty")
    with (b / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 1785225700.0, **step(1, 1.0)}) + '\n{"time":17852257')
    assert compare(a, b)[0] == 0  # the line that is cut off is passed over


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
def test_the_page_is_whole_in_a_browser(tmp_path):
    nasty = "</script><script>document.title='taken'</script>"
    events = [{"event": "run", "arguments": ["x.py", nasty]}, *(step(i, 1 / i, lr=0.1) for i in range(1, 90))]
    runs = [write(tmp_path / name, *events[: 90 - 9 * i]) for i, name in enumerate(("a", "b<i>", "c" * 100))]
    assert compare(*runs, "-o", tmp_path / "page.html")[0] == 0
    browser = Browser(tmp_path)
    try:
        for width, dark in ((400, False), (1280, True), (2560, False)):
            browser.open(tmp_path / "page.html", width=width, dark=dark)
            assert (browser.problems, browser.requests) == ([], [(tmp_path / "page.html").as_uri()])
            assert browser.value("document.title") == "3 runs compared - unisono compare"
            assert browser.value("document.documentElement.scrollWidth") <= width
            assert browser.value("document.querySelectorAll('.chart .line').length") == 9
    finally:
        browser.close()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"digest_every": 2, "parallel": unisono.parallel.Shard()}, ValueError, "digest_every=2 needs all weights"),
        ({"digest_every": 0}, ValueError, "digest_every=0 must be at least 1"),
        ({"digest_every": 1.5}, TypeError, "digest_every=1.5"),
    ],
)
def test_digests_that_cannot_be_are_refused(options, error, said):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(error, match=said):
        unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=2, progress=False, **options)
