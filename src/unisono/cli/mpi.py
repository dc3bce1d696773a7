"""Launchers that mpirun has started: one for each of its ranks, where one for each machine was meant. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["refuse_several_launchers"]

_RANKS_OF_MACHINE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Open MPI's variable, and that of MPICH and Intel MPI."""


def refuse_several_launchers(given: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Refuse to be one of several launchers on a machine, each of which would run the whole job.

    Raises:
        ValueError: mpirun has started several on this machine, and no flag says where machines meet.

    >>> nothing = {"nnodes": None, "rdzv_endpoint": None, "standalone": False}
    >>> refuse_several_launchers(nothing, {"MPI_LOCALNRANKS": "1"})
    >>> refuse_several_launchers({**nothing, "standalone": True}, {"MPI_LOCALNRANKS": "4"})
    """
    if given["nnodes"] or given["rdzv_endpoint"] or given["standalone"]:
        return
    for name in _RANKS_OF_MACHINE:
        count = environ.get(name, "")
        if count.isdigit() and int(count) > 1:
            raise ValueError(
                f"mpirun has started {count} launchers on this machine, and each would run the whole job: use mpirun "
                f"-n {count} python ... without a launcher, or unisono run -n {count} without mpirun; --standalone "
                "makes each a job of its own"
            )
