"""Replaces gloo with another backend, without changes to the program: `unisono run --cpu-backend shm`.

Where the program asks for gloo, or for no backend on a machine without an accelerator, the group uses the other
backend. It keeps the name that the program asked for, so that a comparison with "gloo" has the same result. Start
reading at `install`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from unisono.backend import register
from unisono.imports import when_imported

__all__ = ["install", "substitute_for"]

_BACKEND = 3
"""Position of the backend among the arguments of torch's `_new_process_group_helper`."""


def install(cpu_backend: str) -> None:
    """Make `torch.distributed` use this backend where the program asks for gloo, now or when it is imported."""
    if cpu_backend != "gloo":
        substitution = _Substitution(cpu_backend)
        when_imported("torch.distributed.distributed_c10d", substitution.attach)


def substitute_for(asked: str, cpu_backend: str, *, accelerator: bool) -> str | None:
    """Return the backend that replaces the one the program asked for, or None if that one stays.

    Args:
        asked: A name such as "gloo", devices with names such as "cpu:gloo,cuda:nccl", or "undefined" for nothing.
        accelerator: True if torch can use one: a group for several devices is then left to torch.

    >>> substitute_for("gloo", "shm", accelerator=True)
    'shm'
    >>> substitute_for("undefined", "shm", accelerator=False)
    'shm'
    >>> substitute_for("cpu:gloo,cuda:nccl", "shm", accelerator=True)
    """
    asked = asked.lower()
    if asked == "gloo" or (asked == "undefined" and not accelerator):
        return cpu_backend
    if ":" in asked:
        by_device = dict(pair.partition(":")[::2] for pair in asked.split(","))
        if by_device.get("cpu") == "gloo" and (len(by_device) == 1 or not accelerator):
            return cpu_backend
    return None


class _Substitution:
    """Replaces the function with which torch creates every group."""

    def __init__(self, cpu_backend: str) -> None:
        self._cpu_backend = cpu_backend
        self._told = False

    def attach(self, c10d: ModuleType) -> None:
        """Replace `_new_process_group_helper` in the module `torch.distributed.distributed_c10d`."""
        make: Callable[..., Any] = c10d._new_process_group_helper

        @functools.wraps(make)
        def make_group(*args: Any, **kwargs: Any) -> Any:
            asked = args[_BACKEND] if len(args) > _BACKEND else kwargs["backend"]
            other = self._substitute(str(asked))
            if other is None:
                return make(*args, **kwargs)
            register()
            if len(args) > _BACKEND:
                args = (*args[:_BACKEND], other, *args[_BACKEND + 1 :])
            else:
                kwargs["backend"] = other
            group, store = make(*args, **kwargs)
            world: Any = c10d._world
            if group in world.pg_map:  # otherwise this rank is not in it
                world.pg_map[group] = (asked, store)
                world.pg_backend_config[group] = str(c10d.BackendConfig(asked))
            return group, store

        c10d._new_process_group_helper = make_group  # type: ignore[attr-defined]

    def _substitute(self, asked: str) -> str | None:
        # The driver is not queried needlessly, since a program may choose its GPUs later.
        accelerator = asked.lower() != "gloo" and bool(sys.modules["torch"].accelerator.is_available())
        other = substitute_for(asked, self._cpu_backend, accelerator=accelerator)
        if other is None and "gloo" in asked.lower() and not self._told:
            self._told = True
            print(
                f"unisono: a group for {asked!r} is torch's own: --cpu-backend {self._cpu_backend} serves groups of "
                "the CPU alone",
                file=sys.stderr,
            )
        return other
