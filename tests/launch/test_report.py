"""The failure report fits on one screen and answers: which rank, what, where, who else, what now."""

import json
import re
import signal
from pathlib import Path

import pytest
import torch

from unisono.launch.failure.error_record import record_error
from unisono.launch.failure.failure_report import Circumstances, render, report_as_data
from unisono.launch.failure.root_cause import RankFailure, find_root_cause

HERE = Path(__file__)
LOST = {"type": "RuntimeError", "message": "Connection closed by peer", "frames": [], "chain": [], "notes": []}
CIRCUMSTANCES = Circumstances(ranks=4, folder=str(HERE.parent))


def failed(function, *, rank=1, tail=()) -> RankFailure:
    try:
        function()
    except BaseException as error:
        account = json.loads(json.dumps(record_error(error)))
        return RankFailure(rank=rank, code=account["code"], time_ns=9, reported=True, account=account, tail=tail)
    raise AssertionError("no error")


def killed(signum, *, rank=1, **more) -> RankFailure:
    return RankFailure(rank=rank, code=-signum, time_ns=9, reported=False, **more)


def victim(rank) -> RankFailure:
    return RankFailure(rank=rank, code=1, time_ns=1, reported=True, account=LOST)


def report(*failures, circumstances=CIRCUMSTANCES, **more) -> str:
    return render(find_root_cause(failures, **more), circumstances)


def bad_batch():
    raise ValueError("bad batch 7")


def test_an_error_is_told_with_the_users_code_and_the_victims():
    text = report(failed(bad_batch), victim(0), victim(2), victim(3))
    line = bad_batch.__code__.co_firstlineno + 1
    assert text.splitlines()[0] == "unisono: rank 1 failed: ValueError: bad batch 7"
    assert f'  test_report.py:{line} in bad_batch\n      raise ValueError("bad batch 7")\n' in text
    assert "ranks 0, 2-3 only lost the connection to rank 1" in text
    assert text.splitlines()[-1].split() == ["exit", "code", "1"]


def test_frames_of_libraries_take_one_line():
    text = report(failed(lambda: torch.nn.Linear(3, 4)(torch.ones(2, 5))))
    folded = [line for line in text.splitlines() if "torch/" in line]
    assert len(folded) == 1
    assert re.search(r"… \d+ frames in torch, the last one torch/nn/modules/linear.py:\d+ in forward", folded[0])


def test_a_program_within_a_package_is_told_by_its_innermost_frames():
    frames = [
        {"file": f"/v/site-packages/tool/{n}.py", "line": n, "function": "f", "source": f"s{n}", "library": "tool"}
        for n in range(6)
    ]
    account = {**LOST, "type": "ValueError", "message": "no", "frames": frames}
    text = report(RankFailure(rank=0, code=1, time_ns=1, reported=True, account=account))
    assert "… 3 frames in tool" in text
    assert "tool/5.py:5 in f\n      s5" in text


def test_the_same_error_of_all_ranks_is_told_once():
    text = report(*[failed(bad_batch, rank=rank) for rank in range(4)])
    assert text.splitlines()[0] == "unisono: all 4 ranks failed: ValueError: bad batch 7"
    assert text.count("in bad_batch") == 1


@pytest.mark.parametrize(
    ("signum", "words"),
    [(signal.SIGSEGV, "native code"), (signal.SIGBUS, "/dev/shm"), (signal.SIGILL, "processor"), (40, "")],
)
def test_a_signal_is_told_with_its_meaning(signum, words):
    text = report(killed(signum))
    assert text.startswith(f"unisono: rank 1 was killed by {'signal 40' if signum == 40 else signum.name}\n")
    assert words in text
    assert text.splitlines()[-1].split()[-1] == str(128 + signum)


def test_a_kill_is_told_with_what_the_kernel_counted():
    evidence = "out of memory: the kernel killed 1 process of this control group; the limit of 64 MiB was reached"
    with_evidence = report(killed(9), circumstances=Circumstances(ranks=4, evidence=evidence))
    assert "64 MiB" in with_evidence
    assert "fewer ranks" in with_evidence
    assert "counter of the kernel" in report(killed(9))


def test_the_python_stack_of_a_crash_is_told_outermost_first():
    stack = (
        "Fatal Python error: Segmentation fault\n\nThread 0x01 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 1 in wait\n\n'
        "Current thread 0x02 (most recent call first):\n"
        f'  File "{HERE}", line 33 in inner\n  File "{HERE}", line 22 in outer\n\nExtension modules: x\n'
    )
    text = report(killed(11, crash_stack=stack, doing="in all_reduce at train.py:7"))
    assert text.index(":22 in outer") < text.index(":33 in inner")
    assert "threading" not in text
    assert "in all_reduce at train.py:7" in text


def test_the_last_lines_do_not_repeat_the_traceback():
    tail = ("epoch 3", *account_lines(), "saved nothing")
    text = report(failed(bad_batch, tail=tail))
    assert text.count("bad batch 7") == 2  # the headline and the source line
    assert "last lines   epoch 3\n               saved nothing\n" in text


def account_lines():
    return [f"  {line}" for line in failed(bad_batch).account["traceback"].splitlines()]


def test_a_rank_that_finished_too_early_is_named():
    text = report(victim(0), victim(2), finished=[1])
    assert text.splitlines()[0] == "unisono: rank 1 ended while ranks 0, 2 still needed it"
    assert "rank 0 then failed: RuntimeError: Connection closed by peer" in text


def test_a_rank_that_never_came_is_named():
    late = {**LOST, "message": "Timed out waiting 5000ms for recv operation to complete"}
    text = report(RankFailure(rank=0, code=1, time_ns=1, reported=True, account=late), running=[1])
    assert text.splitlines()[0] == "unisono: rank 1 did not come where rank 0 waited for it"


def test_causes_files_restarts_and_remarks_are_told():
    def load():
        try:
            {}["lr"]
        except KeyError as error:
            raise RuntimeError("no settings") from error

    circumstances = Circumstances(
        ranks=4,
        log_files={1: [Path("logs/a/attempt_0/1/stderr.log")]},
        restarts=1,
        max_restarts=3,
        remarks=["not restarted again"],
    )
    text = report(failed(load), circumstances=circumstances)
    assert "caused by KeyError: 'lr'" in text
    for words in ("logs/a/attempt_0/1/stderr.log", "1 of 3 used", "not restarted again"):
        assert words in text


def test_known_errors_come_with_a_hint():
    def allocate():
        raise MemoryError

    assert "fewer ranks" in report(failed(allocate))
    assert "hint" not in report(failed(bad_batch))


def huge():
    raise ValueError("\n".join("word " * 60 for _ in range(200)))


def recurse(depth=0):
    if depth % 2:
        return recurse(depth + 1)
    return recurse(depth + 1)


@pytest.mark.parametrize("function", [huge, recurse])
@pytest.mark.parametrize("columns", [60, 100])
def test_the_report_fits_on_a_screen(function, columns):
    failures = [failed(function, tail=tuple(f"{n} " + "x" * 300 for n in range(20)))]
    others = [RankFailure(rank=r, code=r, time_ns=99, reported=False) for r in range(2, 30)]
    circumstances = Circumstances(ranks=32, log_files={1: [Path("a/stdout.log"), Path("a/stderr.log")]}, max_restarts=1)
    lines = render(find_root_cause([*failures, *others, victim(0)]), circumstances, columns=columns).splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= columns


def test_colour_is_only_there_if_asked_for_and_words_cannot_bring_their_own():
    def fail():
        raise ValueError("\x1b[2Jcleared\rover")

    failure = failed(fail, tail=("\x1b[31mred\x1b[0m",))
    plain = render(find_root_cause([failure]), CIRCUMSTANCES)
    coloured = render(find_root_cause([failure]), CIRCUMSTANCES, colour=True)
    assert "\x1b" not in plain
    assert "\r" not in plain
    assert "\x1b[1;31m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_the_same_facts_are_given_as_json():
    circumstances = Circumstances(ranks=4, run_id="a", log_files={1: [Path("a/stderr.log")]})
    data = json.loads(json.dumps(report_as_data(find_root_cause([failed(bad_batch), victim(0)]), circumstances)))
    assert (data["cause_ranks"], data["exit_code"], data["run_id"]) == ([1], 1, "a")
    assert data["cause"]["error"]["type"] == "ValueError"
    assert data["cause"]["log_files"] == ["a/stderr.log"]
    assert [failure["rank"] for failure in data["victims"]] == [0]


def test_an_error_of_a_signal_handler_while_another_error_is_recorded_is_reported(warm_launcher):
    result = warm_launcher.run_script(
        """
        import signal

        class Note(str):
            def __str__(self):
                signal.raise_signal(signal.SIGUSR1)
                return "a note"

        def handler(*_):
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            raise RuntimeError("a worker has died")

        signal.signal(signal.SIGUSR1, handler)
        error = EOFError("nothing more to read")
        error.__notes__ = [Note()]
        raise error  # here
        """,
        ranks=1,
    )
    assert result.returncode == 1
    assert result.stderr.startswith("unisono: rank 0 failed: RuntimeError: a worker has died"), result.stderr
    assert "raise error  # here" in result.stderr
    assert "rank_process" not in result.stderr
