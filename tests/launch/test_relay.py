"""What ranks print reaches the launcher's streams, the log files and the terminal, through pipes as in a job."""

import os
import pty
import random
import selectors
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
from screen import Terminal, nested_bars

from printed import ranks_of
from unisono.launch.launch_job import Output
from unisono.launch.output.relay import Relay

EVERYTHING = frozenset({"stdout", "stderr"})


class Job:
    """Ranks played by the test: what it writes into their pipes goes through a relay, under a clock that it sets."""

    def __init__(self, stdout, stderr, **options):
        self.selector = selectors.PollSelector()
        self.now_s = 100.0
        self.relay = Relay(
            self.selector,
            stdout=stdout,
            stderr=stderr,
            environment={"TERM": "xterm", "NO_COLOR": "1"},
            clock=lambda: self.now_s,
            **{"output": Output(), "run_id": "run", **options},
        )
        self.ends = {}

    def start(self, ranks, attempt=0):
        for rank in range(ranks):
            self.ends[rank] = self.relay.open(rank, attempt=attempt)

    def write(self, rank, data, stream=1):
        os.write(self.ends[rank][stream - 1], data)
        self.turn()

    def wait(self, seconds):
        self.now_s += seconds
        self.turn()

    def turn(self):
        while events := self.selector.select(0):
            for key, _ in events:
                key.data()
        self.relay.tick()
        self.relay.balance()

    def end(self, *ranks):
        for rank in ranks:
            for file in self.ends.pop(rank):
                os.close(file)
        self.relay.drain(ranks)

    def close(self):
        self.end(*self.ends)
        self.relay.finish()
        self.relay.flush()
        self.selector.close()


@pytest.fixture
def job(tmp_path):
    """Make a job whose streams are files. `out` and `err` read them."""
    with ExitStack() as stack:

        def make(**options):
            files = [stack.enter_context((tmp_path / name).open("w")) for name in ("out", "err")]
            job = Job(*files, **options)
            stack.callback(job.close)
            job.out, job.err = (partial((tmp_path / name).read_text, errors="replace") for name in ("out", "err"))
            return job

        yield make


@contextmanager
def on_terminal(**options):
    """Make a job whose two streams are one terminal. `seen` gives what it shows."""
    ours, theirs = pty.openpty()
    terminal = Terminal()

    def seen():
        os.set_blocking(ours, False)
        try:
            while True:
                terminal.write(os.read(ours, 1 << 16).replace(b"\r\n", b"\n"))
        except BlockingIOError:
            return terminal.text

    with os.fdopen(theirs, "w") as stdout, os.fdopen(os.dup(theirs), "w") as stderr:
        job = Job(stdout, stderr, **options)
        job.seen = seen
        try:
            yield job
        finally:
            job.close()
            os.close(ours)


def test_equal_lines_of_ranks_are_printed_once(job):
    job = job()
    job.start(4)
    for rank in range(4):
        job.write(rank, b"start\nrank %d\nready\n" % rank)
    assert sorted(job.out().splitlines()[1:-1]) == [f"[{rank}] rank {rank}" for rank in range(4)]
    assert job.out().splitlines()[0] == "[0-3] start" and job.out().splitlines()[-1] == "[0-3] ready"
    for rank in (0, 1, 3):
        job.write(rank, b"late\n", stream=2)
    assert job.err() == ""
    assert job.relay.next_deadline_s() == pytest.approx(100.1)
    job.wait(0.11)
    assert job.err() == "[0-1,3] late\n"
    assert job.relay.next_deadline_s() is None


def test_last_words_come_before_what_is_said_of_the_end(job):
    job = job()
    job.start(3)
    job.write(1, b"giving up\nno line end", stream=2)
    assert job.err() == ""
    job.end(1)
    job.relay.say("rank 1 exited with code 1")
    job.relay.show("two\nlines")
    assert job.err() == "[1] giving up\n[1] no line end\nunisono: rank 1 exited with code 1\ntwo\nlines\n"


def test_the_order_of_a_rank_holds_across_its_streams_on_a_terminal():
    generator = random.Random(0)
    with on_terminal() as job:
        job.start(3)
        printed = {rank: [] for rank in range(3)}
        for _ in range(300):
            rank, text = generator.randrange(3), f"line {generator.randrange(4)}"
            job.write(rank, f"{text}\n".encode(), stream=generator.choice([1, 2]))
            printed[rank].append(text)
            job.wait(generator.choice([0.0, 0.02]))
        job.wait(1.0)
        lines = job.seen()
        for rank, texts in printed.items():
            assert [line.split("] ", 1)[1] for line in lines if rank in ranks_of(line)] == texts


def test_the_tail_of_a_rank_is_what_it_printed_last_on_either_stream(job):
    job = job(output=Output(shown=frozenset({0})))
    job.start(2)
    job.write(1, b"".join(b"line %d\n" % number for number in range(50)))
    job.write(1, b"\x1b[31merror\x1b[0m\n", stream=2)
    job.write(1, b"\r 10%\r 20%")
    assert job.relay.tail(1) == [*(f"line {number}" for number in range(32, 50)), "error", " 20%"]
    assert job.out() == job.err() == ""
    assert job.relay.tail(0) == [] and job.relay.tail(7) == []
    job.end(1)
    job.start(2, attempt=1)
    assert job.relay.tail(1) == []


def test_a_bar_of_the_first_rank_stays_below_what_others_print():
    with on_terminal() as job:
        job.start(2)
        job.write(0, b"\rbar 10%", stream=2)
        job.wait(0.06)
        assert job.seen() == ["[0] bar 10%"]
        job.write(1, b"one\n")
        job.wait(0.11)
        assert job.seen() == ["[1] one", "[0] bar 10%"]
        job.write(1, b"\rother 10%", stream=2)  # a bar of another rank is quiet until it ends
        job.write(0, b"\rbar 20%", stream=2)
        job.wait(0.06)
        assert job.seen() == ["[1] one", "[0] bar 20%"]
        job.relay.say("a word")
        assert job.seen() == ["[1] one", "unisono: a word", "[0] bar 20%"]
        job.write(1, b"\rother 100%\n", stream=2)
        job.write(0, b"\rbar 100%\n", stream=2)
        job.wait(0.11)
        assert job.seen() == ["[1] one", "unisono: a word", "[1] other 100%", "[0] bar 100%"]


def test_a_notice_stands_at_the_foot_until_a_rank_prints():
    with on_terminal() as job:
        job.relay.notice("unisono: importing torch for 2 ranks ...")
        assert job.seen() == ["unisono: importing torch for 2 ranks ..."]
        job.relay.say("a word")
        assert job.seen() == ["unisono: a word", "unisono: importing torch for 2 ranks ..."]
        job.start(2)
        job.write(1, b"one\n")
        job.wait(0.11)
        assert job.seen() == ["unisono: a word", "[1] one"]
        job.relay.notice("again")
        job.relay.notice("")
        assert job.seen() == ["unisono: a word", "[1] one"]


def test_a_notice_is_not_written_to_a_file(job):
    quiet = job()
    quiet.relay.notice("unisono: importing torch for 2 ranks ...")
    quiet.start(1)
    quiet.write(0, b"one\n")
    assert quiet.err() == ""


def test_nested_bars_of_a_rank_are_drawn_and_leave_their_last_state():
    with on_terminal() as job:
        job.start(2)
        for piece in nested_bars(2, 3):
            job.write(0, piece, stream=2)
            job.wait(0.06 if piece == b"\x1b[A" else 0.0)
            if piece == b"\x1b[A" and job.seen()[-1] == "[0] batch 3/3":
                assert job.seen()[-2].startswith("[0] epoch")
        job.wait(0.11)
        assert job.seen() == ["[0] loss 0", "[0] loss 1", "[0] epoch 2/2"]


def test_a_bar_that_is_left_standing_stays():
    with on_terminal() as job:
        job.start(1)
        job.write(0, b"\r 50%")
        job.wait(0.06)
        job.end(0)
        assert job.seen() == ["[0]  50%"]


def test_a_bar_in_a_file_is_its_last_state(job):
    job = job()
    job.start(2)
    for percent in range(100):
        job.write(0, b"\r%d%%" % percent, stream=2)
        job.wait(0.06)
    job.write(0, b"\r100%\n", stream=2)
    job.wait(0.2)
    assert job.err() == "[0] 100%\n"


def test_log_files_hold_what_each_rank_printed_byte_by_byte(job, tmp_path):
    output = Output(
        directory=tmp_path / "logs",
        redirected={0: EVERYTHING},
        teed={1: EVERYTHING},
        stdout_filters=("loss", "saved"),
    )
    job = job(output=output)
    job.start(3)
    for rank in range(3):
        job.write(rank, b"\r 1%\r 2%\nloss 0.5\nother\nno \xff end")
    job.relay.log(1, "Traceback: é\n")
    assert job.relay.folder == tmp_path / "logs/run"
    folders = [job.relay.rank_folder(rank) for rank in range(3)]
    assert job.relay.log_files(1) == [folders[1] / "stdout.log", folders[1] / "stderr.log"]
    assert job.relay.log_files(2) == []
    job.close()
    for rank in (0, 1):
        assert (folders[rank] / "stdout.log").read_bytes() == b"\r 1%\r 2%\nloss 0.5\nother\nno \xff end"
    assert (folders[1] / "stderr.log").read_text() == "Traceback: é\n"
    assert not any(folders[2].iterdir())
    assert (folders[0].parent / "filtered_stdout.log").read_text() == "[1] loss 0.5\n[2] loss 0.5\n"
    assert "[0]" not in job.out() and "[1-2] loss 0.5\n" in job.out()


def test_a_new_attempt_has_pipes_files_and_events_of_its_own(job, tmp_path):
    job = job(output=Output(directory=tmp_path / "logs"))
    job.start(2)
    job.write(0, b"first\n")
    job.write(0, b'{"event": "step", "total_', stream=3)  # killed in the middle of an event
    job.end(0, 1)
    job.start(2, attempt=1)
    job.write(0, b'{"event": "unknown", "total_steps": 7}\n', stream=3)
    job.write(0, b"second\n")
    job.end(0, 1)
    assert job.relay.progress["step"] == 7
    assert job.out() == "[0] first\n[0] second\n"
    texts = [(job.relay.rank_folder(0, attempt=attempt) / "stdout.log").read_text() for attempt in (0, 1)]
    assert texts == ["first\n", "second\n"]
    assert "not a JSON object" not in job.err()
