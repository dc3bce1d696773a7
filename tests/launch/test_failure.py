"""A rank that fails ends the job, is named, and gives its exit code."""

import pytest

from unisono.launch.failure import Failure, first_failure

MS = 1_000_000


def failure(rank: int, ms: float, *, code: int = 1, reported: bool = True) -> Failure:
    return Failure(rank=rank, code=code, time_ns=int(ms * MS), reported=reported)


def test_the_earliest_error_is_the_cause():
    assert first_failure([failure(0, 30), failure(1, 10), failure(2, 20)]).rank == 1


@pytest.mark.parametrize("code", [-9, -11, 3])
def test_a_rank_that_ended_without_a_word_comes_before_the_errors_this_caused(code):
    assert first_failure([failure(0, 10), failure(1, 11, code=code, reported=False)]).rank == 1


def test_a_library_that_aborts_because_a_peer_is_lost_is_not_the_cause():
    assert first_failure([failure(0, 10), failure(1, 11, code=-6, reported=False)]).rank == 0


# All ranks meet in a collective; rank 1 does not come to the second one, so its peers fail as well.
MEET = """
    import ctypes, os, sys
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        {fault}
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("sys.exit(3)", 3, "rank 1 exited with code 3"),
        ("raise ValueError('bad batch')", 1, "rank 1 exited with code 1"),
        ("os._exit(4)", 4, "rank 1 exited with code 4"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL"),
        ("ctypes.string_at(0)", 139, "rank 1 was killed by SIGSEGV"),
    ],
)
def test_the_cause_is_named_and_its_code_returned(launcher, fault, code, said):
    result = launcher.run_script(MEET.format(fault=fault), ranks=3)
    assert result.returncode == code
    ours = [line for line in result.stderr.splitlines() if line.startswith("unisono:")]
    assert ours == [f"unisono: {said}; ending the other 2 ranks"]


def test_ranks_that_do_not_listen_are_killed(launcher):
    script = launcher.write(
        "script.py",
        """
        import os, pathlib, signal, sys, time
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            pathlib.Path("deaf").touch()
            time.sleep(100)
        while not pathlib.Path("deaf").exists():
            time.sleep(0.01)
        sys.exit("no data")
        """,
    )
    result = launcher.run("run", "-n", "2", "--shutdown-timeout", "0.2", script)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "[1] no data",
        "unisono: rank 1 exited with code 1; ending the other rank",
        "unisono: rank 0 did not end within 0.2 s; killed",
    ]
