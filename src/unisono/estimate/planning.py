"""The layouts of a model that a user names, with their costs. Start reading at `make_plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from unisono.errors import EstimateError
from unisono.estimate.bare_rank import BareRank
from unisono.estimate.costs import LayoutCost, Machine, Trial, Workload
from unisono.estimate.crowding import Load, crowding
from unisono.estimate.device_memory import DeviceMemory, memory_on_devices
from unisono.estimate.exchange_times import measure_exchanges
from unisono.estimate.layouts import costs_without_stages
from unisono.estimate.model_profile import ModelProfile, profile_model
from unisono.estimate.operator_times import OperatorTimes, time_beside_operators
from unisono.estimate.pipelines import Uncut, all_stage_counts, costs_of_pipelines
from unisono.estimate.rates import link_rate, memory_rate, page_rate, pass_over_memory
from unisono.estimate.recommendation import fits
from unisono.estimate.trials import try_layout
from unisono.estimate.user_build import find_build
from unisono.machine import usable_cores

__all__ = ["Plan", "Request", "make_plan"]

_MARGIN = 1.1
"""A layout that is planned to be larger than a limit by no more than this may keep it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The training that is planned."""

    target: str
    """The build function; see `find_build`."""
    ranks: int
    batch_size: int
    virtual_ranks: int
    micro_batch_size: int | None = None
    memory_nbytes: int | None = None
    """The memory that a rank may take. None: any."""
    measures: bool = False
    """True to build and run the model for real."""
    tries: bool = False
    """True to train some steps in each layout that fits."""
    offloads: bool = False
    """True to say what GPUs hold, with and without `Shard(offload=True)`."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            EstimateError: They do not go together.
        """
        if self.ranks > self.virtual_ranks:
            raise EstimateError(
                f"{self.ranks} ranks share {self.virtual_ranks} virtual ranks, so some would have none: give "
                f"--virtual-ranks {self.ranks} or more"
            )
        if self.batch_size < self.virtual_ranks:
            raise EstimateError(
                f"a batch of {self.batch_size} samples is not enough for {self.virtual_ranks} virtual ranks: give "
                f"--batch {self.virtual_ranks} or more, or fewer virtual ranks"
            )

    @property
    def share(self) -> int:
        """The number of samples of a virtual rank; of the largest share, if they differ."""
        return -(-self.batch_size // self.virtual_ranks)

    @property
    def micro_batch(self) -> int:
        """The number of samples of a micro-batch."""
        return min(self.share, self.micro_batch_size or self.share)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The costs of each layout."""

    request: Request
    profile: ModelProfile
    costs: tuple[LayoutCost, ...]
    uncut: tuple[Uncut, ...]
    """Pipelines into which the model cannot be cut."""
    devices: tuple[DeviceMemory, ...] = ()
    """What GPUs hold, if that was asked for."""


def make_plan(request: Request, *, tell: Callable[[str], None]) -> Plan:
    """Return what each layout of a model would cost.

    Args:
        request: What is to be planned.
        tell: Called with what is being done, for a person who waits.

    Raises:
        EstimateError: The model cannot be planned.
        UserCodeError: The user's code failed.
    """
    tell("importing the model")
    build = find_build(request.target)
    workload = Workload(
        ranks=request.ranks,
        virtual_ranks=request.virtual_ranks,
        micro_batches=-(-request.share // request.micro_batch),
    )
    with BareRank(build) as bare:
        tell("timing operators" if not request.measures else "running a micro-batch")
        with _one_thread():
            profile, loads = _profile(build, request, all_stage_counts(workload))
            at_once = min(request.ranks, usable_cores())
            tell("timing exchanges of ranks")
            exchanges = measure_exchanges(min(request.ranks, max(2, usable_cores())))
            machine = Machine(
                base_nbytes=bare.base_nbytes,
                replay=bare.replay,
                memory_bytes_per_s=memory_rate(),
                page_bytes_per_s=page_rate(),
                link_bytes_per_s=link_rate(),
                cores=usable_cores(),
                exchange_s=exchanges.exchange_s,
                message_s=exchanges.message_s,
                shards_s=exchanges.shards_s,
                slowdown=crowding(loads, at_once),
                memory_slowdown=crowding([Load(pass_over_memory, 1)], at_once),
            )
        tell("replaying the memory of steps")
        found = [
            *costs_without_stages(profile, workload, machine),
            *costs_of_pipelines(profile, workload, machine, limit_nbytes=request.memory_nbytes),
        ]
    costs = [each for each in found if isinstance(each, LayoutCost)]
    for number, cost in enumerate(costs if request.tries else ()):
        tell(f"training {cost.name}, {number + 1} of {len(costs)}")
        costs[number] = replace(cost, trial=_trial(request, cost))
    return Plan(
        request=request,
        profile=profile,
        costs=tuple(costs),
        uncut=tuple(each for each in found if isinstance(each, Uncut)),
        devices=tuple(memory_on_devices(profile, workload)) if request.offloads else (),
    )


def _trial(request: Request, cost: LayoutCost) -> Trial:
    limit = request.memory_nbytes
    if not fits(cost, None if limit is None else round(limit * _MARGIN)):
        return Trial(why_not="it is planned to be too large")
    return try_layout(
        cost,
        target=request.target,
        virtual_ranks=request.virtual_ranks,
        batch_size=request.batch_size,
        micro_batch_size=request.micro_batch,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch have one thread, as a Trainer computes if nothing else is said."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _profile(build: Callable[[], Any], request: Request, stages: list[int]) -> tuple[ModelProfile, list[Load]]:
    """Profile a model.

    Returns:
        The profile, and operators that stand for the model.
    """
    times = None if request.measures else OperatorTimes(beside_s=time_beside_operators())
    profile = profile_model(build, micro_batch=request.micro_batch, stages=stages, times=times)
    loads = [] if times is None else times.loads()
    return profile, loads or [Load(_product, 1)]


def _product() -> Callable[[], Any]:
    """Return a product of matrices, which stands for a model whose operators are not known."""
    left, right = torch.ones(256, 256), torch.ones(256, 256)
    return lambda: left @ right
