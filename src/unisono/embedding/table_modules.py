"""Tables as modules, to be used in a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from unisono.embedding.compiled_sums import is_poolable
from unisono.embedding.growth import resize
from unisono.embedding.huge_pages import advise_huge_pages
from unisono.embedding.id_checks import check_ids, check_offsets
from unisono.embedding.lazy_rows import LazyRows
from unisono.embedding.located_rows import LocatedRows
from unisono.embedding.lookup import Bags, Locate, look_up, pool
from unisono.embedding.row_map import RowMap
from unisono.embedding.serving import Serving
from unisono.embedding.table_file import TableFile
from unisono.embedding.table_settings import Table
from unisono.embedding.zero_memory import zero_memory
from unisono.errors import UnisonoError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["BagTable", "RowTable", "match_length"]


class _TableModule(nn.Module):
    """What both kinds of tables have in common."""

    weight: Tensor
    is_divided: bool
    file: TableFile | None

    @property
    def stays_on_cpu(self) -> bool:
        """True if the rows stay in memory of the CPU, or in a file, wherever the model is moved."""
        return self.is_divided or self.file is not None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return super()._apply(_on_cpu(fn, self.weight) if self.stays_on_cpu else fn, recurse)  # type: ignore[no-untyped-call, no-any-return]


class RowTable(_TableModule, nn.Embedding):
    """A table whose ids give a row each. It is an nn.Embedding with sparse gradients, of one pass over memory.

    Args:
        name: Its name, for messages.
        table: Its settings.
        divided: True if each rank keeps a part of the rows, where ranks share no memory.
    """

    def __init__(self, name: str, table: Table, *, divided: bool = False) -> None:
        # nn.Embedding knows only ids that are rows as padding.
        padding = table.padding_idx if table.capacity is None else None
        file = _new_file(name, table)
        super().__init__(
            table.length, table.dim, padding_idx=padding, sparse=True, _weight=_new_weight(table, file, divided)
        )
        self.name, self.table, self.file = name, table, file
        """What `file` has are the rows; None: they are in memory."""
        self.padding_idx = table.padding_idx
        self.rows = _new_rows(name, table)
        """The ids of a dynamic table, or the rows of a fixed one that are written; None: all rows are."""
        if self.rows is None:
            self.reset_parameters()
        self.serving: Serving | None = None
        """The servers that update it; None: ranks do."""
        self.is_divided, self.keeps_twice = divided, False
        self.register_state_dict_pre_hook(_settle)  # type: ignore[no-untyped-call]
        if table.when_full == "grow" or table.is_lazy or file is not None or divided:
            self.register_load_state_dict_pre_hook(_prepare_load)  # type: ignore[no-untyped-call]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Return the rows of ids of any shape, [*input.shape, dim], on the device of the ids.

        Raises:
            TypeError: The ids are not int32 or int64.
            IndexError: An id is out of range.
        """
        if torch.compiler.is_compiling():
            return _look_up_eagerly(self, input)
        if _is_elsewhere(self, input):
            return self.forward(input.cpu()).to(input.device)
        if self.rows is None:
            check_ids(self.name, input, rows=self.num_embeddings)
            return look_up(self.weight, input, padding=self.padding_idx)
        check_ids(self.name, input, rows=self.table.rows)
        locate = partial(self.rows.locate, self.weight.detach(), padding=self.padding_idx)
        return look_up(self.weight, input.long(), padding=self.padding_idx, locate=locate)


class BagTable(_TableModule, nn.EmbeddingBag):
    """A table whose ids come in bags. It is an nn.EmbeddingBag with sparse gradients.

    Args:
        name: Its name, for messages.
        table: Its settings.
        divided: True if each rank keeps a part of the rows, where ranks share no memory.
    """

    def __init__(self, name: str, table: Table, *, divided: bool = False) -> None:
        assert table.pooling is not None
        file = _new_file(name, table)
        super().__init__(
            table.length,
            table.dim,
            mode=table.pooling,
            padding_idx=table.padding_idx if table.capacity is None else None,
            include_last_offset=table.include_last_offset,
            sparse=True,
            _weight=_new_weight(table, file, divided),
        )
        self.name, self.table, self.file = name, table, file
        """What `file` has are the rows; None: they are in memory."""
        self.padding_idx = table.padding_idx
        self.rows = _new_rows(name, table)
        """The ids of a dynamic table, or the rows of a fixed one that are written; None: all rows are."""
        if self.rows is None:
            self.reset_parameters()
        self.serving: Serving | None = None
        """The servers that update it; None: ranks do."""
        self.is_divided, self.keeps_twice = divided, False
        self.register_state_dict_pre_hook(_settle)  # type: ignore[no-untyped-call]
        if table.when_full == "grow" or table.is_lazy or file is not None or divided:
            self.register_load_state_dict_pre_hook(_prepare_load)  # type: ignore[no-untyped-call]

    def forward(
        self,
        input: Tensor,  # noqa: A002  torch's name
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Return the sum or mean of each bag, [bags, dim], on the device of the ids.

        Args:
            input: Ids, [bags, width], or [n] with offsets.
            offsets: Where each bag begins in ids of one dimension, ascending from 0.
            per_sample_weights: A factor for each id, of the shape of `input`; for sums only.

        Raises:
            TypeError: Ids or offsets are not int32 or int64.
            IndexError: An id is out of range.
            ValueError: Shapes do not fit each other, or offsets do not ascend.
        """
        if torch.compiler.is_compiling():
            return _look_up_eagerly(self, input, offsets, per_sample_weights)
        if _is_elsewhere(self, input):
            others = (None if each is None else each.cpu() for each in (offsets, per_sample_weights))
            return self.forward(input.cpu(), *others).to(input.device)
        # The compiled function checks each id that it reads; what it refuses is checked again, for the message.
        is_checked = (
            per_sample_weights is None
            and self.rows is None
            and self.padding_idx is None
            and self.mode == "sum"
            and is_poolable(self.weight)
        )
        bags = self._bags(input, offsets, rows=None if is_checked else self.table.rows)
        mode = cast(Literal["sum", "mean"], self.mode)
        scale = per_sample_weights
        if scale is not None:
            if mode != "sum":
                raise ValueError(f'table {self.name!r} takes per_sample_weights with pooling="sum" only')
            if scale.shape != input.shape:
                raise ValueError(
                    f"table {self.name!r}: per_sample_weights have the shape {list(scale.shape)}, and the ids "
                    f"{list(input.shape)}"
                )
            scale = scale.reshape(-1).to(self.weight.dtype)
        if self.rows is None:
            try:
                return pool(self.weight, bags, scale, mode=mode, padding=self.padding_idx)
            except IndexError:
                check_ids(self.name, input, rows=self.table.rows, begins=bags.begins)
                raise
        bags = bags.of_int64()
        if self.padding_idx is not None:
            bags, scale = bags.without(self.padding_idx, scale)
        locate: Locate = partial(self.rows.locate, self.weight.detach())
        return pool(self.weight, bags, scale, mode=mode, padding=None, locate=locate)

    def _bags(self, ids: Tensor, offsets: Tensor | None, *, rows: int | None) -> Bags:
        """Return the bags of a lookup; None for rows: any id is in range."""
        if not isinstance(ids, Tensor) or ids.dim() == 2:
            check_ids(self.name, ids, rows=rows)
            if offsets is not None:
                raise ValueError(f"table {self.name!r}: ids of two dimensions are bags already; leave offsets out")
            bags, width = ids.shape
            if width:
                return Bags(ids.reshape(-1), None, width)
            return Bags(ids.reshape(-1), ids.new_zeros(bags), None)
        if ids.dim() != 1 or offsets is None:
            raise ValueError(
                f"table {self.name!r}: ids of shape {list(ids.shape)}: give [bags, width], or one dimension and offsets"
            )
        begins = check_offsets(self.name, offsets, ids=len(ids), includes_last=self.include_last_offset)
        check_ids(self.name, ids, rows=rows, begins=begins)
        return Bags(ids, begins.to(ids.dtype), None)


def _is_elsewhere(table: RowTable | BagTable, ids: Tensor) -> bool:
    """Return True if ids are on another device than a table that stays on the CPU."""
    return table.stays_on_cpu and isinstance(ids, Tensor) and ids.device != table.weight.device


def _on_cpu(change: Callable[[Tensor], Tensor], weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what is to be made of the tensors of a table that stays on the CPU where a module changes all of its own.

    Args:
        change: What is made of others, such as a move to a GPU. Of its result, the type alone then counts.
        weight: The rows.
    """
    if change(torch.empty(0, dtype=weight.dtype, device=weight.device)).device.type in ("cpu", "meta"):
        return change

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(change(torch.empty(0, dtype=tensor.dtype)).dtype)

    return convert


def _look_up_eagerly(table: nn.Module, *given: Any) -> Tensor:
    from unisono.embedding.eager_lookup import look_up_eagerly  # noqa: PLC0415  it imports torch's compiler

    return look_up_eagerly(table, *given)


def match_length(table: RowTable | BagTable, length: int) -> None:
    """Give a dynamic table that grows the number of rows that saved values have, which are to replace its own."""
    if isinstance(table.rows, RowMap) and table.table.when_full == "grow" and length != len(table.weight):
        resize(table.weight, table.rows, length)


def _prepare_load(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Match the length of a table to that of a state_dict which is about to be loaded, or the space of its file.

    Raises:
        UnisonoError: The rows are divided over ranks, or in a file that other ranks have, too, or for which the disk
            has no room.
    """
    assert isinstance(module, RowTable | BagTable)
    saved = state.get(f"{prefix}weight")
    if module.rows is not None and module.rows.owners is not None:
        raise UnisonoError(
            f"table {module.name!r} is divided over ranks, each of which keeps its own rows: load weights by "
            "trainer.load(path), or before the Trainer is made; in a loop of your own, by load_state_dict of what "
            "share_tables has returned"
        )
    if saved is not None and module.file is not None:
        if module.file.is_shared:
            raise UnisonoError(
                f"table {module.name!r} is in a file that all ranks share, so a load_state_dict of each rank would "
                "change what others read. Load weights by trainer.load(path), or before the Trainer is made."
            )
        module.file.reserve()
    if isinstance(saved, Tensor) and saved.shape[1:] == module.weight.shape[1:]:
        match_length(module, len(saved))


def _settle(module: nn.Module, *_: Any) -> None:
    """Wait for the servers of a table whose state_dict is about to be read.

    Raises:
        UnisonoError: Its rows are divided over ranks.
    """
    assert isinstance(module, RowTable | BagTable)
    if module.rows is not None and module.rows.owners is not None:
        raise UnisonoError(
            f"table {module.name!r} is divided over ranks, so no state_dict has its rows: write them by "
            "trainer.export(path), or by trainer.save(tag=...), on every rank; in a loop of your own, take state_dict "
            "of what share_tables has returned, which is a part for each rank"
        )
    if module.serving is not None:
        module.serving.settle()


def _new_file(name: str, table: Table) -> TableFile | None:
    if table.directory is None:
        return None
    rule, shape = table.optimizer, (table.length, table.dim)
    state = {**dict.fromkeys(rule.per_row, shape[:1]), **dict.fromkeys(rule.per_element, shape)}
    return TableFile(name, Path(table.directory), shape, state, table.dtype)


def _new_weight(table: Table, file: TableFile | None, divided: bool) -> Tensor:
    """Return memory for the rows: of zeros where some have no values yet, of which these are not written."""
    if file is not None:
        return file.weight
    shape = table.length, table.dim
    if (table.is_lazy or divided) and torch.get_default_device().type == "cpu":
        weight = zero_memory(shape, table.dtype)
    else:
        make = torch.empty if table.capacity is None and not table.is_lazy else torch.zeros
        weight = make(shape, dtype=table.dtype)
    advise_huge_pages(weight)
    return weight


def _new_rows(name: str, table: Table) -> LocatedRows | None:
    if table.capacity is None and not table.is_lazy:
        return None
    seed, std = int(torch.randint(-(2**63), 2**63 - 1, ())), 1.0 if table.init_std is None else table.init_std
    if table.rows is not None:
        return LazyRows(name, table.rows, seed=seed, std=std)
    return RowMap(name, table.length, seed=seed, std=std, policy=table.policy)
