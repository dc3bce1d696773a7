"""The memory by which ranks find the servers of their job and servers find tables. Does not import torch.

The launcher creates it and gives it to each rank and each server, also to one that takes the place of another. Ranks
publish *sessions* there: which tables servers update, and which memory they are in. Servers count there what they do,
which the launcher reads. The launcher's side and the trainer's side share this module alone.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
from typing import Any

__all__ = ["MOST_SERVERS", "ServerPage"]

MOST_SERVERS = 256
_NBYTES = 1 << 20
_VERSION, _LENGTHS, _LOST, _PROGRESS = 0, 1, 3, 8
_TEXTS_AT = 4096
_TEXT_NBYTES = (_NBYTES - _TEXTS_AT) // 2


class ServerPage:
    """The page of a job.

    Args:
        fd: Its descriptor, which stays open.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, _NBYTES)
        self._words = memoryview(self._memory)[:_TEXTS_AT].cast("q")

    @classmethod
    def create(cls) -> ServerPage:
        """Create the page of a job. It is freed with the last process that has it."""
        fd = os.memfd_create("unisono servers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, _NBYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(fd)

    @property
    def version(self) -> int:
        """The number of times that sessions were published; 0: no rank has asked anything of a server."""
        return self._words[_VERSION]

    def publish(self, sessions: list[dict[str, Any]]) -> None:
        """Replace the sessions. One process at a time may call it; if it is killed, the former ones stay.

        Raises:
            ValueError: They are too many.
        """
        text = json.dumps(sessions).encode()
        if len(text) > _TEXT_NBYTES:
            raise ValueError(
                f"the tables on servers take {len(text)} bytes to describe, and there is room for {_TEXT_NBYTES}: put "
                "rows of equal length into fewer tables"
            )
        turn = (self.version + 1) % 2
        start = _TEXTS_AT + turn * _TEXT_NBYTES
        self._memory[start : start + len(text)] = text
        self._words[_LENGTHS + turn] = len(text)
        self._words[_VERSION] += 1

    def sessions(self) -> tuple[int, list[dict[str, Any]]]:
        """Return the version and the sessions."""
        while True:
            version = self.version
            turn = version % 2
            start = _TEXTS_AT + turn * _TEXT_NBYTES
            text = bytes(self._memory[start : start + self._words[_LENGTHS + turn]])
            if self.version == version:
                return version, json.loads(text) if text else []

    def count(self, server: int) -> None:
        """Count one more step of a server. Only that server calls it."""
        self._words[_PROGRESS + server] += 1

    def progress(self, server: int) -> int:
        """Return how many steps a server has done since the start of the job, by its processes together."""
        return self._words[_PROGRESS + server]

    @property
    def is_lost(self) -> bool:
        """True if a server has ended for good."""
        return bool(self._words[_LOST])

    def lose(self) -> None:
        """Note that a server has ended for good, so that no rank waits for it."""
        self._words[_LOST] = 1

    def close(self) -> None:
        """Release the page in this process."""
        self._words.release()
        self._memory.close()
        os.close(self.fd)
