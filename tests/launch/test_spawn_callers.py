"""`unisono.spawn` from a prompt, a notebook and a script, and what becomes of the ranks when the caller ends."""

import signal
import subprocess
import sys
import textwrap

import pytest

from printed import printed

TIMEOUT_S = 120

CELL = """
from dataclasses import dataclass
import torch.distributed as dist

@dataclass
class Point:
    x: int

FACTOR = 3
def scaled(point):
    return Point(point.x * FACTOR)

def work(rank, point):
    dist.init_process_group("gloo")
    points = [None, None]
    dist.all_gather_object(points, scaled(Point(point.x + rank)))
    print(points)
    dist.destroy_process_group()
    if point.x == 2:
        raise ValueError("a bad point")

"""


@pytest.fixture
def launcher(warm_launcher):
    """Not a fresh one: that matters to the test that asks for it."""
    return warm_launcher


def script(launcher, source):
    return launcher.write("script.py", "import unisono\n" + textwrap.dedent(source))


@pytest.fixture(params=["warm", pytest.param("fresh", marks=pytest.mark.soak)])
def type_in(request, launcher, fresh_launcher):
    """Type lines into Python's prompt, or into the same loop in a process that need not import torch anew."""
    if request.param == "fresh":
        command = [sys.executable, "-i", "-q"]
        options = {"cwd": fresh_launcher.folder, "env": fresh_launcher.environment, "timeout": TIMEOUT_S}
        return lambda lines: subprocess.run(
            command, input=lines, capture_output=True, text=True, check=False, **options
        )

    def run(lines):
        launcher.write("typed", lines)
        prompt = launcher.write(
            "prompt.py",
            """
            import code, sys, types
            sys.stdin, sys.ps1, sys.ps2 = open("typed"), "", ""
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            code.interact(banner="", local=vars(main), exitmsg="")
            """,
        )
        return launcher.run_python(prompt)

    return run


def test_what_a_prompt_defines_can_be_called(type_in):
    text = f"import unisono\n{CELL.replace(chr(10) * 2, chr(10)).replace('def ', chr(10) + 'def ')}\n"
    text = text.replace("@dataclass", "\n@dataclass").replace("FACTOR = 3", "\nFACTOR = 3\n")
    call = "unisono.spawn(lambda rank: [work(rank, Point(1)), print('lambda', FACTOR)], nprocs=2)\n"
    done = type_in(text + call)
    assert done.returncode == 0
    assert "Error" not in done.stderr, done.stderr
    points = "[Point(x=3), Point(x=6)]"
    assert printed(done.stdout) == {0: [points, "lambda 3"], 1: [points, "lambda 3"]}


def test_a_notebook_gets_output_and_traceback_with_source(launcher):
    # What matters of a notebook: a prompt, streams of its own, code that is in no file but in the cache of lines.
    notebook = launcher.write(
        "notebook.py",
        f"""
        import io, linecache, sys, types
        import torch.multiprocessing, unisono
        main = types.ModuleType("__main__")
        sys.modules["__main__"], sys.ps1 = main, "In: "
        sys.stdout, shown = io.StringIO(), sys.stdout
        source = {CELL!r} + "import unisono\\nunisono.spawn(work, (Point(2),), 2)\\n"
        linecache.cache["<cell 1>"] = (len(source), None, source.splitlines(keepends=True), "<cell 1>")
        try:
            exec(compile(source, "<cell 1>", "exec"), main.__dict__)
        except torch.multiprocessing.ProcessRaisedException as error:
            shown.write(sys.stdout.getvalue())
            shown.write(f"[{{9}}] {{error.msg.splitlines()[-2].strip()}}\\n")
        """,
    )
    done = launcher.run_python(notebook)
    assert (done.returncode, done.stderr) == (0, "")
    points = "[Point(x=6), Point(x=9)]"
    assert printed(done.stdout) == {0: [points], 1: [points], 9: ['raise ValueError("a bad point")']}


def test_a_script_without_a_guard_is_told_so_and_starts_no_more(launcher):
    done = launcher.run_python(script(launcher, "unisono.spawn(print, nprocs=2)"))
    assert done.returncode == 1
    assert "if __name__ == '__main__':" in done.stderr


def test_ctrl_c_ends_the_ranks_and_then_the_call(launcher):
    name = script(
        launcher,
        """
        import signal, sys
        def work(rank):
            print("up", flush=True)
            signal.pause()
        if __name__ == "__main__":
            try:
                unisono.spawn(work, nprocs=2)
            except KeyboardInterrupt:
                sys.exit("interrupted")
        """,
    )
    with launcher.start_python(name) as process:
        wait_for_ranks(process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert err.splitlines()[-1] == b"interrupted"


def test_ranks_end_with_a_caller_that_is_killed(launcher):
    name = script(
        launcher,
        """
        import signal
        def work(rank):
            print("up", flush=True)
            signal.pause()
        if __name__ == "__main__":
            unisono.spawn(work, nprocs=2)
        """,
    )
    with launcher.start_python(name) as process:
        wait_for_ranks(process)
        process.kill()
    assert launcher.wait_until_gone() == []


def test_a_caller_waits_at_its_end_for_ranks_that_are_no_daemons(launcher):
    name = script(
        launcher,
        """
        import sys
        def work(rank, daemon):
            print("up", flush=True)
            if daemon:
                __import__("signal").pause()
            print("done", flush=True)
        if __name__ == "__main__":
            daemon = sys.argv[1] == "daemon"
            unisono.spawn(work, (daemon,), join=False, daemon=daemon).pids()
        """,
    )
    done = launcher.run_python(name, "waited")
    assert (done.returncode, done.stdout) == (0, "[0] up\n[0] done\n")
    assert launcher.run_python(name, "daemon").returncode == 0
    assert launcher.wait_until_gone() == []


def wait_for_ranks(process):
    """Read until both ranks have said that they are up."""
    seen = {}
    while sum(map(len, seen.values())) < 2:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        for rank, lines in printed(line.decode()).items():
            seen.setdefault(rank, []).extend(lines)
