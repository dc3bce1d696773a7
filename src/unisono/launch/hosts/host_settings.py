"""The description of a job's hosts: how many there are and where their agents meet. Pure; does not import torch.

Start reading at `HostSettings`. `HostPlace` is what this host is told once all have met.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["HOST_TIMEOUT_S", "JOIN_TIMEOUT_S", "NO_ID", "HostPlace", "HostSettings", "read_conf"]

HOST_TIMEOUT_S = 3.0
"""How long an agent may be silent before the others count its host as lost."""

JOIN_TIMEOUT_S = 600.0
"""How long hosts wait for each other, as under torchrun."""

NO_ID = "none"
"""torchrun's name of a job for which none is given: hosts that give none meet, too."""

_SECONDS = ("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "timeout", "read_timeout")
_KNOWN = (*_SECONDS, "keep_alive_interval", "keep_alive_max_attempt", "is_host", "host_timeout", "store_type")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSettings:
    """Where and how the agents of a job on several hosts meet."""

    endpoint_host: str
    """The name or address of the host at which all meet."""
    endpoint_port: int
    """The port there."""
    min_hosts: int
    """How many hosts there are at least."""
    max_hosts: int
    """How many hosts there are at most; with more than `min_hosts`, late ones are waited for a while."""
    backend: Literal["c10d", "static"] = "c10d"
    """torch's rendezvous: "c10d" numbers hosts by their addresses, "static" by `node_rank`."""
    run_id: str = NO_ID
    """The name of the job: hosts with another name do not meet."""
    node_rank: int | None = None
    """The number of this host; used, and needed, by "static"."""
    local_addr: str | None = None
    """The address of this host for the others. None: the one from which it reaches the endpoint."""
    conf: Mapping[str, str] = field(default_factory=dict)
    """Settings of torch's rendezvous by name, such as `join_timeout` in seconds; `host_timeout` is unisono's own."""
    token: str = field(default="", repr=False)
    """The shared secret, as hexadecimal digits; "" for none."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_hosts <= self.max_hosts:
            raise ValueError(
                f"--nnodes {self.min_hosts}:{self.max_hosts} is an empty range: write MIN:MAX with MIN from 1 up to MAX"
            )
        if not 1 <= self.endpoint_port < 1 << 16:
            raise ValueError(
                f"port {self.endpoint_port} of --rdzv-endpoint: hosts need a port from 1 to 65535 that all know"
            )
        if self.backend == "static":
            if self.node_rank is None:
                raise ValueError("--rdzv-backend static needs --node-rank: 0 on the host of the endpoint, then 1, 2, …")
            if self.min_hosts != self.max_hosts:
                raise ValueError(
                    f"--nnodes {self.min_hosts}:{self.max_hosts} is a range, and --node-rank numbers a fixed number of "
                    "hosts: give one number, or leave --node-rank out"
                )
            if not 0 <= self.node_rank < self.max_hosts:
                raise ValueError(
                    f"--node-rank {self.node_rank} is no number of {self.max_hosts} hosts: they count from 0"
                )
        for name in self.conf:
            if name not in _KNOWN:
                raise ValueError(f"--rdzv-conf has {name!r}, which is none of {', '.join(_KNOWN)}")
        if self.conf.get("store_type", "tcp") != "tcp":
            raise ValueError(f"--rdzv-conf store_type={self.conf['store_type']}: hosts meet at a TCP store only")
        for name in (*_SECONDS, "host_timeout"):
            self._seconds(name, 1.0)

    @property
    def endpoint(self) -> str:
        """The endpoint as HOST:PORT."""
        return f"{self.endpoint_host}:{self.endpoint_port}"

    @property
    def join_timeout_s(self) -> float:
        """How long hosts wait for each other."""
        return self._seconds("timeout" if self.backend == "static" else "join_timeout", JOIN_TIMEOUT_S)

    @property
    def host_timeout_s(self) -> float:
        """How long a host may be silent."""
        return self._seconds("host_timeout", HOST_TIMEOUT_S)

    def _seconds(self, name: str, default_s: float) -> float:
        try:
            value = float(self.conf.get(name, default_s))
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"--rdzv-conf {name}={self.conf[name]!r} is not a number of seconds above 0")
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPlace:
    """The place of a host in its job, once all have met."""

    host: int
    """The number of this host, GROUP_RANK of its ranks."""
    hosts: int
    """How many hosts there are."""
    first_rank: int
    """The lowest rank of this host; the others follow."""
    world_size: int
    """How many ranks the job has on all hosts."""
    first_role_rank: int
    """The lowest rank of this host among ranks with the same role."""
    role_world_size: int
    """How many ranks have this role."""
    master_addr: str
    """The address of the store at which ranks meet."""
    master_port: int
    """The port of that store."""
    identity: str
    """A name of this host that no other host of the job has."""
    ranks: tuple[int, ...] = ()
    """The ranks of this host, if they need not follow each other; otherwise none."""
    joins: bool = False
    """True if this host joins a job that runs: its ranks take the state of the others."""


def read_conf(text: str) -> dict[str, str]:
    """Read torchrun's `--rdzv-conf`: NAME=VALUE, separated by commas.

    >>> read_conf("join_timeout=60, last_call_timeout=5")
    {'join_timeout': '60', 'last_call_timeout': '5'}

    Raises:
        ValueError: A part is not NAME=VALUE.
    """
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"has {part!r}: write NAME=VALUE, separated by commas, such as join_timeout=60")
        found[name.strip()] = value.strip()
    return found
