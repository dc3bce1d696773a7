"""The nodes on which Ray has placed ranks, and the flags of the launcher on each. Pure.

Start reading at `shares_of`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from unisono.watch.figures import plural

__all__ = ["NodeShare", "RayRequest", "describe_resources", "launcher_flags", "new_shares", "shares_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RayRequest:
    """A job for Ray."""

    command: tuple[str, ...]
    """The flags of `unisono run` for the ranks, and the program with its arguments."""
    workers: int
    """The number of ranks."""
    cpus: int = 1
    """Cores of each rank."""
    gpus: int = 0
    """GPUs of each rank."""
    address: str | None = None
    """The cluster, as HOST:PORT; None for the one that RAY_ADDRESS names, or that runs on this machine."""
    conf: str = ""
    """Settings of the rendezvous, as for --rdzv-conf."""
    folder: str = ""
    """The working directory of ranks; "" for that of Ray's processes."""

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray reserves for a rank."""
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}


class NodeShare(NamedTuple):
    """A node and the bundles that it has, each of which is for a rank."""

    node: str
    bundles: tuple[int, ...]


def shares_of(placed: Mapping[int, str]) -> list[NodeShare]:
    """Return the shares of nodes, the one with the first bundle first.

    Args:
        placed: By bundle, the node that has it.

    >>> shares_of({0: "a", 1: "b", 2: "a"})
    [NodeShare(node='a', bundles=(0, 2)), NodeShare(node='b', bundles=(1,))]
    """
    nodes = dict.fromkeys(placed[bundle] for bundle in sorted(placed))
    return [NodeShare(node, tuple(bundle for bundle in sorted(placed) if placed[bundle] == node)) for node in nodes]


def new_shares(placed: Mapping[int, str], *, lost: Collection[int], nodes: Collection[str]) -> list[NodeShare]:
    """Return the shares of nodes on which Ray has placed lost bundles again, without some nodes.

    Args:
        placed: By bundle, the node that has it now.
        lost: The bundles that were lost with their node.
        nodes: Those that were lost, which Ray may not know yet, and those that have a launcher.

    >>> new_shares({0: "a", 1: "c", 2: "a"}, lost=[1, 2], nodes=["a"])
    [NodeShare(node='c', bundles=(1,))]
    """
    return shares_of({bundle: placed[bundle] for bundle in lost if placed.get(bundle, "") not in {"", *nodes}})


def launcher_flags(
    ranks: int, *, hosts: int, endpoint: str, address: str, run_id: str, token_file: str, conf: str = ""
) -> tuple[str, ...]:
    """Return the flags of `unisono run` on one of the nodes.

    Any node may be lost, and come back or be replaced by another, so the number of hosts is a range.

    Args:
        ranks: The number of ranks there.
        hosts: The number of nodes with ranks.
        endpoint: Where the launchers meet.
        address: The address of the node.
        run_id: The name of the job.
        token_file: The file with the secret that the launchers share.
        conf: Settings of the rendezvous.

    >>> flags = launcher_flags(2, hosts=3, endpoint="b:9", address="a", run_id="r", token_file="t", conf="timeout=9")
    >>> flags[:6], flags[-1]
    (('-n', '2', '--nnodes', '1:3', '--rdzv-endpoint', 'b:9'), 'is_host=0,timeout=9')
    """
    if hosts == 1:
        return ("-n", str(ranks), "--rdzv-id", run_id)
    # Nodes of one machine, as in tests, all find that the endpoint is theirs.
    is_host = endpoint.rpartition(":")[0] == address
    conf = ",".join(filter(None, (f"is_host={is_host:d}", conf)))
    return (
        *("-n", str(ranks), "--nnodes", f"1:{hosts}", "--rdzv-endpoint", endpoint, "--local-addr", address),
        *("--rdzv-id", run_id, "--rdzv-token-file", token_file, "--rdzv-conf", conf),
    )


def describe_resources(request: RayRequest, *, total: Mapping[str, float], free: Mapping[str, float]) -> str:
    """Return why a job waits: what it asks for, and what the cluster has.

    >>> describe_resources(RayRequest(command=(), workers=4, cpus=2), total={"CPU": 9.0}, free={"CPU": 1.0})
    'waiting for Ray to place 4 ranks of 2 CPUs each: the cluster has 9 CPUs, 1 of them free'
    """
    names = [name for name in ("CPU", "GPU") if name in request.bundle]
    each = " and ".join(plural(int(request.bundle[name]), name) for name in names)
    has = " and ".join(f"{_count(total, name)} {name}s, {_count(free, name)} of them free" for name in names)
    short = [name for name in names if total.get(name, 0) < request.workers * request.bundle[name]]
    what = f"waiting for Ray to place {plural(request.workers, 'rank')} of {each} each: the cluster has {has}"
    return f"{what}. Unless it grows, that is too few: end the job by Ctrl-C, or add nodes" if short else what


def _count(resources: Mapping[str, float], name: str) -> str:
    return f"{resources.get(name, 0):g}"
