"""Selects the engine of a run."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from unisono.collectives.world import World
from unisono.embedding.tables import serving_in
from unisono.engine.base import Engine, Trained
from unisono.engine.collective import CollectiveEngine
from unisono.engine.consistency import ConsistencyCheck, GroupConsistencyCheck, NoConsistencyCheck
from unisono.engine.early_receives import EARLY_TAGS, EarlyReceives
from unisono.engine.host_tree_all_reduce import GroupAllReduce, HostGrid, HostRanks, group_all_reduce
from unisono.engine.joint_optimizer import parts_of
from unisono.engine.local import LocalEngine
from unisono.engine.local_steps import LocalStepsEngine, Workers
from unisono.engine.row_exchange import RowExchange
from unisono.engine.shared import (
    LoadStateDictHook,
    SharedAllReduce,
    SharedConsistencyCheck,
    SharedEngine,
    SharedParameters,
    SharedRuntime,
    copy_state,
    files_of,
    is_divisible,
)
from unisono.engine.trainable import sharing_obstacle
from unisono.engine.tree_all_reduce import NodeLayout
from unisono.engine.weight_writes import PrivateWeights, WeightWrites
from unisono.machine import host_id, shared_memory_obstacle
from unisono.shm.peers import own_process

__all__ = ["EngineFactory", "EngineKind", "select_engines"]

EngineKind = Literal["auto", "shared", "collective"]

_LBFGS = "LBFGS looks at the loss at other weights within a step, and where ranks share weights each updates a part"

_FIRST_TAG, _RUNS = 1 << 28, 1 << 18
"""Tags of messages that nothing else of the process group has: each run takes the next ones, of so many."""


class EngineFactory:
    """Makes the engines of a run, one for each optimizer, and the all-reduce that sums buffers."""

    def __init__(
        self,
        world: World,
        modules: Sequence[nn.Module],
        *,
        virtual_ranks: int,
        overlap: bool,
        protect: bool,
        runtime: SharedRuntime | None,
        shares: bool,
        hosts: HostRanks | None = None,
        tag: int | None = None,
    ) -> None:
        """Note the arguments. `tag` is the first of the tags of this run, on several hosts; see `_FIRST_TAG`."""
        self._world, self._modules = world, modules
        self._shared: tuple[SharedRuntime, SharedParameters, SharedConsistencyCheck] | None = None
        self.runtime = runtime
        """The shared memory of the ranks; None if they have none, as on several hosts."""
        self._virtual_ranks, self._protect = virtual_ranks, protect
        self.overlap = overlap
        """If False, no gradient is added or taken before backward has ended."""
        self._hosts, self._several_hosts = hosts, tag is not None
        self.workers: Workers | None = None
        """The workers that train on their own; None where each step has the gradient of all. Set before any engine."""
        self.exchange: RowExchange | None = None
        """Brings rows of tables that are divided over ranks; None without such tables. Set before any engine."""
        self._made: list[Engine] = []
        self._optimizers: list[Optimizer] = []
        self._loads: LoadStateDictHook | None = None
        self.comparison: ConsistencyCheck = NoConsistencyCheck()
        """Compares what ranks are about to do."""
        if runtime is not None:
            self.comparison = comparison = SharedConsistencyCheck(runtime, counts_attempts=shares)
            if shares:
                self._loads = LoadStateDictHook(modules)
                self._shared = runtime, SharedParameters(runtime, self._loads, files_of(modules).values()), comparison
        elif world.group is not None:
            self.comparison = GroupConsistencyCheck(world, tag)
        self._early: EarlyReceives | None = None
        if tag is not None and world.device.type == "cpu":
            self._early = EarlyReceives(world, tag + 1)

    @property
    def weights(self) -> WeightWrites:
        """Writes values into the models between steps."""
        return PrivateWeights() if self._shared is None else self._shared[1]

    @property
    def shares(self) -> bool:
        """True if ranks share the weights."""
        return self._shared is not None

    def engine(self, optimizer: Optimizer) -> Engine:
        """Make the engine of an optimizer. Every rank must call it, in the same order."""
        made = self._make(optimizer)
        self._made.append(made)
        self._optimizers += parts_of(optimizer)
        return made

    def repair(self, dead: Collection[int]) -> bool:
        """Put back weights and optimizer state that a step has left half written; see `SharedEngine.repair`.

        Engines of which each rank has its own weights leave none half written when another rank dies.
        """
        results = [engine.repair(dead) for engine in self._made if isinstance(engine, SharedEngine)]
        return all(results)

    def make_private(self) -> None:
        """Give this rank its own copy of weights and optimizer state that ranks share, for ranks that share no memory.

        Every rank must call it after `repair`, and pass a barrier before it writes weights.
        """
        if self._shared is not None:
            self._shared[1].make_private()
            for optimizer in self._optimizers:
                copy_state(optimizer)

    def close(self) -> None:
        """Release the models and optimizers, for another factory."""
        for engine in self._made:
            engine.close()
        if self._loads is not None:
            self._loads.remove()
        if self._hosts is not None and self._hosts.runtime is not None:
            # This rank may have seen that one of another host has died before the others of its host have.
            self._hosts.runtime.leave()

    def _make(self, optimizer: Optimizer) -> Engine:
        if self.workers is not None:
            return LocalStepsEngine(
                self.workers,
                self._world,
                self.comparison,
                self.all_reduce,
                virtual_ranks=self._virtual_ranks,
                overlap=self.overlap,
            )
        if self._world.group is None and self._shared is None:
            return LocalEngine(optimizer, self._modules, resumes=self.overlap)
        virtual_ranks, overlap = self._virtual_ranks, self.overlap
        if self._shared is not None:
            return SharedEngine(
                optimizer,
                self._modules,
                *self._shared,
                virtual_ranks=virtual_ranks,
                overlap=overlap,
                protect=self._protect,
            )
        return CollectiveEngine(
            optimizer,
            self._modules,
            self._world,
            self.comparison,
            virtual_ranks=virtual_ranks,
            overlap=overlap,
            hosts=self._hosts,
            several_hosts=self._several_hosts,
            early=self._early,
            exchange=self.exchange,
        )

    def all_reduce(
        self, numel: int, *, widest: NodeLayout, dtype: torch.dtype, device: torch.device
    ) -> GroupAllReduce | SharedAllReduce:
        """Make the all-reduce of a small vector. Every rank must call it, in the same order."""
        if self._shared is not None:
            return SharedAllReduce(self._shared[0], numel, widest=widest, dtype=dtype)
        return group_all_reduce(
            self._world,
            self._hosts,
            numel,
            widest=widest,
            dtype=dtype,
            device=device,
            early=self._early,
        )


def select_engines(
    kind: EngineKind,
    world: World,
    modules: Iterable[nn.Module],
    optimizers: Iterable[Optimizer],
    *,
    virtual_ranks: int,
    overlap: bool,
    protect: bool = False,
) -> EngineFactory:
    """Select the engine of a world, and return its factory. Every rank must call it.

    With one rank, sums stay local. With several CPU ranks on one host, "auto" selects the shared-memory engine if the
    ranks can share the model; otherwise the collective one. An optimizer that is not torch's may compute something over
    all parameters, which no rank of the shared-memory engine updates alone: it gets that one only by "shared".

    Args:
        kind: The engine to use if there are several ranks.
        overlap: If False, no gradient is added or taken before backward has ended.
        protect: If True, the shared-memory engine can undo an update in which a rank dies, at a small cost.

    Raises:
        ValueError: On all ranks, if `kind` is "shared", or the model has tables on servers, and the ranks cannot share
            memory or the model.
    """
    modules, optimizers = list(modules), list(optimizers)
    runtime = host_ranks = None
    tag = None
    may_share = kind == "shared" or (kind == "auto" and all(map(is_divisible, optimizers)))
    shares = False
    has_servers = serving_in(modules) is not None and (world.group is not None or world.size == 1)
    if world.group is not None or has_servers:
        tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        own = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
        named = {id(p): (name, p) for module in modules for name, p in module.named_parameters() if id(p) in own}
        trained = Trained(tuple(name for name, _ in named.values()), tuple(p for _, p in named.values()))
        to_sharing = (
            _obstacle_to_sharing(world, modules, tensors)
            or sharing_obstacle(trained, tensors)
            or next((_LBFGS for each in optimizers if isinstance(each, LBFGS)), None)
        )
        to_shared_memory = shared_memory_obstacle()
        process = own_process() if to_shared_memory is None else ""
        number = world.store("unisono/runs").add("count", 1) if world.group is not None and not world.rank else 0
        everyone = world.gather(
            (host_id(with_network=True), to_shared_memory, to_sharing, secrets.token_hex(8), process, number)
        )
        hosts = {host for host, *_ in everyone}
        grid = HostGrid.of([host for host, *_ in everyone])
        if len(hosts) > 1:
            tag = _FIRST_TAG + everyone[0][-1] % _RUNS * (1 + EARLY_TAGS)
        obstacle = next((f"rank {r}: {a or b}" for r, (_, a, b, *_) in enumerate(everyone) if a or b), None)
        if obstacle is None and len(hosts) > 1:
            obstacle = f"the {world.size} ranks are on {len(hosts)} hosts"
        shares = may_share and obstacle is None
        if kind == "shared" and not shares:
            raise ValueError(
                f'engine="shared" cannot serve here: {obstacle}. Leave engine="auto", which then takes "collective".'
            )
        if has_servers and not shares:
            why = obstacle or (
                f'engine="{kind}" keeps the weights of each rank apart'
                if kind == "collective"
                else "an optimizer is not known to update parameters independently"
            )
            raise ValueError(
                "the tables of the model are on servers, which share memory with all ranks, and here ranks share none: "
                f'{why}. Leave out --servers, or give CPU ranks of one host engine="auto".'
            )
        # Ranks of one host compare what they do in shared memory even if they send their gradients.
        if shares or (len(hosts) == 1 and not any(why_not for _, why_not, *_ in everyone)):
            runtime = SharedRuntime(world, f"unisono/{everyone[0][3]}", [process for *_, process, _ in everyone])
        elif grid is not None and world.device.type == "cpu" and not any(why_not for _, why_not, *_ in everyone):
            host_ranks = HostRanks.sharing(world, grid, [(key, process) for *_, key, process, _ in everyone])
        elif grid is not None:
            host_ranks = HostRanks(grid)
    return EngineFactory(
        world,
        modules,
        virtual_ranks=virtual_ranks,
        overlap=overlap,
        protect=protect,
        runtime=runtime,
        shares=shares,
        hosts=host_ranks,
        tag=tag,
    )


def _obstacle_to_sharing(world: World, modules: Sequence[nn.Module], tensors: Sequence[Tensor]) -> str | None:
    """Return why this rank cannot share its model with others of its host; None if it can."""
    if any(isinstance(m, torch.jit.ScriptModule) for module in modules for m in module.modules()):
        return "the model is one of torch.jit.script, which does not tell when weights are loaded into it"
    elsewhere = [t for t in tensors if t.device.type != "cpu"]
    if elsewhere:
        return f"the model is on {elsewhere[0].device}, and only memory of the CPU is shared"
    if world.device.type != "cpu":
        return f"its process group has no backend for the CPU, only for {world.device.type}"
    return None
