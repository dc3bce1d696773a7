"""Train random programs and print what each comes to: a digest, or how it was refused.

`unisono run -n 3 tests/trainer/programs/random_training.py 17 18 20-40 [--engine collective]`

Every rank prints a line `program SEED = OUTCOME` for each program. With `--phase stopped` the programs are interrupted,
each at a place of its own, with checkpoints in FOLDER/SEED; with `--phase resumed` they go on from there. A program
that fails after it has begun ends the job, since ranks may be at different places: the caller starts another one.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from random_program import Program, Samples, Stream, build_loss, describe, members_of

import unisono
from unisono.state.digest import digest

PATIENCE_S = 60.0
"""How long ranks that have ended a program wait for those that have not."""


class Stopped(Exception):  # noqa: N818  nothing is wrong
    """Raised in the loop of a program that is to stop there."""


class History:
    """The losses of a run, as hexadecimal numbers, and what it was evaluated to after each epoch."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.evaluations: dict[str, list[str]] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "evaluations": dict(self.evaluations)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.evaluations = list(state["losses"]), dict(state["evaluations"])


class Run:
    """One program, trained in this process."""

    def __init__(self, program: Program, *, engine: str, directory: Path | None) -> None:
        self.program, self.history = program, History()
        torch.manual_seed(program.seed)
        nets = [architecture.build() for architecture in program.models]
        self.models: Any = nets[0] if len(nets) == 1 else {str(i): net for i, net in enumerate(nets)}
        self.first = nets[0]
        self.optimizers = {
            f"{each.model} {each.members}": each.build(members_of(nets[each.model], each.members))
            for each in program.optimizers
        }
        self.losses = {
            f"{each.model} {each.members}": build_loss(program, model=each.model) for each in program.optimizers
        }
        schedules = {
            name: each.build_schedule(optimizer)
            for (name, optimizer), each in zip(self.optimizers.items(), program.optimizers, strict=True)
        }
        self.schedules = {name: schedule for name, schedule in schedules.items() if schedule is not None}
        self.stateful: dict[str, Any] = {"history": self.history}
        if program.plateau:
            optimizer = next(iter(self.optimizers.values()))
            self.stateful["plateau"] = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        self.trainer = unisono.Trainer(
            self.models,
            self.optimizers,
            virtual_ranks=program.virtual_ranks,
            directory=directory,
            checkpoints=unisono.Checkpoints(every_steps=program.every_steps),
            scheduler=self.schedules or None,
            stateful=self.stateful,
            engine=engine,
            progress=False,
            **program.trainer,
        )

    def train(self, *, stops: bool) -> None:
        """Train to the end or, if it `stops`, up to the program's place for that."""
        program, trainer = self.program, self.trainer
        data: Any = Stream(program) if program.dataset == "stream" else Samples(program)
        ends_at = program.stop.after if stops and program.stop.how == "steps" else None
        for epoch in trainer.epochs(program.epochs, max_steps=ends_at):
            if program.frozen_part is not None and epoch:
                self.first.parts[program.frozen_part].requires_grad_(False)
            for batch in trainer.batches(data, batch_size=program.batch_size, **program.options):
                for name in self.optimizers:
                    loss = trainer.step(self.losses[name], batch, optimizer=name)
                    self.history.losses.append(f"{name} {loss.hex()}")
                if stops and trainer.steps_done == program.stop.after:
                    self._stop()
            if program.evaluates:
                self._evaluate(epoch, data)

    def outcome(self) -> str:
        """Name all that the run came to."""
        rates = {
            name: [float(group["lr"]) for group in optimizer.param_groups]
            for name, optimizer in self.optimizers.items()
        }
        averages = {
            str(i): {name: p.detach() for name, p in average.named_parameters()}
            for i, average in enumerate(self.trainer._subjects.averages.values())
        }
        found = {"rates": rates, "averages": averages, **self.history.state_dict()}
        return digest({"state": self.trainer.digest(), **found})

    def _stop(self) -> None:
        if self.program.stop.how == "killed":
            print(f"program {self.program.seed} = stopped", flush=True)
            if AGREEMENT is not None:
                agree("stopped")  # all ranks have said so
            os.kill(os.getpid(), signal.SIGKILL)
        raise Stopped

    def _evaluate(self, epoch: int, data: Any) -> None:
        loss = next(iter(self.losses.values()))
        ema = "ema_decay" in self.program.trainer
        value = self.trainer.evaluate(loss, data, ema=ema)
        self.history.evaluations[str(epoch)] = [value.total.hex(), float(value.count).hex()]
        if self.program.plateau:
            self.stateful["plateau"].step(float(value))


def agree(outcome: str) -> bool:
    """Whether all ranks ended the program in one way; ends this process if some do not end it at all."""
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome, group=AGREEMENT)
    return len(set(outcomes)) == 1


def refusal(error: Exception) -> str:
    """What kind of error it is, without the numbers and names that may depend on who raises it."""
    words = re.sub(r"\d+", "#", str(error)).split()
    return f"refused: {type(error).__name__}: {' '.join(words[:9])}"


def do(program: Program, args: argparse.Namespace) -> None:
    directory = None if args.phase == "whole" else args.folder / str(program.seed)
    run = None
    try:
        run = Run(program, engine=args.engine, directory=directory)
        run.train(stops=args.phase == "stopped")
        outcome = run.outcome() if args.phase != "stopped" else "stopped"
    except Stopped:
        outcome = "stopped"
        KEPT.append(run)
    except Exception as error:
        outcome = refusal(error)
        if args.verbose:
            sys.excepthook(type(error), error, error.__traceback__)
    print(f"program {program.seed} = {outcome}", flush=True)
    # An error of one rank's share is known to the others when its process ends, and not before.
    if AGREEMENT is not None and ((run is not None and outcome.startswith("refused")) or not agree(outcome)):
        sys.exit(3)


def numbers(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


KEPT: list[Any] = []
"""Runs that an error has stopped: they are saved when the process ends."""
AGREEMENT: Any = None
"""A group of the ranks beside that of training."""

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", nargs="+", type=numbers)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--phase", choices=["whole", "stopped", "resumed"], default="whole")
    parser.add_argument("--folder", type=Path, default=Path("random-training"))
    parser.add_argument("--verbose", action="store_true", help="describe programs, and show the traceback of errors")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        unisono.init("gloo")
        AGREEMENT = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S))
    programs = [describe(seed) for seeds in args.seeds for seed in seeds]
    # Those that end the process come last: the ones before them are saved when it ends in order.
    for program in sorted(programs, key=lambda each: args.phase == "stopped" and each.stop.how == "killed"):
        if args.verbose and unisono.rank() == 0:
            print(program, flush=True)
        if program.virtual_ranks < unisono.world_size():
            print(f"program {program.seed} = needs no more than {program.virtual_ranks} ranks", flush=True)
        else:
            do(program, args)
