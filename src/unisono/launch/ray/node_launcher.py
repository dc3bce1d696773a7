"""The launcher of a node: an actor of Ray, and the process of `unisono run` that it starts.

The process ends its ranks, and itself, when the actor is gone. Start reading at `NodeLauncher.start`.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from unisono.launch.ray.function_program import NO_RESULTS, read_results
from unisono.launch.spawn.agent_process import end_with_caller

__all__ = ["NodeFacts", "NodeLauncher", "NodeOutput", "watch_actor"]

_STARTER = (
    "import sys; getattr(sys.flags, 'safe_path', False) or sys.path.pop(0); "
    "from unisono.launch.ray.node_launcher import watch_actor; watch_actor(); "
    "from unisono.cli.main import main; main()"
)
_POLL_S = 1.0
_READ_NBYTES = 1 << 16


class NodeFacts(NamedTuple):
    """A node, as its launcher sees it."""

    name: str
    address: str
    gpus: tuple[str, ...]
    """The GPUs that Ray has given to this process."""


class NodeOutput(NamedTuple):
    """What the process of a launcher has printed since it was asked the last time."""

    stdout: bytes
    stderr: bytes
    code: int | None
    """Its exit code; None while it runs."""


class NodeLauncher:
    """The launcher of a node. Ray runs its methods, `read` and `signal` at the same time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline = -1
        self._selector = selectors.DefaultSelector()
        self._files: dict[str, int] = {}
        """In memory, so that nothing is left of them when this process is killed."""

    def facts(self) -> NodeFacts:
        """Return the facts about this node."""
        ray: Any = import_module("ray")
        return NodeFacts(socket.gethostname(), ray.util.get_node_ip_address(), tuple(map(str, ray.get_gpu_ids())))

    def gpus(self) -> tuple[str, ...]:
        """Return the GPUs that Ray has given to this process."""
        return self.facts().gpus

    def free_port(self) -> int:
        """Return a port that is free now at the address of this node."""
        with socket.create_server((self.facts().address, 0)) as server:
            port: int = server.getsockname()[1]
            return port

    def start(
        self,
        flags: Sequence[str],
        command: Sequence[str],
        *,
        folder: str,
        token: str,
        gpus: Sequence[str],
        call: bytes | None,
    ) -> str:
        """Start `unisono run`; return "", or what hinders it.

        Args:
            flags: Those of this node, in which "TOKEN" stands for the file with the token.
            command: Further flags, and the program; in a call of a function, "CALL" stands for the file with it, and
                "RESULTS" for that of the results.
            folder: The working directory; "" for that of this process.
            token: The secret that the launchers share.
            gpus: The GPUs of the ranks; none: all that this process sees.
            call: A function and its arguments, pickled; None: there is none.
        """
        if folder and not Path(folder).is_dir():
            if "_ray_pkg_" not in (here := str(Path.cwd())):  # otherwise Ray has put the program there
                return (
                    f"it has no folder {folder}: start from one that all nodes share, or let Ray copy the program by "
                    "`ray job submit --working-dir . -- unisono run --on ray ...`"
                )
            folder = here
        names = {name: self._keep(name, data) for name, data in _contents(token, call).items()}
        lifeline, self._lifeline = os.pipe()
        words = [names.get(word, word) for word in flags]
        words += [names.get(word, word) for word in command] if call is not None else command
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})}
        try:
            self._process = process = subprocess.Popen(
                [sys.executable, "-c", _STARTER, str(lifeline), "run", *words],
                cwd=folder or None,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[lifeline],
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._lifeline)
            return f"no process could be started there: {error.strerror}"
        finally:
            os.close(lifeline)
        for number, pipe in enumerate((process.stdout, process.stderr)):
            assert pipe is not None
            self._selector.register(pipe, selectors.EVENT_READ, number)
        return ""

    def read(self) -> NodeOutput:
        """Return what the process has printed, as soon as there is something, and after a second at the latest."""
        process = self._process
        assert process is not None
        if not self._selector.get_map():
            return NodeOutput(b"", b"", process.wait())
        found = [b"", b""]
        for key, _ in self._selector.select(_POLL_S):
            data = os.read(key.fd, _READ_NBYTES)
            found[key.data] += data
            if not data:
                self._selector.unregister(key.fileobj)
        # A process that a rank has left behind may have the pipes open for ever.
        is_silent = self._selector.get_map() and not any(found)
        return NodeOutput(found[0], found[1], process.poll() if is_silent else None)

    def close(self) -> None:
        """Close the files of the job."""
        while self._files:
            os.close(self._files.popitem()[1])

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def results(self) -> dict[int, bytes]:
        """Return what the function has returned on ranks that were here when they ended, pickled, by rank."""
        return read_results(self._files["RESULTS"])

    def _keep(self, name: str, data: bytes) -> str:
        """Put data into a file in memory; return the path by which other processes of this user can open it."""
        file = self._files[name] = os.memfd_create(f"unisono-{name.lower()}")
        os.fchmod(file, 0o600)
        with open(file, "wb", closefd=False) as stream:
            stream.write(data)
        return f"/proc/{os.getpid()}/fd/{file}"


def watch_actor() -> None:
    """End this process, a launcher, when its actor is gone. The first argument is the end of a pipe, and is removed."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's processes block SIGINT, and their children would, too
    lifeline = int(sys.argv.pop(1))
    os.set_inheritable(lifeline, False)
    threading.Thread(target=end_with_caller, args=(lifeline,), daemon=True).start()


def _contents(token: str, call: bytes | None) -> dict[str, bytes]:
    """Return the files of a job, by what stands for them in commands."""
    files = {"TOKEN": token.encode()}
    return files if call is None else {**files, "CALL": call, "RESULTS": NO_RESULTS}
