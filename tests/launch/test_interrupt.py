"""However a job ends, it ends as a whole, quietly, and leaves nothing."""

import os
import re
import secrets
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from printed import ranks_of

WAIT = """
    import time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    print("up")
    while True:
        dist.all_reduce(torch.ones(1))
"""


@pytest.fixture
def launcher(warm_launcher):
    """Not a fresh one: that matters to the tests that ask for it."""
    return warm_launcher


def start(launcher, source, *options, ranks=2):
    """Start a job and wait until every rank has printed a line."""
    job = launcher.start("run", "-n", str(ranks), *options, launcher.write("script.py", source))
    return job, read_lines(job, ranks)


def read_lines(job, ranks):
    """Read until every rank has printed a line, alone or together with others."""
    lines, seen = [], set()
    while len(seen) < ranks:
        lines.append(job.stdout.readline().decode())
        assert lines[-1], "the job has ended"
        seen |= ranks_of(lines[-1])
    return lines


def wait_for_processes(launcher, number):
    """Wait until so many run: one that is just executing its program cannot be recognised."""
    deadline_s = time.monotonic() + 30
    while len(launcher.processes()) != number:
        assert time.monotonic() < deadline_s


def finish(job):
    out, err = job.communicate(timeout=60)
    return out.decode(), err.decode(), job.returncode


@pytest.mark.parametrize(
    "fixture", ["warm_launcher", pytest.param("fresh_launcher", marks=pytest.mark.soak)], ids=["warm", "fresh"]
)
def test_ctrl_c_is_quiet(request, fixture):
    job, _ = start(request.getfixturevalue(fixture), WAIT)
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
    assert set().union(*map(ranks_of, out.splitlines())) == {0, 1} and "saved" in out
    assert (err, code) == ("unisono: interrupted; 2 ranks ended\n", 130)


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
    assert all(line.endswith("] no\n") for line in read_lines(job, 2))
    job.send_signal(signal.SIGINT)
    assert finish(job) == ("", "unisono: interrupted; 2 ranks ended\n", 130)


def test_ranks_that_have_only_just_started_end_with_the_job(launcher):
    # Rank 0 fails at once, while the last ranks are still being forked.
    result = launcher.run_script("import os, time\nif os.environ['RANK'] == '0': os._exit(3)\ntime.sleep(100)", ranks=8)
    assert result.stderr.startswith("unisono: rank 0 exited with code 3\n")
    assert result.returncode == 3


def test_ctrl_c_before_there_are_ranks(launcher):
    # The preloaded module interrupts the agent while the fork server still imports.
    launcher.write("early.py", "import os, signal, time\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(100)")
    launcher.environment["PYTHONPATH"] = str(launcher.folder)
    result = launcher.run("run", "-n", "2", "--preload", "early", launcher.write("script.py", "print('ran')"))
    assert (result.stdout, result.stderr, result.returncode) == ("", "unisono: interrupted\n", 130)


EVERYTHING = """
    import os, socket, subprocess, time
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    dist.init_process_group("gloo")
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    listener = socket.create_server(("127.0.0.1", 0))
    batches = iter(DataLoader(list(range(1000)), batch_size=4, num_workers=2))
    next(batches)
    dist.barrier()
    print(listener.getsockname()[1], os.environ["MASTER_PORT"])
    time.sleep(1000)
"""


def traces(launcher, job, lines):
    """Collect what a running job has outside of its processes: shared memory, ports, its name for `unisono ps`."""
    ours = launcher.processes()
    mapped = set()
    for pid in ours:
        with suppress(OSError):  # it has just ended
            mapped |= set(re.findall(r"/dev/shm/\S+$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE))
    makers = tuple(f"torch_{pid}_" for pid in ours)
    named = {str(path) for path in Path("/dev/shm").iterdir() if path.name.startswith(makers)}
    ports = {int(port) for line in lines for port in re.findall(r"\d+", line.partition("] ")[2])}
    return mapped | named, ports, f"@unisono/{os.getuid()}/{job.pid}"


def assert_no_trace(launcher, found):
    """Check that all of it is gone, and that the temporary folder is empty."""
    files, ports, name = found
    assert launcher.processes() == []
    assert [path for path in files if Path(path).exists()] == []
    assert list(Path(launcher.environment["TMPDIR"]).iterdir()) == []
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if " 0A " in line]
    assert not {int(address.rpartition(":")[2], 16) for address in listening} & ports
    assert name not in Path("/proc/net/unix").read_text().split()


@pytest.fixture
def temporary(launcher):
    """Give the job a temporary folder of its own; its path is short, since torch makes sockets in it."""
    with tempfile.TemporaryDirectory(prefix="u") as folder:
        launcher.environment["TMPDIR"] = folder
        yield


@pytest.mark.parametrize(
    ("signum", "code", "verdict"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "SIGTERM received"),
        (signal.SIGHUP, 129, "SIGHUP received"),
        pytest.param(signal.SIGQUIT, 131, "SIGQUIT received", marks=pytest.mark.soak),
    ],
)
@pytest.mark.usefixtures("temporary")
def test_a_signal_leaves_nothing(launcher, signum, code, verdict):
    job, lines = start(launcher, EVERYTHING)
    found = traces(launcher, job, lines)
    assert len(found[1]) == 3
    job.send_signal(signum)
    assert finish(job) == ("", f"unisono: {verdict}; 2 ranks ended\n", code)
    assert_no_trace(launcher, found)


def kill_launcher(launcher):
    """Kill the launcher of 4 ranks with 2 workers each. Returns: after how many seconds nothing was left."""
    job, lines = start(launcher, EVERYTHING, ranks=4)
    found = traces(launcher, job, lines)
    wait_for_processes(launcher, 1 + 1 + 1 + 4 * (1 + 2 + 2))  # agent, fork server, store; workers and sleepers
    begin_s = time.monotonic()
    job.kill()
    assert launcher.wait_until_gone() == []
    took_s = time.monotonic() - begin_s
    job.communicate()
    assert_no_trace(launcher, found)
    return took_s


@pytest.mark.parametrize("attempt", [0, *(pytest.param(i, marks=pytest.mark.soak) for i in (1, 2))])
@pytest.mark.usefixtures("temporary")
def test_a_killed_launcher_leaves_nothing(launcher, attempt):
    kill_launcher(launcher)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("temporary")
def test_a_second_after_the_launcher_was_killed_nothing_is_left(launcher):
    times_s = [kill_launcher(launcher) for _ in range(50)]
    print(f"50 tries: at most {max(times_s):.3f} s, median {sorted(times_s)[25]:.3f} s")
    assert max(times_s) <= 1


SHARING = """
    import multiprocessing, os, signal, time
    from multiprocessing.shared_memory import SharedMemory
    import torch, torch.multiprocessing
    from torch.utils.data import DataLoader

    def end(*_):
        # As on a machine with so much to do that they do not get to run in time.
        from unisono.launch.linux import descendants
        for pid in descendants(os.getpid()):
            os.kill(pid, signal.SIGKILL)
        os._exit(1)

    if __name__ == "__main__":
        torch.multiprocessing.set_sharing_strategy("file_system")
        block = SharedMemory(create=True, size=64)
        otherwise = {otherwise}
        batches = iter(DataLoader(list(range(1000)), num_workers=1))
        kept = [next(each) for each in (batches, otherwise)]
        signal.signal(signal.SIGINT, {at_the_end})
        lock = getattr(kept[1], "_semlock", None)
        print(f"{{block.name}} up", lock.name if lock else "")
        time.sleep(1000)
"""
A_SPAWNED_LOADER = "iter(DataLoader(list(range(1000)), num_workers=1, multiprocessing_context='spawn'))"
LOCKS = "map(multiprocessing.get_context('spawn').Semaphore, range(9))"


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
@pytest.mark.usefixtures("temporary")
def test_shared_memory_with_a_name_is_removed_when_the_launcher_is_killed(launcher, method):
    source = SHARING.format(otherwise=A_SPAWNED_LOADER, at_the_end="signal.SIG_DFL")
    job, lines = start(launcher, source, "--start-method", method, ranks=1)
    files, _, name = traces(launcher, job, lines)
    kinds = {Path(path).name.partition("_")[0].partition("-")[0] for path in files}
    assert kinds == {"psm", "sem.mp", "torch"}
    job.kill()
    assert launcher.wait_until_gone() == []
    job.communicate()
    assert_no_trace(launcher, (files, set(), name))


@pytest.mark.usefixtures("temporary")
def test_shared_memory_is_removed_also_when_its_helpers_have_been_killed(launcher):
    job, lines = start(launcher, SHARING.format(otherwise=LOCKS, at_the_end="end"), ranks=1)
    files, _, name = traces(launcher, job, lines)
    lock = Path(f"/dev/shm/sem.{lines[0].split()[-1].removeprefix('/')}")
    assert lock.exists()  # a process that has made it maps it under another name, which is gone
    files.add(str(lock))
    others = Path(f"/dev/shm/psm_{secrets.token_hex(4)}")
    others.touch()
    try:
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=60)
        assert others.exists()
    finally:
        others.unlink()
    assert_no_trace(launcher, (files, set(), name))


def test_ranks_may_save_after_sigterm_with_their_workers(launcher):
    job, _ = start(
        launcher,
        """
        import signal, sys, time
        from torch.utils.data import DataLoader
        batches = iter(DataLoader(list(range(100)), batch_size=10, num_workers=2, prefetch_factor=1))
        def save(*_):
            print("saved", sum(int(batch.sum()) for batch in batches))
            sys.exit()
        next(batches)
        signal.signal(signal.SIGTERM, save)
        print("up")
        while True:
            time.sleep(100)
        """,
    )
    job.send_signal(signal.SIGTERM)
    out, err, code = finish(job)
    assert {rank for line in out.splitlines() for rank in ranks_of(line)} == {0, 1}
    assert all(line.endswith(f"] saved {sum(range(10, 100))}") for line in out.splitlines())
    assert (err, code) == ("unisono: SIGTERM received; 2 ranks ended\n", 143)


def test_a_rank_that_does_not_end_is_killed_after_the_timeout(launcher):
    job, _ = start(
        launcher,
        """
        import os, signal, time
        if os.environ["RANK"] == "1":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up")
        time.sleep(1000)
        """,
        "--shutdown-timeout",
        "2",  # rank 0 ends within that on any machine
    )
    job.send_signal(signal.SIGTERM)
    lines = ["unisono: rank 1 did not end within 2 s; killed", "unisono: SIGTERM received; 2 ranks ended", ""]
    assert finish(job) == ("", "\n".join(lines), 143)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_rank_ends_with_the_job(launcher, signum):
    source = "import os, time\nprint(os.getpid())\ntime.sleep(1000)"
    job, lines = start(launcher, source, "--shutdown-timeout", "1000")
    (stopped,) = [int(line.split()[1]) for line in lines if line.startswith("[1] ")]
    os.kill(stopped, signal.SIGSTOP)
    job.send_signal(signum)
    _, err, code = finish(job)
    assert code == 128 + signum
    assert len(err.splitlines()) == 1


FAMILY = """
    import os, subprocess, sys, time
    # One child in the rank's process group, one in a session of its own.
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("up")
    time.sleep({seconds})
"""


@pytest.mark.soak  # of a warm launcher, the same is above
def test_a_killed_agent_takes_everything_with_it(fresh_launcher):
    job, _ = start(fresh_launcher, FAMILY.format(seconds=100))
    wait_for_processes(fresh_launcher, 1 + 1 + 1 + 2 + 4)
    job.kill()
    assert fresh_launcher.wait_until_gone() == []
    job.communicate()


@pytest.mark.parametrize("spared", ["agent", "store", "server"])
def test_each_two_of_the_launchers_processes_can_be_killed_and_nothing_is_left(launcher, spared):
    job, _ = start(launcher, FAMILY.format(seconds=100))
    wait_for_processes(launcher, 1 + 1 + 1 + 2 + 4)
    store = child_of(job.pid)
    pids = {"agent": job.pid, "store": store, "server": child_of(store)}
    del pids[spared]
    for pid in pids.values():  # a stopped one does nothing between the two kills
        os.kill(pid, signal.SIGSTOP)
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    assert launcher.wait_until_gone() == []
    job.communicate()


@pytest.mark.parametrize("stopped", ["store", "server"])
def test_a_stopped_process_of_the_launcher_does_not_keep_a_job_from_ending(launcher, stopped):
    job, _ = start(launcher, FAMILY.format(seconds=100))
    store = child_of(job.pid)
    os.kill(store if stopped == "store" else child_of(store), signal.SIGSTOP)
    job.send_signal(signal.SIGINT)
    assert finish(job) == ("", "unisono: interrupted; 2 ranks ended\n", 130)
    assert launcher.processes() == []


def test_what_goes_on_printing_when_its_rank_has_ended_does_not_keep_the_job(launcher):
    result = launcher.run_script("import subprocess\nprint('done')\nsubprocess.Popen(['yes', 'y' * 4000])", ranks=1)
    assert (result.stdout[:9], result.stderr, result.returncode) == ("[0] done\n", "", 0)
    assert launcher.processes() == []


def test_what_ranks_leave_behind_ends_with_the_job(launcher):
    result = launcher.run_script(FAMILY.format(seconds=0))
    assert (result.returncode, result.stderr) == (0, "")
    assert launcher.processes() == []


def child_of(pid):
    """Find the first child of a process: of the agent, the process of the store; of that, the fork server."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def test_a_killed_fork_server_is_named_and_takes_everything_with_it(launcher):
    job, _ = start(launcher, FAMILY.format(seconds=100))
    os.kill(child_of(child_of(job.pid)), signal.SIGKILL)
    out, err, code = finish(job)
    assert (out, err, code) == ("", "unisono: the fork server was killed by SIGKILL, and the job with it\n", 1)
    assert launcher.processes() == []


def test_the_loss_of_the_store_ends_the_job(launcher):
    job, _ = start(launcher, "import time\nprint('up')\ntime.sleep(100)")
    os.kill(child_of(job.pid), signal.SIGKILL)
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
