"""Whatever ends a rank: the launcher names the right one first, says where, fails, and leaves nothing behind."""

import json
import re

import pytest
from faults import FAULTS, Fault

BY_NAME = {fault.name: fault for fault in FAULTS}


def check(launcher, fault: Fault, ranks: int) -> None:
    for name, source in (("script.py", fault.script()), *fault.files):
        (launcher.folder / name).write_text(source)
    result = launcher.run("run", "-n", str(ranks), *fault.options, *fault.target)
    said = result.stderr
    assert result.returncode in fault.codes, said
    # The first thing that the launcher says names the cause.
    own = [
        line for line in said.splitlines() if not line.startswith(("[", "unisono: the job has failed; the cause is"))
    ]
    assert re.match(fault.pattern(f"unisono: {fault.first}", ranks), own[0]), said
    for detail in fault.details:
        assert re.search(fault.pattern(detail, ranks), said), f"{detail!r} is missing in:\n{said}"
    # One screen, and ranks keep quiet about it.
    assert len(own) == 1 if fault.one_line else len(own) < 40, said
    assert not (fault.quiet and said.startswith("[")), said


@pytest.mark.parametrize(
    ("name", "ranks"), [pytest.param(f.name, ranks, id=f"{f.name}-{ranks}") for f in FAULTS for ranks in f.ranks]
)
def test_the_rank_at_fault_is_named_first(warm_launcher, name, ranks):
    check(warm_launcher, BY_NAME[name], ranks)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", BY_NAME)
def test_the_rank_at_fault_is_named_first_every_time(launcher, name, ranks):
    for _ in range(10):
        check(launcher, BY_NAME[name], ranks)


def test_a_syntax_error_in_the_script_is_shown_once_and_nothing_is_started(warm_launcher):
    result = warm_launcher.run_script("import os\nfor i in range(3:\n    print(i)\n", ranks=3)
    assert (result.returncode, result.stdout) == (1, "")
    place, source, _, error = result.stderr.splitlines()
    assert place.endswith('script.py", line 2') and source.strip() == "for i in range(3:"
    assert error.startswith("SyntaxError: ")


def test_an_error_in_a_process_that_a_rank_forked_is_not_the_ranks(warm_launcher):
    result = warm_launcher.run_script("""
        import os, sys
        for code in (0, 3):
            if not (child := os.fork()):
                sys.exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
        if not (child := os.fork()):
            raise ValueError("in the child")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        print('"done"')
    """)
    assert (result.returncode, warm_launcher.values(result)) == (0, {0: "done", 1: "done"}), result.stderr
    assert "ValueError: in the child" in result.stderr and "unisono:" not in result.stderr


def test_the_report_is_in_the_log_folder_as_data(warm_launcher):
    fault = BY_NAME["exception"]
    warm_launcher.write("script.py", fault.script())
    warm_launcher.run("run", "-n", "3", "--log-dir", "logs", "script.py")
    (file,) = warm_launcher.folder.glob("logs/*/attempt_0/report.json")
    report = json.loads(file.read_text())
    assert (report["cause_ranks"], report["exit_code"]) == ([2], 1)
    assert report["headline"] == "rank 2 failed: ValueError: bad batch 7"
    innermost = report["cause"]["error"]["frames"][-1]
    assert (f"{innermost['file'].rpartition('/')[2]}:{innermost['line']}", innermost["function"]) == (
        fault.place(),
        "step",
    )


def test_a_hang_that_ended_the_job_is_in_the_log_folder_as_data(warm_launcher):
    fault = BY_NAME["mismatched-collectives"]
    warm_launcher.write("script.py", fault.script())
    result = warm_launcher.run("run", "-n", "2", *fault.options, "--log-dir", "logs", "script.py")
    (file,) = warm_launcher.folder.glob("logs/*/attempt_0/report.json")
    report = json.loads(file.read_text())
    assert (result.returncode, report["exit_code"], report["ranks"]) == (1, 1, 2)
    assert report["headline"].startswith("rank 1 calls broadcast where rank 0 calls all_reduce (collective 2), and")
    assert "rank 0: all_reduce(float32[4, 4], sum)  at script.py:" in report["hang"]
