"""Hosts of their own on this machine: network namespaces on a link of limited rate and with a delay."""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.errors import CannotRun

__all__ = ["HostOfRank", "linked_hosts"]

_LINK = Path(__file__).parent / "scripts" / "delayed_link.py"
_PREFIX = "unisono-"
"""Of namespaces; the process id of their maker follows."""
_CLONE_NEWNET = 0x40000000
_END_S = 30.0


@dataclass(frozen=True, slots=True)
class HostOfRank:
    """The host on which a process is to be a rank."""

    host: int
    namespace: str

    def enter(self) -> None:
        """Move this process there. It must have one thread only, and no connection."""
        with Path("/run/netns", self.namespace).open("rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"the network namespace {self.namespace} cannot be entered")
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        os.environ["UNISONO_HOST"] = str(self.host)


@contextmanager
def linked_hosts(hosts: int, *, per_host: int, bits_per_s: int, delay_s: float) -> Iterator[list[HostOfRank]]:
    """Make hosts with the addresses 10.97.1.1, 10.97.1.2, …; give that of each rank.

    Args: bits_per_s: what each host sends at most; delay_s: of each packet, in either direction.
    Raises: CannotRun where this machine gives no right to make hosts, or its kernel lacks what a slow link takes.
    """
    _remove_stale()
    stem = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(2)}"
    names = [f"{stem}-{host}" for host in range(hosts)]
    with ExitStack() as made:
        for name in names:
            _run("ip", "netns", "add", name)
            made.callback(_remove, name)
        places = [f"{name}=10.97.1.{host + 1}" for host, name in enumerate(names)]
        command = [sys.executable, str(_LINK), str(bits_per_s), str(delay_s), *places]
        pipe = subprocess.PIPE
        link = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        made.callback(link.communicate, timeout=_END_S)
        assert link.stdout is not None
        assert link.stderr is not None
        if link.stdout.readline().strip() != "ready":
            reason = link.stderr.read().strip().splitlines() or ["no reason given"]
            raise CannotRun(f"a slow link cannot be made here: {reason[-1]}")
        yield [HostOfRank(host, name) for host, name in enumerate(names) for _ in range(per_host)]


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotRun(f"hosts cannot be made here: {error}") from error
    if done.returncode:
        raise CannotRun(f"hosts cannot be made here: {done.stderr.strip()}")


def _remove_stale() -> None:
    """Remove the namespaces of makers that are gone: a killed one removes nothing."""
    for namespace in Path("/run/netns").glob(f"{_PREFIX}*"):
        maker = namespace.name.removeprefix(_PREFIX).partition("-")[0]
        if maker.isdigit() and not Path("/proc", maker).exists():
            _remove(namespace.name)


def _remove(name: str) -> None:
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
