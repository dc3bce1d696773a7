"""Averages and counts that are exact over ranks with uneven shares."""

from unisono.metrics.adapters import TorchMetric
from unisono.metrics.aggregates import Max, Mean, Min, Total
from unisono.metrics.average import Average
from unisono.metrics.classification import Accuracy, Confusion, ConfusionCounts
from unisono.metrics.collection import Metrics
from unisono.metrics.metric import Metric

__all__ = [
    "Accuracy",
    "Average",
    "Confusion",
    "ConfusionCounts",
    "Max",
    "Mean",
    "Metric",
    "Metrics",
    "Min",
    "TorchMetric",
    "Total",
]
