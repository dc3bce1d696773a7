"""Keeps programs from hanging in torch's `destroy_process_group`.

A thread of gloo releases a tensor after the call that used it, and needs the interpreter's lock for that. The main
thread holds the lock while DDP's reducer, the group's last owner, is freed, and waits for that thread meanwhile:
forever, if it has not released the tensor by then. Threads therefore get time to finish before groups are destroyed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from unisono.imports import when_imported
from unisono.machine import let_threads_finish

__all__ = ["install"]


def install() -> None:
    """Make `destroy_process_group` wait for the threads of groups, now or when torch.distributed is imported."""
    when_imported("torch.distributed.distributed_c10d", _attach)


def _attach(c10d: ModuleType) -> None:
    destroy: Callable[..., Any] = c10d.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        let_threads_finish()
        return destroy(*args, **kwargs)

    for module in (c10d, sys.modules.get("torch.distributed")):
        if module is not None and getattr(module, "destroy_process_group", None) is destroy:
            module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]
