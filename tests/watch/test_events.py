"""The event log: whole lines, valid JSON, and a run that does not notice when a log is lost."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from unisono.watch import EventLog, read_events

STEP = {"epoch": 0, "step": 3, "total_steps": 4, "samples": 128, "lr": 1e-3, "step_s": 6e-4}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_is_one_json_line_with_its_time_and_kind(tmp_path):
    path = tmp_path / "new" / "events.jsonl"
    with EventLog(path) as log:
        log.emit("step", loss=0.1 + 0.2, **STEP)
        log.emit("warning", message='a "quote", a\nline end and Größe')
    first, second = lines(path)
    assert list(first)[:2] == ["time", "event"]
    assert first["time"] > 1.7e9
    assert {**STEP, "event": "step", "loss": 0.1 + 0.2, "time": first["time"]} == first
    assert second["message"] == 'a "quote", a\nline end and Größe'


def test_listeners_get_the_event_itself_in_order():
    seen = []
    log = EventLog(listeners=[lambda event: seen.append(("a", event)), lambda event: seen.append(("b", event))])
    log.emit("step", loss=math.nan, **STEP)
    assert [name for name, _ in seen] == ["a", "b"]
    assert math.isnan(seen[0][1]["loss"])
    assert seen[0][1] is seen[1][1]


def test_a_log_without_sinks_takes_everything_and_does_nothing():
    log = EventLog()
    log.emit("warning", message=object())
    log.close()


def test_what_comes_after_close_goes_nowhere(tmp_path):
    seen = []
    log = EventLog(tmp_path / "log", listeners=[seen.append])
    log.close()
    log.close()
    log.emit("end", total_steps=1, seconds=1.0)
    assert (seen, (tmp_path / "log").read_text()) == ([], "")


def test_floats_that_json_does_not_have_become_their_names(tmp_path):
    path = tmp_path / "log"
    values = {"perplexity": {"value": math.inf, "total": -math.inf, "count": 3}}
    with EventLog(path) as log:
        log.emit("step", loss=math.nan, **STEP)
        log.emit("evaluation", epoch=0, name="test", values=values, seconds=0.1)
    step, evaluation = lines(path)
    assert step["loss"] == "nan"
    assert evaluation["values"] == {"perplexity": {"value": "inf", "total": "-inf", "count": 3}}
    assert math.isnan(float(next(read_events(path))["loss"]))


def test_a_path_is_text_even_with_bytes_that_are_none(tmp_path):
    path = tmp_path / "log"
    with EventLog(path) as log:
        log.emit("checkpoint", path=Path("runs") / os.fsdecode(b"\xff"), total_steps=1, nbytes=1, seconds=0.1)
    assert os.fsencode(lines(path)[0]["path"]) == b"runs/\xff"


def test_a_field_that_json_cannot_say_is_an_error_that_names_the_type(tmp_path):
    with EventLog(tmp_path / "log") as log:
        with pytest.raises(TypeError, match=r"complex.*\.item\(\)"):
            log.emit("warning", message=1j)
        log.emit("warning", message="fine")
    assert [event["message"] for event in read_events(tmp_path / "log")] == ["fine"]


def test_a_log_goes_on_after_another_run(tmp_path):
    path = tmp_path / "log"
    for run in range(2):
        with EventLog(path) as log:
            log.emit("warning", message=str(run))
    assert [event["message"] for event in lines(path)] == ["0", "1"]


def test_a_torn_last_line_does_not_spoil_the_next_event(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b'{"time":1.0,"event":"warning","message":"old"}\n{"time":2.0,"event":"st')
    with EventLog(path) as log:
        log.emit("warning", message="new")
    assert path.read_bytes().count(b"\n") == 3
    assert [event["message"] for event in read_events(path)] == ["old", "new"]


def test_reading_leaves_out_a_torn_last_line(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b'{"event":"end"}\n{"event":"en\xc3')
    assert list(read_events(path)) == [{"event": "end"}]
    path.write_bytes(b'{"event":"end"}')
    assert list(read_events(path)) == [{"event": "end"}]


def test_threads_do_not_mix_their_lines(tmp_path):
    path = tmp_path / "log"
    seen = []
    with EventLog(path, listeners=[seen.append]) as log:

        def work(name):
            for number in range(500):
                log.emit("warning", message=f"{name} {number}")

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = lines(path)
    assert events == seen
    assert sorted(event["message"] for event in events) == sorted(f"{t} {n}" for t in range(4) for n in range(500))
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)


def test_a_listener_may_emit(tmp_path):
    def answer(event):
        if event["event"] == "end":
            log.emit("warning", message="after the end")

    with EventLog(tmp_path / "log", listeners=[answer]) as log:
        log.emit("end", total_steps=1, seconds=1.0)
    assert [event["event"] for event in lines(tmp_path / "log")] == ["end", "warning"]


def test_a_pipe_gets_every_event_and_stays_the_callers(tmp_path):
    read, write = os.pipe()
    with EventLog(fd=write) as log:
        log.emit("end", total_steps=1, seconds=1.0)
    with EventLog(fd=write) as log:  # a second run of the same process
        log.emit("end", total_steps=2, seconds=1.0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert [json.loads(line)["total_steps"] for line in pipe] == [1, 2]


def test_a_pipe_without_reader_is_dropped_without_a_word(tmp_path):
    read, write = os.pipe()
    seen = []
    with EventLog(tmp_path / "log", fd=write, listeners=[seen.append]) as log:
        os.close(read)
        for step in range(3):
            log.emit("end", total_steps=step, seconds=1.0)
    os.close(write)
    assert [event["event"] for event in seen] == ["end"] * 3
    assert lines(tmp_path / "log") == seen


def test_no_descriptor_is_left_open(tmp_path):
    def count():
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    read, write = os.pipe()
    before = count()
    for _ in range(20):
        with EventLog(tmp_path / "log", fd=write) as log:
            log.emit("end", total_steps=1, seconds=1.0)
        with pytest.raises(OSError, match="Bad file descriptor"):
            EventLog(tmp_path / "log", fd=9999)
        with pytest.raises(IsADirectoryError):
            EventLog(tmp_path)
        list(read_events(tmp_path / "log"))
    assert count() == before
    os.close(read)
    os.close(write)


def test_a_program_that_is_started_does_not_inherit_the_log(tmp_path):
    with EventLog(tmp_path / "log"):
        listing = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in listing


FULL_DISK = """
import resource, sys
from pathlib import Path
from unisono.watch import EventLog
seen = []
log = EventLog(Path(sys.argv[1]), listeners=[seen.append])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for step in range(50):
    log.emit("end", total_steps=step, seconds=1.0)
log.close()
assert [e["total_steps"] for e in seen if e["event"] == "end"] == list(range(50))
print([e["message"] for e in seen if e["event"] == "warning"])
"""


def test_a_full_disk_is_one_warning_and_not_the_end_of_the_run(tmp_path):
    path = tmp_path / "log"
    done = subprocess.run([sys.executable, "-c", FULL_DISK, path], capture_output=True, text=True, check=True)
    (message,) = eval(done.stdout)
    assert message == f"{path} cannot be written (File too large); the run goes on without this event log"
    assert path.stat().st_size == 1000
    steps = [event["total_steps"] for event in read_events(path)]
    assert steps == list(range(len(steps)))
    assert len(steps) > 10


ENDLESS = """
import sys
from pathlib import Path
from unisono.watch import EventLog
log = EventLog(Path(sys.argv[1]))
step = 0
while True:
    log.emit("checkpoint", path="x" * (step % 3000), total_steps=step, nbytes=1, seconds=1.0)
    step += 1
"""


def test_a_killed_writer_leaves_whole_lines_and_at_most_one_torn_last(tmp_path):
    path = tmp_path / "log"
    for run in range(3):
        size = path.stat().st_size if run else 0
        with subprocess.Popen([sys.executable, "-c", ENDLESS, path]) as writer:
            while not path.exists() or path.stat().st_size < size + 200_000:
                pass
            writer.send_signal(signal.SIGKILL)
        with path.open("rb") as file:
            file.seek(size)
            for line in file.read().split(b"\n")[1 if run else 0 : -1]:
                json.loads(line)
    numbers = [event["total_steps"] for event in read_events(path)]
    starts = [place for place, number in enumerate(numbers) if number == 0]
    runs = [numbers[a:b] for a, b in zip(starts, [*starts[1:], len(numbers)], strict=True)]
    assert len(runs) == 3
    assert all(run == list(range(len(run))) for run in runs)


def emit_steps(log, count, first=0):
    for number in range(first, first + count):
        log.emit("step", loss=0.5, **(STEP | {"total_steps": number}))


def steps_in(path):
    return [event["total_steps"] for event in read_events(path) if event["event"] == "step"]


def test_steps_that_follow_each_other_are_written_together_and_at_latest_with_the_next_event(tmp_path):
    path = tmp_path / "log"
    with EventLog(path) as log:
        emit_steps(log, 20)
        assert len(steps_in(path)) < 20
        log.emit("warning", message="now")
        assert [event["event"] for event in read_events(path)] == ["step"] * 20 + ["warning"]
        deadline, count = time.monotonic() + 20, 20
        while len(steps_in(path)) == 20 and time.monotonic() < deadline:
            emit_steps(log, 10, first=count)
            count += 10
        assert len(steps_in(path)) > 20
    assert steps_in(path) == list(range(count))
    times = [event["time"] for event in lines(path)]
    assert times == sorted(times)


def test_a_step_that_no_event_follows_is_written_all_the_same(tmp_path):
    path = tmp_path / "log"
    with EventLog(path) as log:
        for first in (0, 2):
            emit_steps(log, 2, first=first)
            deadline = time.monotonic() + 20
            while len(steps_in(path)) < first + 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert steps_in(path) == list(range(first + 2))


AT_THE_END = """
import os, sys
from pathlib import Path
from unisono.watch import EventLog
log = EventLog(Path(sys.argv[1]))
def step(number, loss):
    log.emit("step", epoch=0, step=number, total_steps=number, loss=loss, samples=8, lr=0.1, step_s=0.01)
for number in range(5):
    step(number, 0.5)
if child := os.fork():
    os.waitpid(child, 0)
else:
    step(5, float("nan"))
sys.exit("oops")
"""


def test_a_process_that_exits_writes_what_it_holds_and_a_forked_one_only_its_own(tmp_path):
    path = tmp_path / "log"
    subprocess.run([sys.executable, "-c", AT_THE_END, path], check=False, capture_output=True)
    assert sorted(event["total_steps"] for event in lines(path)) == list(range(6))


def test_a_log_that_nobody_refers_to_writes_what_it_holds_and_ends_its_thread(tmp_path):
    log = EventLog(tmp_path / "log")
    emit_steps(log, 3)
    del log
    assert steps_in(tmp_path / "log") == [0, 1, 2]


def test_a_listener_hears_a_step_at_once_and_its_own_event_comes_after_it_in_the_file(tmp_path):
    def answer(event):
        if event["event"] == "step":
            seen.append(event["total_steps"])
            if event["total_steps"] == 2:
                log.emit("warning", message="two")

    seen = []
    with EventLog(tmp_path / "log", listeners=[answer]) as log:
        emit_steps(log, 3)
        assert seen == [0, 1, 2]
        emit_steps(log, 1, first=3)
    assert [event.get("message", event.get("total_steps")) for event in lines(tmp_path / "log")] == [0, 1, 2, "two", 3]
