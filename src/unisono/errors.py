"""Every error that unisono raises for what is not a plain wrong argument.

    UnisonoError
    ├── DataError              a dataset or loader cannot give what the plan asks for
    ├── LossError              a loss function returned something that cannot be trained on
    │   └── NonFiniteLossError the loss of a step is NaN or infinite; the weights kept their last good value
    ├── RankMismatchError      ranks disagree about the model, the data or the settings
    ├── CheckpointError        a checkpoint cannot be written, read or applied
    │   └── CorruptCheckpointError  its bytes are not those that were written
    ├── LaunchError            a job cannot be started
    ├── GroupError             a process group is used before it is there, after its end, by a rank outside it, or
    │                         where collectives have no place: in a loss function
    └── PeerError              another rank failed or did not come, so this one cannot go on

A wrong argument is a ValueError or TypeError. All messages say what was found, with the numbers, and what to do.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CorruptCheckpointError",
    "DataError",
    "GroupError",
    "LaunchError",
    "LossError",
    "NonFiniteLossError",
    "PeerError",
    "RankMismatchError",
    "UnisonoError",
]


class UnisonoError(Exception):
    """Root of the errors that unisono raises on purpose."""


class DataError(UnisonoError):
    """A dataset or loader cannot give what the plan asks for."""


class LossError(UnisonoError):
    """A loss function returned something that cannot be trained on."""


class NonFiniteLossError(LossError):
    """The loss of a step is NaN or infinite. The step did not happen: weights and buffers are those before it."""


class RankMismatchError(UnisonoError):
    """Ranks disagree about something that must be equal on all of them."""


class CheckpointError(UnisonoError):
    """A checkpoint cannot be written, read or applied."""


class CorruptCheckpointError(CheckpointError):
    """The bytes of a checkpoint are not those that were written."""


class LaunchError(UnisonoError):
    """A job cannot be started."""


class GroupError(UnisonoError):
    """A process group is used before it is there, after its end, by a rank that is not in it, or in a loss
    function, which ranks call different numbers of times."""


class PeerError(UnisonoError):
    """Another rank failed or did not come, so this one cannot go on."""
