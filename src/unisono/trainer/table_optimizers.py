"""The optimizer of embedding tables, which a Trainer steps with the others without being given it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.embedding.imported_rows import refuse_lost_rows
from unisono.embedding.table_modules import BagTable, RowTable, match_length
from unisono.embedding.table_optimizer import TableOptimizer
from unisono.embedding.tables import optimizer_of, tables_in
from unisono.engine.model_contents import parameter_names, plain_name
from unisono.text import a_type

__all__ = ["TABLES", "match_lengths", "refuse_averages", "refuse_tables", "tensors_in_files", "with_tables"]

TABLES = "tables"
"""The name of the optimizer."""


def with_tables(optimizers: dict[str, Optimizer], modules: Mapping[str, nn.Module]) -> dict[str, Optimizer]:
    """Return the optimizers, and that of the embedding tables which none of them has, as "tables".

    Raises:
        ValueError: An optimizer of torch has the weight of a table, or another one is named "tables"; or values were
            written where no lookup reads them.
    """
    tables = tables_in(modules.values())
    refuse_lost_rows(tables.values())
    for each in optimizers.values():
        if isinstance(each, TableOptimizer):
            for group in each.param_groups:
                for p in group["params"]:
                    tables.pop(id(p), None)
    for name, each in optimizers.items():
        found = [tables[id(p)] for group in each.param_groups for p in group["params"] if id(p) in tables]
        if found:
            of_name = f" {name!r}" if name else ""
            raise ValueError(
                f"table {found[0].name!r} has an optimizer of its own, {type(found[0].table.optimizer).__name__}, and "
                f"the optimizer{of_name} that Trainer was given, {a_type(each)}, has its weight, too. Make that one "
                "with unisono.embedding.dense_parameters(model)."
            )
    if not tables:
        return optimizers
    if TABLES in optimizers:
        raise ValueError(
            f"Trainer names the optimizer of embedding tables {TABLES!r}, and was given another one of this name: "
            "call that one something else"
        )
    return {**optimizers, TABLES: optimizer_of(tables.values())}


def refuse_tables(modules: Mapping[str, nn.Module], division: str) -> None:
    """Raise ValueError if models that are divided over ranks have embedding tables."""
    for module in tables_in(modules.values()).values():
        raise ValueError(
            f"the model has the embedding table {module.name!r}, whose gradient is one of rows, and {division} divides "
            "parameters with dense gradients alone. Leave out parallel=, since ranks of one host share the table as it "
            "is; or take nn.Embedding in place of the table."
        )


def refuse_averages(modules: Mapping[str, nn.Module], decay: float | None) -> None:
    """Raise ValueError if a model whose weights are averaged has a dynamic table."""
    if decay is None:
        return
    for module in tables_in(modules.values()).values():
        if module.rows is not None:
            what, remedy = "is dynamic", "rows= in place of capacity="
            if module.table.rows is not None:
                what, remedy = "has init_std=", "neither init_std= nor directory="
            raise ValueError(
                f"table {module.name!r} {what}, so rows come into being during the run, and ema_decay={decay} averages "
                f"what a model has from its start. Leave out ema_decay, or give the table {remedy}."
            )


def tensors_in_files(
    modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> dict[tuple[str, str], Tensor]:
    """Return the rows of tables in files, and the memory for their state, by group and name in a checkpoint.

    Tables of which each rank has a part are not among them.
    """
    found: dict[tuple[str, str], Tensor] = {}
    names = parameter_names(modules)
    for module in tables_in(modules.values()).values():
        if module.file is not None and not module.file.is_divided:
            found["model", names[id(module.weight)]] = module.file.weight
    single = [*optimizers] == [""]
    for key, optimizer in optimizers.items():
        for p, file in optimizer.files.items() if isinstance(optimizer, TableOptimizer) else ():
            if file.is_divided:
                continue
            where = names[id(p)] if single else f"{key}.{names[id(p)]}"
            found |= {("optimizer", f"{where}.{of_state}"): tensor for of_state, tensor in file.state.items()}
    return found


def match_lengths(modules: Mapping[str, nn.Module], saved: Mapping[str, Tensor]) -> None:
    """Give dynamic tables that grow the number of rows that they have in a checkpoint, which is to be restored.

    Args:
        modules: Models by the prefix of their names.
        saved: The tensors of the checkpoint, of which the shapes count.
    """
    for prefix, root in modules.items():
        for path, module in root.named_modules():
            form = saved.get(prefix + plain_name(f"{path}.weight" if path else "weight"))
            if isinstance(module, RowTable | BagTable) and form is not None and form.dim():
                match_length(module, len(form))
