"""Runs the command `unisono` as a user does, in a process of its own or forked from one that has imported torch."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from printed import ranks_of

TIMEOUT_S = 120

# Runs `unisono` with arguments in a folder with an environment: see `fork_launcher` in conftest.py.
Fork = Callable[..., "subprocess.CompletedProcess[str]"]


class Launcher:
    """Starts `unisono` in a folder. All that descends from it carries a mark in its environment.

    `run` forks if it is given a way to, otherwise it starts a new process, as `start` always does.
    """

    def __init__(self, folder: Path, fork: Fork | None = None) -> None:
        self.folder = folder
        self._fork = fork
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
        return subprocess.Popen(
            [sys.executable, "-m", "unisono", *arguments],
            cwd=self.folder,
            **{
                "env": self.environment,
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                **options,
            },
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        if self._fork is not None:
            return self._fork(*arguments, cwd=self.folder, environment=self.environment)
        with self.start(*arguments) as process:
            try:
                out, err = process.communicate(timeout=TIMEOUT_S)
            finally:
                process.kill()
        return subprocess.CompletedProcess(
            arguments, process.returncode, out.decode(errors="surrogateescape"), err.decode(errors="surrogateescape")
        )

    def run_script(self, source: str, *arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
        return self.run("run", "-n", str(ranks), self.write("script.py", source), *arguments)

    @staticmethod
    def values(result: subprocess.CompletedProcess[str]) -> dict[int, object]:
        """Return the value that each rank printed as a line of JSON, alone or together with others."""
        lines = result.stdout.splitlines()
        return {rank: json.loads(line.split("] ", 1)[1]) for line in lines for rank in ranks_of(line)}

    def processes(self) -> list[int]:
        """List the processes that carry the mark, without zombies."""
        found = []
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                if folder.name.isdigit() and self._mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found

    def wait_until_gone(self) -> list[int]:
        """Wait for the end of all processes; return those that are still there after the timeout."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while (left := self.processes()) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return left

    def check_nothing_is_left(self) -> None:
        """End what still runs after the timeout, and fail if there was any."""
        left = self.wait_until_gone()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        assert not left, f"processes left behind: {left}"
