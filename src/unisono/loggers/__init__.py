"""Loggers: listeners that write a run's events to CSV, TensorBoard, Prometheus, OpenTelemetry, W&B and MLflow."""

from unisono.loggers.csv_logger import CSVLogger
from unisono.loggers.logger import Logger
from unisono.loggers.mlflow_logger import MLflowLogger
from unisono.loggers.opentelemetry_logger import OpenTelemetryLogger
from unisono.loggers.prometheus_logger import PrometheusLogger
from unisono.loggers.rows import ImageFile, Row, read_row
from unisono.loggers.tensorboard_logger import TensorBoardLogger
from unisono.loggers.wandb_logger import WandbLogger

__all__ = [
    "CSVLogger",
    "ImageFile",
    "Logger",
    "MLflowLogger",
    "OpenTelemetryLogger",
    "PrometheusLogger",
    "Row",
    "TensorBoardLogger",
    "WandbLogger",
    "read_row",
]
