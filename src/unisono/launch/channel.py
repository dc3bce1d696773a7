"""Messages between two processes of one job: JSON objects and open files over a socket pair.

A message is its length in four bytes, then JSON. Files travel with the first bytes of their message (SCM_RIGHTS) and
are not inherited by programs that the receiver starts. Start reading at `Channel`.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

__all__ = ["Channel", "Message"]

Message = dict[str, Any]

_MOST_FILES = 64
"""Files accepted by one read. A message carries up to seven, those of a rank; several messages may have arrived."""


class Channel:
    """One end of a socket pair that carries messages. `closed` is True once the other end is known to be gone."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._bytes = bytearray()
        self._files: list[int] = []
        self.closed = False

    def fileno(self) -> int:
        """Return the socket's file number, for a selector."""
        return self._socket.fileno()

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """Send a message and copies of open files. If the other end is gone, only mark the channel closed."""
        body = json.dumps({**message, "files": len(files)}).encode()
        data = len(body).to_bytes(4, "big") + body
        try:
            sent = socket.send_fds(self._socket, [data], list(files)) if files else 0
            self._socket.sendall(data[sent:])
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True

    def receive(self) -> list[tuple[Message, list[int]]]:
        """Wait for bytes and return the messages that they complete, each with its files, which the caller must close.

        The list is empty while a message is incomplete, and when the other end is gone, which `closed` shows.
        """
        try:
            data, files, _, _ = socket.recv_fds(self._socket, 1 << 16, _MOST_FILES)
        except ConnectionResetError:
            data, files = b"", []
        for file in files:  # `recv_fds` ignores its flags, so it cannot be asked for this
            os.set_inheritable(file, False)
        self.closed = self.closed or not data
        self._bytes += data
        self._files += files
        messages = []
        while len(self._bytes) >= 4 and len(self._bytes) >= (end := 4 + int.from_bytes(self._bytes[:4], "big")):
            message = json.loads(self._bytes[4:end])
            del self._bytes[:end]
            taken = message.pop("files")
            messages.append((message, self._files[:taken]))
            del self._files[:taken]
        return messages

    def close(self) -> None:
        """Close this end, and files that arrived without the rest of their message."""
        self._socket.close()
        for file in self._files:
            os.close(file)
        self._files.clear()
