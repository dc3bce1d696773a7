"""The program that ranks of `unisono.ray.run` run, as `__main__`: it calls the function, and keeps what it returns.

Arguments: the file of the pickled call, and the file for results, which the ranks of a node share: the length of what
is complete, then for each result its rank, its length and itself.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import struct
import sys
from pathlib import Path

import cloudpickle

__all__ = ["NO_RESULTS", "append_result", "read_results"]

_LENGTH = struct.Struct("<Q")
_HEAD = struct.Struct("<QQ")
NO_RESULTS = _LENGTH.pack(_LENGTH.size)
"""The content of a file for results without any."""


def append_result(path: Path, rank: int, result: bytes) -> None:
    """Append a result to a file that several ranks have; one that is killed meanwhile leaves the others whole."""
    with path.open("r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (end,) = _LENGTH.unpack(file.read(_LENGTH.size))
        left = memoryview(_HEAD.pack(rank, len(result)) + result)
        file.seek(end)
        end += len(left)
        while left:
            left = left[file.write(left) :]
        file.seek(0)
        file.write(_LENGTH.pack(end))


def read_results(file: int) -> dict[int, bytes]:
    """Return the results in an open file, by rank."""
    with open(file, "rb", closefd=False) as stream:
        stream.seek(0)
        (end,) = _LENGTH.unpack(stream.read(_LENGTH.size))
        found: dict[int, bytes] = {}
        while stream.tell() < end:
            rank, length = _HEAD.unpack(stream.read(_HEAD.size))
            found[rank] = stream.read(length)
    return found


def main(call: str, results: str) -> None:
    """Call the function."""
    function, arguments = pickle.loads(Path(call).read_bytes())
    append_result(Path(results), int(os.environ["RANK"]), cloudpickle.dumps(function(*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
