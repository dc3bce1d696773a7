"""The fields of events about what a loop does: epochs, steps, evaluations, and what it logs or shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from typing_extensions import NotRequired

__all__ = [
    "DigestFields",
    "EpochFields",
    "EvaluationFields",
    "ImageFields",
    "LogFields",
    "LoggedFields",
    "OtherStepFields",
    "ProgressFields",
    "StepFields",
    "StepParts",
    "TableFigures",
    "TablesFields",
    "TimesFields",
]


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


class DigestFields(TypedDict):
    """The bits of the weights after some steps, by `Trainer(digest_every=...)`."""

    total_steps: int
    tensors: Mapping[str, str]
    """For each parameter and buffer, by name, 16 hexadecimal digits that are equal where dtype, shape and bits are."""


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
