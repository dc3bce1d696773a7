"""Registers the backend `shm` with torch.distributed.

Where unisono is installed, `import torch` calls `register`: the package's metadata lists it as an entry point of the
group "torch.backends". The rest of the package is imported when a group is made. Nothing changes for a program that
uses another backend, or none.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["register"]


def register() -> None:
    """Register the backend, so that `init_process_group("shm")` works. Imports torch; a second call does nothing."""
    import torch.distributed as dist  # noqa: PLC0415  the launcher reads this module's package, and has no torch

    if not dist.is_available():
        return
    backend: Any = dist.Backend
    if "shm" not in backend.backend_list:
        # Torch has a default backend for the CPU already, and keeps it.
        backend.register_backend("shm", _make_group, extended_api=True, devices=["cpu"])


def _make_group(asked: Any, pg_options: Any) -> Any:
    """Make the process group that torch requests."""
    from unisono.shm.process_group import ProcessGroupShm  # noqa: PLC0415  imported when it is needed
    from unisono.shm.runtime import GroupRuntime  # noqa: PLC0415
    from unisono.shm.segment_layout import Options  # noqa: PLC0415

    runtime = GroupRuntime(
        asked.store,
        asked.group_rank,
        asked.group_size,
        timeout=asked.timeout,
        ranks=asked.global_ranks_in_group,
        name=asked.group_id,
        options=Options.choose(pg_options, os.environ),
    )
    return ProcessGroupShm(runtime)
