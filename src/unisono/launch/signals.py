"""Signals of the agent's own process, in the form that its loop reads."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from unisono.launch.failure.root_cause import name_signal

__all__ = ["describe_signal", "signals_as_bytes"]


@contextmanager
def signals_as_bytes(signals: Iterable[int]) -> Iterator[int]:
    """Turn signals into bytes of a pipe for the loop. Signals already ignored, as under nohup, stay ignored."""
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    earlier_file = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    handled = [signum for signum in signals if signal.getsignal(signum) is not signal.SIG_IGN]
    earlier = {signum: signal.signal(signum, lambda *_: None) for signum in handled}
    try:
        yield read
    finally:
        for signum, handler in earlier.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(earlier_file)
        os.close(read)
        os.close(write)


def describe_signal(signum: int) -> str:
    """Return the words for a job that a signal has ended."""
    return "interrupted" if signum == signal.SIGINT else f"{name_signal(signum)} received"
