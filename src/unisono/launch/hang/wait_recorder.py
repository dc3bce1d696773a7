"""Records waits in a step that `call_recorder` does not see, in the rank's status block.

Where the ranks of a Trainer share memory, a step calls no function of torch.distributed: its waits are counted like
collectives of one group. Where they do not, as on several hosts, and between stages of a pipeline, ranks wait for
messages after the call that begins to receive them.
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
        key = (wait.name, wait.group, wait.peer, caller)
        text = texts.get(key)
        if text is None:
            file, line, function = caller
            text = texts[key] = encode_call(
                name=wait.name,
                kind="collective" if wait.peer is None else "message",
                group=wait.group,
                ranks=format_ranks(range(wait.size), separator=",") if wait.peer is None else "",
                peer=wait.peer,
                file=file,
                line=line,
                function=function,
            )
        number = block.begin(text, sequence=wait.sequence, epoch=recorder.epoch)
        return lambda failed: block.end(number, failed=failed)

    observers.append(begin)
