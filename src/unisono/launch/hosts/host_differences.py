"""The comparison of hosts before a job begins: versions, and addresses that do not tell them apart. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["find_difference"]

_VERSIONS = ("unisono", "torch", "Python")


def find_difference(hellos: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Return why hosts cannot form a job, for the user; None if they can. The same on all hosts.

    Args:
        hellos: By number, what each host says of itself: `versions`, `address`, `name`, and `system`, which is equal
            for launchers in one network of one running system.

    >>> def hello(torch, address, system):
    ...     versions = {"unisono": "1", "torch": torch, "Python": "3.11"}
    ...     return {"versions": versions, "address": address, "name": f"h ({address})", "system": system}
    >>> find_difference({0: hello("2.9", "10.0.0.1", "a"), 1: hello("2.9", "10.0.0.2", "b")})
    >>> find_difference({0: hello("2.9", "10.0.0.1", "a"), 1: hello("2.8", "10.0.0.2", "b")}).partition(", and")[0]
    'hosts have different versions of torch'
    >>> find_difference({0: hello("2.9", "10.0.0.1", "a"), 1: hello("2.9", "10.0.0.1", "b")}).partition(":")[0]
    'hosts 0 and 1 cannot be told apart'
    """
    for name in _VERSIONS:
        found = {host: hello["versions"].get(name) for host, hello in sorted(hellos.items())}
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{value} on {hellos[host]['name']}" for host, value in found.items())
            return f"hosts have different versions of {name}, and bits may depend on it: {listed}; install the same"
    by_address: dict[str, int] = {}
    for host, hello in sorted(hellos.items()):
        other = by_address.setdefault(hello["address"], host)
        if other != host and hellos[other]["system"] != hello["system"]:
            return (
                f"hosts {other} and {host} cannot be told apart: both are {hello['name']} for the others; give each "
                "its own address with --local-addr"
            )
    return None
