"""Keeps programs from hanging where they take their process groups down, with torch's own functions.

A thread of gloo lets go of a tensor after the call that used it, and needs the interpreter for that. The main thread
keeps the interpreter while DDP's reducer, the group's last owner, is freed, and waits there for that thread: for ever,
if it has not let go by then. So it gets its time before the groups go.
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
    """Have `destroy_process_group` wait for the threads of groups, from the import of torch.distributed on."""
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
