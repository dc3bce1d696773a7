"""The facts of a run that every part of a trainer needs: the plan's numbers, the ranks and the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from unisono.collectives.world import World
from unisono.data.fetch import NoteSamples
from unisono.engine.row_exchange import RowExchange
from unisono.engine.totals import Wants
from unisono.plan import derive_key, rank_block
from unisono.state.random import set_generators
from unisono.trainer.step_clock import StepClock

__all__ = ["Agreement", "RunContext"]


def _nothing(*_: object) -> None:
    """Note nothing."""


class Agreement(Protocol):
    """Has something done by all ranks between two steps, though one of them alone may know that it is wanted."""

    def is_wanted(self) -> bool:
        """Return True if this rank wants it to be done after the present step."""

    def agree(self, *, is_wanted: bool) -> None:
        """Note in a step what all ranks know of it together: it is to be done after the step, or not."""


class _NoAgreement:
    """That of something which is never done."""

    def is_wanted(self) -> bool:
        """Return False."""
        return False

    def agree(self, *, is_wanted: bool) -> None:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """The constants of one run on one rank."""

    seed: int
    """Root of all random numbers."""
    virtual_ranks: int
    """Number of shares of every global batch, fixed for the whole run."""
    world: World
    """The real ranks, which may be different ones later."""
    device: torch.device
    """The device that this rank computes on."""
    note: Callable[..., None] = _nothing
    """Notes what this rank does, as note(phase, virtual rank, indices of samples), for messages about its death."""
    noting: Callable[[], NoteSamples | None] = lambda: None
    """Returns what notes the samples that are about to be read, for the same messages; None if they are not noted."""
    is_cut: bool = False
    """True if the user has the model cut over ranks, also if this number of ranks leaves it whole."""
    is_divided: bool = False
    """True if the user has weights and optimizer state divided over ranks, also with one rank."""
    in_turn: bool = False
    """True if virtual ranks are dealt to ranks in turn, and not in blocks of neighbours."""
    ranks_of_replica: int = 1
    """Number of ranks over which each replica of the model is cut; they follow each other."""
    resizing: Agreement = field(default_factory=_NoAgreement)
    """Changes the number of ranks."""
    saving: Agreement = field(default_factory=_NoAgreement)
    """Writes checkpoints of which several hosts write a part."""
    clock: StepClock
    """Measures where the time of steps goes."""
    exchange: RowExchange | None = None
    """Brings rows of tables that are divided over ranks; None without such tables."""

    @property
    def has_whole_model(self) -> bool:
        """True if each rank has the whole model at any time."""
        return not self.is_cut and not self.is_divided

    @property
    def block(self) -> range:
        """The virtual ranks of this rank's replica."""
        return self._block_of(self.world.rank)

    def results_of(self, rank: int) -> range:
        """Return the virtual ranks for which a rank gets the results of functions: where a model is cut, the last."""
        return self._block_of(rank) if (rank + 1) % self.ranks_of_replica == 0 else range(0)

    def _block_of(self, rank: int) -> range:
        replicas = self.world.size // self.ranks_of_replica
        own = rank // self.ranks_of_replica
        return rank_block(own, world_size=replicas, virtual_ranks=self.virtual_ranks, in_turn=self.in_turn)

    def wants(self) -> Wants:
        """Return what this rank wants to be done after the present step."""
        return Wants(resize=self.resizing.is_wanted(), save=self.saving.is_wanted())

    def agree(self, wants: Wants) -> None:
        """Note in a step what all ranks do after it."""
        self.resizing.agree(is_wanted=wants.resize)
        self.saving.agree(is_wanted=wants.save)

    def set_generators(self, stream: str, *coordinates: int) -> None:
        """Seed all generators of this process and of its device for one point of one stream."""
        set_generators(derive_key(self.seed, stream, *coordinates), self.device)
