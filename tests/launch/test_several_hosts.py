"""Jobs on several hosts, which are network namespaces: they meet, share a failure's cause, and notice who is lost."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from host_network import Hosts, finish
from host_training import await_line

from printed import ranks_of

TRAIN = """
import torch
import torch.nn.functional as F
import unisono
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(6, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, seed=5)
for epoch in trainer.epochs(2):
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch)
trainer.print("weights sha256:", trainer.digest())
job = unisono.init()
trainer.print("backend:", job.backend, job.num_nodes, job.world_size)
"""

FACTS = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
         "ROLE_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"]
lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
listening = sorted({line[1].partition(":")[0] for line in lines if line[3] == "0A"})
facts = {name: os.environ.get(name) for name in names}
sys.stdout.write(json.dumps({**facts, "total": total.item(), "listening": listening}) + "\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""

TRAFFIC = """
import re
from pathlib import Path
import torch
import torch.nn.functional as F
import unisono

def sent():
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line)
    return int(line.partition(":")[2].split()[8])

torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(500, 700), torch.nn.Tanh(), torch.nn.Linear(700, 500))
data = torch.utils.data.TensorDataset(torch.randn(32, 500), torch.randint(0, 3, (32,)))
trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=4, seed=5)
counts = []
for epoch in trainer.epochs(1):
    for batch in trainer.batches(data, batch_size=4):
        trainer.step(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch)
        counts.append(sent())
trainer.print("ratio", (counts[-1] - counts[1]) / (len(counts) - 2) / sum(4 * p.numel() for p in model.parameters()))
"""

WORK = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(100000):
    dist.all_reduce(torch.ones(1))
    if step == 5 and dist.get_rank() == 0:
        print("working", flush=True)
    if step == 20 and dist.get_rank() == int(sys.argv[1]):
        os.kill(os.getpid(), 9)
    time.sleep(0.01)
"""


LOCKED = """
import threading
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
def save():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # for ever
if dist.get_rank() == 2:
    save()
dist.barrier()
"""

IDLE = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
open("fifo").read()
"""


def write(hosts: Hosts, source: str) -> str:
    (hosts.folder / "script.py").write_text(source)
    return "script.py"


def start_work(hosts: Hosts, *, dies: int = -1) -> list[subprocess.Popen[bytes]]:
    """Start a job of one rank on each of two hosts, and wait until it works."""
    started = [hosts.start_rank(host, write(hosts, WORK), str(dies), ranks=1) for host in range(2)]
    assert started[0].stdout is not None
    assert b"working" in started[0].stdout.readline()
    return started


def test_a_run_on_two_hosts_has_the_bits_of_a_run_on_one(hosts, run_ranks):
    two = hosts.run(write(hosts, TRAIN))
    assert [job.returncode for job in two] == [0, 0], two[0].stderr + two[1].stderr
    assert "backend: gloo 2 4" in two[0].stdout
    one = run_ranks(1, TRAIN)
    assert f"weights sha256: {one.sha()}" in two[0].stdout
    assert "[0] " in two[0].stdout and two[1].stdout == ""


def test_a_host_sends_no_more_than_in_a_ring_all_reduce_over_hosts(hosts):
    first = hosts.run(write(hosts, TRAFFIC))[0]
    assert first.returncode == 0, first.stderr
    ratio = float(first.stdout.rpartition("ratio ")[2])
    # A ring over 2 hosts sends the gradient once. Frames of 1514 bytes carry 1448 of it; the rest is acknowledgements.
    assert 0.9 < ratio < 1.1


@pytest.mark.soak
def test_with_rounds_a_host_sends_the_weights_once_in_a_round(hosts):
    source = TRAFFIC.replace("seed=5)", "seed=5, sync=unisono.DiLoCo(every=4))")
    source = source.replace("(counts[-1] - counts[1]) / (len(counts) - 2)", "(counts[7] - counts[3]) / 4")
    first = hosts.run(write(hosts, source))[0]
    assert first.returncode == 0, first.stderr
    ratio = float(first.stdout.rpartition("ratio ")[2])
    assert 0.9 / 4 < ratio < 1.1 / 4


def test_a_run_continues_where_rank_0_has_its_checkpoints_and_not_elsewhere(hosts):
    source = TRAIN.replace("seed=5)", "seed=5, directory='run')")
    folders = [hosts.folder / "0", hosts.folder / "1"]  # hosts that share no file system
    for folder in folders:
        folder.mkdir()
        (folder / "script.py").write_text(source)

    def run(flags: list[str]) -> list[subprocess.CompletedProcess[str]]:
        started = []
        for host in range(2):
            hosts.folder = folders[host]
            rank = flags[host]
            where = ("--node-rank", rank, "--rdzv-endpoint", f"host{flags.index('0')}:29500")
            started.append(hosts.start_rank(host, "script.py", ranks=1, flags=where))
        return [finish(process) for process in started]

    first = run(["0", "1"])
    assert [job.returncode for job in first] == [0, 0], first[0].stderr
    again = run(["0", "1"])
    assert "step 8" in again[0].stderr + again[0].stdout
    for job in run(["1", "0"]):
        assert job.returncode == 1
        assert "checkpoints up to step 8 in" in " ".join(job.stderr.split())
    assert not (folders[1] / "run" / "checkpoints").exists() or not list((folders[1] / "run" / "checkpoints").iterdir())


def test_ranks_find_their_places_and_only_their_hosts_address_is_listened_on(hosts, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # the other tests are without it
    jobs = hosts.run(write(hosts, FACTS), ranks=2)
    assert [job.returncode for job in jobs] == [0, 0], jobs[0].stderr + jobs[1].stderr
    facts = {}
    for host, job in enumerate(jobs):
        for line in job.stdout.splitlines():
            for rank in ranks_of(line):
                facts[rank] = json.loads(line.partition("] ")[2])
                assert facts[rank].pop("GROUP_RANK") == str(host)
    for rank in range(4):
        listening = facts[rank].pop("listening")
        own = {f"{host + 1:02X}00610A" for host in range(2)} | {"0100007F"}  # 10.97.0.N and 127.0.0.1, as in the kernel
        assert set(listening) <= own, listening
        assert facts[rank] == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 2),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_WORLD_SIZE": "2",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "4",
            "MASTER_ADDR": "10.97.0.1",
            "TORCHELASTIC_RUN_ID": "none",
            "total": 6.0,
        }


def test_a_killed_rank_ends_the_job_on_all_hosts_which_name_it(hosts):
    jobs = [finish(process) for process in start_work(hosts, dies=1)]
    assert [job.returncode for job in jobs] == [137, 137]
    assert "unisono: host 1, host1 (10.97.0.2): rank 1 was killed by SIGKILL; 1 rank ended" in jobs[0].stderr
    assert "unisono: rank 1 was killed by SIGKILL" in jobs[1].stderr


def test_a_killed_launcher_ends_the_job_on_the_other_host(hosts):
    jobs = start_work(hosts)
    begin_s = time.monotonic()
    os.kill(jobs[1].pid, signal.SIGKILL)
    first = finish(jobs[0])
    assert time.monotonic() - begin_s < 8
    assert first.returncode == 1
    # The rank may have lost its peer and ended before it is ended.
    assert re.search(r"unisono: host 1, host1 \(10.97.0.2\), its launcher was killed(; 1 rank ended)?\n", first.stderr)
    assert finish(jobs[1]).returncode == -signal.SIGKILL


def test_a_hang_is_reported_on_all_hosts_with_the_ranks_of_all_and_ends_the_job(hosts):
    flags = ("--hang-report", "1", "--hang-abort", "2")
    for process in [hosts.start_rank(host, write(hosts, LOCKED), ranks=2 - host, flags=flags) for host in range(2)]:
        job = finish(process)
        assert job.returncode == 1
        assert "unisono: ranks 0-1 have waited " in job.stderr
        assert " in barrier for rank 2\n  ranks 0-1: barrier()  at script.py:12\n" in job.stderr
        assert "\nrank 2: waiting\n" in job.stderr
        assert "    script.py:9 in save\n        lock.acquire()  # for ever\n" in job.stderr
        assert "\nRank 2 on host 1, host1 (10.97.0.2).\nThe job is ended in " in job.stderr
        assert "unisono: ending the job: ranks still wait, and --hang-abort is 2 s" in job.stderr
        assert "done nothing" not in job.stderr


def test_ranks_that_do_nothing_on_any_host_are_reported_on_all(hosts):
    flags = ("--hang-report", "1")
    os.mkfifo(hosts.folder / "fifo")
    jobs = [hosts.start_rank(host, write(hosts, IDLE), ranks=1, flags=flags) for host in range(2)]
    told = [await_line(job, "shows where they are; Ctrl-C ends it") for job in jobs]
    (hosts.folder / "fifo").write_text("go on")
    assert [finish(job).returncode for job in jobs] == [0, 0]
    for report in told:
        assert re.search(r"unisono: ranks 0-1 have done nothing for \d", report), report
        assert 'script.py:5\n        open("fifo").read()\n' in report
        assert "Rank 0 on host 0, host0 (10.97.0.1); rank 1 on host 1, host1 (10.97.0.2).\nThe job goes on" in report


def test_a_host_behind_a_broken_link_is_named_and_both_sides_end(hosts):
    jobs = start_work(hosts)
    try:
        hosts.network.set_link(1, "down")
        first, second = map(finish, jobs)
    finally:
        hosts.network.set_link(1, "up")
    assert (first.returncode, second.returncode) == (1, 1)
    assert "host 1, host1 (10.97.0.2), has not answered for 3 s" in first.stderr
    assert "host 0, host0 (10.97.0.1), has not answered for 3 s" in second.stderr


def test_stacks_shows_the_ranks_of_all_hosts_and_an_interrupt_on_one_ends_all(hosts):
    jobs = start_work(hosts)
    shown = finish(hosts.start(1, "stacks"))
    assert shown.returncode == 0, shown.stderr
    assert re.match(r"ranks? 0(-1)?: ", shown.stdout) and "script.py:" in shown.stdout
    assert shown.stdout.endswith("\nRank 0 on host 0, host0 (10.97.0.1); rank 1 on host 1, host1 (10.97.0.2).\n")
    os.kill(jobs[1].pid, signal.SIGINT)
    first, second = map(finish, jobs)
    assert (first.returncode, second.returncode) == (130, 130)
    assert "host 1, host1 (10.97.0.2): interrupted; 1 rank ended" in first.stderr
    assert "unisono: interrupted; 1 rank ended" in second.stderr


def test_top_on_one_host_shows_the_ranks_of_all_and_names_one_that_is_silent(hosts):
    jobs = start_work(hosts)
    shown = finish(hosts.start(1, "top"))
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert " · 2 ranks on 2 hosts · " in lines[0]
    assert lines[2].split() == ["RANK", "HOST", "STATE", "CPU", "MEMORY", "WAITS", "CALL"]
    for number, line in enumerate(lines[3:5]):
        found = re.fullmatch(
            rf" +{number} +{number} +\w+ +\d+ % +[1-9][\d.]* MB +\d+ %  .*all_reduce at script.py:\d+", line
        )
        assert found is not None, shown.stdout
    os.kill(jobs[0].pid, signal.SIGSTOP)
    try:
        shown = finish(hosts.start(1, "top"))
    finally:
        os.kill(jobs[0].pid, signal.SIGCONT)
    assert re.search(r"^host 0, host0 \(10.97.0.1\), has shown nothing new for \d+ s$", shown.stdout, re.MULTILINE)
    os.kill(jobs[1].pid, signal.SIGINT)
    assert [finish(job).returncode for job in jobs] == [130, 130]


def test_hosts_that_came_are_named_if_others_do_not(hosts):
    flags = ("--rdzv-conf", "join_timeout=3")
    jobs = hosts.run(write(hosts, FACTS), hosts=2, flags=("--nnodes", "3", *flags))
    for job in jobs:
        assert job.returncode == 2
        assert "2 of 3 hosts" in job.stderr
        assert "host0 (10.97.0.1)" in job.stderr and "host1 (10.97.0.2)" in job.stderr
    assert any("came to host0:29500 within 3 s" in job.stderr for job in jobs)


def test_an_endpoint_that_cannot_be_reached_is_named(hosts):
    flags = ("--rdzv-endpoint", "host2:29500", "--rdzv-conf", "join_timeout=1")
    job = finish(hosts.start_rank(0, write(hosts, FACTS), flags=flags))
    assert job.returncode == 2
    assert "no rendezvous at host2 (10.97.0.3), port 29500, within 1 s: Connection refused; start" in job.stderr


def test_a_name_that_is_known_only_later_is_waited_for_and_one_that_never_is_not_for_ever(hosts):
    def start(host: int, *flags: str) -> subprocess.Popen[bytes]:
        return hosts.start_rank(host, "-m", "this", ranks=1, flags=("--rdzv-endpoint", "late-host:29500", *flags))

    never = finish(start(1, "--rdzv-conf", "join_timeout=0.1"))
    assert never.returncode == 2
    assert "--rdzv-endpoint late-host:29500: the name late-host could not be resolved for 0.1 s" in never.stderr
    late = start(1)
    assert late.stderr is not None
    assert b"unisono: the name late-host is not known yet (" in late.stderr.readline()
    hosts.network.name("late-host", 0)
    done = [finish(start(0)), finish(late)]
    assert [job.returncode for job in done] == [0, 0], done[0].stderr + done[1].stderr


def test_hosts_with_a_token_meet_and_refuse_others(hosts):
    assert finish(hosts.start(0, "token", "token")).returncode == 0
    assert (hosts.folder / "token").stat().st_mode & 0o077 == 0
    assert "exists already" in finish(hosts.start(0, "token", "token")).stderr
    finish(hosts.start(0, "token", "other"))
    script = write(hosts, FACTS)
    first = hosts.start_rank(0, script, ranks=1, flags=("--rdzv-token-file", "token"))
    wrong = finish(hosts.start_rank(1, script, ranks=1, flags=("--rdzv-token-file", "other")))
    assert wrong.returncode == 2
    assert "host0 (10.97.0.1), port 29500, has another token than this host" in wrong.stderr
    without = finish(hosts.start_rank(1, script, ranks=1))
    assert without.returncode == 2
    assert "host0 (10.97.0.1), port 29500, asks for a token" in without.stderr
    second = finish(hosts.start_rank(1, script, ranks=1, flags=("--rdzv-token-file", "token")))
    done = finish(first)
    assert (done.returncode, second.returncode) == (0, 0), done.stderr + second.stderr
    assert done.stderr.count("refused a connection from 10.97.0.2, which does not know the token") == 1
    told = [json.loads(job.stdout[job.stdout.index("{") :]) for job in (done, second)]
    assert [facts["MASTER_ADDR"] for facts in told] == ["127.0.0.1", "127.0.0.1"]
    assert [facts["total"] for facts in told] == [1.0, 1.0]


def start_check(hosts: Hosts, host: int, *, count: int) -> subprocess.Popen[bytes]:
    return hosts.start(host, "hosts", "check", "--nnodes", str(count), "--rdzv-endpoint", "host0:29500")


def test_a_check_shows_the_same_table_on_all_hosts_and_what_differs(hosts):
    hosts.network.set_mtu(1, 1400)
    try:
        first, second = map(finish, [start_check(hosts, host, count=2) for host in range(2)])
    finally:
        hosts.network.set_mtu(1, 1500)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.replace("0*", "0 ") == second.stdout.replace("1*", "1 ")
    rows = [line.split() for line in first.stdout.splitlines()]
    assert ["0*", "host0", "10.97.0.1", "eth0", "0", "1500"] in rows
    assert ["1", "host1", "10.97.0.2", "eth0"] in [row[:4] for row in rows]
    for one, other in ("01", "10"):
        (link,) = (row for row in rows if row[:2] == [one, other])
        assert 0 <= float(link[2]) < 1000 and float(link[4]) > 0 and link[5] in ("Gbit/s", "Mbit/s")
    assert "note: MTU: 1500 on host 0, host0 (10.97.0.1), 1400 on host 1, host1 (10.97.0.2)" in first.stdout
    assert "2 hosts can form a job" in first.stdout


@pytest.mark.soak
def test_a_check_names_the_pair_that_cannot_connect(hosts):
    third = [sys.executable, "-m", "unisono", "hosts", "check", "--nnodes", "3", "--rdzv-endpoint", "host0:29500"]
    with (
        hosts.network.no_route(1, to=2),
        subprocess.Popen(hosts.network.command(2, *third), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
    ):
        for job in map(finish, [*(start_check(hosts, host, count=3) for host in range(2)), process]):
            assert job.returncode == 1, job.stderr
            assert (
                "error: host 1, host1 (10.97.0.2) cannot connect to host 2, host2 (10.97.0.3): No route" in job.stdout
            )
            assert (
                "error: host 2, host2 (10.97.0.3) cannot connect to host 1, host1 (10.97.0.2): timed out" in job.stdout
            )
            assert "can form a job" not in job.stdout


@pytest.mark.soak
def test_a_check_names_a_host_that_does_not_answer_any_more(hosts):
    first, second = [start_check(hosts, host, count=2) for host in range(2)]
    assert second.stderr is not None
    while b"measuring" not in (line := second.stderr.readline()):
        assert line
    os.kill(second.pid, signal.SIGKILL)
    finish(second)
    job = finish(first)
    assert job.returncode == 2
    assert "no answer for 25 s from host 1, host1 (10.97.0.2)" in job.stderr


@pytest.mark.parametrize(
    ("endpoint", "shares"),
    [("unisono", True), ("torchrun", True), *(pytest.param(*case, marks=pytest.mark.soak) for case in
                                              [("unisono", False), ("torchrun", False)])],
)  # fmt: skip
def test_torchrun_on_one_host_and_unisono_on_the_other_meet(hosts, endpoint, shares, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", str(int(not shares)))
    host = 1 if endpoint == "unisono" else 0
    where = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29500"]
    torchrun = hosts.folder / "torchrun.py"  # what the command runs
    torchrun.write_text("from torch.distributed.run import main; main()")
    script = write(hosts, FACTS)
    process = hosts.start_python(host, str(torchrun), *where, "--local-addr", hosts.network.address(host), script)
    ours = finish(hosts.start_rank(1 - host, script, ranks=1))
    theirs = finish(process)
    assert (ours.returncode, theirs.returncode) == (0, 0), ours.stderr + theirs.stderr
    told = [json.loads(text[text.index("{") :]) for text in (ours.stdout, theirs.stdout)]
    assert [facts["total"] for facts in told] == [1.0, 1.0]
    assert sorted(facts["RANK"] for facts in told) == ["0", "1"]
    assert {facts["WORLD_SIZE"] for facts in told} == {"2"}


@pytest.mark.soak
@pytest.mark.usefixtures("third_host")
def test_torchrun_meets_two_hosts_of_unisono(hosts):
    where = ["--nnodes", "3", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29500"]
    (hosts.folder / "torchrun.py").write_text("from torch.distributed.run import main; main()")
    script = write(hosts, FACTS)
    process = hosts.start_python(0, "torchrun.py", *where, "--local-addr", hosts.network.address(0), script)
    ours = [finish(each) for each in [hosts.start_rank(host, script, hosts=3, ranks=1) for host in (1, 2)]]
    theirs = finish(process)
    assert [job.returncode for job in (*ours, theirs)] == [0, 0, 0], ours[0].stderr + ours[1].stderr + theirs.stderr
    told = [json.loads(job.stdout[job.stdout.index("{") :]) for job in (*ours, theirs)]
    assert [facts["total"] for facts in told] == [3.0, 3.0, 3.0]


def test_the_network_is_removed_also_after_a_kill(tmp_path):
    from host_network import obstacle, remove_stale

    if obstacle() is not None:
        pytest.skip(f"several hosts cannot be made here: {obstacle()}")
    code = (
        f"import sys, os; sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parent.parent)]!r}\n"
        "from host_network import HostNetwork\nHostNetwork(1)\nos.kill(os.getpid(), 9)"
    )
    process = subprocess.run([sys.executable, "-c", code], check=False)
    assert process.returncode == -9
    remove_stale()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    makers = {line.split()[0].split("-")[1] for line in listed.splitlines() if line.startswith("unisono-")}
    assert all(Path(f"/proc/{maker}").exists() for maker in makers)
