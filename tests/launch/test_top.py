"""`unisono top` shows the ranks of a running job in a terminal of any size, and leaves both as they were."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from unisono.cli.top import top
from unisono.launch.control import ask

SLOW = """
    import time
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    while True:
        if dist.get_rank() == 1:
            time.sleep(0.3)
        dist.all_reduce(torch.ones(3))
"""


@contextmanager
def running(launcher, *arguments):
    job = launcher.start("run", *arguments)
    try:
        until(lambda: (ask(job.pid, {"ask": "job"}) or {"running": 0})["running"] == int(arguments[1]))
        yield job
        assert job.poll() is None, "the job was disturbed"
    finally:
        job.terminate()
        job.communicate(timeout=60)


def until(done, show=str):
    """Wait until something holds; if it does not, show what there is."""
    deadline_s = time.monotonic() + 100
    while not done():
        assert time.monotonic() < deadline_s, show()
        time.sleep(0.05)


def test_one_picture_is_printed_where_there_is_no_terminal(warm_launcher):
    def calls(pid):
        return [each["doing"] for each in ask(pid, {"ask": "top"})["activity"]]

    with running(warm_launcher, "-n", "2", warm_launcher.write("train.py", SLOW)) as job:
        until(lambda: sum("all_reduce" in call for call in calls(job.pid)) == 2)
        result = CliRunner().invoke(top, [str(job.pid)])
        assert (result.exit_code, result.exception) == (0, None)
        head, _, columns, *ranks = result.stdout.splitlines()
    assert head.startswith(f"train.py (job {job.pid}) · 2 ranks · ")
    assert columns.split() == ["RANK", "STATE", "CPU", "MEMORY", "WAITS", "CALL"]
    line = 1 + SLOW.splitlines().index("        dist.all_reduce(torch.ones(3))")
    for number, row in enumerate(ranks[:2]):
        assert row.split()[0] == str(number)
        assert row.endswith(f" all_reduce at train.py:{line}")
    assert ranks[-1].startswith("slowest: rank 1, ")


LOOP = """
    import time
    import unisono

    with unisono.RunLog(None, steps=9000) as log:
        while True:
            time.sleep(0.02)
            log.step(loss=0.5, samples=64, lr=0.125)
"""


def test_a_loop_with_a_run_log_is_shown_with_the_time_that_is_left(warm_launcher):
    with running(warm_launcher, "-n", "1", warm_launcher.write("train.py", LOOP)) as job:
        until(lambda: ask(job.pid, {"ask": "top"})["times"])
        result = CliRunner().invoke(top, [str(job.pid)])
    assert (result.exit_code, result.exception) == (0, None)
    assert re.fullmatch(r"step of [\d.]+ ms: data 0 %, compute 100 %", result.stdout.splitlines()[2])
    assert re.fullmatch(
        r"step \d+ of 9000 · loss 0\.5000 · lr 0\.125 · [\d,.k]+ samples/s · 0:0\d:\d\d left",
        result.stdout.splitlines()[1],
    )


class Tmux:
    """A terminal, of its own server, in which a shell runs."""

    def __init__(self, folder):
        self._command = ["tmux", "-f", "/dev/null", "-S", str(folder / "tmux")]

    def do(self, *arguments):
        return subprocess.run([*self._command, *arguments], check=True, capture_output=True, text=True).stdout

    @property
    def lines(self):
        return self.do("capture-pane", "-p").splitlines()

    @property
    def ranks(self):
        """The numbers at the beginning of lines."""
        return [line.split()[0] for line in self.lines if line.split() and line.split()[0].isdigit()]

    def terminate(self, command):
        """Send SIGTERM to the program in the terminal whose command line ends so."""
        shell = self.do("display-message", "-p", "#{pane_pid}").strip()
        found = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
        lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in found}
        (pid,) = [pid for pid, line in lines.items() if line.strip().endswith(command)]
        os.kill(pid, signal.SIGTERM)

    def until(self, done):
        until(done, show=lambda: "\n".join(self.lines))

    def shows(self, text):
        return any(text in line for line in self.lines)


@pytest.fixture
def tmux(tmp_path):
    terminal = Tmux(tmp_path)
    terminal.do("new-session", "-d", "-x", "80", "-y", "24", "env", "PS1=$ ", "sh")
    server = int(terminal.do("display-message", "-p", "#{pid}"))
    yield terminal
    terminal.do("kill-server")
    until(lambda: not Path(f"/proc/{server}").exists())


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_a_terminal_of_any_size_shows_what_fits_and_is_left_as_it_was(warm_launcher, tmux):
    with running(warm_launcher, "-n", "64", "--no-python", shutil.which("sleep"), "1000") as job:
        command = f"{sys.executable} -m unisono top {job.pid}; echo left with $?; stty -a | grep -o '.icanon'"
        tmux.do("send-keys", command, "Enter")
        tmux.until(lambda: tmux.shows("ranks 0-19 of 64: scroll with j and k"))
        assert tmux.lines[0].startswith(f"sleep (job {job.pid}) · 64 ranks · ")
        tmux.do("send-keys", "j")
        tmux.until(lambda: tmux.shows("ranks 1-20 of 64"))
        for width, height, last in ((200, 60, 56), (30, 6, 2), (80, 24, 20)):
            tmux.do("resize-window", "-x", str(width), "-y", str(height))
            tmux.until(lambda last=last: tmux.shows(f"ranks 1-{last} of 64"))
            assert tmux.lines[0].startswith("sleep (job ")
        tmux.do("send-keys", "q")
        tmux.until(lambda: tmux.shows("left with 0") and tmux.shows(" icanon"))
        assert not tmux.shows("RANK")
        tmux.do("send-keys", f"clear; {command}", "Enter")
        tmux.until(lambda: tmux.shows("RANK"))
        tmux.do("send-keys", "C-c")
        tmux.until(lambda: tmux.shows("left with 0") and tmux.shows(" icanon"))
        assert not tmux.shows("RANK")
        tmux.do("send-keys", f"clear; {command}", "Enter")
        tmux.until(lambda: tmux.shows("RANK"))
        tmux.terminate(f"unisono top {job.pid}")
        tmux.until(lambda: tmux.shows("left with 0") and tmux.shows(" icanon"))
        assert not tmux.shows("RANK")


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.soak), 8])
def test_a_few_ranks_fit_a_terminal_without_scrolling(warm_launcher, tmux, ranks):
    with running(warm_launcher, "-n", str(ranks), "--no-python", shutil.which("sleep"), "1000") as job:
        tmux.do("send-keys", f"{sys.executable} -m unisono top {job.pid}; echo left with $?", "Enter")
        for width, height in ((80, 24), (200, 60), (80, 24)):
            tmux.do("resize-window", "-x", str(width), "-y", str(height))
            tmux.until(lambda: len(tmux.ranks) == ranks)
            assert tmux.ranks == [str(number) for number in range(ranks)]
            assert not tmux.shows("scroll with")
        tmux.do("send-keys", "q")
        tmux.until(lambda: tmux.shows("left with 0"))
