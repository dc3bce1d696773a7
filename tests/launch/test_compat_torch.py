"""Scripts written for torchrun run unmodified: what torch.distributed offers, as its users call it."""

from pathlib import Path

import pytest

from ports import free_port
from printed import printed

PROGRAMS = Path(__file__).with_name("programs")


def run(warm_launcher, name, *arguments, ranks=2):
    result = warm_launcher.run("run", "-n", str(ranks), str(PROGRAMS / name), *arguments)
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.parametrize(
    ("name", "lines"),
    [("ddp.py", ["trained"]), ("fsdp2.py", ["same weights"]), ("tensor_parallel.py", ["same output"])],
)
def test_parallel_training(warm_launcher, name, lines):
    result = run(warm_launcher, name)
    assert (printed(result.stdout), result.stderr) == ({0: lines, 1: lines}, "")


def test_ddp_ends_while_a_thread_of_gloo_lets_go_of_its_tensors(warm_launcher):
    result = run(warm_launcher, "ended_ddp.py")
    assert (printed(result.stdout), result.stderr) == ({0: ["ended"], 1: ["ended"]}, "")


def test_pipelining(warm_launcher):
    result = run(warm_launcher, "pipelining.py")
    assert (printed(result.stdout), result.stderr) == ({0: ["stage 0 done"], 1: ["stage 1 done"]}, "")


def test_distributed_checkpoints(warm_launcher, tmp_path):
    result = run(warm_launcher, "checkpoint.py", str(tmp_path / "saved"))
    assert (printed(result.stdout), result.stderr) == ({0: ["loaded step 7"], 1: ["loaded step 7"]}, "")


def test_rpc_twice_and_a_group_beside_it(warm_launcher):
    result = run(warm_launcher, "rpc.py")  # torch itself warns on standard error
    assert printed(result.stdout) == {0: ["sum [2.0, 2.0]"] * 2}


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_groups_made_and_destroyed_and_made_again(warm_launcher, ranks):
    result = run(warm_launcher, "remade_groups.py", ranks=ranks)
    sums = [f"sum {sum(rank + meeting for rank in range(ranks))}" for meeting in range(4)]
    assert (printed(result.stdout), result.stderr) == (dict.fromkeys(range(ranks), sums), "")


def test_addresses_of_the_scripts_own(warm_launcher):
    result = run(warm_launcher, "own_address.py", free_port(), free_port())
    assert (printed(result.stdout), result.stderr) == ({0: ["sum 4.0"], 1: ["sum 4.0"]}, "")


def test_elastics_record(warm_launcher):
    result = warm_launcher.run("run", "-n", "2", str(PROGRAMS / "recorded.py"))
    assert result.returncode == 1
    assert "ValueError: a bad batch" in result.stderr
    assert "rank 1" in result.stderr
