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
from collections.abc import Callable
from typing import NoReturn, Protocol

from unisono.launch.channel import Channel
from unisono.launch.cleanup import remove_scratch
from unisono.launch.failure.root_cause import name_signal
from unisono.launch.linux import become_subreaper, end_descendants
from unisono.tcp_store import LOOPBACK, serve_store

__all__ = ["host_store"]

_PATIENCE_S = 6.0
"""How long the fork server may take to end everything when the agent is gone, before it is killed."""

_CHECK_S = 0.25
"""How often to look whether other hosts can still be reached."""

_KILLED = "its launcher was killed"


class JoinedHosts(Protocol):
    """This host's part in a job on several hosts (`launch.hosts.member`)."""

    def receive(self) -> bool:
        """Take the messages of the agent; return False if it is gone."""

    def lose(self, reason: str) -> None:
        """Tell the other hosts that this one is lost, unless they know how it ends."""

    def check(self) -> None:
        """Tell the agent if the other hosts cannot be reached. To be called some times a second."""

    def close(self) -> None:
        """Leave the other hosts. Takes some seconds at most."""


def host_store(
    server: int,
    *,
    agent: Channel,
    listener: socket.socket,
    scratch: str,
    join: tuple[int, Callable[[], JoinedHosts]] | None = None,
) -> NoReturn:
    """Host the store until the fork server has ended; then end the processes that it left, and this one the same way.

    Args:
        server: The process id of the fork server, a child of this process.
        agent: The channel to the agent, from which nothing is read here.
        listener: A socket bound to the port of the store.
        scratch: The job's folder for sockets.
        join: On several hosts, the file over which the agent tells about them, and what begins to meet them.
    """
    become_subreaper()
    wakeups, wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    store = serve_store(LOOPBACK, listener) if join is None else None
    listener.close()  # the store has it by now; with other hosts, ranks meet elsewhere
    poll = select.poll()
    poll.register(wakeups, select.POLLIN)
    poll.register(agent.fileno(), 0)  # only whether it is closed
    link, member = (-1, None) if join is None else (join[0], join[1]())
    if member is not None:
        poll.register(link, select.POLLIN)
    deadline_s: float | None = None
    while not (ended := os.waitpid(server, os.WNOHANG))[0]:
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        if left_s == 0:
            os.kill(server, signal.SIGKILL)
            deadline_s = None
            continue
        if member is not None:
            member.check()
            left_s = _CHECK_S if left_s is None else min(left_s, _CHECK_S)
        for file, _ in poll.poll(None if left_s is None else 1000 * left_s):
            if file == wakeups:
                os.read(wakeups, 1024)
            elif file == link and member is not None:
                if not member.receive():
                    poll.unregister(link)
                    member.lose(_KILLED)
            else:
                poll.unregister(file)
                os.kill(server, signal.SIGCONT)  # a stopped one would not notice
                deadline_s = time.monotonic() + _PATIENCE_S
    code = os.waitstatus_to_exitcode(ended[1])
    if member is not None:
        _leave(member, link, code)
    if code != 0:  # otherwise it has left nothing
        end_descendants()
        remove_scratch(scratch)
    del store
    if code < 0:  # the agent reports the signal
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _leave(member: JoinedHosts, link: int, code: int) -> None:
    """Leave the other hosts once the fork server has ended with this code."""
    while select.select([link], [], [], 0)[0] and member.receive():
        pass  # the last words of the agent
    # The fork server ends after these words, or has seen the end of the agent before this process has.
    how = f"was killed by {name_signal(-code)}" if code < 0 else "failed"
    member.lose(f"its fork server {how}" if code else _KILLED)
    member.close()
