"""Which stage of a pipeline has which parameters and buffers of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["StageMap", "StageOwnership"]


@dataclass(frozen=True, slots=True)
class StageMap:
    """The stages that use parameters and buffers, by plain name."""

    parameters: Mapping[str, tuple[int, ...]]
    """The stages that use each parameter, ascending. The first one owns it: it gets the gradient and updates it."""
    buffers: Mapping[str, int]
    """The stage that may write each buffer."""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> StageMap:
        """Return the map that `document` has described."""
        parameters = {name: tuple(stages) for name, stages in document["parameters"].items()}
        return cls(parameters, dict(document["buffers"]))

    def document(self) -> dict[str, Any]:
        """Return it as plain values, for a checkpoint."""
        parameters = {name: list(stages) for name, stages in self.parameters.items()}
        return {"parameters": parameters, "buffers": dict(self.buffers)}

    def owner(self, parameter: str) -> int:
        """Return the stage that updates a parameter; one that no stage uses belongs to the first."""
        return self.parameters.get(parameter, (0,))[0]

    def difference(self, other: StageMap) -> str:
        """Return how another map of the same model contradicts this one, as words; "" if it does not."""
        for name, stages in other.parameters.items():
            known = self.parameters.get(name, ())
            if not set(stages) <= set(known) and (known or stages != (0,)):
                return f"parameter {name!r} is used on {_stages(stages)}, and was on {_stages(known)} before"
        for name, stage in other.buffers.items():
            if self.buffers.get(name, stage) != stage:
                return f"buffer {name!r} is written on stage {stage}, and was on stage {self.buffers[name]} before"
        return ""


@dataclass(slots=True)
class StageOwnership:
    """The map of a run, once its first step has found it; and whether the model is whole on this rank."""

    map: StageMap | None = None
    """None before the first step: then all ranks have the whole state."""
    whole: Literal["nowhere", "main", "everywhere"] = "everywhere"
    """Which ranks of a pipeline have the present state of all stages: those of others come only where they are asked
    for. Equal on all its ranks. "main" is the first one."""

    def has_all(self, *, is_main: bool) -> bool:
        """Return True if the first rank of a pipeline, or another one, has the present state of all stages."""
        return self.whole == "everywhere" or (self.whole == "main" and is_main)


def _stages(numbers: tuple[int, ...]) -> str:
    if not numbers:
        return "none"
    return f"stage{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
