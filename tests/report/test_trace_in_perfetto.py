"""`unisono report --trace`: Perfetto's own trace processor shows a run as it was, and has nothing to complain about."""

import pytest
import trace_server
import written_runs

from unisono.report.trace import trace_of
from unisono.watch import read_events


@pytest.fixture(scope="module")
def address():
    if reason := trace_server.missing():
        pytest.skip(reason)
    with trace_server.running() as found:
        yield found


@pytest.fixture
def load(address, tmp_path):
    """Return a function that loads events into the trace processor, and returns one that asks it for rows."""
    from perfetto.trace_processor import TraceProcessor

    opened = []

    def load(events):
        path = tmp_path / "trace.json"
        path.write_text("".join(trace_of(events)))
        processor = TraceProcessor(trace=str(path), remote=address)
        opened.append(processor)

        def ask(query):
            return [tuple(row.__dict__.values()) for row in processor.query(query)]

        assert ask("select name, value from stats where severity in ('error', 'data_loss') and value != 0") == []
        return ask

    yield load
    for each in opened:
        each.close()


def tree(ask):
    """Return each span as its track, the names of those around it and its own, its beginning and its length in µs."""
    rows = ask(
        "select s.id as id, s.parent_id as parent, thread.name as thread, s.name as name, s.ts / 1000 as ts,"
        " s.dur / 1000 as dur from slice s join thread_track t on s.track_id = t.id join thread using (utid)"
        " order by s.id"
    )
    paths = {}
    for each, parent, _, name, *_ in rows:
        paths[each] = (*paths.get(parent, ()), name)
    return [(thread, paths[each], ts, dur) for each, _, thread, _, ts, dur in rows]


@pytest.mark.parametrize("state", written_runs.STATES)
def test_steps_lie_in_their_epochs_and_parts_in_the_steps_of_their_ranks(load, tmp_path, state):
    events = list(read_events(written_runs.STATES[state](tmp_path / state) / "events.jsonl"))
    ask = load(events)
    spans = tree(ask)
    loop = [path for thread, path, *_ in spans if thread == "epochs, steps, evaluations"]
    expected, epoch = [], None
    for event in events:
        kind = event["event"]
        if kind in ("run", "end", "failure"):
            epoch = None
        elif kind == "epoch":
            epoch = f"epoch {event['epoch']}"
            expected.append((epoch,))
        elif kind in ("step", "evaluation"):
            name = f"step {event['total_steps']}" if kind == "step" else f"evaluation {event['name']}"
            expected.append((epoch, name) if epoch else (name,))
    assert loop == expected
    told = [event for event in events if event["event"] == "times"]
    for rank in range(max((len(event["last"]["data"]) for event in told), default=0)):
        own = [path for thread, path, *_ in spans if thread == f"rank {rank}"]
        steps = [f"step {event['total_steps']}" for event in told if rank < len(event["last"]["data"])]
        assert [path[0] for path in own if len(path) == 1] == steps
        parts = {path for path in own if len(path) > 1}
        assert parts <= {
            (step, part) for step in steps for part in ("data", "forward and backward", "waiting", "sum and update")
        }
        assert {step for step, _ in parts} == set(steps)


def test_names_lengths_figures_and_moments_are_the_ones_of_the_run(load, tmp_path):
    events = list(read_events(written_runs.recovered(tmp_path / "run") / "events.jsonl"))
    ask = load(events)
    assert ask("select distinct process.name as name from thread join process using (upid) where tid > 0") == [
        ("unisono run, 3 ranks",)
    ]
    steps = [event for event in events if event["event"] == "step"]
    found = ask(
        "select extract_arg(arg_set_id, 'args.total_steps') as step, extract_arg(arg_set_id, 'args.loss') as loss,"
        " dur / 1e9 as seconds from slice where category = 'step' order by ts"
    )
    assert [row[0] for row in found] == [event["total_steps"] for event in steps]
    assert [row[1] for row in found] == pytest.approx([event["loss"] for event in steps], rel=1e-12)
    assert [row[2] for row in found] == pytest.approx([event["step_s"] for event in steps], rel=0.001)
    counters = dict(
        ask("select t.name as name, count(*) as n from counter c join counter_track t on c.track_id = t.id group by 1")
    )
    for name in ("loss", "lr", "grad_norm"):
        assert counters[f"{name} value"] == sum(event["event"] == "step" and name in event for event in events)
    moments = dict(ask("select name, count(*) as n from slice where dur = 0 group by 1"))
    assert moments == {
        {"run": "run starts"}.get(kind, kind): count
        for kind in ("run", "warning", "failure", "end")
        if (count := sum(event["event"] == kind for event in events))
    }


def test_clocks_that_go_back_and_events_of_one_microsecond_leave_no_span_in_a_wrong_place(load):
    def at(time, kind, **fields):
        return {"time": time, "event": kind, **fields}

    ask = load([
        at(100.0, "run"),
        at(100.0, "epoch", epoch=0),
        at(100.0, "step", total_steps=1, step_s=0.25),
        at(100.5, "step", total_steps=2, step_s=0.5),
        at(100.5, "times", total_steps=2, last={"data": [0.0], "compute": [0.5], "waiting": [0.0], "update": [0.0]}),
        at(99.0, "step", total_steps=3, step_s=0.25),
        at(99.0, "times", total_steps=3, last={"data": [0.1], "compute": [0.1], "waiting": [0.0], "update": [0.0]}),
        at(100.5, "evaluation", name="test", seconds=0.25),
        at(100.5, "epoch", epoch=1),
        at(100.5, "step", total_steps=4, step_s=0.25),
        at(100.5, "failure"),
        at(100.5, "run"),
        at(101.0, "epoch", epoch=1),
        at(101.5, "step", total_steps=4, step_s=0.75),
        at(101.5, "end"),
    ])  # fmt: skip
    begun = [path for thread, path, *_ in tree(ask) if thread == "epochs, steps, evaluations"]
    assert begun == [
        ("epoch 0",),
        ("epoch 0", "step 1"),
        ("epoch 0", "step 2"),
        ("epoch 0", "step 3"),
        ("epoch 0", "evaluation test"),
        ("epoch 1",),
        ("epoch 1", "step 4"),
        ("epoch 1",),
        ("epoch 1", "step 4"),
    ]
    # A part as long as its step stands below it; a step that took no time is not shown.
    assert [path for thread, path, *_ in tree(ask) if thread == "rank 0"] == [
        ("step 2",),
        ("step 2", "forward and backward"),
        ("step 3",),
        ("step 3", "data"),
    ]
