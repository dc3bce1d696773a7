"""The benchmarks run from end to end and say what they found in the form that others read; never how fast."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture
def modules(monkeypatch):
    """Make the package bench importable, which is not installed."""
    monkeypatch.syspath_prepend(str(ROOT))
    from bench import measure, page, rows, tables

    return measure, rows, tables, page


@pytest.fixture
def command(monkeypatch):
    """Give the function behind `python -m bench`, for what it says without measuring."""
    monkeypatch.syspath_prepend(str(ROOT))
    from bench.__main__ import main

    return main


def test_list_names_every_benchmark_with_a_line(command, capsys):
    assert command(["--list"]) == 0
    names = [line.split(maxsplit=1)[0] for line in capsys.readouterr().out.splitlines() if len(line.split()) > 1]
    assert names[:8] == ["permutation", "step", "events", "top", "ddp", "replicate", "remote", "shared"]
    assert names[8:] == [
        "protect",
        "planning",
        "shards",
        "pipeline",
        "gpu",
        "split",
        "exchange",
        "collectives",
        "comm",
        "loading",
        "embedding",
        "divided",
        "checkpoint",
        "host_checkpoint",
        "recovery",
        "kills",
        "hosts",
        "membership",
        "link",
        "start",
        "faults",
    ]


def test_unknown_benchmark_is_refused_by_name(command, capsys):
    with pytest.raises(SystemExit) as ended:
        command(["nonsense"])
    assert ended.value.code == 2
    assert "nonsense" in capsys.readouterr().err


def test_step_runs_from_end_to_end(fork_python, tmp_path):
    (script := tmp_path / "bench.py").write_text(
        f"import runpy, sys; sys.path[0] = {str(ROOT)!r}; runpy.run_module('bench', run_name='__main__')"
    )
    printed = fork_python(script, "step", "--quick", "--json", tmp_path / "rows")
    header, rule, *lines = (line.strip("|").split("|") for line in printed)
    assert [cell.strip() for cell in header] == ["case", "peer", "peer's figure", "ours", "unit", "ratio", "goal", "n"]
    assert {len(line) for line in (header, rule, *lines)} == {8}
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert len(rows) == len(lines) == 4
    for row, line in zip(rows, lines, strict=True):
        assert (row["bench"], row["unit"], row["n"]) == ("step", "ms", 3)
        assert row["case"] == line[0].strip()
        assert row["ratio"] == pytest.approx(row["peer"]["median"] / row["ours"]["median"], rel=1e-4)


@pytest.mark.soak
def test_top_measures_on_one_rank_and_on_two(tmp_path):
    ended = bench("top", "--quick", "--json", str(tmp_path / "rows"))
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    turns = [row for row in rows if row["peer_name"] == "view stopped"]
    assert [(row["parameters"]["ranks"], row["n"]) for row in turns] == [(1, 3), (2, 3)]
    assert all(float(row["parameters"]["view_s"]) > 0 for row in turns)


@pytest.mark.soak
def test_pipeline_measures_against_the_ideal_and_torch(tmp_path):
    ended = bench("pipeline", "--quick", "--json", str(tmp_path / "rows"))
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    peers = ["the ideal of 1F1B", "the ideal of 1F1B", "torch.distributed.pipelining", "the ideal of 1F1B"]
    assert [row["peer_name"] for row in rows] == peers
    assert all(row["parameters"] == {"micro_batches": 4, "ranks": 2} and row["n"] == 3 for row in rows)
    assert [row["goal"] and row["goal"]["bound"] for row in rows] == [0.926, None, 1.0, 1.0]


@pytest.mark.soak
def test_shards_measure_every_division_and_both_backends(tmp_path):
    ended = bench("shards", "--quick", "--json", str(tmp_path / "rows"))
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["parameters"].get("division") or row["parameters"]["backend"] for row in rows] == [
        'by="block"', 'by="block"', 'by="size"', "zero=1", "replicas=2",
        "2 stages x 2", "2 stages x 2, zero=1", "4 stages x 2, zero=3", 'sums="divided"', 'by="block"', 'by="block"',
        "gloo", "gloo", "shm", "shm",
    ]  # fmt: skip
    assert [(row["parameters"]["ranks"], row["unit"]) for row in rows] == [(4, "MB")] * 11 + [(2, "ms")] * 4


@pytest.mark.soak
def test_split_measures_in_two_and_four_stages(tmp_path):
    ended = bench("split", "--quick", "--json", str(tmp_path / "rows"))
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["parameters"]["stages"] for row in rows] == [2, 4]
    assert [len(row["parameters"][side].split(", ")) for row in rows for side in ("ours_begins", "best_begins")] == [
        1, 1, 3, 3,
    ]  # fmt: skip


@pytest.mark.soak
def test_exchange_measures_on_two_ranks(tmp_path):
    ended = bench("exchange", "--quick", "--json", str(tmp_path / "rows"))
    assert ended.returncode == 0, ended.stderr
    (row,) = (json.loads(line) for line in (tmp_path / "rows").read_text().splitlines())
    assert row["parameters"] == {"nbytes": 4096, "ranks": 2}


@pytest.mark.soak
def test_collectives_measure_every_kind_and_the_script(tmp_path):
    ended = bench("collectives", "--quick", "--json", str(tmp_path / "rows"))
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert {row["parameters"]["operation"] for row in rows} == {
        "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all",
        "send and recv", "step",
    }  # fmt: skip
    assert {row["peer_name"] for row in rows} == {"gloo", "one memcpy"}


@pytest.mark.soak
def test_comm_measures_every_function(tmp_path):
    ended = bench("comm", "--quick", "--json", str(tmp_path / "rows"))
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    alone = {row["parameters"]["operation"] for row in rows if row["parameters"]["ranks"] == 1}
    assert alone == {
        "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all",
    }  # fmt: skip
    assert {row["goal"]["bound"] for row in rows if row["parameters"]["ranks"] == 1} == {20.0}


def test_the_chart_shows_every_size_over_shm_gloo_and_memcpy(modules):
    _, rows, *_ = modules
    from bench.chart import draw

    def row(nbytes, peer_name, peer):
        facts = {"operation": "all_reduce", "nbytes": nbytes, "ranks": 2}
        return rows.summarise("b", "c", ours=[nbytes / 1e6], peer=[peer], peer_name=peer_name, unit="ms", **facts)

    sizes = [1000, 1000_000, 100_000_000]
    pictured = [row(n, name, n / 1e5) for n in sizes for name in ("gloo", "one memcpy")]
    picture = ElementTree.fromstring(
        draw([*pictured, rows.summarise("b", "c", ours=[9.0], peer=[9.0], peer_name="gloo", unit="ms")])
    )
    dots = [mark.get("class") for mark in picture.iter() if mark.tag.endswith("circle")]
    # Two panels and the legend.
    assert {name: dots.count(name) for name in ("shm", "gloo", "memcpy")} == dict.fromkeys(("shm", "gloo", "memcpy"), 7)
    texts = [mark.text for mark in picture.iter() if mark.tag.endswith("text")]
    assert {"1 KB", "1 MB", "100 MB", "ms", "GB/s", "shm", "gloo", "memcpy"} <= set(texts)


def test_sides_are_measured_in_pairs_of_random_but_equal_order(modules):
    measure, *_ = modules

    def order(seed):
        calls = []
        sides = [lambda name=name: calls.append(name) or 1.0 for name in ("ours", "peer")]
        pairs = measure.alternate(*sides, rounds=20, warmup=2, seed=seed)
        assert (len(pairs.ours), len(pairs.peer)) == (20, 20)
        return calls

    calls = order(0)
    assert calls == order(0) != order(1)
    assert {tuple(calls[i : i + 2]) for i in range(0, 44, 2)} == {("ours", "peer"), ("peer", "ours")}


def test_ratio_is_above_one_where_ours_is_faster_and_goals_bound_the_right_side(modules):
    _, rows, tables, _ = modules

    def row(unit, goal, ours, peer):
        return rows.summarise("b", "c", ours=[ours] * 4, peer=[peer] * 4, peer_name="p", unit=unit, goal=goal)

    ratio = rows.Goal(of="ratio", bound=1.0)
    assert (row("ms", ratio, 1.0, 2.0).ratio, row("ms", ratio, 1.0, 2.0).met) == (2.0, True)
    assert (row("samples/s", ratio, 1.0, 2.0).ratio, row("samples/s", ratio, 1.0, 2.0).met) == (0.5, False)
    ours = rows.Goal(of="ours", bound=5.0)
    assert [row("ms", ours, value, 1.0).met for value in (4.0, 6.0)] == [True, False]
    assert [row("million/s", ours, value, 1.0).met for value in (4.0, 6.0)] == [False, True]
    assert "ours ≤ 5: MISSED" in tables.table([row("ms", ours, 6.0, 1.0)])
    assert "ours ≥ 5: met" in tables.table([row("million/s", ours, 6.0, 1.0)])


def test_a_goal_is_even_if_it_is_missed_by_less_than_the_measurement_can_tell(modules):
    _, rows, tables, _ = modules

    def told(ratio: float, spread: float) -> str:
        peer = [ratio + spread * step / 10 for step in range(-20, 21)]  # half its interquartile range is the spread
        goal = rows.Goal(of="ratio", bound=1.0)
        row = rows.summarise("b", "c", ours=[1.0] * 41, peer=peer, peer_name="p", unit="ms", goal=goal)
        assert abs(row.ratio_spread - spread) < 1e-6
        return tables.table([row]).splitlines()[-1].split("|")[7].strip()

    assert told(1.0, 0.1) == "ratio ≥ 1: met"
    assert told(0.96, 0.1) == "ratio ≥ 1: even"  # twice the standard error is 0.058
    assert told(0.93, 0.1) == "ratio ≥ 1: MISSED"
    assert told(0.96, 0.01) == "ratio ≥ 1: MISSED"


def test_rows_survive_json_and_reach_the_page(modules):
    _, rows, tables, page = modules
    from bench.catalogue import BENCHMARKS

    goal = rows.Goal(of="ratio", bound=0.952)
    row = rows.summarise("step", "c", ours=[2.0, 3.0], peer=[1.0, 1.5], peer_name="p", unit="ms", goal=goal, ranks=2)
    assert rows.row_from_json(rows.row_to_json(row)) == row
    sections = [page.Section(BENCHMARKS[1], [row], None), page.Section(BENCHMARKS[2], [], "no gloo here")]
    text = page.page(sections, date="2000-01-01", machine="a machine", load="load", versions="torch 0")
    assert tables.table([row]) in text
    assert "**Goals missed**: step: c." in text
    assert "no gloo here" in text
    assert os.uname().nodename not in text.split()
    again = page.Section(BENCHMARKS[2], [row], None)
    changed = page.with_section(text, again, date="2000-01-02", machine="another", load="load 2")
    note = "Measured again on 2000-01-02, on another; before the run: load 2."
    assert "no gloo here" not in changed and changed.count(note) == 1
    assert f"**Goals missed**: step: c; {again.benchmark.name}: c." in changed
    assert page.with_section(changed, again, date="2000-01-02", machine="another", load="load 2") == changed
    new = page.Section(BENCHMARKS[0], [row], None)
    longer = page.with_section(changed, new, date="2000-01-02", machine="another", load="load 2")
    assert [line[3:] for line in longer.splitlines() if line.startswith("## ")] == [b.name for b in BENCHMARKS[:3]]
    assert page.with_section(longer, new, date="2000-01-02", machine="another", load="load 2") == longer
    last = page.Section(BENCHMARKS[-1], [row], None)
    longer = page.with_section(longer, last, date="2000-01-02", machine="another", load="load 2")
    assert page.with_section(longer, last, date="2000-01-02", machine="another", load="load 2") == longer


@pytest.mark.soak
def test_membership_measures_a_change_among_simulated_hosts(tmp_path):
    ended = bench("membership", "--quick", "--json", str(tmp_path / "rows"))
    assert ended.returncode == 0, ended.stderr
    (row,) = (json.loads(line) for line in (tmp_path / "rows").read_text().splitlines())
    assert (row["parameters"]["hosts"], row["peer_name"], row["goal"]["bound"]) == (4, "torchrun's rendezvous", 50.0)


def test_a_small_cost_is_found_among_disturbances(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from bench.events import cost_of

    rng = random.Random(0)
    noise = [[1 + abs(rng.gauss(0, 0.02)) + 3 * (rng.random() < 0.05) for _ in range(800)] for _ in range(2)]
    cost = cost_of([1.01 * each for each in noise[0]], noise[1])
    assert cost.low < 0.01 < cost.high and cost.high - cost.low < 0.005
    assert cost_of([2.02] * 8, [2.0] * 8) == pytest.approx((0.01, 0.01, 0.01))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_benchmark_of_gpus_says_that_there_is_none(command, capsys):
    assert command(["gpu", "--quick"]) == 1
    assert "there is no NVIDIA GPU, or torch was built without CUDA" in capsys.readouterr().err


@pytest.mark.soak
def test_events_are_measured_on_one_and_two_ranks(tmp_path):
    ended = bench("events", "--quick", "--json", str(tmp_path / "rows"))
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["parameters"]["ranks"] for row in rows] == [1, 1, 2, 2]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("link", ["MLP 1k, 1000 Mbit/s, 2 hosts x 1 ranks x 16", "MLP 1k, 1000 Mbit/s, 2 hosts x 2 ranks x 16"]),
        ("host_checkpoint", ["MLP 1k, in the call", "MLP 1k, until on disk"]),
    ],
)
def test_hosts_are_measured_that_are_namespaces_of_this_machine(tmp_path, name, cases):
    ended = bench(name, "--quick", "--json", str(tmp_path / "rows"))
    if "cannot be made here" in ended.stderr:
        pytest.skip(ended.stderr.splitlines()[-1])
    assert ended.returncode == 0, ended.stderr
    assert [json.loads(line)["case"] for line in (tmp_path / "rows").read_text().splitlines()] == cases
