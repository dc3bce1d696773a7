"""A job on a Ray cluster, where the user is: reserves a place for each rank, and follows the launchers there.

Ray places the ranks (a placement group, one bundle for each), and an actor on each node with bundles starts
`unisono run` there. From then on the launchers talk to each other, not through Ray. If a node is lost, they go on
without it, and Ray finds another place for its bundles: a launcher there joins the job. Start reading at `RayJob.run`.
"""

from __future__ import annotations

import codecs
import logging
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from ipaddress import ip_address
from typing import Any

from unisono.errors import LaunchError
from unisono.launch.ray.merged_output import MergedOutput
from unisono.launch.ray.node_launcher import NodeFacts, NodeLauncher, NodeOutput
from unisono.launch.ray.node_shares import (
    NodeShare,
    RayRequest,
    describe_resources,
    launcher_flags,
    new_shares,
    shares_of,
)
from unisono.watch.figures import plural

__all__ = ["RayJob"]

_PATIENCE_S = 3.0
"""How long Ray may take to place ranks before it is said that the job waits."""
_POLL_S = 0.1
_LOOK_S = 1.0
_START_S = 60.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(eq=False)
class _RayNode:
    """A node with a launcher of the job."""

    share: NodeShare
    launcher: Any
    """The actor."""
    facts: NodeFacts
    code: int | None = None
    """Its exit code; None while it runs."""

    @property
    def name(self) -> str:
        """The node in words."""
        return f"{self.facts.name} ({self.facts.address})"


class RayJob:
    """A job on a Ray cluster.

    Args:
        request: The job.
        output: Where its output goes.
        call: A function and its arguments, pickled, if ranks are to call one; see `NodeLauncher.start`.
    """

    def __init__(self, request: RayRequest, output: MergedOutput, *, call: bytes | None = None) -> None:
        self._request, self._output, self._call = request, output, call
        self._run_id, self._token = f"ray-{secrets.token_hex(4)}", secrets.token_hex(32)
        self._nodes: list[_RayNode] = []
        self._lost: set[int] = set()  # bundles that were lost with their node
        self._unusable: set[str] = set()  # nodes that are lost, and those on which no launcher could be started
        self._hosts = 0
        self._port = 0
        self._signals: list[int] = []
        self._group: Any = None
        self.results: dict[int, bytes] = {}
        """What the function has returned, pickled, by rank, after `run`."""

    def run(self) -> int:
        """Run the job, and return its exit code. Signals are passed on to the ranks.

        Raises:
            LaunchError: There is no Ray, no cluster, or a node on which the job cannot start.
        """
        with _connected(self._request.address), self._taking_signals():
            try:
                if not self._place():
                    return 128 + self._signals[0]
                for share in shares_of(self._placed()):
                    self._nodes.append(self._reach(share))
                self._start()
                self._follow()
                if self._call is not None:
                    self._collect()
                codes = [node.code for node in self._nodes if node.code is not None]
                # A launcher that was cut off, or came too late, fails alone. If the job does, all of them do.
                return 0 if 0 in codes else max(codes, default=1)
            finally:
                self._close()

    @contextmanager
    def _taking_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, lambda number, _: self._signals.append(number)) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _place(self) -> bool:
        """Let Ray reserve a place for each rank; return False if a signal came first."""
        ray = _ray()
        request = self._request
        self._group = ray.util.placement_group([request.bundle] * request.workers, strategy="PACK")
        begun_s, said = time.monotonic(), ""
        while not self._group.wait(timeout_seconds=_POLL_S):
            if self._signals:
                return False
            if time.monotonic() - begun_s > _PATIENCE_S:
                told = describe_resources(request, total=ray.cluster_resources(), free=ray.available_resources())
                if told != said:
                    said = told
                    self._output.say(told)
        return True

    def _placed(self) -> dict[int, str]:
        ray = _ray()
        table = ray.util.placement_group_table(self._group)
        if table["state"] != "CREATED":
            return {}
        return {int(bundle): str(node) for bundle, node in table["bundles_to_node_id"].items()}

    def _actor(self, bundle: int) -> Any:
        ray = _ray()
        strategies = import_module("ray.util.scheduling_strategies")
        place = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        options = {"num_cpus": self._request.cpus, "num_gpus": self._request.gpus, "max_concurrency": 3}
        return ray.remote(NodeLauncher).options(scheduling_strategy=place, max_restarts=0, **options).remote()

    def _reach(self, share: NodeShare) -> _RayNode:
        """Start the actor of a node."""
        ray = _ray()
        launcher = self._actor(share.bundles[0])
        try:
            facts = NodeFacts(*ray.get(launcher.facts.remote(), timeout=_START_S))
            if self._request.gpus:
                others = [self._actor(bundle) for bundle in share.bundles[1:]]
                given = ray.get([other.gpus.remote() for other in others], timeout=_START_S)
                facts = facts._replace(gpus=(*facts.gpus, *(gpu for gpus in given for gpu in gpus)))
                for other in others:
                    ray.kill(other)
        except ray.exceptions.GetTimeoutError:
            raise LaunchError(f"no process of Ray has started on node {share.node} within {_START_S:g} s") from None
        except ray.exceptions.RayError as error:
            raise LaunchError(f"no launcher could be started on node {share.node}: {_reason(error)}") from error
        return _RayNode(share, launcher, facts)

    def _start(self) -> None:
        """Start the launchers of all nodes."""
        ray = _ray()
        self._nodes.sort(key=lambda node: ip_address(node.facts.address).packed)  # as the rendezvous numbers hosts
        self._hosts = len(self._nodes)
        self._port = ray.get(self._nodes[0].launcher.free_port.remote())
        for node in self._nodes:
            self._launch(node)

    def _launch(self, node: _RayNode) -> None:
        ray = _ray()
        first = next(each for each in self._nodes if each.code is None)
        flags = launcher_flags(
            len(node.share.bundles),
            hosts=self._hosts,
            endpoint=f"{first.facts.address}:{self._port}",
            address=node.facts.address,
            run_id=self._run_id,
            token_file="TOKEN",
            conf=self._request.conf,
        )
        problem = ray.get(
            node.launcher.start.remote(
                flags,
                self._request.command,
                folder=self._request.folder,
                token=self._token,
                gpus=node.facts.gpus,
                call=self._call,
            )
        )
        if problem:
            raise LaunchError(f"node {node.name}: {problem}")

    def _follow(self) -> None:
        """Pass on what launchers print until all have ended."""
        ray = _ray()
        reads = {node.launcher.read.remote(): node for node in self._nodes}
        decoders: dict[tuple[_RayNode, int], Any] = {}
        look_s = 0.0
        while reads:
            done, _ = ray.wait([*reads], num_returns=1, timeout=_POLL_S)
            while self._signals:
                number = self._signals.pop(0)
                for node in reads.values():
                    node.launcher.signal.remote(number)
            for reference in done:
                node = reads.pop(reference)
                try:
                    output = NodeOutput(*ray.get(reference))
                except ray.exceptions.RayError:
                    self._lose(node)
                    continue
                for number, data in enumerate((output.stdout, output.stderr)):
                    decoder = decoders.setdefault((node, number), codecs.getincrementaldecoder("utf-8")("replace"))
                    self._output.write(node.share.node, number, decoder.decode(data), now_s=time.monotonic())
                if (code := output.code) is None:
                    reads[node.launcher.read.remote()] = node
                else:
                    node.code = code
                    self._output.end(node.share.node)
            if self._lost and reads and time.monotonic() >= look_s:
                look_s = time.monotonic() + _LOOK_S
                reads |= {node.launcher.read.remote(): node for node in self._replace()}

    def _lose(self, node: _RayNode) -> None:
        """Note that a node is lost."""
        self._output.end(node.share.node)
        self._nodes.remove(node)
        self._lost.update(node.share.bundles)
        self._unusable.add(node.share.node)
        self._output.say(
            f"Ray has lost node {node.name}, which had {plural(len(node.share.bundles), 'place')} of the job"
        )

    def _replace(self) -> list[_RayNode]:
        """Start launchers where Ray has placed lost bundles again."""
        added = []
        taken = self._unusable.union(node.share.node for node in self._nodes)
        for share in new_shares(self._placed(), lost=self._lost, nodes=taken):
            try:
                node = self._reach(share)
                self._launch(node)
            except LaunchError as error:
                self._output.say(str(error))
                self._unusable.add(share.node)
                continue
            self._output.say(
                f"Ray has {plural(len(share.bundles), 'place')} on node {node.name}: a launcher starts there"
            )
            self._nodes.append(node)
            self._lost.difference_update(share.bundles)
            added.append(node)
        return added

    def _collect(self) -> None:
        ray = _ray()
        for node in self._nodes:
            self.results |= ray.get(node.launcher.results.remote())

    def _close(self) -> None:
        """Let Ray have its resources back."""
        ray = _ray()
        for node in self._nodes:
            with suppress(ray.exceptions.RayError):
                ray.get(node.launcher.close.remote(), timeout=_START_S)
                ray.kill(node.launcher)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)


@contextmanager
def _connected(address: str | None) -> Iterator[None]:
    """Be connected to a cluster; leave a connection that there is already as it is."""
    ray = _ray()
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = f"at {address}" if address else "that RAY_ADDRESS names, or that runs on this machine,"
        raise LaunchError(
            f"no Ray cluster {where} answers: {_reason(error)}. Start one by `ray start --head`, or give "
            "--ray-address HOST:PORT"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _ray() -> Any:
    """Return the package, which few jobs need.

    Raises:
        LaunchError: It is not installed.
    """
    try:
        return import_module("ray")
    except ModuleNotFoundError as error:
        raise LaunchError("a job on Ray needs the package ray, which is not installed: pip install ray") from error


def _reason(error: Exception) -> str:
    """Return the line of an error of Ray that tells most: a module that is missing, or the first one."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if "No module named" in line), lines[0]).strip().rstrip(".")
