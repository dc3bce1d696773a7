"""Records the waits in a step of a Trainer whose ranks share memory, in the rank's status block.

Such a step calls no function of torch.distributed, so `call_recorder` does not see it. Its waits are counted like
collectives of one group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.activity import Wait, observers
from unisono.launch.hang.call_recorder import CallRecorder
from unisono.launch.hang.status_block import encode_call
from unisono.text import format_ranks

__all__ = ["install"]


def install(recorder: CallRecorder) -> None:
    """Record the waits of Trainers in this process."""
    texts: dict[Any, bytes] = {}

    def begin(wait: Wait) -> Callable[[bool], None]:
        block = recorder.block
        if block is None:
            return lambda _: None
        caller = recorder.find_caller()
        key = (wait.name, wait.group, caller)
        text = texts.get(key)
        if text is None:
            file, line, function = caller
            text = texts[key] = encode_call(
                name=wait.name,
                kind="collective",
                group=wait.group,
                ranks=format_ranks(range(wait.size), separator=","),
                file=file,
                line=line,
                function=function,
            )
        number = block.begin(text, sequence=wait.sequence, epoch=recorder.epoch)
        return lambda failed: block.end(number, failed=failed)

    observers.append(begin)
