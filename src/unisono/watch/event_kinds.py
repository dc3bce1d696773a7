"""The kinds of events and the fields of each; docs/events.md describes them for readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

if TYPE_CHECKING:
    from typing_extensions import NotRequired

__all__ = [
    "CheckpointFields",
    "DigestFields",
    "EndFields",
    "EpochFields",
    "EvaluationFields",
    "Event",
    "FailureFields",
    "GitFields",
    "ImageFields",
    "Kind",
    "LogFields",
    "LoggedFields",
    "MachineFields",
    "OtherStepFields",
    "OverFields",
    "PipelineFields",
    "ProgressFields",
    "RecoveryFields",
    "ResizeFields",
    "ResumeFields",
    "RunFields",
    "StepFields",
    "StepParts",
    "TableFigures",
    "TablesFields",
    "TimesFields",
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


class EpochFields(TypedDict):
    """An epoch starts, or continues after a resume."""

    epoch: int
    """Number of the epoch, from 0."""
    epochs: int | None
    """Epochs of the whole run; None if not known."""
    steps: int | None
    """Steps of the whole epoch; None for data without a length."""
    first_step: int
    """0, or the step at which a resumed epoch continues."""
    total_steps: int
    """Steps of the run done before."""
    run_steps: int | None
    """Steps of the whole run, up to its last epoch or to `max_steps`; None if not known."""
    num_samples: int | None
    """Samples of the whole epoch; None for data without a length."""


class OtherStepFields(TypedDict, total=False):
    """Fields that only some events of steps have."""

    weight: float
    """Divisor of the sum of losses, if that is not the number of samples: tokens, for example."""
    grad_norm: float
    """Norm of the gradient before clipping, if it is clipped."""
    values: Mapping[str, float]
    """The means of the further values that the loss function returned, over the global batch."""
    optimizer: str
    """Name of the optimizer, if there are several."""
    memory: int
    """Bytes in use by this rank, on its GPU or resident in main memory. Present about once a second."""


class StepFields(OtherStepFields):
    """A step was committed."""

    epoch: int
    """Number of the epoch, from 0."""
    step: int
    """Number of the step within the epoch, from 0."""
    total_steps: int
    """Steps of the run up to and including this one."""
    loss: float
    """Mean loss of the global batch, with all its digits."""
    samples: NotRequired[int]
    """Samples of the global batch. It and `lr` may be missing in a loop without a Trainer."""
    lr: NotRequired[float]
    step_s: float
    """Seconds since the previous step ended."""


class StepParts(TypedDict):
    """Seconds of each rank in its parts of steps, by rank; of rank 0 alone in a loop without a Trainer."""

    data: Sequence[float]
    """Waiting for the next batch."""
    compute: Sequence[float]
    """Forward and backward; on a GPU, all of `Trainer.step`, since the host does not see where its time goes. In a loop
    without a Trainer, all that is in no other part."""
    waiting: NotRequired[Sequence[float]]
    """Waiting for other ranks, within `Trainer.step`."""
    update: NotRequired[Sequence[float]]
    """The rest of it: summing the gradient, and updating the weights."""


class TimesFields(StepParts):
    """Where the time of steps has gone on each rank, about once a second: sums over some measured steps."""

    total_steps: int
    """Steps of the run up to and including the last one that is measured."""
    steps: int
    """The number of measured steps."""
    of_steps: int
    """The number of steps since the event before, of which they are some."""
    seconds: float
    """Seconds that they took on the rank that writes, each from the end of the step before it. The part that is in none
    of the four is the loop's own: its code, evaluations, saving."""
    last: Mapping[str, Any]
    """`seconds` and the four parts of the last step alone."""


class TableFigures(TypedDict):
    """The lookups of a step in an embedding table, on the rank that writes."""

    rows: int
    """Rows in use: of a dynamic table, those that ids have."""
    capacity: int
    """Rows that there is memory for."""
    ids: int
    """Ids that were looked up in one step, on this rank."""
    distinct: float
    """The part of them that is left without repetitions."""
    nbytes: int
    """Bytes of the rows that were looked up, repeated ones too."""
    hottest: Sequence[Sequence[float]]
    """The most frequent ids, each with its part of all that were counted since the start of this process."""
    hit_rate: NotRequired[float]
    """Of a dynamic table, the part of the ids that had a row."""
    evicted: NotRequired[int]
    """Of a dynamic table, the rows that have been given up."""


class TablesFields(TypedDict):
    """The lookups of a step in embedding tables, about once a second."""

    total_steps: int
    """Steps of the run up to and including this one."""
    tables: Mapping[str, TableFigures]
    """By the name in the model."""


class EvaluationFields(TypedDict):
    """An evaluation ended."""

    epoch: int
    """Number of the epoch, from 0; between two epochs, that of the last one."""
    name: str
    values: Mapping[str, Mapping[str, Any]]
    """Metric to its value, total and count; value = total / count."""
    seconds: float


class ImageFields(TypedDict):
    """A file with an image."""

    path: str
    """A PNG file, relative to the directory of the run."""
    width: int
    """In pixels, as height."""
    height: int
    nbytes: int
    """Size of the file."""
    caption: NotRequired[str]
    thumbnail: NotRequired[str]
    """A smaller PNG file, of an image that is larger than 160 pixels."""


class LoggedFields(TypedDict):
    """The values that the user's loop has logged, by name."""

    values: Mapping[str, float]
    """Empty if there are only texts or images."""
    texts: NotRequired[Mapping[str, str]]
    """Up to 10,000 characters each, and then their number."""
    images: NotRequired[Mapping[str, ImageFields]]


class LogFields(LoggedFields):
    """The user's loop logged something, by `Trainer.log`."""

    epoch: int
    """Number of the epoch, from 0; between two epochs, that of the last one."""
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


class DigestFields(TypedDict):
    """The bits of the weights after some steps, by `Trainer(digest_every=...)`."""

    total_steps: int
    tensors: Mapping[str, str]
    """For each parameter and buffer, by name, 16 hexadecimal digits that are equal where dtype, shape and bits are."""


class FailureFields(TypedDict):
    """An exception or a signal has ended the program before the end of the loop."""

    type: str
    """The name of the exception's type, or "SIGTERM"."""
    message: str
    """The first line of its message, up to 300 characters."""
    total_steps: int
    """Steps of the run done before."""


class ProgressFields(TypedDict):
    """A user loop, shown by `unisono.progress`, made progress."""

    bar: int
    """Number of the loop in this process, from 0."""
    name: str
    done: int
    """Count over all ranks."""
    total: int | None
    """Total over all ranks; None if not known."""
    unit: str
    """Name of the counted things, in the plural."""
    values: Mapping[str, float]
    """Further values of the loop, such as its loss."""
    ended: bool
