"""Hosts of their own on this machine: network namespaces with an address and a name each, on one bridge or a slow link.

All devices live in the namespaces, the bridge too, so that removing these removes everything. Names hold the process id
of their maker: what a killed one has left is removed by the next.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from launcher import TIMEOUT_S, Host, Launcher, LaunchHost

TESTS = Path(__file__).parent.parent
_LINK = TESTS.parent / "bench" / "scripts" / "delayed_link.py"
_PREFIX = "unisono-"
_FILES = Path("/etc/netns")
"""For each namespace, files that its processes find in /etc."""


def obstacle() -> str | None:
    """Why this machine cannot make hosts; None if it can."""
    if os.getuid() != 0:
        return "making network namespaces needs root"
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"there is no program {program!r}"
    name = f"{_PREFIX}{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces cannot be made: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return None


class NoSlowLinkError(Exception):
    """This machine can make hosts, and no slow link between them; the text says why."""


@dataclass(frozen=True)
class SlowLink:
    """The link of each host."""

    bits_per_s: int
    delay_s: float
    """Of each packet, in either direction."""


class HostNetwork:
    """Hosts host0, host1, … with the addresses 10.97.0.1, 10.97.0.2, …, which know each other by name.

    With a slow link, none of its devices can be changed later.
    """

    def __init__(self, hosts: int, *, link: SlowLink | None = None) -> None:
        remove_stale()
        self._stem = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(2)}"
        self._names: list[str] = []
        self._relay: subprocess.Popen[str] | None = None
        try:
            self._make(hosts)
            self._connect() if link is None else self._connect_slowly(link)
        except BaseException:
            self.close()
            raise

    def address(self, host: int) -> str:
        return f"10.97.0.{host + 1}"

    def command(self, host: int, *command: str, name: str | None = None) -> list[str]:
        """The command on a host, which believes itself to have that name."""
        set_name = f'hostname {name or f"host{host}"} && exec "$@"'
        return ["ip", "netns", "exec", self._names[host], "unshare", "--uts", "sh", "-c", set_name, "-", *command]

    def name(self, name: str, host: int) -> None:
        """Give a host one more name, which all processes know from now on."""
        for each in self._names:
            with (_FILES / each / "hosts").open("a") as file:
                file.write(f"{self.address(host)} {name}\n")

    def give_name_server(self, host: int, address: str) -> None:
        """Let processes that are started on a host from now on ask a name server for what its files do not have."""
        (_FILES / self._names[host] / "resolv.conf").write_text(f"nameserver {address}\n")
        (_FILES / self._names[host] / "nsswitch.conf").write_text("hosts: files dns\n")

    def set_link(self, host: int, state: str) -> None:
        """Plug the cable of a host in ("up") or out ("down")."""
        _ip("-n", self._stem, "link", "set", f"p{host}", state)

    def set_mtu(self, host: int, nbytes: int) -> None:
        """Set the largest packet of a host's device."""
        _ip("-n", self._names[host], "link", "set", "eth0", "mtu", str(nbytes))

    @contextmanager
    def no_route(self, host: int, *, to: int) -> Iterator[None]:
        """Take a host's way to another one. Within a context."""
        _ip("-n", self._names[host], "route", "add", "unreachable", self.address(to))
        try:
            yield
        finally:
            _ip("-n", self._names[host], "route", "del", "unreachable", self.address(to))

    def transmitted(self, host: int) -> int:
        """The bytes that a host has sent to others so far."""
        shown = subprocess.run(
            ["ip", "netns", "exec", self._names[host], "cat", "/proc/net/dev"],
            capture_output=True,
            text=True,
            check=True,
        )
        line = next(line for line in shown.stdout.splitlines() if "eth0:" in line)
        return int(line.partition(":")[2].split()[8])

    def processes(self) -> list[int]:
        """The processes that run on any host."""
        command = ("ip", "netns", "pids")
        told = [subprocess.run([*command, name], capture_output=True, text=True, check=True) for name in self._names]
        return [int(pid) for each in told for pid in each.stdout.split()]

    def close(self) -> None:
        if self._relay is not None:
            self._relay.communicate(timeout=60)
        for name in (*self._names, self._stem):
            _remove(name)

    def _make(self, hosts: int) -> None:
        table = "".join(f"{self.address(host)} host{host}\n" for host in range(hosts))
        for host in range(hosts):
            name = f"{self._stem}-{host}"
            _ip("netns", "add", name)
            self._names.append(name)
            folder = _FILES / name
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{table}")
            # There is no name server.
            (folder / "nsswitch.conf").write_text("hosts: files\n")

    def _connect(self) -> None:
        _ip("netns", "add", self._stem)
        _ip("-n", self._stem, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._stem, "link", "set", "br0", "up")
        for host, name in enumerate(self._names):
            _ip("-n", self._stem, "link", "add", f"p{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self._stem, "link", "set", f"p{host}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")

    def _connect_slowly(self, link: SlowLink) -> None:
        places = [f"{name}={self.address(host)}" for host, name in enumerate(self._names)]
        command = (sys.executable, str(_LINK), str(link.bits_per_s), str(link.delay_s), *places)
        pipe = subprocess.PIPE
        self._relay = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        if self._relay.stdout.readline() != "ready\n":  # type: ignore[union-attr]
            reason = self._relay.communicate(timeout=60)[1]
            self._relay = None
            raise NoSlowLinkError((reason.strip().splitlines() or ["no reason given"])[-1])


class Hosts:
    """Hosts with a network between them, on each of which jobs can be started."""

    def __init__(
        self,
        network: HostNetwork,
        folder: Path,
        make_folder: Callable[[str], Path],
        start_host: Callable[..., Host],
    ) -> None:
        self.network, self.folder = network, folder
        self._make_folder, self._start_host = make_folder, start_host
        self._launch_hosts: dict[int, LaunchHost] = {}
        self._open = ExitStack()
        self.launchers: list[Launcher] = []

    def start(self, host: int, *arguments: str) -> subprocess.Popen[bytes]:
        """Start `unisono` on a host."""
        self.launchers.append(launcher := Launcher(self.folder, self._launch_host(host)))
        return launcher.start(*arguments)

    def start_python(self, host: int, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a script on a host as `python` does."""
        self.launchers.append(launcher := Launcher(self.folder, self._launch_host(host)))
        return launcher.start_python(*arguments)

    def run(
        self, *arguments: str, hosts: int = 2, ranks: int = 2, flags: Sequence[str] = ()
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run a job on all hosts, to its end."""
        started = [self.start_rank(host, *arguments, hosts=hosts, ranks=ranks, flags=flags) for host in range(hosts)]
        return [finish(process) for process in started]

    def start_rank(
        self, host: int, *arguments: str, hosts: int = 2, ranks: int = 2, flags: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Start the part of a job that runs on one host."""
        where = ("--nnodes", str(hosts), "-n", str(ranks), "--rdzv-endpoint", "host0:29500")
        return self.start(host, "run", *where, *flags, *arguments)

    def close(self) -> None:
        self._open.close()

    def _launch_host(self, host: int) -> LaunchHost:
        if host not in self._launch_hosts:
            pipe = subprocess.PIPE
            there = subprocess.Popen(
                self.network.command(host, "sh", "-c", "echo there; exec cat"), stdin=pipe, stdout=pipe, text=True
            )
            assert there.stdout.readline() == "there\n"  # type: ignore[union-attr]
            process = self._open.enter_context(self._start_host("launch_host", beside=there.pid))
            self._launch_hosts[host] = LaunchHost(process, self._make_folder)
            self._open.callback(there.communicate, timeout=60)
        return self._launch_hosts[host]


def finish(process: subprocess.Popen[bytes]) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a launcher."""
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{error}\n{error.stdout!r}\n{error.stderr!r}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out.decode(), err.decode())


def remove_stale() -> None:
    """Remove the namespaces of makers that are gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for name in (line.split()[0] for line in listed.splitlines() if line.startswith(_PREFIX)):
        maker = name.removeprefix(_PREFIX).partition("-")[0]
        if maker.isdigit() and not Path(f"/proc/{maker}").exists():
            _remove(name)


def _remove(name: str) -> None:
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    shutil.rmtree(_FILES / name, ignore_errors=True)
    with suppress(OSError):
        _FILES.rmdir()


def _ip(*arguments: str | Sequence[str]) -> None:
    done = subprocess.run(["ip", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(map(str, arguments))}: {done.stderr}"
