"""The errors that unisono raises, except those for wrong arguments.

    UnisonoError
    ├── DataError              a dataset or loader cannot provide what the plan requires
    ├── LossError              a loss function returned something that cannot be trained on
    │   ├── NonFiniteLossError the loss of a step is NaN or infinite; the weights keep their values
    │   └── TableFullError     a dynamic embedding table has no row for a new id; the weights keep their values
    ├── RankMismatchError      ranks disagree about the model, the data or the settings
    ├── CheckpointError        a checkpoint cannot be written, read or applied
    │   └── CorruptCheckpointError  its bytes are not those that were written
    ├── LaunchError            a job cannot be started
    ├── ReportError            the events of a run cannot be read, or its report cannot be written
    ├── EstimateError          the cost of a model cannot be computed from what its build function returns
    ├── GroupError             a process group is used before it exists, after its end, by a rank outside it, or
    │                         where collectives are not allowed: in a loss function
    └── PeerError              another rank failed or did not arrive, so this one cannot continue

A wrong argument raises ValueError or TypeError. All messages state the values found, with numbers, and a remedy.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CorruptCheckpointError",
    "CutError",
    "DataError",
    "EstimateError",
    "GroupError",
    "LaunchError",
    "LossError",
    "NonFiniteLossError",
    "PathChangedError",
    "PeerError",
    "RankMismatchError",
    "ReportError",
    "TableFullError",
    "UnisonoError",
]


class UnisonoError(Exception):
    """Root of the errors that unisono raises on purpose."""


class DataError(UnisonoError):
    """A dataset or loader cannot provide what the plan requires."""


class LossError(UnisonoError):
    """A loss function returned something that cannot be trained on."""


class NonFiniteLossError(LossError):
    """The loss of a step is NaN or infinite. The step was not applied: weights and buffers are those before it."""


class TableFullError(LossError):
    """A step has more new ids than a dynamic table has free rows. The step was not applied."""


class RankMismatchError(UnisonoError):
    """Ranks disagree about something that must be equal on all of them."""


class CutError(UnisonoError):
    """A model cannot be cut into the stages that were asked for."""


class PathChangedError(CutError):
    """The code of a model that is cut made other calls, or read other numbers, than before."""


class CheckpointError(UnisonoError):
    """A checkpoint cannot be written, read or applied."""


class CorruptCheckpointError(CheckpointError):
    """The bytes of a checkpoint are not those that were written."""


class LaunchError(UnisonoError):
    """A job cannot be started."""


class ReportError(UnisonoError):
    """The events of a run cannot be read, or a report of them cannot be written."""


class EstimateError(UnisonoError):
    """The cost of training a model cannot be computed."""


class GroupError(UnisonoError):
    """A process group is used before it exists, after its end, by a rank outside it, or in a loss function, which
    ranks call different numbers of times."""


class PeerError(UnisonoError):
    """Another rank failed or did not arrive, so this one cannot continue."""
