"""Embedding tables whose cost per step is that of the rows looked up, not of the rows that there are."""

from unisono.embedding.export import export_rows
from unisono.embedding.imported_rows import import_rows
from unisono.embedding.row_optimizers import SGD, Adagrad, Adam, RowOptimizer, RowwiseAdagrad, RowwiseAdam
from unisono.embedding.serving import ServerCounts
from unisono.embedding.table_optimizer import TableOptimizer
from unisono.embedding.table_settings import Table
from unisono.embedding.tables import Tables, dense_parameters

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "RowOptimizer",
    "RowwiseAdagrad",
    "RowwiseAdam",
    "ServerCounts",
    "Table",
    "TableOptimizer",
    "Tables",
    "dense_parameters",
    "export_rows",
    "import_rows",
]
