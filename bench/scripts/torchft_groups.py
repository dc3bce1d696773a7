"""Start a lighthouse and replica groups of one process each, as torchft documents it: `torchft_groups.py N SCRIPT ...`.

Each group has a torchrun of its own, which starts a dead process anew.
"""

import os
import signal
import socket
import subprocess
import sys

from torchft.coordination import LighthouseServer

groups, command = int(sys.argv[1]), sys.argv[2:]
lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=10_000, quorum_tick_ms=100)
port = lighthouse.address().rpartition(":")[2]


def free_port() -> int:
    """Find a port for the store of a group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(group: int) -> subprocess.Popen[bytes]:
    """Start a group."""
    launcher = ["-m", "torch.distributed.run", f"--master-port={free_port()}", "--nnodes=1", "--nproc-per-node=1"]
    variables = {
        "REPLICA_GROUP_ID": str(group),
        "NUM_REPLICA_GROUPS": str(groups),
        "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
    }
    environment = {**os.environ, **variables}
    return subprocess.Popen([sys.executable, *launcher, "--max-restarts=3", *command], env=environment)


def end(signum: int, _: object) -> None:
    """End this process, and with it the groups."""
    sys.exit(128 + signum)


signal.signal(signal.SIGTERM, end)
launchers = [start(group) for group in range(groups)]
try:
    codes = [launcher.wait() for launcher in launchers]
finally:
    for launcher in launchers:
        launcher.terminate()
    for launcher in launchers:
        launcher.wait()
    lighthouse.shutdown()
sys.exit(max(abs(code) for code in codes))
