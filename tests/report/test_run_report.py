"""`unisono report`: what the page of each state says, in a real browser where there is one."""

import json
from itertools import pairwise

import pytest
import written_runs
from browser import CHROMIUM, Browser
from click.testing import CliRunner

from unisono.cli.main import cli
from unisono.errors import ReportError
from unisono.report.advice import advise
from unisono.report.downsampling import downsample
from unisono.report.page import read_report, render_page
from unisono.report.rank_times import PARTS, RankTimes
from unisono.report.source import open_run
from unisono.report.thumbnails import read_thumbnails
from unisono.report.verdict import parts_of_time

INSIDE = """[...document.querySelectorAll("main *")].filter((e) => {
  if (e.closest("svg") || !e.textContent.trim() || e.children.length) return false;
  const box = e.getBoundingClientRect();
  return box.width > 0 && (box.left < -0.5 || box.right > innerWidth + 0.5 || e.scrollWidth > e.clientWidth + 1
    && getComputedStyle(e).display !== "inline");
}).map((e) => e.textContent.slice(0, 60))"""


# Axes with two labels of the same text, as if they were the same value.
ALIKE = """[...document.querySelectorAll(".y, .chart .x")].map((e) => [...e.children].map((s) => s.textContent))
  .filter((labels) => new Set(labels).size < labels.length)"""

# Images that the browser has read, as large as they should be.
DRAWN = (
    "[...document.images].filter((e) => e.complete && e.naturalWidth && e.offsetWidth && e.offsetWidth <= 162).length"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


WINDOWS = ((400, False), (1280, True), (2560, False))  # widths, and whether it is dark


@pytest.mark.parametrize(
    ("state", "windows"),
    [
        *(
            pytest.param(state, WINDOWS if state in {"finished", "many_ranks", "nasty"} else WINDOWS[:1], id=state)
            for state in written_runs.STATES
        ),
        *(
            pytest.param(state, WINDOWS, id=f"{state} in all windows", marks=pytest.mark.soak)
            for state in written_runs.STATES
        ),
    ],
)
def test_a_page_is_whole_in_a_browser(browser, tmp_path, state, windows):
    page = tmp_path / "page.html"
    document = open_run(written_runs.STATES[state](tmp_path / state))
    page.write_text(render_page(document, read_thumbnails(document, tmp_path / state)))
    for width, dark in windows:
        browser.open(page, width=width, dark=dark)
        assert browser.problems == []
        assert browser.requests == [page.resolve().as_uri()]
        images = sum(map(len, document["images"].values()))
        assert browser.value(DRAWN) == images == {"finished": 12, "nasty": 3}.get(state, 0)
        assert browser.value("document.title") == f"{state} - unisono report"
        assert browser.value("document.documentElement.scrollWidth") <= width
        assert browser.value(INSIDE) == []
        assert browser.value(ALIKE) == []
    # As JavaScript draws them again.
    browser.value("document.getElementById('smoothing')?.dispatchEvent(new Event('input'))")
    browser.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
    assert browser.value(ALIKE) == []
    assert browser.problems == []


@pytest.mark.soak
def test_a_page_of_a_million_steps_is_small(browser, tmp_path):
    document = open_run(written_runs.many_steps(tmp_path / "run", steps=1_000_000))
    page = tmp_path / "page.html"
    page.write_text(render_page(document))
    assert page.stat().st_size < 3_000_000
    browser.open(page, width=1280, dark=False)
    assert browser.problems == []
    assert "97.25" in page.read_text()


def test_the_data_in_a_page_reads_back(tmp_path):
    document = open_run(written_runs.nasty(tmp_path / "nasty"))
    (tmp_path / "page.html").write_text(render_page(document))
    assert read_report(tmp_path / "page.html") == json.loads(json.dumps(document))


def test_the_rank_that_others_wait_for_is_named_with_the_reason(tmp_path):
    document = open_run(written_runs.finished(tmp_path / "run"))
    advice = [each for each in advise(document) if each.what.startswith("Ranks wait for rank 1: ")]
    said = "Forward and backward take 16.5 ms of a step on rank 1, and 10 ms on others: "
    assert [each.remedy.startswith(said) for each in advice] == [True]
    names = [name for name, *_ in parts_of_time(document)]
    assert names[:5] == ["data", "compute", "waits", "update", "loop"]
    steps_s = sum(seconds for _, seconds, _ in parts_of_time(document)[:5])
    assert steps_s == pytest.approx(document["seconds"]["step"])
    assert "A step on each rank</h3>" in render_page(document)
    waits = document["waits"]
    assert all(before[1] <= after[0] for before, after in pairwise(waits))
    assert {tuple(parts) for *_, parts in waits} == {(0.318, 0.023, 0.318, 0.318)}


@pytest.mark.parametrize(
    "damage",
    [{"steps": 0}, {"data": [0.1]}, {"waiting": ["nan", 1.0]}, {"compute": None}, {"seconds": "inf"}, {"update": {}}],
)
def test_times_of_another_form_are_passed_over(damage):
    times = RankTimes()
    event = {"steps": 1, "of_steps": 1, "seconds": 1.0, **{name: [0.1, 0.2] for name in PARTS}}
    times.add({**event, **damage}, 2.0)
    known = {name: event[name] for name in PARTS if name not in damage}
    assert times.document() is None or (times.document()["mean"].keys() == known.keys() and "compute" in known)
    times.add(event, 3.0)
    assert times.document()["ranks"]["waiting"] == [0.1, 0.2]


def test_a_spike_among_many_steps_is_kept():
    found = downsample((step, 97.25 if step == 54_321 else 1.0) for step in range(100_000))
    assert (len(found["x"]) <= 1000, max(found["high"]), found["greatest"]) == (True, 97.25, (97.25, 54_321))


def test_a_torn_line_is_skipped_and_a_run_without_an_end_is_stopped(tmp_path):
    folder = written_runs.without_an_end(tmp_path / "run")
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"time":1785225700.1,"event":"st')
    document = open_run(folder)
    assert (document["state"], document["totals"]["steps_done"]) == ("stopped", 81)


@pytest.mark.parametrize(("name", "said"), [("missing", "does not exist"), (".", "is no run")])
def test_what_is_no_run_is_an_error(tmp_path, name, said):
    with pytest.raises(ReportError, match=said):
        open_run(tmp_path / name)


def test_a_page_that_cannot_be_written_is_an_error_and_writes_nothing(tmp_path):
    folder = written_runs.one_step(tmp_path / "run")
    done = CliRunner().invoke(cli, ["report", str(folder), "-o", str(tmp_path / "none" / "x.html")])
    assert isinstance(done.exception, ReportError)
    assert "cannot be written: No such file or directory" in str(done.exception)
    assert [path.name for path in folder.iterdir()] == ["events.jsonl"]


def test_texts_and_images_stand_in_the_page_and_its_data(tmp_path):
    folder = written_runs.nasty(tmp_path / "nasty")
    assert CliRunner().invoke(cli, ["report", str(folder)], standalone_mode=False).exit_code == 0
    page = (folder / "report.html").read_text()
    assert page.count("<script") == 2 and page.count('src="data:image/png;base64,') == 3
    told = json.loads(CliRunner().invoke(cli, ["report", "--json", str(folder / "report.html")]).stdout)
    assert told["texts"][written_runs.NASTY][0]["text"].startswith(written_runs.NASTY + "\n\tnext line")
    assert told["texts"]["long"] == [{"step": 3, "text": "w" * 1000 + "…"}]
    assert (folder / told["images"]["wide"][0]["path"]).is_file()
