"""The flags of `unisono run` about machines: one, where they must name it, or several. Start reading at `hosts_of`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from unisono.launch.preflight import is_this_machine

if TYPE_CHECKING:
    from unisono.launch.hosts.host_settings import HostSettings

__all__ = ["hosts_of"]

_PORT = 29500
_C10D_PORT = 29400
"""torchrun's ports where none is given."""


def hosts_of(given: Mapping[str, Any]) -> HostSettings | None:
    """Return where the hosts of a job meet, from the values of all flags; None for a job on this machine alone.

    Raises:
        ValueError: The flags contradict each other, or name another machine although there is one only.
    """
    least, most = given["nnodes"] or (1, 1)
    if most == 1:
        _check_one(given)
        return None
    from unisono.launch.hosts.host_settings import NO_ID, HostSettings, read_conf  # noqa: PLC0415  not needed on one machine

    if given["standalone"]:
        raise ValueError(f"--standalone is for one machine, and --nnodes says {most}: leave one out")
    backend: Literal["c10d", "static"] = given["rdzv_backend"] or ("c10d" if given["node_rank"] is None else "static")
    endpoint = given["rdzv_endpoint"]
    host = endpoint.host if endpoint is not None else given["master_addr"]
    port = endpoint.port if endpoint is not None else given["master_port"]
    if not host:
        raise ValueError(
            f"--nnodes {most} needs to know where hosts meet: give all of them --rdzv-endpoint HOST:PORT, with the "
            "name of one of them and a free port there"
        )
    if port is None:
        port = _C10D_PORT if backend == "c10d" else given["master_port"] or _PORT
    token = given["rdzv_token_file"]
    return HostSettings(
        endpoint_host=host.removeprefix("[").removesuffix("]"),
        endpoint_port=port,
        min_hosts=least,
        max_hosts=most,
        backend=backend,
        run_id=given["rdzv_id"] or NO_ID,
        node_rank=given["node_rank"] if backend == "static" else None,
        local_addr=given["local_addr"],
        conf=read_conf(given["rdzv_conf"] or ""),
        token="" if token is None else _read_token(Path(token)),
    )


def _read_token(path: Path) -> str:
    from unisono.launch.hosts.shared_token import read_token  # noqa: PLC0415  few jobs have one

    try:
        return read_token(path)
    except ValueError as error:
        raise ValueError(f"--rdzv-token-file {error}") from error


def _check_one(given: Mapping[str, Any]) -> None:
    """Refuse flags that name another machine than this one."""
    several = "a job on several machines needs --nnodes, such as --nnodes 2"
    if given["node_rank"]:
        raise ValueError(f"--node-rank {given['node_rank']} is not 0, the only machine there is: {several}")
    if given["rdzv_token_file"] is not None:
        raise ValueError(f"--rdzv-token-file is for the rendezvous of several machines: {several}, or leave it out")
    endpoint = given["rdzv_endpoint"]
    for flag, host in (
        ("--rdzv-endpoint", endpoint.host if endpoint is not None else None),
        ("--master-addr", given["master_addr"]),
    ):
        if host and not is_this_machine(host):
            raise ValueError(f"{flag} {host!r} is not this machine: {several}")
