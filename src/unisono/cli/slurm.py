"""`srun unisono run train.py`: the machines of a job, from the variables that Slurm's srun sets. Pure.

Start reading at `flags_of_slurm`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from unisono.cli.reading import Endpoint
from unisono.watch.figures import plural

__all__ = ["flags_of_slurm"]


def flags_of_slurm(given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of flags that srun's variables tell; none if the user has given --nnodes or an endpoint.

    Machines are numbered by Slurm and meet at the first one, at a port that follows from the numbers of job and step.

    Raises:
        ValueError: srun has started several launchers on a machine, or names no machine.

    >>> step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
    ...         "SLURM_STEP_NODELIST": "gpu[003-004]", "SLURM_NODEID": "1"}
    >>> nothing = {"nnodes": None, "rdzv_endpoint": None, "master_addr": None, "standalone": False}
    >>> flags_of_slurm(nothing, step)["node_rank"], flags_of_slurm(nothing, step)["rdzv_endpoint"]
    (1, Endpoint(host='gpu003', port=20049))
    >>> flags_of_slurm(nothing, {})
    {}
    """
    nodes, tasks = (environ.get(f"SLURM_STEP_NUM_{what}", "") for what in ("NODES", "TASKS"))
    asked = given["nnodes"] or given["rdzv_endpoint"] or given["master_addr"] or given["standalone"]
    if asked or not (nodes.isdigit() and tasks.isdigit()) or "1" == nodes == tasks:
        return {}
    if tasks != nodes:
        raise ValueError(
            f"srun has started {tasks} launchers on {plural(int(nodes), 'machine')}, and each starts all ranks "
            "of its machine: use srun --ntasks-per-node=1 unisono run -n RANKS ..., or srun python ... without a "
            "launcher; --standalone makes each a job of its own"
        )
    first = re.match(r"([^,\[]+)(?:\[(\w+))?", environ.get("SLURM_STEP_NODELIST", ""))
    if first is None or not environ.get("SLURM_NODEID", "").isdigit():
        raise ValueError("SLURM_STEP_NODELIST or SLURM_NODEID tells no machine: give --nnodes and --rdzv-endpoint")
    job, step = (int(environ.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return {
        "nnodes": (int(nodes), int(nodes)),
        "node_rank": int(environ["SLURM_NODEID"]),
        "rdzv_endpoint": Endpoint(first[1] + (first[2] or ""), 20_000 + (job * 7 + step) % 12_000),
        "rdzv_id": given.get("rdzv_id") or f"slurm-{job}.{step}",
        "rdzv_backend": "static",
    }
