"""Standard input, such as the terminal for a debugger, is that of one rank or of none."""

import os
import subprocess

import pytest

DEBUG = """
    import os
    if os.environ["RANK"] == os.environ["WHO"]:
        found = 6
        breakpoint()
        print("found", found)
"""


def read_until(terminal, text):
    """Read what the terminal shows, to a text."""
    shown = b""
    while text not in shown:
        shown += os.read(terminal, 1 << 12)
    return shown


@pytest.mark.parametrize(("ranks", "flags"), [(1, ()), (2, ("--stdin", "1"))], ids=["one rank", "--stdin"])
def test_a_debugger_has_the_terminal(warm_launcher, ranks, flags):
    warm_launcher.environment |= {"WHO": str(ranks - 1), "TERM": "xterm"}
    ours, theirs = os.openpty()
    job = warm_launcher.start_in_terminal(
        theirs, "run", "-n", str(ranks), *flags, warm_launcher.write("script.py", DEBUG)
    )
    os.close(theirs)
    read_until(ours, b"(Pdb) ")
    os.write(ours, b"found = 7 * found\n")
    read_until(ours, b"(Pdb) ")
    os.write(ours, b"continue\n")
    assert b"found 42" in read_until(ours, b"found 42")
    os.set_blocking(ours, False)
    assert job.wait(timeout=60) == 0
    os.close(ours)


def test_standard_input_that_is_a_pipe_is_one_ranks(warm_launcher):
    script = warm_launcher.write("script.py", "import os, sys\nprint(os.environ['RANK'], sys.stdin.read())")
    job = warm_launcher.start("run", "-n", "2", "--stdin", "1", script, stdin=subprocess.PIPE)
    out, err = job.communicate(b"told", timeout=60)
    assert (sorted(out.splitlines()), err) == ([b"[0] 0 ", b"[1] 1 told"], b"")


def test_several_ranks_are_told_why_there_is_no_input(warm_launcher):
    warm_launcher.environment["WHO"] = "1"
    result = warm_launcher.run_script(DEBUG)
    assert result.returncode == 1
    assert "`--stdin RANK` gives it to one" in " ".join(result.stderr.split())
    result = warm_launcher.run("run", "-n", "2", "--stdin", "2", "script.py")
    assert (result.returncode, result.stderr.partition(":")[2][:31]) == (2, " stdin=2 is no rank: there are ")
