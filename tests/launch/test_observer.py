"""Hangs of real ranks, found and explained from outside, while no rank does anything for it."""

import json
import os
import secrets
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from launcher import Host
from unisono.launch.channel import Channel
from unisono.launch.hang.hang_report import render_stacks
from unisono.launch.hang.observer import Observer

TIMEOUT_S = 90

_PROLOGUE = """
import os, sys, time, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
def init():
    method = f"file://{os.path.dirname(os.path.abspath(__file__))}/store"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
def compute():  # a quarter of the time, so that tests beside it go on
    end_s = time.process_time() + 0.02
    while time.process_time() < end_s:
        pass
    time.sleep(0.06)
"""


@pytest.fixture(scope="module")
def host(start_host: Callable[..., Host]) -> Iterator[Channel]:
    """The process that forks ranks for the tests of this file."""
    address = f"unisono-observer-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener, start_host("launch.observed_ranks") as process:
        listener.bind(f"\0{address}")
        listener.listen()
        process.stdin.write(f"{address}\n")
        process.stdin.flush()
        channel = Channel(listener.accept()[0])
        yield channel
        channel.close()


class Watch:
    """An observer and the ranks that it watches."""

    def __init__(self, folder: Path, host: Channel) -> None:
        self.folder = folder
        self._host = host
        self.pids: list[int] = []
        self.codes: dict[int, int] = {}
        self.reports: list[str] = []
        self.slowest_s = 0.0

    def start(
        self, source: str, *, ranks: int = 2, hang_report_s: float = 1.0, hang_abort_s: float | None = None
    ) -> None:
        script = self.folder / "script.py"
        script.write_text(_PROLOGUE + source)
        self.observer = Observer(
            ranks, hang_report_s=hang_report_s, hang_abort_s=hang_abort_s, job="4711", folder=str(self.folder)
        )
        files = [self.observer.files(rank) for rank in range(ranks)]
        flat = [file for group in files for file in group]
        told, output = os.pipe()
        errors = os.open(self.folder / "stderr", os.O_WRONLY | os.O_CREAT)
        # Without a buffer: a line that lay in one would not show in `select`.
        self._told = os.fdopen(told, "rb", buffering=0)
        self._host.send({"script": str(script)}, [output, errors, *flat])
        for file in (output, errors, *flat):
            os.close(file)
        line = self._told.readline()
        assert line, (self.folder / "stderr").read_text()
        self._job, *self.pids = json.loads(line)
        for rank, pid in enumerate(self.pids):
            self.observer.started(rank, pid)

    def until(self, done) -> None:
        """Turn the loop of an agent until something holds."""
        end_s = time.monotonic() + TIMEOUT_S
        while not done():
            assert time.monotonic() < end_s, f"nothing after {TIMEOUT_S} s: {self.reports}"
            deadline_s = self.observer.next_deadline_s()
            wait_s = 0.1 if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            ready, _, _ = select.select([self._told], [], [], min(wait_s, 1.0))
            if ready and (line := self._told.readline()):
                rank, code = json.loads(line)
                self.codes[rank] = code
                self.observer.ended(rank, code)
            self.reports += self.observer.tick()

    def report(self, *parts: str) -> str:
        """Wait for a report that holds all these texts."""
        self.until(lambda: any(all(part in report for part in parts) for report in self.reports))
        return next(report for report in self.reports if all(part in report for part in parts))

    def place(self, source: str) -> str:
        """Name the last line of the script that holds a text."""
        lines = (self.folder / "script.py").read_text().splitlines()
        return f"script.py:{max(number for number, line in enumerate(lines, 1) if source in line)}"

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._job, signal.SIGKILL)
        self._told.read()  # to the end, which is that of all that can write
        self._told.close()
        self.observer.close()


@pytest.fixture
def watch(tmp_path: Path, host: Channel) -> Iterator[Watch]:
    watch = Watch(tmp_path, host)
    yield watch
    watch.close()


def test_a_rank_that_loops_is_named_with_its_line(watch):
    watch.start("""
def validate():
    while True:
        pass
init()
dist.all_reduce(torch.ones(4, 4))
if rank == 1:
    validate()
dist.all_reduce(torch.ones(4, 4))
""")
    report = watch.report("unisono: rank 0 has waited", "in all_reduce for rank 1")
    place = watch.place("all_reduce")
    assert f"all_reduce(float32[4, 4], sum)  at {place}" in report
    assert "rank 1: computing" in report and "in validate" in report
    stacks = render_stacks(watch.observer.snapshot(wait_s=10), now_ns=time.monotonic_ns(), folder=str(watch.folder))
    assert "in validate" in stacks and f"in all_reduce(float32[4, 4], sum) at {place}" in stacks
    assert watch.observer.has_met()


def test_a_mismatch_is_named_at_once_and_ends_the_job_if_asked(watch):
    watch.start(
        """
init()
tp = dist.new_group(group_desc="tp")
dist.barrier(tp)
if rank == 0:
    dist.all_reduce(torch.ones(4, 4), group=tp)
else:
    dist.broadcast(torch.ones(4, 4), 0, group=tp)
    dist.barrier(tp)
""",
        hang_report_s=1000,
        hang_abort_s=2,
    )
    report = watch.report("rank 1 calls broadcast where rank 0 calls all_reduce (collective 2 of the group 'tp')")
    assert f"rank 0: all_reduce(float32[4, 4], sum)  at {watch.place('all_reduce')}" in report
    assert f"rank 1: broadcast(float32[4, 4], root 0)  at {watch.place('broadcast')}" in report
    watch.until(lambda: watch.observer.abort is not None)
    assert "--hang-abort is 2 s" in watch.observer.abort
    assert "(collective 2 of the group 'tp')" in watch.observer.explain()


def test_a_stopped_rank_is_named_with_its_last_call(watch):
    watch.start("""
init()
while True:
    dist.all_reduce(torch.ones(4))
    time.sleep(0.01)
""")
    watch.until(watch.observer.has_met)
    os.kill(watch.pids[1], signal.SIGSTOP)
    report = watch.report("for rank 1", "rank 1: stopped")
    assert f"kill -CONT {watch.pids[1]}" in report and f"at {watch.place('all_reduce')}" in report


def test_reductions_of_ddp_are_seen_too(watch):
    watch.start("""
init()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
for _ in range(3):
    model(torch.ones(2, 3)).sum().backward()
if rank == 1:
    time.sleep(1000)
model(torch.ones(2, 3)).sum().backward()
""")
    report = watch.report("unisono: rank 0 has waited", "in all_reduce for rank 1")
    assert f"all_reduce(float32[12])  at {watch.place('backward')}" in report
    assert "time.sleep(1000)" in report


def test_a_worker_of_a_loader_is_shown(watch):
    watch.start("""
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == 5 and rank == 1:
            time.sleep(1000)
        return index
init()
for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1):
    dist.all_reduce(batch)
""")
    report = watch.report("for rank 1", "its child process")
    assert "rank 1: waiting for its DataLoader" in report
    assert "in __getitem__\n          time.sleep(1000)" in report


def test_ranks_that_never_make_the_group_are_named(watch):
    watch.start("""
if rank == 1:
    time.sleep(1000)
init()
""")
    report = watch.report("rank 0 has waited", "in init_process_group for rank 1")
    assert "time.sleep(1000)" in report
    assert not watch.observer.has_met()


def test_a_rank_that_stays_and_does_nothing_when_the_others_have_ended_is_shown_once(watch):
    watch.start(
        """
import threading
init()
dist.barrier()
if rank == 1:
    while not os.path.exists(sys.argv[0] + ".go"):  # it computes, so nothing is said
        compute()
    threading.Event().wait()
""",
        ranks=3,
        hang_report_s=1.0,
    )
    watch.until(lambda: watch.codes == {0: 0, 2: 0})
    end_s = time.monotonic() + 2.5
    watch.until(lambda: time.monotonic() > end_s)
    assert watch.reports == []
    (watch.folder / "script.py.go").touch()
    report = watch.report("ranks 0, 2 ended", "rank 1 has done nothing since")
    assert f"{watch.place('wait()')}" in report and "threading.Event().wait()" in report
    end_s = time.monotonic() + 2.5
    watch.until(lambda: time.monotonic() > end_s)
    assert len(watch.reports) == 1


def test_ranks_of_which_none_does_anything_are_shown_once_and_go_on(watch):
    watch.start(
        """
import threading
if rank == 1:
    while not os.path.exists(sys.argv[0] + ".go"):
        print("still here", flush=True, file=sys.stderr)
        time.sleep(0.1)
lock = threading.Lock()
lock.acquire()
lock.acquire()
""",
        hang_report_s=1.0,
        hang_abort_s=1.5,
    )
    watch.until(lambda: "still here" in (watch.folder / "stderr").read_text())
    end_s = time.monotonic() + 2.5
    watch.until(lambda: time.monotonic() > end_s)
    assert watch.reports == []  # one of them prints
    (watch.folder / "script.py.go").touch()
    report = watch.report("ranks 0-1 have done nothing for", "no CPU time, no output, no I/O")
    assert f"ranks 0-1: waiting\n    {watch.place('lock.acquire()')}\n        lock.acquire()\n" in report
    end_s = time.monotonic() + 2.5
    watch.until(lambda: time.monotonic() > end_s)
    assert len(watch.reports) == 1 and watch.observer.abort is None


def test_a_server_that_waits_for_workers_is_left_in_peace(watch):
    watch.start(
        """
init()
buffer = torch.ones(3)
if rank == 0:
    for _ in range(2):
        dist.recv(buffer)
else:
    end_s = time.monotonic() + 1.5 * rank
    while time.monotonic() < end_s:
        compute()
    dist.send(buffer, 0)
""",
        ranks=3,
    )
    watch.until(lambda: len(watch.codes) == 3)
    assert watch.codes == {0: 0, 1: 0, 2: 0}
    assert not [report for report in watch.reports if "recv" in report]


def test_receives_that_wait_for_each_other_are_reported_once_and_again_later(watch):
    watch.start("""
init()
dist.recv(torch.ones(3), 1 - rank)
""")
    words = ("rank 0 has waited", "in recv for rank 1", "rank 1 has waited", "in recv for rank 0")
    first = watch.report(*words, "They wait for each other.")
    seen = len(watch.reports)
    watch.until(lambda: len(watch.reports) > seen)
    assert watch.reports[-1] != first  # it has taken longer by now
    assert "They wait for each other." in watch.reports[-1]


def test_nothing_is_said_when_reports_are_off(watch):
    watch.start(
        """
init()
if rank == 1:
    time.sleep(3)
dist.barrier()
""",
        hang_report_s=0,
    )
    watch.until(lambda: len(watch.codes) == 2)
    assert watch.reports == [] and watch.observer.abort is None
    assert watch.observer.next_deadline_s() is None


def test_a_new_generation_starts_with_empty_pages(watch):
    watch.start("init()\ndist.barrier()\n")
    watch.until(lambda: len(watch.codes) == 2)
    assert watch.observer.has_met()
    for rank in range(2):
        for file in watch.observer.files(rank):
            os.close(file)
    assert not watch.observer.has_met(wait_s=0)
    assert watch.observer.failure(0) is None and watch.observer.crash(0) == ""
