"""The program that ranks of `unisono.ray.run` run, as `__main__`: it calls the function, and keeps what it returns.

Arguments: the file of the pickled call, and the folder for results.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import cloudpickle

__all__ = ["RESULT"]

RESULT = "result"
"""The name of a file with what a rank's function has returned, before the number of the rank."""


def main(call: str, folder: str) -> None:
    """Call the function. The file with its result is complete or not there."""
    function, arguments = pickle.loads(Path(call).read_bytes())
    result = function(*arguments)
    final = Path(folder) / f"{RESULT}.{os.environ['RANK']}"
    partial = final.with_name(f"partial.{os.getpid()}")
    partial.write_bytes(cloudpickle.dumps(result))
    partial.rename(final)


if __name__ == "__main__":
    main(*sys.argv[1:])
