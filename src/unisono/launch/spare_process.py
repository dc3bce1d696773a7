"""The wait of a spare process for its rank: the process's end of a socket, whose other end the agent has.

The process says that it waits, and sleeps until the agent sends the variables of its rank, or is gone. The agent's side
is `launch.spares`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from unisono.errors import LaunchError
from unisono.launch.reserved_files import OwnFile
from unisono.variables import EVENTS_VARIABLE

__all__ = ["WAITS", "RankGrant", "encode_grant"]

WAITS = b"w"
"""The message of a spare process that has come to the place where it needs a rank."""


def encode_grant(environment: Mapping[str, str], *, events: bool) -> bytes:
    """Return the message by which a spare process becomes a rank.

    Args:
        environment: The variables of the rank.
        events: True if it writes the events of the run.
    """
    return json.dumps({"environment": dict(environment), "events": events}).encode() + b"\n"


class RankGrant:
    """The rank that a spare process will have.

    Args:
        file: The socket, which is open now.
        events: The file to which rank 0 writes events; other ranks close it.
    """

    def __init__(self, file: int, *, events: int | None) -> None:
        self._file, self._events = OwnFile(file), events

    def take(self) -> None:
        """Wait for a rank and set its variables. Ends this process if the job needs it no more.

        Raises:
            LaunchError: The program has closed the socket.
        """
        if not self._file.is_intact:
            raise LaunchError(
                "this spare rank cannot be told which rank it becomes, since the program has closed files that it did "
                "not open: leave out --spares, or close only the program's own files"
            )
        message = b""
        try:
            os.write(self._file.number, WAITS)
            while not message.endswith(b"\n"):
                part = os.read(self._file.number, 1 << 16)
                if not part:
                    os._exit(0)
                message += part
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)
        os.close(self._file.number)
        told = json.loads(message)
        os.environ.update(told["environment"])
        if self._events is not None and told["events"]:
            os.environ[EVENTS_VARIABLE] = str(self._events)
        elif self._events is not None:
            os.close(self._events)
