"""Stacks of running processes: also of one that never comes back to the interpreter, never at the price of its life."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unisono.launch.hang.stacks import StackRequest, crash_text, create_dump, parse_stacks, read_state
from unisono.launch.linux import descendants

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def dump() -> Iterator[int]:
    number = create_dump()
    yield number
    os.close(number)


@pytest.fixture
def start(dump: int, tmp_path: Path) -> Iterator[Start]:
    """Run a program that has installed the handler; it prints a line when it is ready."""
    started: list[subprocess.Popen[bytes]] = []

    def run(source: str, *, handler: bool = True) -> subprocess.Popen[bytes]:
        path = tmp_path / "program.py"
        install = "import sys; from unisono.launch.hang.stacks import install; install(int(sys.argv[1]))\n"
        path.write_text((install if handler else "\n") + source)
        process = subprocess.Popen([sys.executable, str(path), str(dump)], stdout=subprocess.PIPE, pass_fds=[dump])
        started.append(process)
        process.stdout.readline()
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def request_stacks(pid, dump, *, timeout_s=1.0, children=False):
    """Collect the stacks of a process. Returns: threads by process; empty if it cannot answer."""
    request = StackRequest(pid, dump, children=children, timeout_s=timeout_s)
    while not request.poll():
        time.sleep(0.001)
    return request.stacks


def test_a_loop_in_the_program_is_found(start, dump):
    process = start("def work():\n    print(flush=True)\n    while True:\n        sum(range(1000))\nwork()\n")
    threads = request_stacks(process.pid, dump, timeout_s=30)[process.pid]
    assert [frame.function for frame in threads[-1].frames] == ["work", "<module>"]
    place = threads[-1].place
    assert place.line in (3, 4, 5) and not place.is_library and place.file.endswith("program.py")


def test_a_process_stuck_in_c_code_answers(start, dump):
    # C code that keeps the interpreter's lock: nothing of Python can run in the process. A signal ends one sleep.
    source = (
        "import ctypes\nlibc = ctypes.PyDLL(None)\nprint(flush=True)\nlibc.sleep(1000)\n" + "libc.sleep(1000)\n" * 50
    )
    process = start(source)
    places = [request_stacks(process.pid, dump, timeout_s=30)[process.pid][-1].place.source for _ in range(5)]
    assert "libc.sleep(1000)" in places


def test_threads_that_run_are_shown_and_do_not_crash_the_process(start, dump):
    # Their stacks grow and shrink and their memory comes and goes: who reads it meanwhile from outside falls through.
    source = """
import threading
def deep(n):
    return 0 if n == 0 else 1 + deep(n - 1)
def run():
    while True:
        deep(600)
def start():
    while True:
        thread = threading.Thread(target=deep, args=(300,))
        thread.start()
        thread.join()
for function in (run, start):
    threading.Thread(target=function, daemon=True).start()
print(flush=True)
threading.Event().wait()
"""
    process = start(source)
    complete = cut = 0
    for _ in range(120):
        threads = request_stacks(process.pid, dump, timeout_s=30)[process.pid]
        functions = {frame.function for thread in threads for frame in thread.frames}
        cut += "wait" not in functions
        complete += {"run", "start"} <= functions  # else the main thread was kept from answering, and shown alone
    assert process.poll() is None and complete > 60 and not cut


def test_all_threads_and_forked_children_answer(start, dump):
    source = """
import os, threading, time
there, here = os.pipe()
running = threading.Event()
def child():
    os.write(here, b"!")
    time.sleep(1000)
def thread():
    running.set()
    time.sleep(1000)
if os.fork() == 0:
    child()
threading.Thread(target=thread, daemon=True).start()
os.read(there, 1)
running.wait()
print(flush=True)
time.sleep(1000)
"""
    process = start(source)
    stacks = request_stacks(process.pid, dump, timeout_s=30, children=True)
    children = set(stacks) - {process.pid}
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    functions = [{frame.function for frame in thread.frames} for thread in stacks[process.pid]]
    assert any("thread" in names for names in functions)
    assert len(children) == 1
    assert [thread.place.function for thread in stacks[children.pop()]] == ["child"]


def test_children_of_a_process_that_cannot_answer_are_shown(start, dump):
    source = """
import os, time
there, here = os.pipe()
def child():
    os.write(here, b"!")
    time.sleep(1000)
if os.fork() == 0:
    child()
os.read(there, 1)
print(flush=True)
time.sleep(1000)
"""
    process = start(source)
    os.kill(process.pid, signal.SIGSTOP)
    while read_state(process.pid).state != "stopped":
        time.sleep(0.001)
    (child,) = descendants(process.pid)
    try:
        stacks = request_stacks(process.pid, dump, timeout_s=30, children=True)
    finally:
        os.kill(child, signal.SIGKILL)
    assert stacks.keys() == {child}
    assert [thread.place.function for thread in stacks[child]] == ["child"]


def test_a_second_request_gets_a_dump_of_its_own(start, dump):
    process = start("import time\nprint(flush=True)\ntime.sleep(1000)\n")
    answers = [request_stacks(process.pid, dump, timeout_s=30)[process.pid] for _ in range(3)]
    assert [len(threads) for threads in answers] == [1, 1, 1]


def test_a_process_without_the_handler_is_left_alone(start, dump):
    process = start("import time\nprint(flush=True)\ntime.sleep(1000)\n", handler=False)
    assert request_stacks(process.pid, dump) == {}
    time.sleep(0.05)
    assert process.poll() is None


def test_a_stopped_process_is_not_waited_for(start, dump):
    process = start("import time\nprint(flush=True)\ntime.sleep(1000)\n")
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert read_state(process.pid).state == "stopped"
    assert request_stacks(process.pid, dump, timeout_s=1000) == {}


def test_a_process_that_has_ended_has_no_stacks(start, dump):
    process = start("print(flush=True)\n")
    process.wait()
    assert request_stacks(process.pid, dump, timeout_s=1000) == {}
    assert read_state(process.pid).state == "ended"


@pytest.mark.parametrize(
    "signum",
    [signal.SIGSEGV, *(pytest.param(other, marks=pytest.mark.soak) for other in (signal.SIGABRT, signal.SIGBUS))],
)
def test_a_crash_leaves_its_stack(start, dump, signum):
    process = start(f"import os\ndef crash():\n    os.kill(os.getpid(), {int(signum)})\nprint(flush=True)\ncrash()\n")
    process.wait()
    assert process.returncode == -signum
    text = crash_text(dump)
    assert text.startswith("Fatal Python error")
    assert "crash" in [frame.function for frame in parse_stacks(text)[0].frames]


def test_stacks_on_request_are_no_crash(start, dump):
    process = start("import time\nprint(flush=True)\ntime.sleep(1000)\n")
    request_stacks(process.pid, dump, timeout_s=30)
    assert crash_text(dump) == ""


def test_text_that_was_cut_is_read_as_far_as_it_goes():
    text = (
        "Thread 0x0000000a [worker] (most recent call first):\n"
        '  File "/home/me/a b.py", line ??? in <lambda>\n  ...\n\n'
        "Current thread 0x0000000b (most recent call first):\n  <no Python frame>\n"
        "Current thread's C stack trace (most recent call first):\n  Binary file\n"
    )
    worker, current = parse_stacks(text)
    assert (worker.ident, worker.frames[0].file, worker.frames[0].line) == (10, "/home/me/a b.py", 0)
    assert current.frames == () and current.place is None
