"""Records in the rank's page where it waits in a step of a Trainer whose ranks share memory.

Such a step passes no function of torch.distributed, so `recorder` does not see it. Its waits are counted like
collectives of one group: before the n-th barrier comes a wait until the others have begun the step too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from unisono.imports import when_imported
from unisono.launch.hang.page import describe, name_range
from unisono.launch.hang.recorder import Recorder

__all__ = ["install"]

_MODULE = "unisono.engine.shared.hall"
_WAITS = {"wait_until_free": 1, "barrier": 2}
"""Methods of its class Hall, and which of the two waits that belong to a barrier each is."""

Method = Callable[..., Any]


def install(recorder: Recorder) -> None:
    """Record the waits of Trainers in this process, from the import of the engine on."""

    def attach(module: ModuleType) -> None:
        for name, place in _WAITS.items():
            setattr(module.Hall, name, _recorded(getattr(module.Hall, name), recorder, place))

    when_imported(_MODULE, attach)


def _recorded(method: Method, recorder: Recorder, place: int) -> Method:
    texts: dict[Any, bytes] = {}

    @functools.wraps(method)
    def recorded(hall: Any, *args: Any, **options: Any) -> Any:
        page = recorder.page
        if page is None:
            return method(hall, *args, **options)
        caller = recorder.find_caller()
        key = (hall.name, caller)
        text = texts.get(key)
        if text is None:
            file, line, function = caller
            text = texts[key] = describe(
                name="Trainer.step",
                kind="collective",
                group=hall.name,
                ranks=name_range(tuple(range(hall.size))),
                file=file,
                line=line,
                function=function,
            )
        number = page.begin(text, sequence=2 * hall.barriers + place, epoch=recorder.epoch)
        try:
            result = method(hall, *args, **options)
        except BaseException:
            page.end(number, failed=True)
            raise
        page.end(number)
        return result

    return recorded
