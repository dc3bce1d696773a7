"""Accuracy, and the confusion matrix with precision, recall and F1, over the samples of all ranks.

All of them are made of counts, so they are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from unisono.arguments import real, whole
from unisono.metrics.average import Average
from unisono.metrics.metric import Metric

__all__ = ["Accuracy", "Confusion", "ConfusionCounts"]

Averaging = Literal["macro", "micro", "weighted"]


class Accuracy(Metric[Average]):
    """The share of samples whose class is predicted, or is among the k classes with the highest scores.

    Args:
        k: The number of classes with the highest scores that count as a hit.
        ignore_index: The class number of targets that are not counted, such as padding.
        threshold: For two classes with one score per sample: the score above which class 1 is predicted.

    Raises:
        TypeError: k or ignore_index is not a whole number, or threshold is not a number.
        ValueError: k is less than 1, threshold is NaN, or k > 1 is combined with a threshold.
    """

    def __init__(self, k: int = 1, *, ignore_index: int | None = None, threshold: float | None = None) -> None:
        k = whole("k", k, least=1)
        ignore_index, threshold = _options(ignore_index, threshold)
        if k > 1 and threshold is not None:
            raise ValueError(f"k={k} and threshold={threshold} contradict each other: a threshold is for two classes")
        self.k, self.ignore_index, self.threshold = k, ignore_index, threshold
        self.reset()

    def reset(self) -> None:
        """Discard everything counted so far on this rank."""
        self._hits: Tensor | int = 0
        self._seen: Tensor | int = 0

    @torch.no_grad()
    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Compare predictions with targets, on this rank.

        Args:
            predictions: The scores of the classes, [N, C, ...] as for cross_entropy; or, for k=1, classes [N, ...].
                With a threshold, one score per sample, [N, ...].
            targets: The classes, [N, ...].

        Raises:
            ValueError: The shapes do not fit each other or k, or class numbers are expected and floats were given.
            TypeError: An argument is not a tensor.
        """
        _check_tensors(predictions, targets)
        _check_whole(targets)
        if self.k > 1:
            if predictions.dim() != targets.dim() + 1:
                raise ValueError(
                    _unfit(predictions, targets, f"for k={self.k}, scores [N, C, ...] and classes [N, ...]")
                )
            _check_scores(predictions, targets)
            if self.k > predictions.shape[1]:
                raise ValueError(f"k={self.k} and only {predictions.shape[1]} classes: choose a smaller k")
            right = (predictions.topk(self.k, dim=1).indices == targets.unsqueeze(1)).any(1)
        else:
            right = _classes(predictions, targets, self.threshold) == targets
        counted = None if self.ignore_index is None else targets != self.ignore_index
        hits = (right if counted is None else right & counted).sum()
        self._hits = hits + (self._hits.to(hits.device) if isinstance(self._hits, Tensor) else self._hits)
        if counted is None:
            self._seen = self._seen + right.numel()
        else:
            seen = counted.sum()
            self._seen = seen + (self._seen.to(seen.device) if isinstance(self._seen, Tensor) else self._seen)

    def pack(self) -> tuple[Tensor, Tensor]:
        """Return what this rank has counted, as words."""
        hits = torch.as_tensor(self._hits)
        return torch.stack([hits, torch.as_tensor(self._seen, device=hits.device)]), hits.new_empty(0)

    def unpack(self, added: Tensor, apart: Tensor) -> None:
        """Set the counts to those of all ranks."""
        self._hits, self._seen = added.tolist()

    def local(self) -> Average:
        """Return the value over the samples of this rank alone."""
        return Average(int(self._hits), int(self._seen))

    def __repr__(self) -> str:
        return f"Accuracy(k={self.k}, ignore_index={self.ignore_index}, threshold={self.threshold})"


@dataclass(frozen=True, eq=False)
class Confusion:
    """A confusion matrix: how often each class was predicted for the samples of each class."""

    matrix: Tensor
    """int64 [C, C] on the CPU: the number of samples of the row's class for which the column's was predicted."""

    @property
    def accuracy(self) -> Average:
        """The share of all samples whose class was predicted."""
        return Average(int(self.matrix.diag().sum()), int(self.matrix.sum()))

    @property
    def support(self) -> Tensor:
        """The number of samples of each class, [C]."""
        return self.matrix.sum(1)

    @overload
    def precision(self, average: Averaging = "macro") -> float: ...
    @overload
    def precision(self, average: None) -> Tensor: ...
    def precision(self, average: Averaging | None = "macro") -> float | Tensor:
        """Return the share of a class's predictions that are right. Arguments and errors are those of `f1`."""
        return self._averaged(self._hits, self.matrix.sum(0).double(), average)

    @overload
    def recall(self, average: Averaging = "macro") -> float: ...
    @overload
    def recall(self, average: None) -> Tensor: ...
    def recall(self, average: Averaging | None = "macro") -> float | Tensor:
        """Return the share of a class's samples that are found. Arguments and errors are those of `f1`."""
        return self._averaged(self._hits, self.matrix.sum(1).double(), average)

    @overload
    def f1(self, average: Averaging = "macro") -> float: ...
    @overload
    def f1(self, average: None) -> Tensor: ...
    def f1(self, average: Averaging | None = "macro") -> float | Tensor:
        """Return the harmonic mean of precision and recall.

        Args:
            average: "macro" returns the mean over the classes that occur as target or prediction, "weighted" the mean
                weighted by the number of samples, "micro" the value over all decisions together. None returns the
                value of each class, float64 [C]. A quotient 0/0 counts as 0.

        Raises:
            ValueError: average is none of these.
        """
        both = self.matrix.sum(0) + self.matrix.sum(1)
        return self._averaged(2 * self._hits, both.double(), average)

    @property
    def _hits(self) -> Tensor:
        return self.matrix.diag().double()

    def _averaged(self, hits: Tensor, of: Tensor, average: Averaging | None) -> float | Tensor:
        if average == "micro":
            return float(hits.sum() / of.sum().clamp(min=1))
        each = hits / of.clamp(min=1)
        if average is None:
            return each
        if average == "macro":
            occurs = (self.matrix.sum(0) + self.matrix.sum(1)) > 0
            return float(each[occurs].mean()) if occurs.any() else 0.0
        if average == "weighted":
            return float((each * self.support).sum() / self.support.sum().clamp(min=1))
        raise ValueError(f"average={average!r} must be 'macro', 'micro', 'weighted' or None")


class ConfusionCounts(Metric[Confusion]):
    """The confusion matrix, from which accuracy, precision, recall and F1 follow: `compute()` returns a `Confusion`.

    Args:
        num_classes: The number of classes, which are 0 to num_classes - 1.
        ignore_index: The class number of targets that are not counted, such as padding.
        threshold: For two classes with one score per sample: the score above which class 1 is predicted.

    Raises:
        TypeError: num_classes or ignore_index is not a whole number, or threshold is not a number.
        ValueError: num_classes is less than 2, threshold is NaN, or a threshold is combined with more than 2 classes.
    """

    def __init__(self, num_classes: int, *, ignore_index: int | None = None, threshold: float | None = None) -> None:
        num_classes = whole("num_classes", num_classes, least=2)
        ignore_index, threshold = _options(ignore_index, threshold)
        if threshold is not None and num_classes != 2:
            raise ValueError(f"threshold={threshold} is for two classes, and num_classes={num_classes}: give scores")
        self.num_classes, self.ignore_index, self.threshold = num_classes, ignore_index, threshold
        self.reset()

    def reset(self) -> None:
        """Discard everything counted so far on this rank."""
        # The last element counts pairs with a target or prediction outside the classes.
        self._counts = torch.zeros(self.num_classes**2 + 1, dtype=torch.int64)

    @torch.no_grad()
    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Compare predictions with targets, on this rank.

        Args:
            predictions: The scores, [N, C, ...], or classes [N, ...]; with a threshold, one score per sample, [N, ...].
            targets: The classes, [N, ...].

        Raises:
            ValueError: The shapes do not fit each other, or a class is outside the range. On a GPU, where a check of
                the range would wait for the device, the latter is raised only when the value is computed.
            TypeError: An argument is not a tensor.
        """
        _check_tensors(predictions, targets)
        found, wanted = _classes(predictions, targets, self.threshold).flatten(), targets.flatten().to(torch.int64)
        # Ignored samples are added as zeros: leaving them out would wait for the device.
        counted = torch.ones_like(wanted) if self.ignore_index is None else (wanted != self.ignore_index).long()
        inside = (found >= 0) & (found < self.num_classes) & (wanted >= 0) & (wanted < self.num_classes)
        if targets.device.type == "cpu" and (counted * ~inside).any():
            which = int((counted * ~inside).nonzero()[0])
            raise ValueError(
                f"target {int(wanted[which])} with prediction {int(found[which])} is outside the classes 0 to "
                f"{self.num_classes - 1}: correct num_classes, or name what to leave out in ignore_index"
            )
        places = torch.where(inside, wanted * self.num_classes + found, self.num_classes**2)
        counts = self._counts.to(places.device)
        self._counts = counts.scatter_add(0, places, counted)

    def pack(self) -> tuple[Tensor, Tensor]:
        """Return what this rank has counted, as words."""
        return self._counts, self._counts.new_empty(0)

    def unpack(self, added: Tensor, apart: Tensor) -> None:
        """Set the counts to those of all ranks."""
        self._counts = added

    def local(self) -> Confusion:
        """Return the value over the samples of this rank alone."""
        if lost := int(self._counts[-1]):
            raise ValueError(
                f"{lost} targets or predictions were outside the classes 0 to {self.num_classes - 1}: correct "
                "num_classes, or name what to leave out in ignore_index"
            )
        return Confusion(self._counts[:-1].view(self.num_classes, self.num_classes).cpu())

    def __repr__(self) -> str:
        return f"ConfusionCounts({self.num_classes}, ignore_index={self.ignore_index}, threshold={self.threshold})"


def _classes(predictions: Tensor, targets: Tensor, threshold: float | None) -> Tensor:
    """Return the predicted classes, in the shape of the targets."""
    _check_whole(targets)
    if predictions.dim() == targets.dim() + 1 and threshold is None:
        _check_scores(predictions, targets)
        return predictions.argmax(1)
    if predictions.shape != targets.shape:
        if threshold is not None:
            raise ValueError(_unfit(predictions, targets, "with threshold, one score per sample, [N, ...]"))
        raise ValueError(_unfit(predictions, targets, "scores [N, C, ...] or classes [N, ...], and classes [N, ...]"))
    if threshold is not None:
        return (predictions > threshold).to(torch.int64)
    if predictions.is_floating_point():
        raise ValueError(
            f"predictions are one {predictions.dtype} per sample: give class numbers, scores [N, C], or threshold=..., "
            "above which class 1 is predicted"
        )
    return predictions.to(torch.int64)


def _check_scores(predictions: Tensor, targets: Tensor) -> None:
    if predictions.dim() < 2 or predictions[:, :1].squeeze(1).shape != targets.shape:
        raise ValueError(_unfit(predictions, targets, "scores [N, C, ...] and classes [N, ...]"))
    if predictions.shape[1] == 1:
        raise ValueError(
            f"predictions of shape {list(predictions.shape)} are scores of a single class, which is always right or "
            "always wrong: for two classes with one score per sample, give predictions.squeeze(1), and threshold=..."
        )


def _check_tensors(predictions: Tensor, targets: Tensor) -> None:
    for name, given in (("predictions", predictions), ("targets", targets)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} are of type {type(given).__name__}: give a tensor, such as torch.as_tensor(...)")


def _check_whole(targets: Tensor) -> None:
    if targets.is_floating_point():
        raise ValueError(f"targets are {targets.dtype}: give class numbers, such as targets.long()")


def _options(ignore_index: int | None, threshold: float | None) -> tuple[int | None, float | None]:
    return (
        None if ignore_index is None else whole("ignore_index", ignore_index, meant="a class number, or None"),
        None if threshold is None else real("threshold", threshold),
    )


def _unfit(predictions: Tensor, targets: Tensor, expected: str) -> str:
    shapes = f"predictions of shape {list(predictions.shape)} do not fit targets of {list(targets.shape)}"
    return f"{shapes}: expected {expected}"
