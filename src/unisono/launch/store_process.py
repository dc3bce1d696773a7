"""The process above the fork server: it hosts the job's store, and outlives the fork server.

It is the parent and subreaper of the fork server, as the agent is of this process. If any two of the three are killed,
the third still reaches all processes of the job and ends them. It runs threads (the store's) and never forks. Start
reading at `host_store`.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import time
from datetime import timedelta
from typing import NoReturn

from unisono.launch.channel import Channel
from unisono.launch.cleanup import remove_scratch
from unisono.launch.linux import become_subreaper, end_descendants

__all__ = ["host_store"]

_PATIENCE_S = 6.0
"""How long the fork server may take to end everything when the agent is gone, before it is killed."""


def host_store(server: int, *, agent: Channel, listener: socket.socket, scratch: str) -> NoReturn:
    """Host the store until the fork server has ended; then end the processes that it left, and this one the same way.

    Args:
        server: The process id of the fork server, a child of this process.
        agent: The channel to the agent, from which nothing is read here.
        listener: A socket bound to the port of the store.
        scratch: The job's folder for sockets.
    """
    become_subreaper()
    wakeups, wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    store = _host_store(listener)
    poll = select.poll()
    poll.register(wakeups, select.POLLIN)
    poll.register(agent.fileno(), 0)  # only whether it is closed
    deadline_s: float | None = None
    while not (ended := os.waitpid(server, os.WNOHANG))[0]:
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        if left_s == 0:
            os.kill(server, signal.SIGKILL)
            deadline_s = None
            continue
        for file, _ in poll.poll(None if left_s is None else 1000 * left_s):
            if file == wakeups:
                os.read(wakeups, 1024)
            else:
                poll.unregister(file)
                os.kill(server, signal.SIGCONT)  # a stopped one would not notice
                deadline_s = time.monotonic() + _PATIENCE_S
    code = os.waitstatus_to_exitcode(ended[1])
    if code != 0:  # otherwise it has left nothing
        end_descendants()
        remove_scratch(scratch)
    del store
    if code < 0:  # the agent reports the signal
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _host_store(listener: socket.socket) -> object:
    """Start the store and return the object that serves it as long as the object exists."""
    from torch import distributed as dist  # noqa: PLC0415  importing this module must not import torch

    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )
