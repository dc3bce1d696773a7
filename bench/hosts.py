"""A lost host: the time until the others have done the next new step, beside torchrun with --max-restarts.

Three launchers on this machine, with a rank each, stand for three hosts; two are enough (`--nnodes 2:3`). After 20
steps, all processes of one are killed, or stopped: then nothing of it answers, and nothing is closed, as after a loss
of power. The time is from there to the first step that needs no rank of the lost host, by the machine's monotonic
clock. A stopped host counts as lost after 3 s; torchrun gets the shortest times that it takes for the same
(`last_call_timeout=1`, `keep_alive_interval=1`, `keep_alive_max_attempt=3`), and a checkpoint after each step. If it
has done no new step after 60 s, that is its figure. The host of the endpoint is never lost there, since torchrun's job
ends with it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bench.errors import CannotRun
from bench.measure import Effort
from bench.rows import Goal, Row, summarise
from bench.step_log import StepLog, first_new_s

__all__ = ["run"]

_HOSTS = 3
_BEFORE = 20
"""Steps before a host is lost."""
_STEPS = 1_000_000
"""More than a run ever does."""
_START_S, _MOST_S = 120.0, 60.0
_PAUSE_S = 0.01
_GOAL_S = 5.0
_SCRIPTS = Path(__file__).parent / "scripts"


class _Case(NamedTuple):
    name: str
    signum: signal.Signals
    host: int
    """The host that is lost, by the order in which launchers are started. The first one has the endpoint."""


_CASES = (
    _Case("killed", signal.SIGKILL, 1),
    _Case("silent", signal.SIGSTOP, 1),
    _Case("killed, that of the rendezvous", signal.SIGKILL, 0),
    _Case("silent, that of the rendezvous", signal.SIGSTOP, 0),
)


def run(effort: Effort) -> Iterator[Row]:
    """Measure each case. Raises: CannotRun if the hosts do not meet, or the run does not go on."""
    rounds = effort.rounds(5, quick=1)
    peers: dict[signal.Signals, list[float]] = {}
    for case in _CASES[:1] if effort.quick else _CASES:
        ours: list[float] = []
        measured = peers.get(case.signum, [])
        for _ in range(rounds):
            ours.append(_seconds("unisono", case))
            if len(measured) < rounds:
                measured.append(_seconds("torchrun", case))
        peer = peers[case.signum] = measured
        if max(ours) >= _MOST_S:
            raise CannotRun(f"the run has not gone on within {_MOST_S:g} s after a host was lost ({case.name})")
        yield summarise(
            "hosts",
            f"one of {_HOSTS} hosts is lost ({case.name}), to the next new step",
            ours=ours,
            peer=peer,
            peer_name="torchrun, another host lost" if case.host == 0 else "torchrun",
            unit="s",
            goal=Goal(of="ours", bound=_GOAL_S),
        )


def _seconds(system: str, case: _Case) -> float:
    """Lose a host of a run; return the seconds to the next new step, or the longest time that is waited."""
    with tempfile.TemporaryDirectory() as folder:
        command, log = _command(system, _free_port(), folder), StepLog(Path(folder))
        hosts = []
        try:
            for _ in range(_HOSTS):
                hosts.append(_start(command, system))
                time.sleep(0.5)  # they are numbered by their addresses, which are equal, and then as they come
            _await_steps(log, system)
            lost_s = time.monotonic()
            for pid in _family(hosts[case.host].pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, case.signum)
            before, old = log.latest(), set(log.pids)
            while (new_s := first_new_s(log.read(), before, old)) is None and time.monotonic() - lost_s < _MOST_S:
                time.sleep(_PAUSE_S)
            return _MOST_S if new_s is None else new_s - lost_s
        finally:
            for host in hosts:
                for pid in _family(host.pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                host.wait()


def _command(system: str, port: int, folder: str) -> list[str]:
    where = ["--nnodes", f"{_HOSTS - 1}:{_HOSTS}", "--nproc-per-node", "1", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    if system == "unisono":
        script = [str(_SCRIPTS / "recovery_unisono.py"), folder, str(_STEPS), "auto"]
        return [sys.executable, "-m", "unisono", "run", *where, *script]
    conf = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    flags = ["--rdzv-backend", "c10d", "--rdzv-conf", conf, "--max-restarts", "3", "--local-addr", "127.0.0.1"]
    script = [str(_SCRIPTS / "recovery_ddp.py"), folder, str(_STEPS), "1"]
    return [sys.executable, "-m", "torch.distributed.run", *where, *flags, *script]


def _start(command: list[str], system: str) -> subprocess.Popen[bytes]:
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    if system == "torchrun":  # each generation of ranks in a store of its own: otherwise they meet where the dead were
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return subprocess.Popen(
        command, env={**os.environ, **variables}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def _await_steps(log: StepLog, system: str) -> None:
    end_s = time.monotonic() + _START_S
    while log.read() is not None and log.latest() < _BEFORE:
        if time.monotonic() > end_s:
            raise CannotRun(f"{system} has done {log.latest()} steps on {_HOSTS} hosts within {_START_S:g} s")
        time.sleep(_PAUSE_S)


def _family(pid: int) -> list[int]:
    """Return a process and all that it has started."""
    found = [pid]
    for each in found:
        with suppress(OSError):
            for thread in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
    return found


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
