"""The costs of a step: its memory by kind, its traffic and its time, and the facts they are computed from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unisono.estimate.heap_replay import HeapPeak, MemoryOperation

__all__ = ["LayoutCost", "Machine", "MemoryParts", "Trial", "Workload"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """How a step is divided."""

    ranks: int
    virtual_ranks: int
    micro_batches: int = 1
    """Micro-batches of a share."""
    hosts: int = 1
    recovers: bool = True
    """True if ranks keep what is needed to replace one of them, as under `unisono run`."""

    def shares_of(self, ranks: int) -> int:
        """Return the number of shares of the rank that has the most."""
        return -(-self.virtual_ranks // ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The machine that steps run on."""

    base_nbytes: int
    """The memory of a process with torch and the user's file, without a model."""
    replay: Callable[[Sequence[MemoryOperation]], HeapPeak]
    """Returns when a rank that does some operations takes most memory."""
    memory_bytes_per_s: float
    page_bytes_per_s: float
    """The rate at which the system makes pages for a process."""
    link_bytes_per_s: float
    """The rate of messages between two ranks of this host, which one copies in and the other one out."""
    cores: int
    exchange_s: float = 0.0
    """The time of an exchange of some bytes between all ranks, with the code around it."""
    message_s: float = 0.0
    """The same of a message between stages."""
    shards_s: float = 0.0
    """What a step with shards takes besides, however many exchanges it has."""
    slowdown: float = 1.0
    """How many times as long computing takes where ranks compute on all of their cores at once."""
    memory_slowdown: float = 1.0
    """The same of passes over memory."""

    def turns(self, ranks: int) -> float:
        """Return how many ranks share a core, at least 1."""
        return max(1.0, ranks / self.cores)

    def crowded_s(self, ranks: int, *, computing_s: float, moving_s: float = 0.0) -> float:
        """Return the time of what each rank does by itself, where all do it at once.

        Args:
            ranks: Their number.
            computing_s: What operators of the model take in one that is alone.
            moving_s: What passes over memory take there: sums, copies, messages and updates.
        """
        if ranks == 1:
            return computing_s + moving_s
        return self.turns(ranks) * (self.slowdown * computing_s + self.memory_slowdown * moving_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryParts:
    """The memory of a rank at the moment when it has the most, in bytes. Shared memory counts in equal parts."""

    parameters: int
    """With buffers."""
    gradients: int
    """With sums of earlier shares, and what other ranks send or read."""
    optimizer: int
    activations: int
    """With the batch, and what an update takes for a moment if that is more."""
    copies: int = 0
    """The copy from which a rank that dies is replaced."""
    holes: int = 0
    """Parts of the C library's heap that cannot be used again."""
    base: int = 0
    renewed: int = 0
    """What each step gives back to the system and takes anew, whose pages are made again. It is in the others."""

    @property
    def total(self) -> int:
        """All of them."""
        training = self.parameters + self.gradients + self.optimizer + self.activations
        return training + self.copies + self.holes + self.base


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What some steps in a layout have taken on this machine."""

    nbytes: int = 0
    """The memory of the rank with the most. Shared memory counts in equal parts."""
    step_s: float = 0.0
    steps: int = 0
    why_not: str = ""
    """Why there are no figures; "" if there are."""
    has_failed: bool = False
    """True if it was begun and did not end well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutCost:
    """A layout and what it costs."""

    name: str
    code: str
    """The argument of the Trainer."""
    memory: MemoryParts
    sent_nbytes: int
    """The traffic of a rank in a step."""
    step_s: float
    waiting: float = 0.0
    """The part of ranks' time in which they wait for a stage, 0 to 1."""
    ranks: int = 1
    trial: Trial | None = None
    """None: it was not asked for."""

    @property
    def known_nbytes(self) -> int:
        """The memory of a rank, as it was tried, or as it is planned."""
        return self.memory.total if self.trial is None or self.trial.why_not else self.trial.nbytes

    @property
    def known_step_s(self) -> float:
        """The time of a step, as it was tried, or as it is planned."""
        return self.step_s if self.trial is None or self.trial.why_not else self.trial.step_s
