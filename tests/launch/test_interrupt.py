"""However a job ends, it ends as a whole, quietly, and leaves nothing."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

WAIT = """
    import time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    print("up")
    while True:
        dist.all_reduce(torch.ones(1))
"""


def start(launcher, source, *options, ranks=2):
    """Start a job and wait until every rank has printed a line."""
    job = launcher.start("run", "-n", str(ranks), *options, launcher.write("script.py", source))
    lines = [job.stdout.readline().decode() for _ in range(ranks)]
    return job, lines


def finish(job):
    out, err = job.communicate(timeout=60)
    return out.decode(), err.decode(), job.returncode


def test_ctrl_c_is_quiet(launcher):
    job, _ = start(launcher, WAIT)
    job.send_signal(signal.SIGINT)
    assert finish(job) == ("", "unisono: interrupted; 2 ranks ended\n", 130)


def test_ranks_may_clean_up_after_ctrl_c(launcher):
    job, _ = start(
        launcher,
        """
        import time
        try:
            print("up")
            time.sleep(100)
        except KeyboardInterrupt:
            print("saved")
        """,
    )
    job.send_signal(signal.SIGINT)
    out, err, code = finish(job)
    assert (sorted(out.splitlines()), err, code) == (
        ["[0] saved", "[1] saved"],
        "unisono: interrupted; 2 ranks ended\n",
        130,
    )


def test_a_second_ctrl_c_kills(launcher):
    job, _ = start(
        launcher,
        """
        import signal, time
        signal.signal(signal.SIGINT, lambda *_: print("no"))
        print("up")
        while True:
            time.sleep(100)
        """,
        "--shutdown-timeout",
        "1000",
    )
    job.send_signal(signal.SIGINT)
    assert sorted(job.stdout.readline() for _ in range(2)) == [b"[0] no\n", b"[1] no\n"]
    job.send_signal(signal.SIGINT)
    assert finish(job) == ("", "unisono: interrupted; 2 ranks ended\n", 130)


def test_ranks_that_have_only_just_started_end_with_the_job(launcher):
    # Rank 0 fails at once, while the last ranks are still being forked.
    result = launcher.run_script("import os, time\nif os.environ['RANK'] == '0': os._exit(3)\ntime.sleep(100)", ranks=8)
    assert (result.stderr, result.returncode) == ("unisono: rank 0 exited with code 3; ending the other 7 ranks\n", 3)


def test_ctrl_c_before_there_are_ranks(launcher):
    # The preloaded module interrupts the agent while the fork server still imports.
    launcher.write("early.py", "import os, signal, time\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(100)")
    launcher.environment["PYTHONPATH"] = str(launcher.folder)
    result = launcher.run("run", "-n", "2", "--preload", "early", launcher.write("script.py", "print('ran')"))
    assert (result.stdout, result.stderr, result.returncode) == ("", "unisono: interrupted\n", 130)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_end_of_the_session_ends_the_job(launcher, signum, code):
    job, _ = start(launcher, "import time\nprint('up')\ntime.sleep(100)")
    job.send_signal(signum)
    assert finish(job) == ("", f"unisono: {signum.name} received; 2 ranks ended\n", code)


FAMILY = """
    import os, subprocess, sys, time
    # One child in the rank's process group, one in a session of its own.
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("up")
    time.sleep({seconds})
"""


def test_a_killed_agent_takes_everything_with_it(launcher):
    job, _ = start(launcher, FAMILY.format(seconds=100))
    assert len(launcher.processes()) >= 1 + 1 + 1 + 2 + 4
    job.kill()
    assert launcher.wait_until_gone() == []
    job.communicate()


def test_what_ranks_leave_behind_ends_with_the_job(launcher):
    result = launcher.run_script(FAMILY.format(seconds=0))
    assert (result.returncode, result.stderr) == (0, "")
    assert launcher.processes() == []


def test_a_killed_fork_server_is_named_and_takes_everything_with_it(launcher):
    job, _ = start(launcher, FAMILY.format(seconds=100))
    server = int(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()[0])
    os.kill(server, signal.SIGKILL)
    out, err, code = finish(job)
    assert (out, err, code) == ("", "unisono: the fork server was killed by SIGKILL, and the job with it\n", 1)
    assert launcher.processes() == []


def test_the_loss_of_the_store_ends_the_job(launcher):
    job, lines = start(
        launcher,
        """
        import os, time
        print(os.getppid())
        time.sleep(100)
        """,
    )
    server = re.fullmatch(r"\[\d] (\d+)\n", lines[0])[1]
    # The store was forked before the ranks.
    store = int(Path(f"/proc/{server}/task/{server}/children").read_text().split()[0])
    os.kill(store, signal.SIGKILL)
    out, err, code = finish(job)
    assert (out, err, code) == (
        "",
        "unisono: the process of the job's store was killed by SIGKILL; ending the job\n",
        1,
    )


def test_a_job_holds_no_port_but_on_the_loopback_address(launcher):
    job, lines = start(launcher, "import os, time\nprint(os.environ['MASTER_PORT'])\ntime.sleep(100)")
    port = int(lines[0].split()[1])
    listening = {
        line.split()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
    }
    assert listening == {f"0100007F:{port:04X}"}
    job.terminate()
    finish(job)
    deadline_s = time.monotonic() + 30
    while f":{port:04X} 00000000:0000 0A" in Path("/proc/net/tcp").read_text():
        assert time.monotonic() < deadline_s
