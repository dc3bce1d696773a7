"""Forks the agents of `unisono.spawn` from a process that has imported torch, for a script or for a test's own process.

Otherwise the fork server of each call would import torch anew. The caller's Popen asks a process that was forked
before the caller began, and nothing else differs: what is forked becomes a child of the caller, with the files, folder,
environment and arguments that a new interpreter would have had.
"""

from __future__ import annotations

import fcntl
import multiprocessing.process
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernel import set_subreaper
from launch_host import become_agent, close, fork_child_of, set_environment
from unisono.launch.channel import Channel
from unisono.launch.spawn import caller as spawn_caller

_AGENT = "from unisono.launch.spawn.agent_process import main; main()"


def become_caller() -> str:
    """Take the place of `python`, whose arguments this process has. Returns: what the forked processes go on with."""
    ours, theirs = socket.socketpair()
    if not os.fork():
        ours.close()
        return serve(theirs)
    theirs.close()
    spawn_caller.subprocess = AgentStarter(Channel(ours))
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # noqa: PTH109  as for the module that a script imports
    folder = str(Path(sys.argv[0]).resolve().parent)
    return f"import sys, rank_host; sys.path[0] = {folder!r}; rank_host.run()"


def become_server() -> str:
    """Fork agents for a test, which listens at the address that is this process's argument."""
    end = socket.socket(socket.AF_UNIX)
    end.connect(f"\0{sys.argv[0]}")
    return serve(end)


def serve(end: socket.socket) -> str:
    """Fork agents for this process's parent until that has ended. Returns: what an agent goes on with."""
    parent, asking = os.getppid(), Channel(end)
    while not asking.closed:
        for message, files in asking.receive():
            if not (pid := fork_child_of(parent)):
                asking.close()
                return _become_agent(message, files)
            close(files)
            asking.send({"pid": pid})
    os._exit(0)


def _become_agent(message: dict[str, Any], files: Sequence[int]) -> str:
    """Take the place of the process that `unisono.spawn` starts."""
    first_free = max(message["numbers"]) + 1
    moved = [_move(file, first_free) for file in files]
    for file, number in zip(moved, message["numbers"], strict=True):
        os.dup2(file, number)
    close(moved)
    os.setsid()
    os.chdir(message["cwd"])
    set_environment(message["environment"])
    sys.argv = ["-c", *message["arguments"]]
    return become_agent(f"import sys; del sys.path[0]; {_AGENT}", files=message["numbers"][3:])


def _move(file: int, first_free: int) -> int:
    """Give a file another number from `first_free` on."""
    moved = fcntl.fcntl(file, fcntl.F_DUPFD, first_free)
    os.close(file)
    return moved


class AgentStarter:
    """Stands in for the module subprocess in `unisono.spawn`, which starts one process: its agent."""

    DEVNULL, PIPE = subprocess.DEVNULL, subprocess.PIPE

    def __init__(self, server: Channel) -> None:
        self._server = server

    def Popen(self, command: list[str], *, start_new_session: bool, **options: Any) -> subprocess.Popen[bytes]:  # noqa: N802
        assert command[2].endswith(_AGENT) and start_new_session
        return _Agent(self._server, command, **options)


class _Agent(subprocess.Popen):
    """An agent that another process forks, with all that a child has."""

    def __init__(self, server: Channel, command: Sequence[str], **options: Any) -> None:
        self._server = server
        super().__init__(command, **options)

    def _execute_child(self, arguments, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        files = others[3:9]  # both ends of each of the three pipes
        out, err = (number if file == -1 else file for number, file in ((1, files[3]), (2, files[5])))
        message = {"environment": dict(os.environ), "cwd": os.getcwd(), "arguments": arguments[3:]}  # noqa: PTH109
        set_subreaper(True)
        try:
            self._server.send({**message, "numbers": [0, 1, 2, *pass_fds]}, [files[0], out, err, *pass_fds])
            ((answer, _),) = self._server.receive()
        finally:
            set_subreaper(False)
            self._close_pipe_fds(*files)
        self.pid = answer["pid"]
        self._child_created = True
