"""A rank of a trial: it trains some steps in one layout, and tells what they took. A program that `trials` starts.

Usage: python -m unisono.estimate.layout_trial FOLDER, where FOLDER has `trial.json`. Each rank writes `rank-N.json`.
"""

from __future__ import annotations

import ast
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import unisono
import unisono.parallel
from unisono.estimate.user_build import build_subject, find_build
from unisono.machine import kernel_text

__all__: list[str] = []


def _arguments(code: str) -> dict[str, Any]:
    """Return the arguments of a Trainer that a plan has as text, such as "parallel=unisono.parallel.Shard(zero=1)"."""
    call = ast.parse(f"f({code})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(each.arg): _value(each.value) for each in call.keywords}


def _value(node: ast.expr) -> Any:
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    assert isinstance(node.func, ast.Attribute)
    layout = getattr(unisono.parallel, node.func.attr)
    return layout(**{str(each.arg): _value(each.value) for each in node.keywords})


def _train(
    *, target: str, code: str, virtual_ranks: int, steps: int, batch_size: int, micro_batch_size: int
) -> dict[str, Any]:
    """Train, and return the memory of this rank at its peak, its part of what ranks share, and the times of steps."""
    subject = build_subject(find_build(target))
    trainer = unisono.Trainer(
        subject.model, subject.optimizer, virtual_ranks=virtual_ranks, progress=False, **_arguments(code)
    )
    data = [subject.sample] * (batch_size * steps)
    times_s: list[float] = []
    own = shared = 0
    for _ in trainer.epochs(1, max_steps=steps):
        for batch in trainer.batches(data, batch_size=batch_size, micro_batch_size=micro_batch_size):
            since_s = time.perf_counter()
            trainer.step(subject.loss_fn, batch)
            times_s.append(time.perf_counter() - since_s)
            if len(times_s) == steps:  # before the parts of ranks come together at the end of the loop
                # Each rank counts its part of the pages that several have.
                shared = _status("Pss_Shmem", "smaps_rollup")
                own = _status("VmHWM") - _status("RssShmem")
    half = statistics.median(times_s[len(times_s) // 2 :])
    return {"own_nbytes": own, "shared_nbytes": shared, "step_s": half, "steps": steps}


def _status(field: str, file: str = "status") -> int:
    """Return a number of bytes that the kernel tells of this process."""
    lines = kernel_text(f"/proc/self/{file}").splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), 0)


def _main(folder: Path) -> None:
    found = _train(**json.loads((folder / "trial.json").read_text()))
    (folder / f"rank-{unisono.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
