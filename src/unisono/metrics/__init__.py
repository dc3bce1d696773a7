"""Averages and counts that are exact over ranks with uneven shares."""

from unisono.metrics.accumulator import Accumulator
from unisono.metrics.adapters import TorchMetric
from unisono.metrics.averages import Max, Mean, Min, Sum
from unisono.metrics.classification import Accuracy, Confusion, ConfusionCounts
from unisono.metrics.collection import Metrics
from unisono.metrics.metric import Metric

__all__ = [
    "Accumulator",
    "Accuracy",
    "Confusion",
    "ConfusionCounts",
    "Max",
    "Mean",
    "Metric",
    "Metrics",
    "Min",
    "Sum",
    "TorchMetric",
]
