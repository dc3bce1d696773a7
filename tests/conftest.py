"""Fixtures of all layers: scripts on N ranks, and a check that a test leaves nothing behind.

There are two ways to start ranks. With the launcher (launcher.py): `run_ranks` for its output and exit code, `launcher`
and `warm_launcher` in launch/ for tests of the launcher itself, `warm_spawn` for `unisono.spawn`. Without one
(rank_host.py): `fork_ranks`, with `fork_python` for a single process and `run_alone` in trainer/ for a script behind a
preamble. Neither imports torch anew, except `launcher` and what `FRESH_LAUNCHES=1` asks for.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest

from launcher import TIMEOUT_S, Host, Launcher, LaunchHost
from ports import free_port
from printed import ranks_of

# Where the environment forbids to cache bytecode, as a container's often does, each of the thousands of processes would
# compile all that it imports of unisono: in most tests that takes longer than anything else.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Whoever starts the tests in the background, or under nohup, has these ignored, and so would every job: a job keeps
# ignoring what it finds ignored.
_HANDLERS = {
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}
for _signum, _handler in _HANDLERS.items():
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, _handler)


def pytest_configure(config: pytest.Config) -> None:
    """Let torch use one thread; the process that only hands tests to workers does not import it."""
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        gc.disable()  # what is imported stays, and to look for garbage in it takes a sixth of the time
        import torch

        torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Let the collector look at what tests make, and no longer at what was there before them."""
    gc.enable()
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class Job:
    """A job that has ended: its exit code, and its standard output without and with the ranks' prefixes."""

    code: int
    out: str
    err: str
    codes: Sequence[int | None] = ()
    """Without a launcher: the exit code of each rank, None for one that had to be ended."""

    def lines(self, rank: int = 0) -> list[str]:
        """What one rank printed on standard output, alone or together with others."""
        return [line.partition("] ")[2] for line in self.out.splitlines() if rank in ranks_of(line)]

    @property
    def said(self) -> str:
        """Standard error as running text: where a report breaks its lines is another test's business."""
        return " ".join(self.err.split())

    def sha(self) -> str:
        """The digest that the job printed last."""
        return re.findall(r"weights sha256: ([0-9a-f]{64})", self.out)[-1]


Runner = Callable[..., Job]


@pytest.fixture
def run_ranks(tmp_path: Path, launch_host: LaunchHost | None) -> Runner:
    """Run a script on N ranks with `unisono run`, and check its exit code."""

    def run(n: int, script: str | Path, *args: object, code: int | None = 0, flags: Sequence[object] = ()) -> Job:
        launcher = Launcher(Path.cwd(), launch_host)
        path = _file(script, tmp_path)
        done = launcher.run("run", "-n", str(n), *map(str, flags), str(path), *map(str, args))
        job = Job(done.returncode, done.stdout, done.stderr)
        assert code is None or job.code == code, f"exit code {job.code}\n{job.out[-3000:]}\n{job.err[-6000:]}"
        if launch_host is None:  # it has looked
            launcher.check_nothing_is_left()
        return job

    return run


class RankHost:
    """Forks ranks that have imported torch; see rank_host.py."""

    def __init__(self, process: Host) -> None:
        self._process = process

    def run(
        self,
        n: int,
        script: Path,
        *args: object,
        folder: Path,
        cwd: Path | None = None,
        watched: bool = True,
        environment: Mapping[str, str] = MappingProxyType({"RANK": "{rank}"}),
    ) -> tuple[list[int | None], int | None]:
        """Run a script on N ranks, whose output goes to files out0, err0, … in a folder.

        Args: watched is whether all are ended when one fails; {rank} in an argument or in the environment stands for
            the rank.
        Returns: exit codes by rank, minus the signal for one that was killed, None for one that had to be ended; and
            the code of the one that failed first, 0 if none did.
        """
        job = {
            "ranks": n,
            "script": str(script),
            "arguments": list(map(str, args)),
            "folder": str(folder),
            "cwd": str(cwd or Path.cwd()),
            "environment": dict(environment),
            "watched": watched,
            "timeout_s": TIMEOUT_S,
        }
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        codes, first = json.loads(self._process.stdout.readline())
        return codes, first


@pytest.fixture(scope="session")
def start_host() -> Iterator[Callable[..., Host]]:
    """Start a host from a process that has imported torch once for all; see warm_host.py."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "OMP_"))}
    environ |= {"OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}
    ours, theirs = socket.socketpair()
    # The command names launch_host, by which Launcher finds the processes of a job.
    code = "import warm_host; exec(warm_host.serve(int(sys.argv[1])))  # rank_host or launch_host"
    command = [sys.executable, "-c", f"import sys; sys.path[0] = {str(Path(__file__).parent)!r}; {code}"]
    command.append(str(theirs.fileno()))
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environ, start_new_session=True
    ) as process:
        theirs.close()

        def start(name: str, *, beside: int = 0) -> Host:
            """Start a host by the name of its module, in the namespaces of a process if one is given."""
            (read_in, write_in), (read_out, write_out) = os.pipe(), os.pipe()
            socket.send_fds(ours, [f"{name} {beside}".encode()], [read_in, write_out])
            os.close(read_in), os.close(write_out)
            return Host(os.fdopen(write_in, "w"), os.fdopen(read_out))

        yield start
        ours.close()
        process.wait(timeout=60)


@pytest.fixture(scope="session")
def rank_host(start_host: Callable[..., Host]) -> Iterator[RankHost]:
    """The process that forks ranks for this process's tests."""
    with start_host("rank_host") as host:
        yield RankHost(host)


@pytest.fixture
def fork_ranks(rank_host: RankHost, tmp_path: Path) -> Runner:
    """Run a script on N ranks as `run_ranks` does, but without a launcher, and without importing torch anew.

    With watched=False ranks are not ended soon after one has failed. {rank} in `variables` stands for the rank.
    """

    def run(
        n: int,
        script: str | Path,
        *args: object,
        code: int | None = 0,
        watched: bool = True,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> Job:
        folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=tmp_path))
        environment = {
            **variables,
            "RANK": "{rank}",
            "LOCAL_RANK": "{rank}",
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
        }
        path = _file(script, tmp_path)
        codes, first = rank_host.run(n, path, *args, folder=folder, watched=watched, environment=environment)
        out, err = (
            "".join(
                f"[{rank}] {line}\n"
                for rank in range(n)
                for line in (folder / f"{name}{rank}").read_text().splitlines()
            )
            for name in ("out", "err")
        )
        job = Job(-1 if first is None else first if first >= 0 else 128 - first, out, err, codes)
        assert code is None or job.code == code, f"ranks ended with {codes}\n{out[-3000:]}\n{err[-6000:]}"
        return job

    return run


@pytest.fixture(scope="session")
def fork_python(rank_host: RankHost, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Run a script as `python` does, without any launcher, but without importing torch anew; return what it printed."""

    def run(script: Path, *args: object) -> list[str]:
        folder = tmp_path_factory.mktemp("python")
        codes, _ = rank_host.run(1, script, *args, folder=folder, environment={})
        assert codes == [0], (folder / "err0").read_text()[-4000:]
        return (folder / "out0").read_text().splitlines()

    return run


@pytest.fixture(scope="session")
def simulated_device(pytestconfig: pytest.Config) -> Path:
    """The library of a device that works as a GPU does, for programs behind `simulated_device.py` (which see)."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to compile the simulated device")
    from simulated_device import build  # which imports torch

    assert pytestconfig.cache is not None
    return build(pytestconfig.cache.mkdir("simulated_device"))


@pytest.fixture(scope="session")
def launch_host(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LaunchHost | None]:
    """The process that forks launchers for this process's tests; None if FRESH_LAUNCHES asks for new processes."""
    if os.environ.get("FRESH_LAUNCHES") == "1":
        yield None
        return
    with request.getfixturevalue("start_host")("launch_host") as host:
        yield LaunchHost(host, tmp_path_factory.mktemp)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a child process, a thread or a variable behind."""
    threads, environ, children = set(threading.enumerate()), dict(os.environ), _children()
    yield
    left = set(threading.enumerate()) - threads
    for thread in left:  # one of multiprocessing's queues, or one that saves a dropped run, ends a little later
        thread.join(10)
    running = {t.name for t in left if t.is_alive()}
    assert not running, f"threads left running: {running}"
    # What torch and scikit-learn set when they are imported stays.
    ignored = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
    changed = {k for k in {*environ, *os.environ} - ignored if environ.get(k) != os.environ.get(k)}
    assert not changed, f"environment variables left changed: {changed}"
    late = {pid for pid in _children() - children if not _ends(pid, within_s=10)}
    assert not late, f"processes left running: {late}"


@pytest.fixture(autouse=True, scope="module")
def nothing_kept_open() -> Iterator[None]:
    """Fail the tests of a module that leave a port or shared memory behind; to look takes too long for each test."""
    before = _ports() | _shared_memory()
    yield
    gc.collect()  # what is in a circle is let go of later
    gc.freeze()  # what is left has been imported, and is not looked at again after the next module
    left = (_ports() | _shared_memory()) - before
    assert not left, f"left open: {left}"


def _file(script: str | Path, folder: Path) -> Path:
    """Return the file of a script, written to a folder if it is given as text."""
    if isinstance(script, Path):
        return script
    path = folder / "script.py"
    path.write_text(script)
    return path


def _children() -> set[int]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def _ends(pid: int, *, within_s: float) -> bool:
    """Return True if a child has ended, or does so in time. It is reaped.

    A process whose parent ended while this one started a launcher may have come to this one, and end a little later.
    """
    end_s = time.monotonic() + within_s
    while True:
        with suppress(ChildProcessError):
            if not os.waitpid(pid, os.WNOHANG)[0]:
                if time.monotonic() > end_s:
                    return False
                time.sleep(0.01)
                continue
        return True


def _ports() -> set[str]:
    """List the ports on which this process listens."""
    sockets = set()
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            sockets |= set(re.findall(r"socket:\[(\d+)\]", str(file.readlink())))
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path("/proc/net", table).read_text().splitlines()[1:]]
    return {f"port {int(row[1].rpartition(':')[2], 16)}" for row in rows if row[3] == "0A" and row[9] in sockets}


def _shared_memory() -> set[str]:
    """List the shared memory that this process has mapped."""
    maps = Path("/proc/self/maps").read_text()
    return {f"memory {name}" for name in re.findall(r"/dev/shm/\S+|/memfd:unisono[^\n]*", maps)}
