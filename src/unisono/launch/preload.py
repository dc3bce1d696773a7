"""Which modules are imported once, before ranks are forked, without the user's asking.

Optimizers and DistributedDataParallel import torch._dynamo when the first one is made: 1.3 s of CPU time and 80 MB in
every rank by itself. So the program's source is looked at for their names. A wrong guess costs the import, or saves
nothing; it changes no result. Start reading at `modules_to_preload`.
"""

from __future__ import annotations

import re
from pathlib import Path

from unisono.launch.job import Job

__all__ = ["modules_to_preload", "uses_dynamo"]

_USERS_OF_DYNAMO = re.compile(rb"\b(optim|DistributedDataParallel|DDP|fully_shard|FSDP|accelerate|lightning)\b")


def modules_to_preload(job: Job) -> tuple[str, ...]:
    """List what the fork server of a job imports beside torch: what the user names, and what all ranks would import.

    One rank gains nothing by it, and would only start later.
    """
    if job.ranks == 1 or not job.python or job.start_method != "fork" or "torch._dynamo" in job.preload:
        return job.preload
    source = _source_of(job)
    return ("torch._dynamo", *job.preload) if source is not None and uses_dynamo(source) else job.preload


def uses_dynamo(source: bytes) -> bool:
    """Guess from a program's source whether it makes an optimizer or wraps a model.

    >>> uses_dynamo(b"optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"), uses_dynamo(b"print('optimal')")
    (True, False)
    """
    return _USERS_OF_DYNAMO.search(source) is not None


def _source_of(job: Job) -> bytes | None:
    """Read the program; None if it is not a file that is found without importing anything."""
    if job.module:
        place = Path(*job.target.split("."))
        candidates = [place.with_suffix(".py"), place / "__main__.py"]
    else:
        candidates = [Path(job.target), Path(job.target) / "__main__.py"]
    for path in candidates:
        if path.is_file():
            try:
                return path.read_bytes()
            except OSError:  # who runs it says why
                return None
    return None
