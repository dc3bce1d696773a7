"""The optimizers of a run by name: their steps, and the averages and schedules that follow them."""

from __future__ import annotations

from unisono.parallel.pipeline.cut_model import CutModel
from unisono.trainer.averages import update_average
from unisono.trainer.trainer_parts import TrainerParts

__all__ = ["OptimizerSteps"]

_STEPPED = (
    "scheduler.step() has been called since the last trainer.step(...), and the Trainer, which was given the "
    "scheduler, calls it as well: the rate changes twice as fast. Leave scheduler.step() out of the loop, or "
    "scheduler= out of Trainer."
)


class OptimizerSteps:
    """The optimizers of a run.

    Args:
        parts: The parts of the run.
    """

    def __init__(self, parts: TrainerParts) -> None:
        self.runners = parts.runners
        """Run the steps, by the name of the optimizer; None: that of all, where there are several."""
        self._modules, self._averages, self._schedulers = parts.modules, parts.averages, parts.schedulers
        self._cut, self._divided = parts.cut, parts.divided_average
        self._interval = parts.settings.scheduler_interval
        self._left: dict[str, int] | None = {}
        """How far each schedule is after its first step; None once that has been looked at before the second."""
        self._message: str | None = None

    def name(self, optimizer: str | None) -> str | None:
        """Return the name under which the runner of a step is kept; None stands for all optimizers, if several."""
        if optimizer is None and len(self.runners) == 1:
            return next(iter(self.runners))
        if optimizer not in self.runners:
            names = [repr(name) for name in self.runners if name]
            given = f"several: name one of {', '.join(names)}, or none to step all"
            if len(self.runners) == 1:
                given = f"one, named {names[0]}: give that name or none" if names else "one: leave the name out"
            raise ValueError(f"optimizer={optimizer!r}, but Trainer was given {given}")
        return optimizer

    def update_averages(self, name: str | None) -> None:
        """Update averages after a step of the optimizer with this name."""
        runner = self.runners[name]
        for prefix, average in self._averages.items():
            if runner.trains(self._modules[prefix]):
                if isinstance(self._cut, CutModel):
                    update_average(average, self._modules[prefix], self._cut.own_pairs(average.module))
                elif self._divided is not None:
                    self._divided.update(average, self._modules[prefix])
                else:
                    average.update_parameters(self._modules[prefix])

    def update_schedules(self, name: str | None) -> None:
        """Update schedules after a step of the optimizer with this name."""
        if self._interval == "step":
            for of_optimizer, scheduler in self._schedulers.items():
                if name in (of_optimizer, None):
                    self._look(of_optimizer)
                    scheduler.step()
                    if self._left is not None:
                        self._left[of_optimizer] = scheduler.last_epoch

    def _look(self, of_optimizer: str) -> None:
        """Look once whether the loop steps a schedule as well: what a loop does, it does in each turn."""
        if self._left is not None and of_optimizer in self._left:
            if self._schedulers[of_optimizer].last_epoch != self._left[of_optimizer]:
                self._message = _STEPPED
            self._left = None

    def forget(self) -> None:
        """Compare schedules no more: another rank has stepped them."""
        self._left = None

    def warning(self) -> str | None:
        """Return a warning, once, if there is one."""
        message, self._message = self._message, None
        return message

    def end_epoch(self) -> None:
        """Update schedules after an epoch."""
        if self._interval == "epoch":
            for scheduler in self._schedulers.values():
                scheduler.step()

    def begin_training(self, optimizer: str | None) -> None:
        """Put the models that an optimizer trains into training mode, if they are in evaluation mode as a whole."""
        self.runners[self.name(optimizer)].begin_training()
