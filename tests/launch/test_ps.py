"""`unisono ps` finds this user's running jobs; `unisono stacks` shows where their ranks are and disturbs nothing."""

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from printed import ranks_of
from unisono.cli import ps as commands
from unisono.errors import LaunchError
from unisono.launch import control

MEET = """
    import os, time
    import torch, torch.distributed as dist

    def compute():
        print(os.getpid())
        time.sleep(1000)

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(3))
    if os.environ["RANK"] == "1":
        compute()
    print(os.getpid())
    dist.barrier()
"""


@pytest.fixture
def launcher(warm_launcher):
    """Not a fresh one: that matters to the tests that ask for it."""
    return warm_launcher


@contextmanager
def running(launcher, *options, name="script.py", source=MEET, ranks=2):
    """Run a job, normally one whose rank 1 computes while the others wait. Gives its process and those of its ranks."""
    job = launcher.start("run", "-n", str(ranks), *options, launcher.write(name, source))
    try:
        pids = {}
        while len(pids) < ranks:
            line = job.stdout.readline().decode()
            assert line, job.stderr.read().decode()
            pids |= {rank: int(line.split()[1]) for rank in ranks_of(line)}
        yield job, [pids[rank] for rank in range(ranks)]
        assert job.poll() is None, "the job was disturbed"
    finally:
        job.terminate()
        job.communicate(timeout=60)


@pytest.fixture
def only(monkeypatch):
    """Leave only these jobs to be seen, of all that run on this machine."""

    def see(*agents):
        monkeypatch.setattr(commands, "running_jobs", lambda: sorted(set(control.running_jobs()) & set(agents)))

    return see


def call(command, *arguments):
    """Run a command in this process. Returns: the lines that it prints, or its complaint."""
    result = CliRunner().invoke(command, arguments)
    if isinstance(result.exception, LaunchError):
        return str(result.exception)
    assert result.exception is None, result.exception
    return result.output.splitlines()


def test_jobs_are_listed_side_by_side(launcher, only):
    with running(launcher, name="train.py") as (one, _), running(launcher, name="tune.py", ranks=3) as (other, _):
        only(one.pid, other.pid)
        head, *rows = call(commands.ps)
        assert head.split() == ["JOB", "NAME", "RANKS", "SINCE", "STEP", "LOSS", "ARGUMENTS", "DIRECTORY"]
        found = {(*row.split()[:3], row.split()[-1]) for row in rows}
        folder = str(launcher.folder)
        assert found == {(str(one.pid), "train.py", "2", folder), (str(other.pid), "tune.py", "3", folder)}
        complaint = call(commands.stacks)
        assert complaint.startswith("several jobs are running: name one of ")
        assert f"{one.pid} (train.py)" in complaint
        assert f"{other.pid} (tune.py)" in complaint
        complaint = call(commands.stacks, "no-such-job")
        assert complaint.startswith("no running job is called 'no-such-job'; running: ")
    assert not {one.pid, other.pid} & set(control.running_jobs())


def test_the_installed_command_finds_them_too(launcher, fresh_launcher):
    with running(launcher) as (job, _):
        listed = fresh_launcher.run("ps")
        # Tests that run beside this one stop their launchers, which then do not answer.
        silent = "(stopped)" in listed.stdout or "(no answer)" in listed.stdout
        assert (listed.returncode, listed.stderr) == (int(silent), "")
        (line,) = [line for line in listed.stdout.splitlines() if line.split()[0] == str(job.pid)]
        assert "script.py" in line
        shown = fresh_launcher.run("stacks", str(job.pid))
        assert (shown.returncode, shown.stderr) == (0, "")
        assert "compute" in shown.stdout
        missing = fresh_launcher.run("stacks", "no-such-job")
        assert (missing.returncode, missing.stdout) == (2, "")
        assert missing.stderr.startswith("unisono: no running job is called 'no-such-job'")


def test_no_job_is_no_error_for_ps(only):
    only()
    assert call(commands.ps) == ["no job of yours is running on this machine"]
    assert call(commands.stacks) == "no job of yours is running on this machine"


def until(done):
    """Wait until something holds."""
    deadline_s = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def line_of(text):
    return 1 + next(i for i, line in enumerate(MEET.splitlines()) if text in line)


ALONE = """
    import os, time

    def compute():
        print(os.getpid())
        time.sleep(1000)

    compute()
"""


def test_stacks_show_the_line_of_a_rank_that_is_a_new_interpreter(launcher, only):
    with running(launcher, "--start-method", "spawn", source=ALONE, ranks=1) as (job, _):
        only(job.pid)
        until(lambda: "script.py:6 in compute" in "\n".join(call(commands.stacks)))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_stacks_show_the_line_of_every_rank(launcher, only, method):
    options = ["--rdzv-id", f"exp.{os.getpid()}", "--start-method", method]
    with running(launcher, *options) as (job, pids):
        only(job.pid)
        # Ranks print before they come where they stay.
        until(lambda: "in barrier()" in (text := "\n".join(call(commands.stacks))) and "time.sleep(1000)" in text)
        for names in ([], [str(job.pid)], ["script.py"], [options[1]]):
            text = "\n".join(call(commands.stacks, *names))
            first, second = re.split("^rank 1: ", text.partition("rank 0: ")[2], flags=re.MULTILINE)
            assert f"in barrier() at script.py:{line_of('barrier')}" in first
            assert f"script.py:{line_of('sleep')} in compute" in second
            assert f"all_reduce(float32[3], sum) at script.py:{line_of('all_reduce')}" in second
        os.kill(pids[1], signal.SIGSTOP)
        until(lambda: Path(f"/proc/{pids[1]}/stat").read_text().rpartition(") ")[2].startswith("T"))
        text = "\n".join(call(commands.stacks))
        assert "rank 1: stopped" in text
        assert f"script.py:{line_of('all_reduce')}" in text.partition("rank 1: ")[2]


def test_a_job_whose_launcher_is_stopped_is_shown_as_such(launcher, only):
    with running(launcher) as (job, _):
        only(job.pid)
        os.kill(job.pid, signal.SIGSTOP)
        try:
            (row,) = call(commands.ps)[1:]
            assert row.split() == [str(job.pid), "(stopped)", *"-----", str(launcher.folder)]
            ps = subprocess.run([sys.executable, "-m", "unisono", "ps"], capture_output=True, timeout=60, check=False)
            assert ps.returncode == 1
            for names in ([], [str(job.pid)]):
                assert call(commands.stacks, *names).startswith(
                    f"job {job.pid} does not answer: its launcher is stopped"
                )
        finally:
            os.kill(job.pid, signal.SIGCONT)
        assert call(commands.ps)[1].split()[:3] == [str(job.pid), "script.py", "2"]


SWEPT = """
    import os, sys, time
    told = [
        '{"event": "epoch", "epoch": 2, "epochs": 5, "steps": 12, "run_steps": 60}',
        '{"event": "step", "epoch": 2, "step": 7, "total_steps": 32, "loss": %s}' % sys.argv[2],
    ]
    os.write(int(os.environ["UNISONO_EVENTS_FD"]), "".join(line + "\\n" for line in told).encode())
    time.sleep(1000)
"""


def test_jobs_of_a_sweep_are_told_apart_in_80_columns(launcher, only):
    script = launcher.write("train.py", SWEPT)
    losses = ("0.51234567", '"nan"')
    more = ["--data", "/somewhere/with/a/rather/long/path", "--seed", "0"]
    jobs = [launcher.start("run", script, "--lr", loss, *more) for loss in losses]
    try:
        only(*(job.pid for job in jobs))
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            answers = [control.ask(job.pid, {"ask": "job"}) for job in jobs]
            rows = [commands._row(answer) for answer in answers if answer is not None]
            if [row[5] != "-" for row in rows] == [True, True]:
                break
            time.sleep(0.02)
        assert [row[4:6] for row in rows] == [("32/60", "0.5123"), ("32/60", "nan")]
        wide = "\n".join(call(commands.ps))
        assert "--lr 0.51234567 --data /somewhere/with/a/rather/long/path --seed 0" in wide
        narrow = commands._table(rows, width=80)
        assert all(len(line) <= 80 for line in narrow)
        assert "… --lr 0.51234567 " in narrow[1]
        assert "nan" in narrow[2].split("…")[1]
    finally:
        for job in jobs:
            job.terminate()
        for job in jobs:
            job.communicate(timeout=60)


def connect(agent):
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.settimeout(30)
    end.connect(f"\0unisono/{os.getuid()}/{agent}")
    return end


def test_garbage_does_no_harm(launcher, only):
    with running(launcher) as (job, _):
        only(job.pid)
        for garbage in (
            b"\n",
            b"\xff\xfe\n",
            b"[" * 4000,
            b"7\n",
            b'{"ask": []}\n',
            b'{"ask": "all"}\n',
            b"x" * 100_000,
        ):
            with connect(job.pid) as end, suppress(BrokenPipeError, ConnectionResetError):
                end.sendall(garbage)
                received = end.recv(1000)
                assert received == b"" or json.loads(received) == {"error": "not understood"}
        silent = [connect(job.pid) for _ in range(40)]
        assert call(commands.ps)[1].split()[0] == str(job.pid)
        for end in silent:
            end.close()
        assert call(commands.ps)[1].split()[0] == str(job.pid)


@pytest.fixture
def agent():
    """A control socket in this process, and a function that serves it for a moment."""
    with selectors.DefaultSelector() as selector:
        end = control.Control(selector, lambda question: {"told": question})

        def serve(turns):
            for _ in range(turns):
                for key, _ in selector.select(1):
                    key.data()

        yield serve
        end.close()


def test_the_questions_of_another_user_are_not_heard(agent, monkeypatch):
    with connect(os.getpid()) as end:
        end.sendall(b'{"ask": "job"}\n')
        agent(2)
        assert json.loads(end.recv(1000)) == {"told": {"ask": "job"}}
    monkeypatch.setattr(control, "_user_of", lambda _: os.getuid() + 1)
    with connect(os.getpid()) as end:
        end.sendall(b'{"ask": "job"}\n')
        agent(1)
        with suppress(ConnectionResetError):
            assert end.recv(1000) == b""


@pytest.mark.usefixtures("agent")
def test_the_answers_of_another_user_are_not_believed(monkeypatch):
    monkeypatch.setattr(control, "_user_of", lambda _: os.getuid() + 1)
    assert control.ask(os.getpid(), {"ask": "job"}) is None


@pytest.mark.usefixtures("agent")
def test_an_agent_without_an_answer_is_not_waited_for():
    with pytest.raises(LaunchError, match=f"job {os.getpid()} did not answer within 0.1 s"):
        control.ask(os.getpid(), {"ask": "job"}, patience_s=0.1)
    assert control.ask(os.getpid() + 1_000_000_000, {"ask": "job"}) is None


def test_a_name_that_is_taken_does_not_stop_a_job():
    with selectors.DefaultSelector() as selector:
        first, second = (control.Control(selector, lambda question: question) for _ in range(2))
        assert os.getpid() in control.running_jobs()
        second.close()
        first.close()
    assert os.getpid() not in control.running_jobs()


BUSY = """
import os, selectors, sys, time
from unisono.launch.control import Control

busy_s = [2.5] if "foreign" not in sys.argv else []


def answer(question):
    time.sleep(busy_s.pop() if busy_s else 0)
    job = {"pid": os.getpid(), "name": "busy.py", "run_id": "r", "directory": "/"}
    job |= {"ranks": 1, "running": 1, "step": None}
    return job if "foreign" not in sys.argv else {"error": "not understood"}


selector = selectors.PollSelector()
control = Control(selector, answer)
print("listens", flush=True)
while True:
    for key, _ in selector.select():
        key.data()
"""


def test_a_job_whose_launcher_is_busy_is_waited_for():
    launcher = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout.readline() == "listens\n"
        assert commands.find_job(str(launcher.pid))["name"] == "busy.py"
    finally:
        launcher.kill()
        launcher.communicate()


def test_a_job_of_another_version_that_does_not_understand_does_not_hide_the_others():
    launcher = subprocess.Popen([sys.executable, "-c", BUSY, "foreign"], stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout.readline() == "listens\n"
        result = CliRunner().invoke(commands.ps, standalone_mode=False)
        # Numbers of other jobs on this machine may be longer.
        assert re.search(rf"^{launcher.pid} +\(no answer\)", result.stdout, re.MULTILINE), result.stdout
        assert result.return_value == 1
        with pytest.raises(LaunchError, match=f"job {launcher.pid} does not answer"):
            commands.find_job(str(launcher.pid))
    finally:
        launcher.kill()
        launcher.communicate()
