"""Runs the command `unisono` as a user does, in a process of its own or forked from one that has imported torch."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kernel import set_subreaper
from printed import ranks_of

TIMEOUT_S = 120


@dataclass(frozen=True)
class Host:
    """Standard input and output of a process that does what it reads, line by line; it ends when they are closed."""

    stdin: IO[str]
    stdout: IO[str]

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdin.close()
        self.stdout.read()  # to the end of the process
        self.stdout.close()


class LaunchHost:
    """Forks launchers that have imported torch; see launch_host.py."""

    def __init__(self, process: Host | subprocess.Popen[str], make_folder: Callable[[str], Path]) -> None:
        self._process = process
        self._make_folder = make_folder

    def run(
        self, *arguments: str, cwd: Path, environment: Mapping[str, str], program: str = "unisono"
    ) -> subprocess.CompletedProcess[str]:
        """Run the command `unisono`, or `python`, as a new process. Fails if it leaves a process behind."""
        folder = self._make_folder("launch")
        facts = {"folder": str(folder), "timeout_s": TIMEOUT_S, "program": program}
        code, left = self._ask(arguments, cwd, environment, **facts)
        out, err = ((folder / name).read_text(errors="surrogateescape") for name in ("out", "err"))
        assert code is not None, f"the job did not end within {TIMEOUT_S} s\n{out[-3000:]}\n{err[-6000:]}"
        assert not left, f"processes left behind: {left}"
        return subprocess.CompletedProcess(arguments, code, out, err)

    def start(
        self,
        *arguments: str,
        cwd: Path,
        environment: Mapping[str, str],
        files: Sequence[int],
        mark: str,
        program: str = "unisono",
        terminal: bool = False,
    ) -> int:
        """Start the command `unisono`, or `python`, as a child of this process. Returns: its process id.

        Args: files are its standard input, output and error; what it forks has mapped memory with the mark; with
            terminal, its standard input is the terminal of its session.
        """
        paths = [f"/proc/{os.getpid()}/fd/{file}" for file in files]
        set_subreaper(True)
        try:
            facts = {"paths": paths, "mark": mark, "parent": os.getpid()}
            facts |= {"program": program, "terminal": terminal}
            return self._ask(arguments, cwd, environment, **facts)
        finally:
            set_subreaper(False)

    def _ask(self, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], **facts: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        job = {"arguments": arguments, "cwd": str(cwd), "environment": dict(environment), **facts}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


class _ForkedLauncher(subprocess.Popen):
    """A launcher that a host forks, with all that a child has."""

    def __init__(
        self, host: LaunchHost, arguments: Sequence[str], mark: str, facts: Mapping[str, Any], **options: Any
    ) -> None:
        self._host, self._mark, self._facts = host, mark, facts
        super().__init__(arguments, **options)

    def _execute_child(self, arguments, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        files = others[3:9]  # both ends of each of the three pipes
        try:
            self.pid = self._host.start(
                *arguments,
                cwd=cwd,
                environment=env,
                files=(files[0], files[3], files[5]),
                mark=self._mark,
                **self._facts,
            )
            self._child_created = True
        finally:
            self._close_pipe_fds(*files)


class Launcher:
    """Starts `unisono` in a folder. All that descends from it carries a mark in its environment.

    A host forks it if there is one; otherwise, and with options of Popen but standard streams, it is a new process.
    """

    def __init__(self, folder: Path, host: LaunchHost | None = None) -> None:
        self.folder = folder
        self._host = host
        self._mark = secrets.token_hex(16)
        dropped = ("PYTEST", "OMP_", "GLOO_SOCKET_IFNAME", "NO_COLOR")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        self.environment = {**kept, "UNISONO_TEST_MARK": self._mark}

    def write(self, name: str, source: str) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return name

    def start(self, *arguments: str, **options: object) -> subprocess.Popen[bytes]:
        """Start the command `unisono`."""
        return self._start(arguments, options, program="unisono")

    def start_in_terminal(self, terminal: int, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the command `unisono` with a terminal of its own."""
        files = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        if self._host is not None:
            return self._start(arguments, files, program="unisono", terminal=True)

        def take() -> None:
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

        return self.start(*arguments, **files, start_new_session=True, preexec_fn=take)

    def start_python(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a script as `python` does; `unisono.spawn` in it starts agents that do not import torch anew either."""
        return self._start(arguments, {}, program="python")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command `unisono`."""
        return self._run(arguments, program="unisono")

    def run_python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a script as `start_python` does."""
        return self._run(arguments, program="python")

    def _run(self, arguments: Sequence[str], *, program: str) -> subprocess.CompletedProcess[str]:
        if self._host is not None:
            return self._host.run(*arguments, cwd=self.folder, environment=self.environment, program=program)
        with self._start(arguments, {}, program=program) as process:
            try:
                out, err = process.communicate(timeout=TIMEOUT_S)
            finally:
                process.kill()
        return subprocess.CompletedProcess(
            arguments, process.returncode, out.decode(errors="surrogateescape"), err.decode(errors="surrogateescape")
        )

    def _start(
        self, arguments: Sequence[str], options: Mapping[str, Any], *, program: str, terminal: bool = False
    ) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        files = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, **options}
        if self._host is not None and options.keys() <= {"stdin", "stdout", "stderr"}:
            facts = {"program": program, "terminal": terminal}
            place = {"cwd": self.folder, "env": self.environment}
            return _ForkedLauncher(self._host, arguments, self._mark, facts, **place, **files)
        command = [sys.executable, *(() if program == "python" else ("-m", "unisono")), *arguments]
        return subprocess.Popen(command, cwd=self.folder, **{"env": self.environment, **files})

    def run_script(self, source: str, *arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
        return self.run("run", "-n", str(ranks), self.write("script.py", source), *arguments)

    @staticmethod
    def values(result: subprocess.CompletedProcess[str]) -> dict[int, object]:
        """Return the value that each rank printed as a line of JSON, alone or together with others."""
        lines = result.stdout.splitlines()
        return {rank: json.loads(line.split("] ", 1)[1]) for line in lines for rank in ranks_of(line)}

    def processes(self) -> list[int]:
        """List the processes that carry the mark, without zombies."""
        return self._ours(int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208

    def _ours(self, pids: Iterable[int]) -> list[int]:
        found = []
        for pid in pids:
            with suppress(OSError):
                if self._is_ours(Path(f"/proc/{pid}")):
                    found.append(pid)
        return found

    def _is_ours(self, folder: Path) -> bool:
        """Whether a process carries the mark: in its environment, or in the memory of one that a host has forked."""
        mark = self._mark.encode()
        return mark in (folder / "environ").read_bytes() or (
            b"launch_host" in (folder / "cmdline").read_bytes() and mark in (folder / "maps").read_bytes()
        )

    def wait_until_gone(self) -> list[int]:
        """Wait for the end of all processes; return those that are still there after the timeout."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while (left := self.processes()) and time.monotonic() < deadline_s:
            # To look at all processes of the machine takes long, so only these are looked at until they have ended.
            while self._ours(left) and time.monotonic() < deadline_s:
                time.sleep(0.01)
        return left

    def check_nothing_is_left(self) -> None:
        """End what still runs after the timeout, and fail if there was any."""
        left = self.wait_until_gone()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        assert not left, f"processes left behind: {left}"
