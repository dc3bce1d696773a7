"""Logs of runs that never were, one for each state that a report has to show."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import torch

from unisono.rank_zero.image import Image
from unisono.rank_zero.image_folder import ImageFolder

START_S = 1785225600.0
NASTY = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>"
FACTS = {
    "version": "0.1.0", "world_size": 4, "virtual_ranks": 8, "seed": 0, "parameters": 27098, "device": "cpu",
    "threads": 1, "directory": "runs/digits", "torch": "2.13.0", "arguments": ["train.py", "--lr", "0.1"],
    "git": {"commit": "5b48af7c1f0d2e3b4a5968778695a4b3c2d1e0f9", "branch": "main"},
    "machine": {
        "host": "node7", "system": "Linux 6.1", "python": "3.11.2", "cores": 8, "memory": 33_554_432_000,
        "processor": "AMD EPYC 7763 64-Core Processor",
    },
    "settings": {"virtual_ranks": 8, "clip_grad_norm": 1.0, "optimizer": "AdamW(lr=0.001)"},
}  # fmt: skip


class Log:
    """Writes events one after the other, at times that it makes up."""

    def __init__(self, folder: Path, **facts) -> None:
        folder.mkdir(parents=True)
        self.folder, self.now_s, self.random = folder, START_S, random.Random(0)
        self._file = (folder / "events.jsonl").open("w", buffering=1 << 20)
        self("run", **{**FACTS, **facts})

    def __call__(self, kind: str, after_s: float = 0.0, **fields) -> None:
        self.now_s += after_s
        event = {"time": round(self.now_s, 6), "event": kind, **fields}
        self._file.write(json.dumps(event, separators=(",", ":")) + "\n")

    def epoch(self, epoch: int, *, first: int, steps: int = 20, epochs: int = 10) -> None:
        own = {"epoch": epoch, "epochs": epochs, "steps": steps, "first_step": 0, "num_samples": 128 * steps}
        self("epoch", 0.01, **own, total_steps=first, run_steps=epochs * steps)

    def step(self, total: int, of: int, *, step_s: float = 0.02, epoch: int = 0, loss=None, **others) -> None:
        noise = math.exp(self.random.gauss(0, 0.2))
        if loss is None:
            loss = 0.1 + 2 * math.exp(-4 * total / of) * noise
        rate = 1e-3 * (1 + math.cos(math.pi * total / of)) / 2
        fields = {"loss": loss, "samples": 128, "lr": rate, "step_s": step_s, "grad_norm": 1.2 * noise, **others}
        self("step", step_s, epoch=epoch, step=0, total_steps=total, **fields)

    def times(self, total: int, ranks: int, *, steps: int = 5) -> None:
        """Rank 1 takes long to compute, and the others wait for it."""
        waiting = [0.0005 if rank == 1 else 0.007 for rank in range(ranks)]
        own = {
            "data": [0.001 + 0.0001 * rank / ranks for rank in range(ranks)],
            "compute": [0.017 - each for each in waiting],
            "waiting": waiting,
            "update": [0.002] * ranks,
        }
        sums = {name: [round(steps * each, 6) for each in times] for name, times in own.items()}
        last = {"seconds": 0.021, **own}
        self("times", total_steps=total, steps=steps, of_steps=10, seconds=0.022 * steps, **sums, last=last)

    def evaluation(self, epoch: int, name: str = "test", metric: str = "accuracy", value: float = 0.9) -> None:
        values = {metric: {"value": value, "total": 0.0, "count": 1}}
        self("evaluation", 0.2, epoch=epoch, name=name, values=values, seconds=0.2)

    def samples(self, total: int, texts=None, *, images=None) -> None:
        """Log texts, and pictures with a gradient, each with its shape and caption."""
        folder, written = ImageFolder(self.folder, print), {}
        for name, (shape, caption) in (images or {}).items():
            height, width, channels = shape
            across = torch.linspace(0, 1, width).expand(height, width)
            pixels = torch.stack([across, *[across.flip(1)] * (channels - 1)], 2)
            written[name] = folder.write(name, Image(pixels, caption=caption, layout="HWC"), step=total)
        self("log", epoch=0, total_steps=total, values={}, texts=texts or {}, images=written)

    def checkpoint(self, total: int) -> None:
        self(
            "checkpoint",
            path=f"runs/digits/checkpoints/step-{total:09}",
            total_steps=total,
            nbytes=327680,
            seconds=0.05,
        )

    def close(self) -> Path:
        self._file.close()
        return self.folder


def _epochs(log: Log, epochs: range, *, ranks: int = 4, evaluates: bool = True, of: int = 10, pictures=False) -> None:
    for epoch in epochs:
        log.epoch(epoch, first=20 * epoch)
        for step in range(20 * epoch + 1, 20 * epoch + 21):
            more = {}
            if step % 10 == 0:
                more = {"memory": 400_000_000 + 1000 * step}
                log.times(step - 1, ranks)
            log.step(step, 20 * of, step_s=0.02 * (1 + 0.2 * log.random.random()), epoch=epoch, **more)
        if evaluates:
            log.evaluation(epoch, value=1 - 0.8 * math.exp(-epoch / 3))
        log.checkpoint(20 * epoch + 20)
        if pictures:
            texts = {"prompt": f"Once upon a time, {epoch + 1} epochs ago."}
            log.samples(
                20 * epoch + 20,
                texts,
                images={"samples": ((200, 300, 3), f"epoch {epoch + 1}"), "digit": ((8, 8, 1), "")},
            )


def finished(folder: Path) -> Path:
    log = Log(folder)
    _epochs(log, range(10), pictures=True)
    log("end", total_steps=200, seconds=log.now_s - START_S, digest="3f" * 32)
    return log.close()


def without_an_end(folder: Path) -> Path:
    """A run that still trains, or was killed: what distinguishes them is not in the log."""
    log = Log(folder)
    _epochs(log, range(4))
    log.epoch(4, first=80)
    log.step(81, 200)
    return log.close()


def failed(folder: Path) -> Path:
    log = Log(folder)
    _epochs(log, range(3))
    log.epoch(3, first=60)
    log.step(61, 200, loss="nan")
    log("warning", message="3 workers on 2 cores: use fewer")
    log("failure", message="NonFiniteLossError: the loss of step 62 is nan; the samples are 17, 204 and 1033")
    return log.close()


def recovered(folder: Path) -> Path:
    log = Log(folder)
    _epochs(log, range(4))
    place = {"epoch": 4, "step": 0, "total_steps": 80}
    log("recovery", 0.25, number=1, ranks=[2], **place, seconds=0.25, call="trainer.step")
    log("resize", 0.1, number=2, ranks=2, before=4, **place, seconds=0.1)
    _epochs(log, range(4, 6), ranks=2)
    log.now_s += 7200
    log("run", **{**FACTS, "world_size": 3})
    log("resume", path="runs/digits/checkpoints/step-000000100", epoch=5, step=0, total_steps=100)
    _epochs(log, range(5, 10), ranks=3)
    log("end", total_steps=200, seconds=5.0, digest="3f" * 32)
    return log.close()


def many_steps(folder: Path, steps: int = 5_000) -> Path:
    log = Log(folder)
    log.epoch(0, first=0, steps=steps, epochs=1)
    for step in range(1, steps + 1):
        log.step(step, steps, loss=97.25 if step == steps // 3 else None)
        if step % 500 == 0:
            log.times(step, 4)
    log("end", total_steps=steps, seconds=2e4)
    return log.close()


def one_step(folder: Path) -> Path:
    log = Log(folder, world_size=1)
    log.epoch(0, first=0, steps=1, epochs=1)
    log.step(1, 1)
    log("end", total_steps=1, seconds=0.02)
    return log.close()


def no_step(folder: Path) -> Path:
    return Log(folder).close()


def converged(folder: Path) -> Path:
    """A loss that falls to what float32 can tell, as in a small regression."""
    log = Log(folder)
    log.epoch(0, first=0, steps=100, epochs=1)
    for step in range(1, 101):
        log.step(step, 100, loss=10.0 ** -min(13, step / 4) * (1 + log.random.random() / 9))
        if step % 30 == 0:
            log.evaluation(0, metric="mse", value=1e-13 * (2 - step / 100))
    log("end", total_steps=100, seconds=2.0)
    return log.close()


def without_evaluation(folder: Path) -> Path:
    log = Log(folder)
    _epochs(log, range(10), evaluates=False)
    log("end", total_steps=200, seconds=4.0)
    return log.close()


def many_ranks(folder: Path) -> Path:
    log = Log(folder, world_size=64, virtual_ranks=64)
    _epochs(log, range(10), ranks=64)
    log("end", total_steps=200, seconds=4.0)
    return log.close()


def nasty(folder: Path) -> Path:
    """A run whose names and texts are HTML, or do not end."""
    machine = {"host": NASTY, "processor": "x" * 400}
    log = Log(folder, arguments=["train.py", NASTY, "y" * 500], directory=NASTY, machine=machine, device=NASTY)
    log.epoch(0, first=0)
    for step in range(1, 4):
        log.step(step, 20, values={NASTY: 0.5 + step, "a_name_without_spaces_" * 12: 1.0})
        log("log", epoch=0, total_steps=step, values={"\u202eright to left": 1.0, "größe & <b>": -step})
    log.evaluation(0, name=NASTY, metric="<i>" * 40)
    texts = {NASTY: NASTY + "\n\tnext line \x1b[31m", "long": "w" * 3000, "poem": "one\ntwo"}
    log.samples(
        3, texts, images={NASTY: ((30, 40, 3), NASTY + "q" * 300), "wide": ((5, 1024, 1), ""), "dot": ((1, 1, 4), "")}
    )
    log("warning", message=NASTY + " " + "z" * 3000)
    log("failure", message=f"ValueError: {NASTY}")
    return log.close()


STATES = {
    run.__name__: run
    for run in (
        finished, without_an_end, failed, recovered, one_step, no_step, converged, without_evaluation, many_ranks,
        many_steps, nasty,
    )
}  # fmt: skip
