"""A rank that fails ends the job, is named, and gives its exit code."""

import json
from dataclasses import replace

import pytest

from unisono.launch.failure.root_cause import RankFailure, find_root_cause, first_failure

MS = 1_000_000


def failure(rank: int, ms: float, *, code: int = 1, reported: bool = True) -> RankFailure:
    return RankFailure(rank=rank, code=code, time_ns=int(ms * MS), reported=reported)


def test_the_earliest_error_is_the_cause():
    assert first_failure([failure(0, 30), failure(1, 10), failure(2, 20)]).rank == 1


@pytest.mark.parametrize("code", [-9, -11, 3])
def test_a_rank_that_ended_without_a_word_comes_before_the_errors_this_caused(code):
    assert first_failure([failure(0, 10), failure(1, 11, code=code, reported=False)]).rank == 1


def test_a_library_that_aborts_because_a_peer_is_lost_is_not_the_cause():
    assert first_failure([failure(0, 10), failure(1, 11, code=-6, reported=False)]).rank == 0


LOST = "[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41003"
LATE = "[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete"


def told(
    rank: int, ms: float, message: str, kind: str = "RuntimeError", *, line: int = 7, **more: object
) -> RankFailure:
    """A failure with an account."""
    frames = [{"file": "train.py", "line": line}]
    account = {"type": kind, "message": message, "frames": frames, "chain": [], **more}
    return RankFailure(rank=rank, code=1, time_ns=int(ms * MS), reported=True, account=account)


def ranks(failures) -> list[int]:
    return [failure.rank for failure in failures]


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (LOST, "RuntimeError"),
        ("[rank 0, group 0] barrier: the group was left by rank 1, whose", "torch.distributed.DistBackendError"),
        ("[rank 0, group 0] barrier: the process of rank 1 has ended", "torch.distributed.DistBackendError"),
        ("Read error [127.0.0.1]:37303: Connection reset by peer", "RuntimeError"),
        ("writev [127.0.0.1]:5: Broken pipe", "RuntimeError"),
        ("failed to recv, got 0 bytes. Connection was likely closed.", "torch.distributed.DistNetworkError"),
        ("The client socket has failed to connect to localhost:5", "torch.distributed.DistNetworkError"),
        ("NCCL error: remote process exited or there was a network error", "torch.distributed.DistBackendError"),
        (LATE, "RuntimeError"),
        ("[Errno 104] Connection reset by peer", "ConnectionResetError"),
        ("", "EOFError"),
        ("rank 1 failed while this rank needed its part of the model", "unisono.errors.PeerError"),
    ],
)
def test_a_rank_that_only_lost_a_peer_is_a_victim_also_if_it_was_first(message, kind):
    verdict = find_root_cause([told(0, 10, message, kind), told(1, 50, "bad batch", "ValueError")])
    assert (verdict.rank, ranks(verdict.victims), verdict.sure) == (1, [0], True)


def test_an_error_raised_while_a_lost_peer_was_handled_is_a_victims():
    lost = {"type": "RuntimeError", "message": LOST, "link": "context"}
    verdict = find_root_cause(
        [told(0, 10, "cannot save", "OSError", chain=[lost]), told(1, 50, "bad batch", "ValueError")]
    )
    assert (verdict.rank, ranks(verdict.victims)) == (1, [0])


def test_a_library_that_aborts_with_words_of_a_lost_peer_is_a_victim():
    words = ("[rank0]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",)
    aborted = RankFailure(rank=0, code=-6, time_ns=1, reported=False, tail=words)
    verdict = find_root_cause([aborted, failure(1, 20, code=-9, reported=False)])
    assert (verdict.rank, ranks(verdict.victims), verdict.code) == (1, [0], 137)


def test_words_of_another_kind_of_error_are_not_mistaken_for_a_lost_peer():
    refused = told(0, 10, "upload: Connection reset by peer", "botocore.UploadError")
    assert find_root_cause([refused, told(1, 50, LOST)]).rank == 0
    assert find_root_cause([refused, told(1, 50, "bad batch", "ValueError")]).rank == 0


def test_a_connection_lost_by_the_users_code_comes_before_the_peers_it_cost():
    verdict = find_root_cause(
        [told(0, 10, LOST), told(1, 20, "[Errno 104] Connection reset by peer", "ConnectionResetError")]
    )
    assert (verdict.rank, ranks(verdict.victims)) == (1, [0])


def test_ranks_with_the_same_error_in_the_same_place_are_named_together():
    failures = [told(rank, 10 + rank, "no file", "FileNotFoundError") for rank in range(3)]
    verdict = find_root_cause([*failures, told(3, 5, LOST), told(4, 40, "no file", "FileNotFoundError", line=9)])
    assert verdict.ranks == (0, 1, 2)
    assert (ranks(verdict.victims), ranks(verdict.others)) == ([3], [4])


def test_ranks_that_the_launcher_ended_are_not_among_the_failed():
    ended = RankFailure(rank=1, code=-15, time_ns=30 * MS, reported=False)
    handled = RankFailure(
        rank=2, code=1, time_ns=40 * MS, reported=True, account={"type": "SystemExit", "message": "1"}
    )
    verdict = find_root_cause([told(0, 10, "bad batch", "ValueError"), ended, handled], ended_ns=20 * MS)
    assert (verdict.rank, verdict.ended, verdict.victims, verdict.others) == (0, (1, 2), (), ())


def test_a_rank_ended_by_somebody_else_is_the_cause():
    verdict = find_root_cause([RankFailure(rank=1, code=-15, time_ns=10, reported=False), told(0, 1, LOST)])
    assert (verdict.rank, verdict.code) == (1, 143)


def test_a_rank_that_finished_while_others_needed_it_is_the_cause_with_an_exit_code_of_theirs():
    verdict = find_root_cause([told(0, 10, LOST), told(2, 11, LOST)], finished=[1])
    assert (verdict.rank, verdict.ranks, verdict.absent_finished, verdict.code) == (1, (1,), True, 1)


def test_a_rank_that_finished_is_not_blamed_for_an_error_of_another_kind():
    assert find_root_cause([told(0, 10, "disk full", "OSError")], finished=[1]).rank == 0


def test_a_rank_that_never_came_is_named_when_the_others_have_timed_out():
    # The first that gives up closes its connections, which is what the others see.
    failures = [told(0, 10, LATE), told(2, 11, LOST)]
    verdict = find_root_cause(failures, running=[1])
    assert (verdict.ranks, verdict.absent_finished, verdict.sure) == ((1,), False, False)
    ended = RankFailure(rank=1, code=-15, time_ns=90 * MS, reported=False)
    assert find_root_cause([*failures, ended], ended_ns=50 * MS).ranks == (1,)
    # On a busy machine, the others may record theirs first. Long before, they are the first to have lost somebody.
    assert find_root_cause([told(0, 300, LATE), told(2, 10, LOST)], running=[1]).ranks == (1,)
    assert find_root_cause([told(0, 3000, LATE), told(2, 10, LOST)], running=[1]).absent == ()


def test_a_lost_connection_alone_is_not_a_sure_cause_while_others_run():
    assert not find_root_cause([told(0, 10, LOST)], running=[1]).sure
    assert find_root_cause([told(0, 10, LOST)]).sure
    assert not find_root_cause([told(0, 10, "rank 1 failed", "unisono.errors.PeerError")], running=[1]).sure
    assert find_root_cause([failure(0, 10)], running=[1]).sure


def test_words_like_a_lost_peers_are_not_enough():
    # Raised by a line of the program, by what is no rank of a group, or long after the last call has ended well.
    sounds = "Connection reset by peer, failed to connect to database"
    by_program = told(1, 50, sounds, line=7)
    raised = {"file": "load.py", "line": 7, "source": f'if not ready: raise RuntimeError("{sounds}")', "span": [14, 90]}
    by_program.account["frames"][:] = [raised]
    lonely = replace(told(1, 50, sounds), grouped=False)
    key = told(1, 50, "wait timeout after 1000ms, keys: /model", "torch.distributed.DistStoreError")
    for own in (by_program, lonely, replace(key, in_call=False)):
        verdict = find_root_cause([own], finished=[0], running=[2])
        assert (verdict.ranks, verdict.absent, verdict.sure) == ((1,), (), True)
        # The others wait for this rank, and lose it.
        assert find_root_cause([own, told(0, 10, LOST, line=9)]).ranks == (1,)
    # In a call, the key is what a peer should have written.
    assert find_root_cause([key], running=[2]).ranks == (2,)
    # An error that led to another one still counts.
    by_program.account["chain"] = [{"type": "RuntimeError", "message": LOST, "link": "cause"}]
    assert find_root_cause([by_program], finished=[0]).ranks == (0,)


def test_a_rank_that_left_its_groups_is_named_if_nothing_else_is_known():
    verdict = find_root_cause([told(0, 10, LOST)], left=[1], running=[1])
    assert (verdict.ranks, verdict.absent_left, verdict.absent_finished) == ((1,), True, False)
    assert find_root_cause([told(0, 10, "bad batch", "ValueError")], left=[1], running=[1]).ranks == (0,)


@pytest.mark.parametrize("message", [
    "[rank 0, group 0] barrier (call 3 of the group) timed out: rank 1 did not take part within 1 s; see what it does",
    "Rank 0 timed out in monitoredBarrier after 500 ms: [rank 0, group 0] barrier timed out: rank 1 did not",
])  # fmt: skip
def test_what_the_shm_backend_says_of_a_late_rank_is_understood(message):
    assert find_root_cause([told(0, 10, message, "torch.distributed.DistBackendError")], running=[1]).ranks == (1,)


PEERS = """
import json, os, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from unisono.launch.failure.error_record import record_error
fault, over = sys.argv[1], Path(sys.argv[2])
dist.init_process_group("gloo")
group = dist.new_group(timeout=timedelta(seconds=1 + 60 * dist.get_rank()))
dist.all_reduce(torch.ones(1), group=group)
if dist.get_rank() == 1:
    if fault == "exit":
        os._exit(3)
    if fault == "raise":
        raise ValueError("bad batch")
    while not over.exists():
        time.sleep(0.01)
    sys.exit()
try:
    dist.all_reduce(torch.ones(1), group=group)
except RuntimeError as error:
    print(json.dumps(record_error(error)))
over.touch()
"""


@pytest.mark.parametrize("fault", ["exit", "raise", "wait"])
def test_what_torch_says_of_a_lost_peer_is_understood(fork_ranks, tmp_path, fault):
    job = fork_ranks(2, PEERS, fault, tmp_path / "over", code=None)
    account = json.loads(job.lines(0)[0])
    victim = RankFailure(rank=0, code=1, time_ns=10 * MS, reported=True, account=account)
    assert find_root_cause([victim, told(1, 50, "bad batch", "ValueError")]).rank == 1
    if fault == "wait":
        assert find_root_cause([victim], running=[1]).ranks == (1,)


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
        ("raise ValueError('bad batch')", 1, "rank 1 failed: ValueError: bad batch"),
        # test_faults has these ends in the short suite.
        pytest.param("os._exit(4)", 4, "rank 1 exited with code 4", marks=pytest.mark.soak),
        pytest.param("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL", marks=pytest.mark.soak),
        pytest.param("ctypes.string_at(0)", 139, "rank 1 was killed by SIGSEGV", marks=pytest.mark.soak),
    ],
)
def test_the_cause_is_named_and_its_code_returned(warm_launcher, fault, code, said):
    result = warm_launcher.run_script(MEET.format(fault=fault), ranks=3)
    assert result.returncode == code
    ours = [line for line in result.stderr.splitlines() if line.startswith("unisono:")]
    # On a slow machine, ranks may take so long to end that it is said whom the launcher waits for.
    ours = [line for line in ours if not line.startswith("unisono: the job has failed; the cause is told when")]
    assert ours == [f"unisono: {said}"]


def test_ranks_that_do_not_listen_are_killed(warm_launcher):
    script = warm_launcher.write(
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
    result = warm_launcher.run("run", "-n", "2", "--shutdown-timeout", "0.2", script)
    assert result.returncode == 1
    said, killed, blamed, *_ = result.stderr.splitlines()
    assert [said, killed, blamed] == [
        "[1] no data",
        "unisono: rank 0 did not end within 0.2 s; killed",
        "unisono: rank 1 exited with code 1: no data",
    ]


def test_ranks_that_take_their_time_to_end_are_named_with_how_long_they_have(warm_launcher):
    script = warm_launcher.write(
        "script.py",
        """
        import os, pathlib, signal, sys, time
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, lambda *_: (time.sleep(4), sys.exit(0)))
            pathlib.Path("ready").touch()
            time.sleep(100)
        while not pathlib.Path("ready").exists():
            time.sleep(0.01)
        sys.exit("no data")
        """,
    )
    result = warm_launcher.run("run", "-n", "2", "--shutdown-timeout", "50", script)
    assert result.returncode == 1
    said, waiting, blamed, *_ = result.stderr.splitlines()
    assert (said, blamed) == ("[1] no data", "unisono: rank 1 exited with code 1: no data")
    told = "unisono: the job has failed; the cause is told when rank 0 has ended. Ranks that still run in "
    assert 10 < int(waiting.removeprefix(told).removesuffix(" s are killed")) <= 48


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hook_that_ends_with_0_does_not_hide_an_exception(warm_launcher, ranks):
    source = """
        import os, sys
        sys.excepthook = lambda *_: os._exit(0)
        raise ValueError("bad batch")
    """
    result = warm_launcher.run_script(source, ranks=ranks)
    assert result.returncode == 1
    assert "failed: ValueError: bad batch" in result.stderr
