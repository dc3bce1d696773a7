"""Addresses of this host as others see it: which one reaches the endpoint, and which network interface has it.

Does not import torch. Start reading at `find_addresses`.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import LaunchError
from unisono.launch.hosts.host_settings import HostSettings
from unisono.launch.preflight import is_this_machine

__all__ = ["HostAddresses", "NameUnknownError", "find_addresses"]

_SIOCGIFADDR = 0x8915


class NameUnknownError(LaunchError):
    """The name of the endpoint cannot be resolved, but perhaps later. `reason` is the resolver's."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True, slots=True)
class HostAddresses:
    """The addresses that matter for the rendezvous of hosts."""

    endpoint: str
    """The endpoint's numeric address."""
    local: str
    """This host's address for the others."""
    interface: str
    """The network interface that has it; "" if none is found."""
    hosts_endpoint: bool
    """True if this host is the endpoint."""
    listen: str
    """The address at which this host listens, if it is the endpoint; "" for all."""


def find_addresses(settings: HostSettings) -> HostAddresses:
    """Find the addresses of this host. Looks up names; sends nothing.

    Raises:
        NameUnknownError: The endpoint's name cannot be resolved.
        LaunchError: It is no name, there is no route to it, or `local_addr` is not of this host.
    """
    endpoint = _resolve(settings.endpoint_host, "--rdzv-endpoint", may_wait=True)
    is_endpoint = _is_endpoint(settings)
    if settings.local_addr is not None:
        local = _resolve(settings.local_addr, "--local-addr")
        if not is_this_machine(local):
            raise LaunchError(f"--local-addr {settings.local_addr} is no address of this machine; see `ip addr`")
    else:
        local = _source_address(endpoint, settings)
    literal = settings.endpoint_host in ("localhost", endpoint)
    listen = endpoint
    if is_endpoint and ipaddress.ip_address(endpoint).is_loopback and not literal:
        # A host's own name is often an alias of the loopback address in /etc/hosts. Others resolve it differently.
        listen = local if settings.local_addr is not None else ""
    elif is_endpoint and not is_this_machine(endpoint):
        listen = local  # is_host was given: the endpoint's name is that of a proxy or a port that is forwarded
    return HostAddresses(
        endpoint=endpoint, local=local, interface=_interface_of(local), hosts_endpoint=is_endpoint, listen=listen
    )


def _is_endpoint(settings: HostSettings) -> bool:
    if settings.backend == "static":
        return settings.node_rank == 0
    told = settings.conf.get("is_host", "").lower()
    if told:
        return told in ("1", "true", "t", "yes", "y")
    return is_this_machine(settings.endpoint_host)


def _resolve(name: str, flag: str, *, may_wait: bool = False) -> str:
    bare = name.removeprefix("[").removesuffix("]")
    try:
        found = socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        told = f"{flag} {name}: the name cannot be resolved ({reason}); give an address, or a name that all hosts know"
        # What is neither a name nor an address now will be none later.
        if may_wait and isinstance(error, OSError) and any(c.isalpha() for c in bare) and ":" not in bare:
            raise NameUnknownError(told, str(reason)) from error
        raise LaunchError(told) from error
    # IPv4 first: torch's store listens on it in every configuration.
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def _source_address(endpoint: str, settings: HostSettings) -> str:
    """Return the address from which packets to the endpoint leave this host. A datagram socket sends nothing here."""
    family = socket.AF_INET6 if ":" in endpoint else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((endpoint, settings.endpoint_port))
        except OSError as error:
            raise LaunchError(
                f"there is no way from this host to {settings.endpoint_host} ({endpoint}): {error.strerror}; check the "
                "network, or give another --rdzv-endpoint"
            ) from error
        return str(probe.getsockname()[0])


def _interface_of(address: str) -> str:
    """Return the network interface with an address; "" if there is none."""
    if ":" in address:
        wanted = ipaddress.ip_address(address.partition("%")[0]).exploded.replace(":", "")
        with suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                digits, *_, name = line.split()
                if digits == wanted:
                    return name
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return "lo" if ipaddress.ip_address(address).is_loopback else ""
