"""The facts of a host in `unisono hosts check`. Imports torch where it asks it. Start reading at `own_facts`."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from unisono.machine import kernel_text, usable_cores

__all__ = ["HostFacts", "own_facts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """A host as the others see it in their tables."""

    name: str
    """Its host name."""
    address: str
    """Its address for the others; "" if it is alone."""
    interface: str
    """The network interface that has this address; "" if none is found."""
    mtu: int
    """The largest packet of that interface, in bytes; 0 if unknown."""
    versions: Mapping[str, str]
    """The versions of Python, torch and unisono that a job compares."""
    cores: int
    """How many cores its ranks may use."""
    memory_nbytes: int
    """Its main memory."""
    cpu: str
    """The vector instructions that torch uses there, and the model of the processor."""
    gpus: tuple[str, ...]
    """The GPUs that torch can use."""

    @property
    def title(self) -> str:
        """The name and the address, for messages."""
        return f"{self.name} ({self.address})" if self.address else self.name


def own_facts(*, address: str, interface: str) -> HostFacts:
    """Return the facts of this host. Counts GPUs through torch, which opens the driver."""
    import torch  # noqa: PLC0415  the command line is parsed without it

    gpus = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
    return HostFacts(
        name=socket.gethostname(),
        address=address,
        interface=interface,
        mtu=int(kernel_text(f"/sys/class/net/{interface}/mtu").strip() or 0) if interface else 0,
        versions={
            "Python": ".".join(platform.python_version_tuple()[:2]),
            "torch": torch.__version__,
            "unisono": version("unisono"),
        },
        cores=usable_cores(),
        memory_nbytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        cpu=f"{torch.backends.cpu.get_cpu_capability()}, {_processor(Path('/proc/cpuinfo'))}",
        gpus=tuple(gpus),
    )


def _processor(path: Path) -> str:
    for line in kernel_text(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return " ".join(value.split())
    return platform.machine() or "unknown processor"
