"""The comparison of hosts before a job begins: versions, flags, and addresses that do not tell them apart. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

__all__ = ["find_difference"]

_VERSIONS = ("unisono", "torch", "Python")


def find_difference(hellos: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Return why hosts cannot form a job, for the user; None if they can. The same on all hosts.

    Args:
        hellos: By number, what each host says of itself: `versions`, `flags` (those that all must be given alike),
            `address`, `name`, and `system`, which is equal for launchers in one network of one running system.

    >>> def hello(torch, address, system, **flags):
    ...     versions = {"unisono": "1", "torch": torch, "Python": "3.11"}
    ...     name = f"h ({address})"
    ...     return {"versions": versions, "flags": flags, "address": address, "name": name, "system": system}
    >>> find_difference({0: hello("2.9", "10.0.0.1", "a"), 1: hello("2.9", "10.0.0.2", "b")})
    >>> find_difference({0: hello("2.9", "10.0.0.1", "a"), 1: hello("2.8", "10.0.0.2", "b")}).partition(", and")[0]
    'hosts have different versions of torch'
    >>> find_difference({0: hello("2.9", "10.0.0.1", "a"), 1: hello("2.9", "10.0.0.1", "b")}).partition(":")[0]
    'hosts 0 and 1 cannot be told apart'
    >>> find_difference({0: hello("2.9", "10.0.0.1", "a", K="1"), 1: hello("2.9", "10.0.0.2", "b", K="2")})
    'hosts were started with different K: 1 on h (10.0.0.1), 2 on h (10.0.0.2); start all with the same'
    """
    for name in _VERSIONS:
        if listed := _differing(hellos, "versions", name):
            return f"hosts have different versions of {name}, and bits may depend on it: {listed}; install the same"
    for name in sorted({name for hello in hellos.values() for name in hello.get("flags", {})}):
        if listed := _differing(hellos, "flags", name):
            return f"hosts were started with different {name}: {listed}; start all with the same"
    by_address: dict[str, int] = {}
    for host, hello in sorted(hellos.items()):
        other = by_address.setdefault(hello["address"], host)
        if other != host and hellos[other]["system"] != hello["system"]:
            return (
                f"hosts {other} and {host} cannot be told apart: both are {hello['name']} for the others; give each "
                "its own address with --local-addr"
            )
    return None


def _differing(hellos: Mapping[int, Mapping[str, Any]], of: str, name: str) -> str:
    """Return on which hosts a fact has which value; "" if it is the same on all. Hosts with most's are counted."""
    found = {host: str(hello.get(of, {}).get(name)) for host, hello in sorted(hellos.items())}
    values = Counter(found.values())
    if len(values) == 1:
        return ""
    most_common, count = values.most_common(1)[0]
    usual = most_common if 2 * count > len(found) else None
    odd = [f"{value} on {hellos[host]['name']}" for host, value in found.items() if value != usual]
    return ", ".join([*odd, *([f"{usual} on the other {count} hosts"] if usual is not None else [])])
