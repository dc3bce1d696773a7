"""The kinds of events, and the fields of those about the run as a whole, such as its start, checkpoints and end.

The fields of the others, about what a loop does, are in `loop_fields`. docs/events.md describes all for readers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

if TYPE_CHECKING:
    from typing_extensions import NotRequired

__all__ = [
    "CheckpointFields",
    "EndFields",
    "Event",
    "FailureFields",
    "GitFields",
    "Kind",
    "MachineFields",
    "OverFields",
    "PipelineFields",
    "RecoveryFields",
    "ResizeFields",
    "ResumeFields",
    "RunFields",
    "WarningFields",
]

Kind: TypeAlias = Literal[
    "run",
    "resume",
    "epoch",
    "step",
    "times",
    "tables",
    "evaluation",
    "log",
    "checkpoint",
    "recovery",
    "resize",
    "pipeline",
    "warning",
    "over",
    "end",
    "failure",
    "digest",
    "progress",
]
"""The kinds of events."""

Event: TypeAlias = Mapping[str, Any]
"""One event as listeners and readers get it. Use `.get` to read it: an older or newer version may have written it."""


class GitFields(TypedDict):
    """The state of a working tree, as .git tells it. Whether its files have changed since is not known."""

    commit: str
    """40 or 64 hexadecimal digits."""
    branch: str | None
    """None if the commit was checked out, and no branch."""


class MachineFields(TypedDict):
    """A host."""

    host: str
    system: str
    """Name and release of the kernel."""
    python: str
    """Version of Python."""
    cores: int
    """Cores that the process may use."""
    memory: NotRequired[int]
    """Bytes of main memory."""
    processor: NotRequired[str]
    gpu: NotRequired[str]
    """Name of the GPU of rank 0."""


class RunFields(TypedDict):
    """A run starts."""

    version: str
    """Version of unisono."""
    world_size: int
    virtual_ranks: NotRequired[int]
    """Missing in the run of a loop without a Trainer, as are the next three."""
    seed: NotRequired[int]
    parameters: NotRequired[int]
    """Number of elements of all parameters of the models, also of frozen ones."""
    device: NotRequired[str]
    threads: int
    """Torch threads of one rank."""
    directory: str | None
    """Folder of the checkpoints; None if none are kept."""
    torch: str
    """Version of torch."""
    arguments: NotRequired[Sequence[str]]
    """The program and its arguments; values that look like secrets are "***"."""
    git: NotRequired[GitFields]
    """The state of the working tree that the current folder is in, if it is in one."""
    machine: NotRequired[MachineFields]
    """The host of rank 0."""
    settings: NotRequired[Mapping[str, Any]]
    """The arguments of the Trainer that are not None, and its optimizers; without one, what the user has passed."""


class ResumeFields(TypedDict):
    """A run continues from a checkpoint."""

    path: str
    epoch: int
    """Epoch of the next step, from 0."""
    step: int
    """Next step within that epoch, from 0."""
    total_steps: int
    """Steps of the run done before."""


class CheckpointFields(TypedDict):
    """A checkpoint is complete on disk."""

    path: str
    total_steps: int
    nbytes: int
    seconds: float
    """Seconds from its start to its last byte; training mostly continues meanwhile."""


class RecoveryFields(TypedDict):
    """Ranks that died have been replaced, and all go on."""

    number: int
    """The number of the launcher's decision, from 1. One is left out where a rank dies before all have met."""
    ranks: Sequence[int]
    """The ranks that have been replaced."""
    epoch: int
    """Epoch of the next step, from 0."""
    step: int
    """Next step within that epoch, from 0."""
    total_steps: int
    """Steps of the run done before."""
    seconds: float
    """Seconds from the moment when this rank noticed the loss until all go on."""
    call: str
    """The call that was under way, and is made again: "trainer.step", for example."""


class ResizeFields(TypedDict):
    """The number of ranks has changed between two steps, by `unisono scale`."""

    number: int
    """The number of the launcher's decision, which counts with those of recoveries, from 1."""
    ranks: int
    """The number of ranks from now on."""
    before: int
    """The number of ranks before."""
    epoch: int
    """Epoch of the next step, from 0."""
    step: int
    """Next step within that epoch, from 0."""
    total_steps: int
    """Steps of the run done before."""
    seconds: float
    """Seconds that the run has waited."""


class PipelineFields(TypedDict):
    """A model has been divided into stages, by measured times."""

    stages: Sequence[str]
    """The submodules with which stages begin, from the second stage on."""
    shares: Sequence[float]
    """For each stage, its part of the time of a micro-batch, 0 to 1."""
    nbytes: Sequence[int]
    """For each stage, its memory as estimated: parameters, gradients, two averages, and activations."""
    excess: float
    """By what part the slowest stage is slower than in the best of all divisions."""
    schedule: str
    micro_batches: int
    """Of a replica, in a step."""
    step_s: float
    """The time of a step as expected, without what sending takes."""
    waiting: float
    """The part of this time in which ranks wait for each other, 0 to 1."""
    least_step_s: float
    """The time below which no division into as many stages, and no order of their passes, could bring a step."""
    advised_micro_batches: int | None
    """A number of micro-batches with which ranks would wait for less than a tenth of a step. None: they do so already,
    or it would take more than 16 times as many."""
    advised_waiting: float | None
    """The part of a step in which they would wait then."""
    seconds: float
    """Seconds that it took to measure."""


class WarningFields(TypedDict):
    """The user should know something that does not end the run."""

    message: str


class OverFields(TypedDict):
    """There is nothing to do: the resumed run has already done all epochs or steps that the script asks for."""

    epoch: int
    """Epochs done."""
    total_steps: int
    epochs: int
    """Epochs that the script asks for."""
    max_steps: int | None
    """Steps that the script asks for; None: as many as the epochs have."""


class EndFields(TypedDict):
    """The run ended normally."""

    total_steps: int
    seconds: float
    """Seconds since the loop over epochs began."""
    digest: NotRequired[str]
    """`Trainer.digest()`, if the run has a directory and a state that is not large."""


class FailureFields(TypedDict):
    """An exception or a signal has ended the program before the end of the loop."""

    type: str
    """The name of the exception's type, or "SIGTERM"."""
    message: str
    """The first line of its message, up to 300 characters."""
    total_steps: int
    """Steps of the run done before."""
