"""A process that has imported torch and unisono, and forks `unisono run` and its fork server for each job of a test.

Most tests of jobs are about what ranks do and what is said of it. The launcher then need not import torch anew, which
is nearly all the time that such a job takes. All else is as ever: the agent, the process with the store, the fork
server and the ranks are the processes that they always are, with the parents, files and environment that they always
have. Two things are not: neither the agent nor the fork server begins as a new interpreter, and what torch and its
libraries read from the environment on import is what this process had. Tests to which that matters start the command.

With FRESH_LAUNCHES=1 in the environment all tests start the command.

It reads one job a line from standard input, as JSON, and answers with the exit code and with what was left behind. The
agent of a job that names a parent becomes a child of that, and its process id is the answer. Others than the
command `unisono` are in spawn_agents.py.
The interpreter runs the code that `serve` returns at its top level, so that no frame of this file lies below a rank.
"""

import atexit
import fcntl
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from kernel import mark_memory, set_subreaper, wait_for_any
from unisono.launch import fast_exit, forkserver_handle
from unisono.launch.channel import Channel
from unisono.launch.linux import descendants

_AGENT = "from unisono.cli.main import main; main()"
_SERVER = "from unisono.launch.forkserver import main; main()"

_LEFT_S = 30.0
"""How long what a job has left may take to end."""


def serve() -> str:
    """Run jobs until there are no more. Returns: what the forked processes of a job go on with."""
    gc.disable()  # what an import makes stays, and to look for garbage in it takes a sixth of the time
    import_all()
    fast_exit.prepare(programs=False)  # torch takes back none of its operators when an agent ends
    assert threading.active_count() == 1
    set_subreaper(True)  # for what a job leaves behind
    gc.enable()
    gc.collect()
    gc.freeze()
    for line in iter(sys.stdin.readline, ""):
        job = json.loads(line)
        if "parent" in job:
            if not (pid := _start(job)):
                return _take_place(job)
            print(pid, flush=True)
            continue
        job["files"] = [
            os.open(os.devnull, os.O_RDONLY),
            *(os.open(f"{job['folder']}/{name}", os.O_RDWR | os.O_CREAT | os.O_APPEND) for name in ("out", "err")),
        ]
        pid = os.fork()
        if not pid:
            return _take_place(job)
        close(job["files"])
        print(json.dumps([_wait(pid, job["timeout_s"]), _wait_for_the_rest()]), flush=True)
    return ""


def import_all() -> None:
    """Import what ranks and launchers do."""
    import torch
    import torch._dynamo
    import torch.distributed  # noqa: F401

    import unisono.cli.main
    import unisono.comm
    import unisono.launch.hosts.member
    import unisono.parallel
    import unisono.rank_zero
    import unisono.shm.process_group
    import unisono.trainer.trainer  # noqa: F401

    with suppress(ImportError):  # of an extra
        import llvmlite.binding  # noqa: F401


def _start(job: dict) -> int:
    """Fork a process that becomes a child of the job's parent, an ancestor of this process and now a subreaper.

    Returns: its process id; 0 in the process itself.
    """
    flags = (os.O_RDONLY | os.O_NOCTTY, *[os.O_WRONLY | os.O_NOCTTY] * 2)  # this process has no terminal and needs none
    job["files"] = [os.open(path, flag) for path, flag in zip(job["paths"], flags, strict=True)]
    set_subreaper(False)
    if not (pid := fork_child_of(job["parent"])):
        mark_memory(job["mark"])
        return 0
    set_subreaper(True)
    close(job["files"])
    return pid


def fork_child_of(parent: int) -> int:
    """Fork a process that becomes a child of an ancestor, the nearest that is a subreaper.

    Returns: its process id; 0 in the process itself.
    """
    told, tell = os.pipe()
    if not (between := os.fork()):
        if not (pid := os.fork()):
            close([told, tell])
            while os.getppid() != parent:
                time.sleep(0.001)
            return 0
        os.write(tell, str(pid).encode())
        os._exit(0)
    os.waitpid(between, 0)
    pid = int(os.read(told, 32))
    close([told, tell])
    return pid


def close(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)


def _wait(pid: int, timeout_s: float) -> int | None:
    """Wait for the end of a process. Returns: its exit code; None for one that had to be ended."""
    end_s = time.monotonic() + timeout_s
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        wait_for_any([pid], end_s - time.monotonic())
    return os.waitstatus_to_exitcode(ended[1])


def _wait_for_the_rest() -> list[str]:
    """Wait for all that a job has left. Returns: the commands of what did not end by itself."""
    end_s = time.monotonic() + _LEFT_S
    late = []
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return late
        if time.monotonic() > end_s:
            for pid in descendants(os.getpid()):
                with suppress(OSError):
                    late.append(f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes()!r}")
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _take_place(job: dict) -> str:
    """Take the place of a new process."""
    for number, file in enumerate(job["files"]):
        os.dup2(file, number)
    close(job["files"])
    if job.get("terminal"):
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  the old one is the host's
    os.chdir(job["cwd"])
    set_environment(job["environment"])
    if job["program"] != "unisono":
        sys.argv = job["arguments"]
        return (
            f"import spawn_agents; exec(spawn_agents.become_{'caller' if job['program'] == 'python' else 'server'}())"
        )
    sys.path[0] = job["cwd"]  # where it held this file's folder
    sys.argv = ["unisono", *job["arguments"]]
    if job["arguments"][0] == "drill":
        forkserver_handle.subprocess = _SubprocessOfDrill()
        return _AGENT
    return become_agent(_AGENT)


def become_agent(code: str, *, files: Iterable[int] = ()) -> str:
    """Be an agent, which runs this code. A child waits to become its fork server.

    Args: files are those that the agent has passed on to it, of which the fork server gets what it passes on again.
    Returns: what each of the two goes on with.
    """
    # A process that is there before the agent begins is to the agent one of its caller's, which it would not end. So
    # the one that waits forks when it is asked for the server, and ends.
    ours, theirs = socket.socketpair()
    if not (waiting := os.fork()):
        ours.close()
        return _become_server(Channel(theirs), files)
    theirs.close()
    forkserver_handle.subprocess = _Subprocess(waiting, Channel(ours))
    return code


class _Subprocess:
    """Stands in for the module in the agent, which starts one process: the parent of the fork server."""

    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, waiting: int, channel: Channel) -> None:
        self._waiting, self._channel = waiting, channel

    def Popen(self, command: list[str], *, env: dict[str, str], pass_fds: list[int], **options: object):  # noqa: N802
        assert options == {"stdin": subprocess.DEVNULL, "start_new_session": True}
        assert command[2].endswith(_SERVER) and pass_fds[0] == int(command[3])
        facts = {"environment": env, "agent": int(command[4]), "kept": pass_fds[1:]}
        self._channel.send(facts, pass_fds[:1])
        os.waitpid(self._waiting, 0)
        told = self._channel.receive()
        self._channel.close()
        return _popen(command, told[0][0]["pid"] if told else _fork_dead())


def _fork_dead() -> int:
    """Fork a process that is killed at once, as the one that was to become this has been. Returns: its process id."""
    if not (pid := os.fork()):
        os.kill(os.getpid(), signal.SIGKILL)
    return pid


class _SubprocessOfDrill:
    """Stands in for the module in a drill, whose processes become an agent each. The servers are forks of these.

    The frames of the drill lie below such a server and its ranks, and stay there.
    """

    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    def Popen(self, command: list[str], *, env: dict[str, str], pass_fds: list[int], **options: object):  # noqa: N802
        assert options == {"stdin": subprocess.DEVNULL, "start_new_session": True}
        assert command[2].endswith(_SERVER) and pass_fds == [int(command[3])]
        told, tell = os.pipe()
        if not (between := os.fork()):
            if not (pid := os.fork()):
                _run_server(command, env, pass_fds)
            os.write(tell, str(pid).encode())
            os._exit(0)  # the agent is a subreaper
        os.waitpid(between, 0)
        pid = int(os.read(told, 32))
        close([told, tell])
        return _popen(command, pid)


def _run_server(command: list[str], environment: dict[str, str], kept: list[int]) -> NoReturn:
    """Be, to all that matters, a new process with these arguments, and run it to its end."""
    code = 1
    try:
        while os.getppid() != int(command[4]):
            time.sleep(0.001)
        os.setsid()
        signal.set_wakeup_fd(-1)
        for signum in signal.valid_signals():
            if callable(signal.getsignal(signum)):
                signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for file in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
            # Not closed: objects of the agent have these numbers, and would close those who got them next.
            if file not in (1, 2, *kept):
                with suppress(OSError):  # that of the folder
                    os.fstat(file)
                    os.dup2(null, file, inheritable=file == 0)
        set_environment(environment)
        del sys.path[0]
        sys.argv = ["-c", *command[3:]]
        exec(_SERVER, {"__name__": "__main__"})
        code = 0
    except SystemExit as end:  # of a rank whose interpreter is to end it
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # nothing above may go on here
        traceback.print_exc()
    finally:
        os._exit(code)


def _popen(command: list[str], pid: int) -> subprocess.Popen[bytes]:
    process: subprocess.Popen[bytes] = subprocess.Popen.__new__(subprocess.Popen)
    nothing = dict.fromkeys(("stdin", "stdout", "stderr", "returncode"))
    vars(process).update(nothing, args=command, pid=pid, _child_created=True)
    process._waitpid_lock = threading.Lock()
    return process


def _become_server(agent: Channel, files: Iterable[int]) -> str:
    """Take the place of what the agent starts, when it does."""
    while not (received := agent.receive()):
        if agent.closed:
            os._exit(0)  # there is nothing to run
    ((message, (file,)),) = received
    if pid := os.fork():
        agent.send({"pid": pid})
        os._exit(0)  # from now on the agent, a subreaper, is the parent of the other
    while os.getppid() != message["agent"]:
        time.sleep(0.001)
    agent.close()
    close({*files} - {*message["kept"]})
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    close([null])
    os.setsid()
    set_environment(message["environment"])
    del sys.path[0]
    sys.argv = ["-c", str(file), str(message["agent"])]
    return _SERVER


def set_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # asks the environment again
    # As the interpreter does when it begins; what this process had itself stays.
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in folders if folder not in ("", *sys.path)]
