"""Slurm on this machine: its controller, and one slurmd on each host of a `HostNetwork`; its files lie in a folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from host_network import HostNetwork

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "squeue", "scontrol", "scancel", "sinfo")

_CONFIGURATION = """\
ClusterName=unisono
SlurmctldHost=host0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=sched_interval=1,sched_min_interval=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
KillWait=30
MinJobAge=60
NodeName=host[0-{last}] CPUs=4 RealMemory=2000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60 OverSubscribe=NO
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 OverSubscribe=NO
"""


def obstacle() -> str | None:
    """Why this machine cannot run Slurm; None if it can."""
    search = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=search) is None]
    return f"there is no program {missing[0]!r} (Debian's slurm-wlm and munge have them)" if missing else None


class SlurmCluster:
    """Slurm on all hosts of a network; its controller is on host 0."""

    def __init__(self, network: HostNetwork, hosts: int, folder: Path) -> None:
        self.network, self._folder = network, folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "SLURM", "OMP_"))},
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
            "SLURM_CONF": f"{folder}/slurm.conf",
            "OMP_NUM_THREADS": "1",
        }
        (folder / "munge").mkdir(mode=0o755)
        (folder / "state").mkdir()
        (folder / "munge" / "key").write_bytes(os.urandom(64))
        (folder / "munge" / "key").chmod(0o400)
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, last=hosts - 1))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # /sys in a network namespace has no groups
        for host in range(hosts):
            (folder / f"spool-host{host}").mkdir()
        try:
            munge = folder / "munge"
            self._start(
                0, "munged", "--foreground", "--force", f"--socket={munge}/socket", f"--key-file={munge}/key",
                f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
            )  # fmt: skip
            self._await((munge / "socket").exists, "munged")
            self._start(0, "slurmctld", "-D", "-i")
            for host in range(hosts):
                self._start(host, "slurmd", "-D", "-N", f"host{host}")
            self._await(lambda: self.call("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(hosts), "nodes")
        except BaseException:
            self.close()
            raise

    def call(self, *command: str, folder: Path | None = None, timeout_s: float = 100) -> str:
        """Run a command on host 0; return its output, errors included."""
        return self.run(*command, folder=folder, timeout_s=timeout_s).stdout

    def run(
        self, *command: str, folder: Path | None = None, timeout_s: float = 100
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on host 0."""
        return subprocess.run(
            self.network.command(0, *command),
            cwd=folder or self._folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def close(self) -> None:
        """End all jobs and daemons."""
        end_s = time.monotonic() + 20
        while self.call("squeue", "-h").strip() and time.monotonic() < end_s:
            self.call("scancel", "--signal=KILL", "--full", "--user=root")
            time.sleep(0.3)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for pid in self.network.processes():  # steps would try for ever to tell the controller that they have ended
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _start(self, host: int, *command: str) -> None:
        with (self._folder / f"{command[0]}-{host}.out").open("wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    self.network.command(host, *command), env=self.environment, stdout=output, stderr=output
                )
            )

    def _await(self, condition, what: str) -> None:
        end_s = time.monotonic() + 30
        while not condition():
            if time.monotonic() > end_s:
                raise AssertionError(f"{what} of Slurm did not come up in 30 s:\n{self._logs()}")
            time.sleep(0.2)

    def _logs(self) -> str:
        paths: Sequence[Path] = sorted([*self._folder.glob("*.out"), *self._folder.glob("*.log")])
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in paths)
