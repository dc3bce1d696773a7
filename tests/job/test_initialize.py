"""`unisono.init` under every launcher and none, by every way to meet, again, after the end, with wrong arguments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import unisono
from launcher import Launcher
from ports import free_port
from unisono.errors import GroupError, LaunchError, RankMismatchError
from unisono.job.current import require_group
from unisono.job.local_ranks import choose_backend, place_on_hosts

PROGRAMS = Path(__file__).parent / "programs"
PROGRAM, AGAIN = PROGRAMS / "job.py", PROGRAMS / "again.py"
TIMEOUT_S = 90


def environ(**variables: str) -> dict[str, str]:
    """The environment of this process without what a launcher left."""
    strange = ("SLURM", "OMPI", "PMI", "PYTEST", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "UNISONO", "CI")
    return {name: value for name, value in os.environ.items() if not name.startswith(strange)} | variables


@pytest.fixture
def processes(rank_host, tmp_path_factory):
    """Run a program in n processes that get their rank as the first argument; return what each printed, and on stderr.

    They are forked, with no variable of a launcher but those that are given.
    """

    def run(n: int, program: str, *arguments: str, code: int = 0, **variables: str) -> tuple[list[str], list[str]]:
        folder = tmp_path_factory.mktemp("processes")
        script = folder / "script.py"
        script.write_text(f"import warnings; warnings.simplefilter('error')\n{program}")
        codes, _ = rank_host.run(n, script, "{rank}", *arguments, folder=folder, environment=variables)
        out, err = ([(folder / f"{name}{rank}").read_text() for rank in range(n)] for name in ("out", "err"))
        assert codes == [code] * n, (codes, err)
        return out, err

    return run


def test_three_ranks_under_unisono_run(run_ranks, tmp_path):
    job = run_ranks(3, PROGRAM, tmp_path)
    checks = ("before", "ranks_that_differ", "one_job", "again", "groups_of_the_script", "trainers")
    for rank in range(3):
        assert job.lines(rank) == [f"ok {name}" for name in checks]
    assert job.err == ""


ALONE = """
import torch, torch.distributed as dist, unisono
assert (unisono.rank(), unisono.local_rank(), unisono.node_rank()) == (0, 0, 0)
assert (unisono.world_size(), unisono.local_world_size(), unisono.is_main()) == (1, 1, True)
job = unisono.init()
assert (job.rank, job.world_size, job.launcher) == (0, 1, "none") and unisono.init() == job
for _ in range(2):
    x = torch.ones(3)
    dist.all_reduce(x)
    dist.barrier()
    assert x.tolist() == [1, 1, 1]
    job.end()
    assert not dist.is_initialized()
    with unisono.init("gloo") as job:
        dist.all_reduce(x)
    job = unisono.init()
raise SystemExit(3)
"""


def test_one_process_is_a_job_without_a_launcher(processes):
    assert processes(1, ALONE, code=3) == ([""], [""])


TYPED = "import unisono\nunisono.init().world_size\nunisono.init().rank\nunisono.init('gloo')\nunisono.rank()\n"
PROMPT = f"""
import code, io, sys
sys.stdin, sys.ps1, sys.ps2 = io.StringIO({TYPED!r}), "", ""
code.interact(banner="", exitmsg="")
"""


def test_a_prompt_can_call_it_again_and_again(processes):
    (out,), (err,) = processes(1, PROMPT)
    assert out.split() == ["1", "0", "0"]
    assert "backend=gloo, but this process is in a job that has shm" in err


@pytest.mark.soak  # the same of Python's own prompt, whose interpreter imports torch
def test_a_prompt_of_python_can_call_it_again_and_again():
    done = subprocess.run(
        [sys.executable, "-i"],
        input=TYPED, env=environ(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stdout.split() == ["1", "0", "0"]
    assert "backend=gloo, but this process is in a job that has shm" in done.stderr


CLOSING = """
import os, sys, time, torch.distributed as dist, unisono
from pathlib import Path

def connections():  # also those that have ended, which the kernel knows for a minute
    remote = f":{int(os.environ['MASTER_PORT']):04X}"
    rows = [row for table in ("tcp", "tcp6") for row in Path("/proc/net", table).read_text().splitlines()]
    return sum(row.split()[2].endswith(remote) for row in rows)

rank = int(sys.argv[1])
for turn in range(3):
    with unisono.init(timeout=60):
        dist.barrier()
        kept = [dist.distributed_c10d._get_default_store()] if rank == 0 else []
    if rank == 0:
        before = connections()
        time.sleep(0.3)
        print(connections() - before <= 0)
        kept.clear()
"""


def test_a_rank_does_not_try_the_store_that_rank_0_is_closing(processes):
    """Its connection would break, of which torch warns on the terminal, with a stack."""
    given = {"RANK": "{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    assert processes(2, CLOSING, **given) == (["True\n" * 3, ""], ["", ""])


MEET = """
import sys, torch, torch.distributed as dist, unisono
rank, tcp, free, file = int(sys.argv[1]), *sys.argv[2:]
store = dist.TCPStore("127.0.0.1", int(free), 2, rank == 0)
who = dict(rank=rank, world_size=2)
for how in (
    dict(),
    dict(init_method="env://"),
    dict(init_method=f"tcp://127.0.0.1:{tcp}", **who),
    dict(init_method=f"tcp://127.0.0.1:{tcp}?rank={rank}&world_size=2"),
    dict(init_method=f"file://{file}", backend="gloo", **who),
    dict(init_method=f"file://{file}2", **who),
    dict(store=store, **who),
    who,
):
    with unisono.init(**how, timeout=60) as job:
        x = torch.tensor([10 ** rank])
        dist.all_reduce(x)
        assert x.item() == 11, x
        assert (job.rank, job.local_rank, job.local_world_size, job.node_rank) == (rank, rank, 2, 0)
        assert unisono.local_rank() == rank
        print(job.backend)
"""


def test_ranks_that_were_started_by_hand_meet_in_every_way(processes, tmp_path):
    outs, errs = processes(
        2, MEET, free_port(), free_port(), str(tmp_path / "meet"),
        RANK="{rank}", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(),
    )  # fmt: skip
    assert (outs, errs) == (["shm\nshm\nshm\nshm\ngloo\nshm\nshm\nshm\n"] * 2, ["", ""])
    assert list(tmp_path.iterdir()) == []


BY_A_RANK = """
import sys, unisono
with unisono.init("gloo", f"tcp://localhost:{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2, timeout=60) as job:
    print(*unisono.comm.all_gather((job.rank, job.local_rank, job.local_world_size, job.num_nodes, job.launcher)))
"""


def test_processes_that_a_rank_starts_meet_at_the_address_that_they_are_given(processes):
    # They inherit what the launcher said to their parent, here rank 0 of another job.
    inherited = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    inherited |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    outs, _ = processes(2, BY_A_RANK, free_port(), **inherited)
    assert outs == ["(0, 0, 2, 1, 'none') (1, 1, 2, 1, 'none')\n"] * 2


SPAWNED = """
import multiprocessing, os, sys, warnings, torch.multiprocessing as mp, unisono
from unisono.errors import LaunchError
def say(*words):  # lines of several processes are not to mix
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()
def by_torch(rank, path):
    try:
        unisono.init()  # which rank?
    except LaunchError as error:
        say(error)
    del os.environ["MASTER_ADDR"]
    with warnings.catch_warnings(record=True) as caught, unisono.init() as alone:
        assert alone.world_size == 1
    assert "so it is a job of one rank: if it is one of several" in str(caught[0].message)
    job = unisono.init(init_method=f"file://{path}", rank=rank, world_size=2)
    assert (unisono.rank(), unisono.local_rank(), unisono.world_size()) == (rank, rank, 2)
    say("torch", rank)
def by_us(rank):
    assert unisono.init().rank == rank == unisono.rank()
    say("ours", rank)
def forked():
    try:
        unisono.init()
    except LaunchError as error:
        say(error, unisono.rank())
if __name__ == "__main__":
    os.environ["MASTER_ADDR"] = "localhost"
    mp.start_processes(by_torch, args=(sys.argv[1],), nprocs=2, start_method="fork")
    del os.environ["MASTER_ADDR"]
    unisono.init()  # a notebook has a job of one rank, and starts others
    unisono.spawn(by_us, nprocs=2)
    child = multiprocessing.get_context("fork").Process(target=forked)
    child.start()
    child.join(30)
    raise SystemExit(child.exitcode)
"""


def test_functions_that_a_script_starts_as_processes_find_their_ranks(launch_host, tmp_path):
    launcher = Launcher(tmp_path, launch_host)
    done = launcher.run_python(launcher.write("script.py", SPAWNED), str(tmp_path / "meet"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {"torch 0", "torch 1", "[0] ours 0", "[1] ours 1"} <= set(lines)
    assert sum("nothing says which rank it is: call init(rank=..., world_size=...)" in line for line in lines) == 2
    assert any("was forked from rank 0 of a job" in line and line.endswith(" 0") for line in lines)


LATE = """
import sys, time, unisono
rank = int(sys.argv[1])
unisono.init(init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=2)
if rank == 1:
    time.sleep(1)  # rank 0, which holds the store, is at its end meanwhile
with unisono.main_first():
    print("in", rank)
"""


def test_rank_0_keeps_its_store_until_the_others_have_ended(processes):
    assert processes(2, LATE, free_port()) == (["in 0\n", "in 1\n"], ["", ""])


def test_a_job_that_begins_again_does_not_meet_at_the_store_that_rank_0_is_closing(fork_ranks):
    job = fork_ranks(2, AGAIN, "late", 0)
    assert job.out == "".join(f"[{rank}] ok\n" for rank in range(2))


@pytest.mark.soak
@pytest.mark.parametrize("n", [2, 4])
def test_jobs_begin_again_and_again_on_a_busy_machine(fork_ranks, n):
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        job = fork_ranks(n, AGAIN, "busy", 40)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert job.out == "".join(f"[{rank}] ok\n" for rank in range(n))


def test_nothing_stays_of_jobs_groups_and_replicas_that_have_ended(fork_ranks):
    assert fork_ranks(2, PROGRAMS / "ended.py").out == "[0] ok\n[1] ok\n"


def test_a_file_of_an_earlier_job_is_recognised(processes, tmp_path):
    program = "import sys, unisono; unisono.init(init_method=sys.argv[2], rank=0, world_size=2, timeout=0.2)"
    meet = f"file://{tmp_path / 'meet'}"
    _, (err,) = processes(1, program, meet, code=1)
    assert "PeerError: rank 1 did not join the 2 ranks at file:" in err
    _, (err,) = processes(1, program, meet, code=1)
    assert "LaunchError: rank 0 of 2 has been at file:" in err
    assert "the file is left from an earlier job" in err


def test_waiting_for_ranks_that_do_not_come_can_be_interrupted(launch_host, tmp_path):
    launcher = Launcher(tmp_path, launch_host)
    program = "import sys, unisono; print(1, flush=True); unisono.init(init_method=sys.argv[1], rank=0, world_size=2)"
    port = free_port()
    waiting = launcher.start_python(launcher.write("script.py", program), f"tcp://127.0.0.1:{port}")
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == b"1\n"
    deadline_s = time.monotonic() + TIMEOUT_S
    while f":{int(port):04X} 00000000:0000 0A" not in Path("/proc/net/tcp").read_text():  # its store listens
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    time.sleep(0.2)  # it begins to wait; earlier it would be interrupted as well
    waiting.send_signal(signal.SIGINT)
    _, err = waiting.communicate(timeout=TIMEOUT_S)
    assert waiting.returncode == -signal.SIGINT
    assert err.endswith(b"KeyboardInterrupt\n")
    launcher.check_nothing_is_left()


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"backend": "ncl"}, ValueError, ["backend='ncl'", '"auto", "nccl", "gloo", "shm" or "mpi"']),
        ({"backend": 3}, TypeError, ["backend=3", '"auto"']),
        ({"timeout": 0}, ValueError, ["timeout=0", "more than 0 seconds"]),
        ({"timeout": timedelta(0)}, ValueError, ["more than 0 seconds"]),
        ({"timeout": "long"}, TypeError, ["timeout='long'", "seconds or a timedelta"]),
        ({"init_method": 5}, TypeError, ["init_method=5"]),
        ({"init_method": "http://x"}, ValueError, ["'http://x'", "env://, tcp://host:port and file:///path"]),
        ({"init_method": "tcp://localhost:1"}, ValueError, ["rank= (from 0)", "world_size="]),
        ({"init_method": "tcp://localhost", "rank": 0, "world_size": 2}, ValueError, ["host or a port"]),
        ({"init_method": "file://a/b", "rank": 0, "world_size": 2}, ValueError, ["three slashes"]),
        ({"init_method": "file:///no/such/meet", "rank": 0, "world_size": 2}, LaunchError, ["no folder /no/such"]),
        ({"init_method": "file:///", "rank": 0, "world_size": 2}, LaunchError, ["it is a folder"]),
        ({"rank": 0}, ValueError, ["rank is given and world_size is not"]),
        ({"world_size": 2}, ValueError, ["world_size is given and rank is not"]),
        ({"rank": 2, "world_size": 2}, ValueError, ["rank=2 and world_size=2", "0..1"]),
        ({"rank": "0", "world_size": 2}, TypeError, ["rank='0'", "whole number"]),
        ({"rank": 0, "world_size": 2}, ValueError, ["MASTER_ADDR and MASTER_PORT are not set", "tcp://host:port"]),
        ({"store": dist.HashStore(), "init_method": "env://"}, ValueError, ["both say where ranks meet"]),
        ({"device": "gpu"}, ValueError, ["device='gpu'", '"cuda:1"']),
        ({"device": "cuda:99"}, LaunchError, ["device='cuda:99'", "GPUs"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_explained_and_begin_nothing(arguments, kind, words):
    with pytest.raises(kind) as caught:
        unisono.init(**arguments)
    for word in words:
        assert word in str(caught.value)
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has the backend here")
def test_a_backend_that_torch_lacks_is_refused():
    with pytest.raises(LaunchError, match="built without nccl"):
        unisono.init("nccl")
    with pytest.raises(LaunchError, match="built without mpi"):
        unisono.init("mpi")


def test_a_default_group_of_one_is_taken_as_it_is():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with unisono.init() as job:
            assert (job.backend, job.world_size) == ("gloo", 1)
        assert dist.is_initialized()
        with pytest.raises(ValueError, match="world_size=2, but this process is in a job"):
            unisono.init(rank=0, world_size=2)
    finally:
        dist.destroy_process_group()
    with pytest.raises(GroupError, match="has ended"):
        job.store("a")


def test_groups_that_cannot_be_used_are_refused():
    with unisono.init():
        group = dist.new_group([0])
        assert require_group(group) is group
        assert require_group() is dist.group.WORLD
        with pytest.raises(GroupError, match="this rank is not in the group"):
            require_group(dist.GroupMember.NON_GROUP_MEMBER)
        with pytest.raises(TypeError, match="group='all' is no process group"):
            require_group("all")
    with pytest.raises(GroupError, match="the group has ended"):
        require_group(group)
    assert require_group() is None  # one rank works without a group


TWO, GPUS = ["a", "a"], ["x", "y"]


@pytest.mark.parametrize(
    ("asked", "hosts", "gpus", "cpu_backend", "chosen"),
    [
        ("auto", TWO, [None, None], None, "shm"),
        ("auto", TWO, [None, None], "gloo", "gloo"),
        ("auto", ["a", "b"], [None, None], None, "gloo"),
        ("auto", TWO, GPUS, None, "nccl"),
        ("auto", ["a", "b"], GPUS, "shm", "nccl"),
        ("gloo", TWO, GPUS, None, "gloo"),
        ("cpu:gloo,cuda:nccl", TWO, GPUS, None, "cpu:gloo,cuda:nccl"),
    ],
)
def test_the_backend_fits_the_hosts_and_gpus(asked, hosts, gpus, cpu_backend, chosen):
    assert choose_backend([asked, asked], hosts=hosts, gpus=gpus, cpu_backend=cpu_backend) == (chosen, None)


def test_ranks_of_which_one_cannot_share_memory_get_gloo():
    chosen = choose_backend(["auto"] * 2, hosts=TWO, gpus=[None] * 2, cpu_backend=None, shares_memory=False)
    assert chosen == ("gloo", None)


def test_ranks_that_share_a_gpu_get_gloo_and_are_told():
    chosen, remark = choose_backend(["auto"] * 3, hosts=["a"] * 3, gpus=["x", "y", "x"], cpu_backend=None)
    assert chosen == "gloo"
    assert remark is not None
    assert remark.startswith("ranks 0, 2 share a GPU")


@pytest.mark.parametrize(
    ("asked", "gpus", "kind", "words"),
    [
        (["gloo", "shm"], [None, None], RankMismatchError, "rank 0: 'gloo', rank 1: 'shm'"),
        (["nccl", "nccl"], ["x", None], LaunchError, "rank 1 of 2 found none"),
        (["nccl", "nccl"], ["x", "x"], LaunchError, "ranks 0-1 share a GPU"),
        (["auto", "auto"], [None, "x"], LaunchError, "rank 0 of 2 found no GPU and the others did"),
    ],
)
def test_backends_that_cannot_work_are_refused(asked, gpus, kind, words):
    with pytest.raises(kind, match=words):
        choose_backend(asked, hosts=TWO, gpus=gpus, cpu_backend=None)


def test_placements_follow_the_ranks_also_where_hosts_alternate_and_differ_in_size():
    placements = place_on_hosts(["b", "a", "b", "b"])
    assert [(p.node_rank, p.local_rank, p.local_world_size) for p in placements] == [
        (0, 0, 3), (1, 0, 1), (0, 1, 3), (0, 2, 3),
    ]  # fmt: skip
