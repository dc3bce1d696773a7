"""Embedding tables in a loop of your own: one copy for all ranks of a host, or a part of the rows on each rank.

Where ranks share memory, they or servers update the one copy. Start reading at `SharedTables.step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.arguments import choice, flag
from unisono.collectives.world import World
from unisono.embedding.imported_rows import refuse_lost_rows
from unisono.embedding.lazy_rows import LazyRows
from unisono.embedding.row_map import RowMap
from unisono.embedding.rows_ahead import RowsAhead
from unisono.embedding.table_modules import BagTable, RowTable
from unisono.embedding.tables import Tables, tables_in
from unisono.engine import EngineFactory, EngineKind, files_of, select_engines, share_files
from unisono.engine.base import Preparation, Trained
from unisono.engine.description import check_equal_documents, describe_groups, describe_row_updates, plain
from unisono.engine.divided_rows import check_equal_rows, divide_rows
from unisono.engine.model_contents import parameter_names
from unisono.engine.row_exchange import RowExchange
from unisono.engine.row_requests import by_table
from unisono.engine.rowed_tensors import NamedTensors
from unisono.engine.step_fingerprint import StepFingerprint, intent_of_call
from unisono.engine.step_transaction import StepTransaction
from unisono.errors import UnisonoError
from unisono.mismatch import Document
from unisono.parallel.row_parts import RowLoading, rows_of_rank
from unisono.parallel.state_parts import load_on_all, refuse_single_part
from unisono.text import a_type

__all__ = ["SharedTables", "share_tables"]

_ENGINES = ("auto", "shared", "collective")
_PARTLY_LOADED = (
    "load_state_dict of the shared tables failed, on this rank or another one, when some rows may have been replaced: "
    "load a whole state before"
)


def share_tables(tables: Tables, *, engine: EngineKind = "auto") -> SharedTables:
    """Let all ranks train the same tables, in a loop of your own. Every rank must call it.

    Ranks that share memory have one copy. Where they do not, as on several hosts, each keeps a part of the rows, if the
    tables were made with divided=True. Rows become those of rank 0 where there is one copy; otherwise all ranks have
    the same ones before. Then call `step` of the result after each backward, in place of `tables.step`.
    Give DistributedDataParallel or `replicate` the dense part of the model alone: `step` takes the mean over ranks.

    Args:
        tables: All tables that are to be shared, on the CPU. Servers update them if the job has some
            (`unisono run --servers`); otherwise ranks divide the work.
        engine: "shared" refuses to divide rows, and "collective" divides them on one host, too.

    Raises:
        TypeError: It is no `Tables`.
        ValueError: The ranks cannot share memory, as on several hosts, and the tables cannot be divided; or a table is
            not on the CPU.
        RankMismatchError: The ranks have other tables, or update rows in another way.
        PeerError: Another rank does not come.
    """
    if not isinstance(tables, Tables):
        raise TypeError(f"tables is {a_type(tables)}; give the object that unisono.embedding.Tables(...) has made")
    choice("engine", engine, _ENGINES)
    for module in tables_in([tables]).values():
        if module.weight.device.type != "cpu":
            raise ValueError(
                f"table {module.name!r} is on {module.weight.device}, and ranks keep shared rows in memory of the CPU: "
                "leave the table on the CPU, or make it with divided=True, with which it stays there"
            )
    refuse_lost_rows(tables_in([tables]).values())
    return SharedTables(tables, engine)


class SharedTables:
    """Tables that all ranks train; `share_tables` makes it."""

    def __init__(self, tables: Tables, engine: EngineKind) -> None:
        self._world = world = World.connect(torch.device("cpu")).on_cpu()
        self._modules = [*tables_in([tables]).values()]
        self._optimizer = optimizer = tables.optimizer
        named = {name: p for name, p in tables.named_parameters() if p.requires_grad}
        self._trained = Trained(tuple(named), tuple(named.values()))
        check_equal_documents(world, self._describe(tables), given_to="share_tables")
        is_divided = all(module.is_divided for module in self._modules)
        if engine == "collective" and not is_divided:
            raise ValueError('engine="collective" divides the rows over ranks: make the tables with divided=True')
        share_files(world, [tables], [optimizer], divided=engine == "collective")
        factory = select_engines(
            engine, world, [tables], [optimizer], virtual_ranks=world.size, overlap=False, protect=False
        )
        self._exchange: RowExchange | None = None
        if world.group is not None:
            if factory.shares:
                self._take_first_rows(tables)
            elif is_divided:
                self._divide(tables, factory)
            else:
                raise ValueError(
                    "the ranks share no memory, as on several hosts, and each would have rows of its own: make the "
                    "tables with divided=True, with which each rank keeps a part of the rows"
                )
        self._comparison, self._engine = factory.comparison, factory.engine(optimizer)
        self._transaction, self._rows = StepTransaction(), RowsAhead(self._modules)
        self._fingerprint = StepFingerprint({"": optimizer}, {"": tables}, call="shared.step")
        self.steps = 0
        """The number of steps made, by earlier runs too, whose state was loaded."""
        self._obstacle: str | None = None
        self._begin()

    @property
    def is_divided(self) -> bool:
        """True if each rank keeps a part of the rows; False if all have one copy."""
        return self._exchange is not None

    def step(self) -> None:
        """Update the rows by the mean of all ranks' gradients, which are None afterwards. Every rank must call it.

        A rank may have no gradient for a table. Traffic: the rows of the step, in shared memory, or to the ranks that
        keep them.

        Raises:
            LossError: A gradient is dense: something else than its module has used the weight of a table.
            TableFullError: On all ranks, a dynamic table has no row for a new id. No table has been changed.
            RankMismatchError: On all ranks, if they make another call, or their optimizers have other settings.
            PeerError: Another rank has died or does not come. The tables are then of no use.
        """
        self._check_loaded()
        engine, step, rank = self._engine, self._transaction, self._world.rank
        gradients = [p.grad for p in self._trained.parameters]
        self._comparison.intend(self._fingerprint.intent(self._trained, epoch=0, step=self.steps, call=0))
        engine.start(step, self._trained, leaves=self._world.size)
        try:
            for p, gradient in zip(self._trained.parameters, gradients, strict=True):
                p.grad = gradient
            engine.close_forward(rank, torch.zeros(()), 1.0, new_buffers=False)
            engine.close_leaf(rank)
            engine.flush()
            engine.finish()
            engine.prepare(Preparation(1 / self._world.size, None, None, None))
        except BaseException:
            engine.abort(alike=True)
            self._begin()
            raise
        engine.update(None)
        for p in self._trained.parameters:
            p.grad = None
        step.close()
        self.steps += 1
        self._begin()

    def fetch(self, lookups: Mapping[str, Tensor], *, ahead: bool = False) -> None:
        """Bring the rows that this step will look up, of all tables in one exchange. Every rank must call it.

        Without it, each lookup is an exchange of all ranks where rows are divided. Until `step`, lookups send nothing
        then, so ranks may make them differently often, and other ids cannot be looked up. Call it again for the next
        micro-batch of the same step. Where ranks have one copy, it only checks its argument.

        With ahead=True, it is for the step behind this one, and local: `step` sends the rows as soon as they are
        updated, so no rank waits for a question and its answer. If a rank leaves that out, as at the end of its data,
        the lookups of the next step are exchanges on all ranks.

        Args:
            lookups: The ids by the name of the table, of any shape and order; some may not be looked up.
            ahead: True for what the next step will look up; once in a step.

        Raises:
            TypeError, ValueError, IndexError: See `Tables.prefetch`.
            PeerError: Another rank has died or does not come.
        """
        self._check_loaded()
        named, ahead = self._rows.named(lookups, source="what fetch gets"), flag("ahead", ahead)
        if self._exchange is None:
            return
        ids = by_table(self._exchange.tables, named)
        if ahead:
            self._exchange.announce_ahead(ids)
        else:
            self._exchange.fetch(ids)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Let ranks look up differently often inside, as in an evaluation. Every rank must enter it.

        Where rows are divided, each lookup asks other ranks for theirs. Those that leave the block answer the others
        until all have left it.

        Raises:
            RankMismatchError: On all ranks, if they make another call.
            PeerError: Another rank has died or does not come.
        """
        self._check_loaded()
        if self._exchange is None:
            self._compare("evaluation")
            yield
            return
        self._exchange.drain()
        try:
            self._compare("evaluation")
            self._exchange.begin(is_step=False)
            yield
        finally:
            self._exchange.drain()
            self._begin()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the rows and of the optimizer's state, for torch.save. Local.

        The parts of all ranks together are a state that any number of ranks can load, also one process. Memory: a copy
        of the part.
        """
        self._check_loaded()
        self._settle()
        world = self._world
        return rows_of_rank(self._modules, self._optimizer, rank=world.rank, ranks=world.size, steps=self.steps)

    def load_state_dict(self, parts: Iterable[Mapping[str, Any]]) -> None:
        """Load a state from the parts that `state_dict` returned on all ranks. Every rank must call it, with all parts.

        A rank keeps what it needs of each part. With a generator, such as `(torch.load(path, mmap=True) for path in
        paths)`, it needs memory for one of them beside its own.

        Args:
            parts: The parts, in any order, of any number of ranks.

        Raises:
            TypeError: parts is a single part.
            CheckpointError: They are not all parts of one state of these tables. Load others before the next step:
                some may have been loaded.
            RankMismatchError: On all ranks, if they have loaded different states.
            PeerError: Another rank could not load them.
        """
        refuse_single_part(parts)
        if self._exchange is not None:
            self._exchange.drain()
            self._exchange.drop_ahead()
        self._settle()

        def load() -> int:
            self._obstacle = _PARTLY_LOADED
            return RowLoading(self._modules, self._optimizer).load(parts)

        try:
            self._compare("load_state_dict")  # no rank reads rows of others any more
            self.steps = load_on_all(self._world, "shared.load_state_dict", load)
            self._obstacle = None
        finally:
            self._begin()

    def _describe(self, tables: Tables) -> Document:
        """Describe what must be equal on all ranks."""
        of_settings = {
            # Hosts may have other disks.
            f"{key} of table {module.name!r}": value is not None if key == "directory" else plain(value)
            for module in self._modules
            for key, value in vars(module.table).items()
            if key != "optimizer"
        }
        return {
            "the names of the tables": [*self._trained.names],
            **of_settings,
            **describe_groups(self._optimizer, parameter_names({"": tables}), of=""),
            **describe_row_updates({"": tables}),
        }

    def _take_first_rows(self, tables: Tables) -> None:
        """Let all ranks have the rows of rank 0, of which one copy is to be shared."""
        files = files_of([tables]).values()
        for tensor in tables.state_dict(keep_vars=False).values():
            if not any(file.has(tensor) for file in files):
                dist.broadcast(tensor, 0, group=self._world.group)

    def _divide(self, tables: Tables, factory: EngineFactory) -> None:
        """Leave a part of the rows to each rank."""
        world, modules = self._world, self._modules
        if any(module.keeps_twice for module in modules):
            raise ValueError(
                f"table {modules[0].name!r} has copies=2, from which a Trainer replaces a rank that dies, and which a "
                "loop of your own does not survive: leave copies= out, and save shared.state_dict() from time to time"
            )
        for module in modules:
            self._take_first_seed(module)
        check_equal_rows(world, modules, before="share_tables")
        divided = divide_rows(world, modules, [self._optimizer])
        self._exchange = factory.exchange = RowExchange(world, divided, joint=True)
        self._exchange.connect()
        NamedTensors(world, {"": tables}, {"": self._optimizer}, divided)

    @torch.no_grad()
    def _take_first_seed(self, module: RowTable | BagTable) -> None:
        """Let the first values of a table be those of rank 0."""
        rows = module.rows
        assert rows is not None
        seed = torch.tensor([rows.seed])
        dist.broadcast(seed, 0, group=self._world.group)
        if isinstance(rows, RowMap):
            rows.counters[:1] = seed
        elif isinstance(rows, LazyRows):
            rows.first_seed.copy_(seed)

    def _begin(self) -> None:
        """Let lookups ask other ranks for rows until the next step."""
        if self._exchange is not None:
            self._exchange.begin(is_step=True)

    def _compare(self, call: str) -> None:
        self._comparison.compare(intent_of_call(f"shared.{call}()", step=self.steps))

    def _settle(self) -> None:
        for module in self._modules:
            if module.serving is not None:
                module.serving.settle()

    def _check_loaded(self) -> None:
        if self._obstacle is not None:
            raise UnisonoError(self._obstacle)
