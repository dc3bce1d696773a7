"""A Ray cluster on this machine: nodes with addresses of their own on the loopback interface, ended by their ids."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import psutil

_START_S = 90


class RayCluster:
    """Nodes with some cores each. Use it in a `with` block.

    Args:
        folder: For Ray's files; its path must be short.
        cpus: The cores of each node, as Ray counts them.
    """

    def __init__(self, folder: Path, cpus: list[int]) -> None:
        self._folder, self._cpus = folder, cpus
        self._nodes: list[subprocess.Popen[bytes]] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._port = server.getsockname()[1]

    @property
    def address(self) -> str:
        """Where jobs find it."""
        return f"127.0.0.1:{self._port}"

    def __enter__(self) -> RayCluster:
        try:
            for cpus in self._cpus:
                self.add(cpus)
            self.await_nodes(len(self._cpus))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        for number in reversed(range(len(self._nodes))):
            self.kill(number)

    def add(self, cpus: int) -> None:
        """Start a node."""
        number = len(self._nodes)
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--num-cpus={cpus}"]
        command += [
            f"--node-ip-address=127.0.0.{number + 1}",
            "--disable-usage-stats",
            "--object-store-memory=80000000",
        ]
        if number == 0:
            command += ["--head", f"--port={self._port}", "--include-dashboard=false", f"--temp-dir={self._folder}"]
        else:
            command += [f"--address={self.address}"]
        log = (self._folder / f"node{number}.log").open("wb")
        environment = {**os.environ, "RAY_ENABLE_MULTI_NODE_LOCALHOST": "1"}
        with log:
            node = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self._nodes.append(node)
        self._await_start(number)

    def _await_start(self, number: int) -> None:
        # Nodes that start at the same time may get ports of each other, and end.
        end_s, log = time.monotonic() + _START_S, self._folder / f"node{number}.log"
        while "Ray runtime started" not in log.read_text():
            if self._nodes[number].poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"node {number} does not start: {log.read_text()}")
            time.sleep(0.1)

    def await_nodes(self, count: int) -> None:
        """Wait until some nodes are there."""
        code = f"""
import ray, time
ray.init({self.address!r}, log_to_driver=False, logging_level=50)
while sum(node["Alive"] for node in ray.nodes()) != {count}:
    time.sleep(0.1)
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=_START_S)

    def runs(self, number: int, word: str) -> bool:
        """Return True if a process of a node has a word in its command."""
        processes = psutil.Process(self._nodes[number].pid).children(recursive=True)
        return any(word in part for process in processes for part in process.cmdline())

    def kill(self, number: int) -> None:
        """Kill a node with all its processes, as a loss of power does."""
        try:
            node = psutil.Process(self._nodes[number].pid)
            processes = [node, *node.children(recursive=True)]
        except psutil.NoSuchProcess:
            processes = []
        for process in processes:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self._nodes[number].wait()
