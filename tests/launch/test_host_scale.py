"""`unisono scale` changes the number of ranks of a job on several hosts, and no bit of its result."""

import os
import re
import signal
import subprocess
import time

import pytest
from host_network import Hosts, finish
from host_training import EARLY, TRAIN, await_line, go_on, hold, sha_of

HINDERED = TRAIN.replace(
    "torch.manual_seed(3)",
    """
if os.path.exists("slow"):
    time.sleep(2)
if os.path.exists("broken"):
    raise RuntimeError("no way")
torch.manual_seed(3)""",
)


def start(
    hosts: Hosts,
    count: int,
    *,
    ranks: int = 1,
    pause_s: float = 0.5,
    nnodes: str = "",
    flags: tuple[str, ...] = (),
    script: str = TRAIN,
) -> list[subprocess.Popen[bytes]]:
    """Start a job, and wait until its last rank has done two steps."""
    (hosts.folder / "script.py").write_text(script)
    flags = ("--nnodes", nnodes or str(count), *flags)
    jobs = [hosts.start_rank(host, "script.py", str(pause_s), ranks=ranks, flags=flags) for host in range(count)]
    await_line(jobs[-1], "working", stream="stdout")
    return jobs


def scale(hosts: Hosts, host: int, job: subprocess.Popen[bytes], ranks: int) -> subprocess.CompletedProcess[str]:
    return finish(hosts.start(host, "scale", str(job.pid), str(ranks)))


def test_the_number_of_ranks_grows_and_shrinks_on_all_hosts(hosts, calm_sha):
    hold(hosts)
    jobs = start(hosts, 2)
    hold(hosts)
    asked = hosts.start(1, "scale", str(jobs[1].pid), "4")
    go_on(hosts, new=2)
    grown = finish(asked)
    assert grown.returncode == 0, grown.stderr
    assert re.search(r"2 -> 4 ranks after step \d+; the run waited \d", grown.stdout)
    shrunk = scale(hosts, 0, jobs[0], 3)
    assert shrunk.returncode == 0, shrunk.stderr
    done = [finish(job) for job in jobs]
    assert [job.returncode for job in done] == [0, 0], done[0].stderr + done[1].stderr
    for job in done:
        assert re.search(r"unisono: 2 -> 4 ranks after step \d+, \d", job.stderr), job.stderr
        assert re.search(r"unisono: 4 -> 3 ranks after step \d+, \d", job.stderr), job.stderr
    assert sha_of(done[0].stdout) == calm_sha
    assert {"place: 0 3 2 2", "place: 2 3 2 2"} & set(re.findall("place: .*", done[0].stdout)), done[0].stdout
    assert "place: 1 3 2 1" in done[1].stdout


@pytest.mark.soak
def test_ranks_move_to_hosts_that_would_have_too_few(hosts, calm_sha):
    jobs = start(hosts, 2, ranks=2)
    for number, change in ((2, "4 -> 2"), (5, "2 -> 5"), (4, "5 -> 4")):
        done = scale(hosts, number % 2, jobs[number % 2], number)
        assert done.returncode == 0, done.stderr
        assert f"{change} ranks after step" in done.stdout
    ends = [finish(job) for job in jobs]
    assert [job.returncode for job in ends] == [0, 0], ends[0].stderr + ends[1].stderr
    assert sha_of(ends[0].stdout) == calm_sha
    assert len(re.findall(r"place: \d 4 2 2", ends[0].stdout)) == 2, ends[0].stdout
    assert len(re.findall(r"place: \d 4 2 2", ends[1].stdout)) == 2, ends[1].stdout


@pytest.mark.soak
def test_what_cannot_be_is_refused_with_the_reason(hosts, calm_sha):
    jobs = start(hosts, 2)
    for ranks, reason in (
        (0, "0 is no number of ranks: a job has at least one"),
        (1, "1 rank cannot be spread over 2 hosts, of which each needs one"),
        (7, "7 ranks are too many for 6 virtual ranks, of which each rank needs one"),
    ):
        for host in range(2):
            done = scale(hosts, host, jobs[host], ranks)
            assert done.returncode == 2
            assert f"keeps its 2 ranks: {reason}" in done.stderr
    same = scale(hosts, 1, jobs[1], 2)
    assert (same.returncode, "has 2 ranks already" in same.stdout) == (0, True)
    ends = [finish(job) for job in jobs]
    assert [job.returncode for job in ends] == [0, 0]
    assert sha_of(ends[0].stdout) == calm_sha


@pytest.mark.soak
def test_of_two_changes_at_once_one_is_refused(hosts, calm_sha):
    jobs = start(hosts, 2, script=HINDERED)
    (hosts.folder / "slow").touch()
    asked = [hosts.start(host, "scale", str(jobs[host].pid), str(3 + host)) for host in range(2)]
    done = [finish(process) for process in asked]
    assert sorted(each.returncode for each in done) == [0, 2], done
    refusal = next(each.stderr for each in done if each.returncode)
    assert re.search(r"a change (from 2 )?to [34] ranks is under way|which was asked for on another host", refusal)
    ends = [finish(job) for job in jobs]
    assert [job.returncode for job in ends] == [0, 0], ends[0].stderr + ends[1].stderr
    assert sha_of(ends[0].stdout) == calm_sha


@pytest.mark.soak
def test_a_new_rank_that_fails_on_its_way_changes_nothing(hosts, calm_sha):
    jobs = start(hosts, 2, script=HINDERED)
    (hosts.folder / "broken").touch()
    done = scale(hosts, 0, jobs[0], 4)
    assert done.returncode == 2
    assert re.search(r"keeps its 2 ranks: rank [23] raised RuntimeError before it had joined the others", done.stderr)
    (hosts.folder / "broken").unlink()
    again = scale(hosts, 1, jobs[1], 3)
    assert again.returncode == 0 or "have not ended yet" in again.stderr
    ends = [finish(job) for job in jobs]
    assert [job.returncode for job in ends] == [0, 0], ends[0].stderr + ends[1].stderr
    assert all("the job keeps its 2 ranks and does not get 4: rank" in job.stderr for job in ends)
    assert sha_of(ends[0].stdout) == calm_sha


@pytest.mark.soak
@pytest.mark.usefixtures("third_host")
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_host_that_is_lost_meanwhile_ends_the_change_and_not_the_run(hosts, calm_sha, lost):
    jobs = start(hosts, 3, nnodes="2:3", script=HINDERED, pause_s=0.6)
    (hosts.folder / "slow").touch()
    asker = (lost + 1) % 3
    asked = hosts.start(asker, "scale", str(jobs[asker].pid), "6")
    time.sleep(1)  # hosts start processes for new ranks, which take two seconds
    os.kill(jobs[lost].pid, signal.SIGKILL)
    (hosts.folder / "slow").unlink()
    done = finish(asked)
    ends = [finish(job) for host, job in enumerate(jobs)]
    text = "".join(job.stdout + job.stderr for job in ends)
    assert sorted(job.returncode for job in ends) == [-9, 0, 0], text
    assert sha_of(text) == calm_sha
    assert done.returncode == 2 and "was lost meanwhile" in done.stderr, done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("host", [0, 1])
def test_a_run_that_ends_meanwhile_ends_the_change(hosts, calm_sha, host):
    jobs = start(hosts, 2, script=HINDERED, pause_s=0.1)
    (hosts.folder / "slow").touch()
    done = scale(hosts, host, jobs[host], 3 + host)
    ends = [finish(job) for job in jobs]
    assert [job.returncode for job in ends] == [0, 0], ends[0].stderr + ends[1].stderr
    assert sha_of(ends[0].stdout) == calm_sha
    assert done.returncode == 2
    assert "the run has ended" in done.stderr or "has just ended" in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_meanwhile_is_replaced_and_the_number_changes(hosts, calm_sha, victim):
    told = f"print('pid', os.getpid(), flush=True) if os.environ['RANK'] == '{victim}' else None"
    script = HINDERED.replace("torch.manual_seed(3)", f"{told}\ntorch.manual_seed(3)")
    (hosts.folder / "script.py").write_text(script)
    jobs = [hosts.start_rank(host, "script.py", "0.6", ranks=1) for host in range(2)]
    pid = int(await_line(jobs[victim], "pid", stream="stdout").rpartition("pid")[2])
    await_line(jobs[1], "working", stream="stdout")
    (hosts.folder / "slow").touch()
    asked = hosts.start(0, "scale", str(jobs[0].pid), "4")
    time.sleep(1)
    (hosts.folder / "slow").unlink()
    os.kill(pid, signal.SIGKILL)
    done = finish(asked)
    ends = [finish(job) for job in jobs]
    assert done.returncode == 0, done.stderr + ends[0].stderr
    assert [job.returncode for job in ends] == [0, 0], ends[0].stderr + ends[1].stderr
    assert all(f"rank {victim} was killed by SIGKILL" in job.stderr for job in ends)
    assert sha_of(ends[0].stdout) == calm_sha


@pytest.mark.soak
@pytest.mark.usefixtures("third_host")
def test_a_host_joins_and_one_is_lost_after_a_change(hosts, calm_sha):
    jobs = start(hosts, 2, nnodes="2:3", pause_s=0.9, flags=("--rdzv-conf", "last_call_timeout=0.5"))
    assert scale(hosts, 1, jobs[1], 4).returncode == 0
    late = hosts.start_rank(2, "script.py", "0.9", ranks=2, flags=(*EARLY, "2:3"))
    told = await_line(jobs[1], "has joined")
    assert re.search(r"host 2, host2 \(10.97.0.3\), has joined with ranks 2-5, |has joined with rank", told), told
    os.kill(jobs[0].pid, signal.SIGKILL)
    ends = [finish(job) for job in (jobs[1], late)]
    text = "".join(job.stdout + job.stderr for job in ends)
    assert [job.returncode for job in ends] == [0, 0], told + text
    assert sha_of(text) == calm_sha
    finish(jobs[0])
