"""`unisono report --trace`: the trace of a run keeps to Chrome's format, whatever its events are."""

import json

import written_runs
from click.testing import CliRunner

from unisono.cli.main import cli
from unisono.report.trace import trace_of
from unisono.watch import read_events

KEYS = {
    "M": {"ph", "name", "pid", "args"},
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
    "B": {"ph", "name", "cat", "pid", "tid", "ts"},
    "E": {"ph", "pid", "tid", "ts"},
    "i": {"ph", "s", "name", "pid", "tid", "ts", "args"},
    "C": {"ph", "name", "pid", "ts", "args"},
}


def read(text: str) -> list[dict]:
    """Read a trace as strictly as its format is: keys, times, and spans that are nested or apart."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    entries = json.loads(text, parse_constant=refuse)["traceEvents"]
    spans: dict[int, list[tuple[int, int]]] = {}
    open_since: dict[int, list[int]] = {}
    for entry in entries:
        assert entry.keys() - {"tid"} == KEYS[entry["ph"]] - {"tid"}
        assert all(isinstance(entry.get(key, 0), int) and entry.get(key, 0) >= 0 for key in ("ts", "dur", "pid", "tid"))
        if entry["ph"] == "B":
            open_since.setdefault(entry["tid"], []).append(entry["ts"])
        elif entry["ph"] == "E":
            spans.setdefault(entry["tid"], []).append((open_since[entry["tid"]].pop(), entry["ts"]))
        elif entry["ph"] == "X":
            spans.setdefault(entry["tid"], []).append((entry["ts"], entry["ts"] + entry["dur"]))
    assert not any(open_since.values())
    for track in spans.values():
        ends: list[int] = []
        for begun, ended in sorted(track, key=lambda span: (span[0], -span[1])):
            while ends and ends[-1] <= begun:
                ends.pop()
            assert begun <= ended
            assert not ends or ended <= ends[-1], f"{begun} to {ended} lies across a span that ends at {ends[-1]}"
            ends.append(ended)
    return entries


def test_each_step_evaluation_and_checkpoint_has_a_span(tmp_path):
    for name, make in written_runs.STATES.items():
        folder = make(tmp_path / name)
        done = CliRunner().invoke(cli, ["report", str(folder), "--trace", str(tmp_path / "trace.json")])
        assert "ui.perfetto.dev" in done.output
        entries = read((tmp_path / "trace.json").read_text())
        counts = [json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines()]
        for kind in ("step", "evaluation", "checkpoint"):
            assert sum(entry.get("cat") == kind for entry in entries) == counts.count(kind)
        assert sum(entry["ph"] == "B" for entry in entries) == counts.count("epoch")


def test_a_step_keeps_its_time_and_clocks_that_go_back_do_no_harm():
    times = (100.0, 100.0, 100.5, 99.0, 100.75)
    kinds = ({"event": "run"}, {"event": "epoch", "epoch": 0}, *({"event": "step", "step_s": 0.25, "loss": "nan"},) * 3)
    entries = read("".join(trace_of({"time": time, **kind} for time, kind in zip(times, kinds, strict=True))))
    steps = [(entry["ts"], entry["dur"]) for entry in entries if entry.get("cat") == "step"]
    assert steps == [(250_000, 250_000), (500_000, 1), (500_001, 249_999)]


def test_ranks_have_the_parts_of_a_step_within_it(tmp_path):
    entries = read("".join(trace_of(read_events(written_runs.finished(tmp_path / "run") / "events.jsonl"))))
    names = {entry["tid"]: entry["args"]["name"] for entry in entries if entry.get("name") == "thread_name"}
    tracks = {name: tid for tid, name in names.items() if name.startswith("rank ")}
    assert [*tracks] == [f"rank {rank}" for rank in range(4)]
    steps = {entry["name"]: entry for entry in entries if entry.get("cat") == "step"}
    for tid in tracks.values():
        own = [entry for entry in entries if entry.get("tid") == tid and entry["ph"] == "X"]
        whole = [entry for entry in own if entry["cat"] == "step of a rank"]
        assert len(whole) == 20
        for entry in whole:
            step = steps[entry["name"]]
            assert (step["ts"] <= entry["ts"], entry["ts"] + entry["dur"]) == (True, step["ts"] + step["dur"])
        parts = [entry["name"] for entry in own if entry["cat"] == "part"]
        assert parts == ["data", "forward and backward", "waiting", "sum and update"] * 20
