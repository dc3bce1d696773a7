"""A host that forks the ranks of test_observer.py, as a fork server does, with a status block for each.

It forks a process for each job, which forks the ranks; that tells its process id and theirs, then how each ended. See
warm_host.py for how it starts. It reads the address at which the test listens.
"""

import json
import os
import signal
import socket
import sys
from functools import partial

from unisono.launch.channel import Channel
from unisono.launch.hang import call_recorder, stacks, status_block

_RANK = """
import os, runpy, sys
code = 1
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
    code = 0
finally:
    os._exit(code)
"""
"""Run where no frame of this file lies below."""


def serve() -> str:
    """Fork jobs until the other end is closed. Returns: what a rank goes on with."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    end = socket.socket(socket.AF_UNIX)
    end.connect(f"\0{sys.stdin.readline().strip()}")
    jobs = Channel(end)
    while not jobs.closed:
        for message, files in jobs.receive():
            if not os.fork():
                jobs.close()
                return _run(message["script"], *files)
            for file in files:
                os.close(file)
    return ""


def _run(script: str, output: int, errors: int, *files: int) -> str:
    """Fork the ranks of a job and wait for them. Returns in ranks only."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in ((1, output), (2, errors)):
        os.dup2(file, number)
        os.close(file)
    pids: dict[int, int] = {}
    for rank, (page_file, dump, ask) in enumerate(zip(*[iter(files)] * 3, strict=True)):
        if not (pid := os.fork()):
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(len(files) // 3), GLOO_SOCKET_IFNAME="lo")
            recording = call_recorder.install(status_block.StatusBlock(page_file), ask=ask, dump=dump)
            stacks.install(dump, has_thread=partial(getattr, recording, "has_thread"))
            sys.argv = [script]
            return _RANK
        pids[pid] = rank
    print(json.dumps([os.getpid(), *pids]), flush=True)
    while pids:
        pid, status = os.wait()
        print(json.dumps([pids.pop(pid), os.waitstatus_to_exitcode(status)]), flush=True)
    os._exit(0)
