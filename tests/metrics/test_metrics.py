"""Metrics count samples, not batches or ranks: over ranks with uneven shares, and what one process sees of them."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import numpy
import pytest
import torch

import unisono
from late_imports import LateModule
from unisono.errors import GroupError
from unisono.metrics import Accuracy, Average, ConfusionCounts, Max, Mean, Metrics, Min, TorchMetric, Total

sklearn_metrics, torchmetrics = LateModule("sklearn.metrics"), LateModule("torchmetrics")
PROGRAM = Path(__file__).parent / "programs" / "metrics.py"


@pytest.mark.parametrize(("ranks", "backend"), [(3, "gloo")])
def test_ranks_with_uneven_shares_equal_one_process(fork_ranks, ranks, backend):
    assert fork_ranks(ranks, PROGRAM, backend).lines(1)[-1] == "ok"


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "backend"), [(2, "gloo"), (3, "shm"), (4, "gloo"), (5, "gloo")])
def test_other_numbers_of_ranks_equal_one_process(fork_ranks, ranks, backend):
    assert fork_ranks(ranks, PROGRAM, backend).lines(1)[-1] == "ok"


def test_a_mean_is_over_samples():
    mean = Mean()
    mean.update(torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True))
    mean.update(8.0, weight=2)
    mean.update(torch.tensor(5, dtype=torch.int32))
    mean.update(torch.empty(0))
    value = mean.compute()
    assert isinstance(value, Average) and unisono.Average is Average
    assert (value.total, value.count, float(value)) == (31, 7, 31 / 7)
    assert str(value) == "4.4286"  # a sum of other values than counts tells nobody anything
    mean.reset()
    assert math.isnan(mean.compute())


def test_weights_of_a_mean():
    mean = Mean()
    losses = torch.tensor([[1.0, 2.0, math.nan], [3.0, 4.0, 5.0]])
    mean.update(losses, weight=torch.tensor([[True, True, False], [False, True, True]]))
    assert repr(mean.compute()) == "Average(12.0, 4.0)"
    mean.update(losses[:, :2], weight=torch.tensor([[2.0], [0.5]]))
    assert repr(mean.compute()) == "Average(21.5, 9.0)"
    mean.update(losses[1], weight=2)
    assert repr(mean.compute()) == "Average(45.5, 15.0)"
    with pytest.raises(ValueError, match="weight=-1 must be 0 or more"):
        mean.update(1.0, weight=-1)
    with pytest.raises(ValueError, match="weight has a negative number"):
        mean.update(torch.ones(2), weight=torch.tensor([1.0, -1.0]))
    with pytest.raises(ValueError, match=r"weight of shape \[2, 2\] does not fit values of \[2\]"):
        mean.update(torch.ones(2), weight=torch.ones(2, 2))
    with pytest.raises(TypeError, match="complex"):
        mean.update(torch.ones(2, dtype=torch.complex64))


def test_what_has_weight_0_is_not_looked_at():
    mean = Mean()
    mean.update(math.nan, weight=0)  # the mean loss of an empty batch
    mean.update(torch.tensor([math.nan, 1.0, math.inf]), weight=torch.tensor([0.0, 2.0, 0.0]))
    assert repr(mean.compute()) == "Average(2.0, 2.0)"


def test_lists_and_arrays_are_counted_as_tensors_are():
    mean, total, low = Mean(), Total(), Min()
    mean.update([0.1, 0.2], weight=numpy.array([3, 1]))
    assert mean.compute().total == pytest.approx(0.5, abs=1e-16)
    total.update(numpy.int64(2**53 + 1))
    total.update([1, 2])
    low.update(numpy.array([4, 3]))
    assert (total.compute(), low.compute()) == (2**53 + 4, 3)
    total.update(0.1)
    assert isinstance(low.compute(), int) and total.compute() == 2**53 + 4 + 0.1


@pytest.mark.parametrize(
    ("metric", "arguments", "message"),
    [
        (Mean(), ("high",), "values='high' is of type str: give a tensor, a number"),
        (Mean(), (None,), "values=None is of type NoneType"),
        (Mean(), (1.0, "2"), "weight='2' is of type str"),
        (Max(), (2**70,), "values=1180591620717411303424 does not fit 64 bits"),
        (Accuracy(), ([1], [1]), "predictions are of type list: give a tensor"),
        (ConfusionCounts(2), (torch.tensor([1]), numpy.array([1])), "targets are of type ndarray"),
    ],
)
def test_what_cannot_be_counted(metric, arguments, message):
    with pytest.raises(TypeError, match=message):
        metric.update(*arguments)


def test_settings_that_cannot_be_meant():
    for wrong in (lambda: Accuracy(1.5), lambda: ConfusionCounts("3")):
        with pytest.raises(TypeError, match="must be a whole number"):
            wrong()
    with pytest.raises(ValueError, match=r"k=2 and threshold=0\.5 contradict each other"):
        Accuracy(2, threshold=0.5)
    with pytest.raises(TypeError, match="a is the class Mean: give metrics, such as Mean"):
        Metrics(a=Mean)
    with pytest.raises(TypeError, match="the class MeanMetric is no single metric"):
        TorchMetric(torchmetrics.MeanMetric)


def test_small_and_large_means_are_printed_with_digits_that_tell():
    shown = [str(Average(total, 4)) for total in (0.0, 2.0, 4.2e-6, 1.5e10, math.nan)]
    assert shown == ["0.0000 (0/4)", "0.5000 (2/4)", "1.05e-06", "3.75e+09", "nan"]


def test_many_small_values_are_not_lost():
    mean = Mean()
    mean.update(torch.full((1,), 2.0**24))
    for _ in range(10):
        mean.update(torch.ones(100))
    assert mean.compute().total == 2**24 + 1000


def test_sums_and_extremes_of_whole_numbers_stay_whole():
    for metric, expected in ((Total(), 2**60 + 9), (Min(), 2), (Max(), 2**60)):
        metric.update(torch.tensor([3, 4]))
        metric.update(2**60)
        metric.update(True if isinstance(metric, Max) else 2)
        assert metric.compute() == expected and isinstance(metric.compute(), int)
        metric.update(0.25)
        assert isinstance(metric.compute(), float)
    huge = Total()
    huge.update(2**95)
    with pytest.raises(OverflowError, match=f"{2**95}, does not fit 95 bits"):
        huge.compute()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64, torch.int32, torch.int8, torch.bool])
def test_sums_of_whole_numbers_do_not_wrap(dtype):
    most = 1 if dtype is torch.bool else torch.iinfo(dtype).max
    least = 0 if dtype is torch.bool else torch.iinfo(dtype).min
    total = Total()
    for _ in range(3):
        total.update(torch.tensor([most] * 4, dtype=dtype))
        total.update(torch.tensor([least], dtype=dtype))
    assert total.compute() == 3 * (4 * most + least)
    other = Total()
    other.load_state_dict(total.state_dict())
    other.collect()
    other.update(torch.tensor([most], dtype=dtype))
    other.load_state_dict(other.state_dict())
    assert other.compute() == 3 * (4 * most + least) + most


def test_shapes_that_do_not_broadcast_and_targets_that_are_no_classes():
    with pytest.raises(ValueError, match=r"weight of shape \[3\] does not fit values of \[4\]"):
        Mean().update(torch.ones(4), weight=torch.ones(3))
    for k in (1, 2):
        with pytest.raises(ValueError, match=r"targets are torch.float32: give class numbers"):
            Accuracy(k).update(torch.rand(4, 3), torch.zeros(4))


def test_a_state_of_other_metrics_changes_nothing():
    meters, others = Metrics(a=Total(), b=Mean()), Metrics(a=Total(), b=Max())
    others.update(a=3)
    with pytest.raises(ValueError, match=r"this is the state of Max\(\), and the metric is Mean\(\)"):
        meters.load_state_dict(others.state_dict())
    assert meters["a"].compute() == 0


def test_extremes_of_mixed_types_and_nothing():
    low, high = Min(), Max()
    assert math.isnan(low.compute())
    for values in (torch.empty(0), torch.tensor([[2, 5]]), torch.tensor(1.5, dtype=torch.bfloat16), 7):
        low.update(values)
        high.update(values)
    assert (low.compute(), high.compute()) == (1.5, 7)
    high.update(math.nan)
    high.update(9)
    assert math.isnan(high.compute())


SCORES = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.4, 0.5, 0.1]])
TARGETS = torch.tensor([1, 1, 2, 2])


def test_accuracy():
    def after(metric, *arguments):
        metric.update(*arguments)
        return repr(metric.compute())

    assert after(Accuracy(), SCORES, TARGETS) == "Average(2, 4)"
    assert after(Accuracy(2), SCORES, TARGETS) == "Average(3, 4)"
    assert after(Accuracy(3), SCORES, TARGETS) == "Average(4, 4)"
    assert after(Accuracy(), SCORES.argmax(1), TARGETS) == "Average(2, 4)"
    assert after(Accuracy(ignore_index=2), SCORES, TARGETS) == "Average(1, 2)"
    assert after(Accuracy(2, ignore_index=-100), SCORES[:2], torch.tensor([1, -100])) == "Average(1, 1)"
    assert after(Accuracy(threshold=0.0), torch.tensor([-1.0, 2.0, 3.0]), torch.tensor([0, 0, 1])) == "Average(2, 3)"
    tokens = SCORES.T.expand(5, 3, 4)  # [N, C, length]
    assert after(Accuracy(), tokens, TARGETS.expand(5, 4)) == "Average(10, 20)"
    assert after(Accuracy(2), tokens, TARGETS.expand(5, 4)) == "Average(15, 20)"
    assert after(Accuracy(), SCORES[:0], TARGETS[:0]) == "Average(0, 0)"


@pytest.mark.parametrize(
    ("metric", "predictions", "targets", "message"),
    [
        (Accuracy(), SCORES, TARGETS[:3], r"predictions of shape \[4, 3\] do not fit targets of \[3\]"),
        (Accuracy(), SCORES[:, 0], TARGETS, "one torch.float32 per sample: give class numbers.*threshold"),
        (Accuracy(), SCORES, SCORES, "targets are torch.float32: give class numbers"),
        (Accuracy(), SCORES[:, :1], TARGETS, "scores of a single class.*squeeze.*threshold"),
        (ConfusionCounts(2), SCORES[:, :1], TARGETS, "scores of a single class"),
        (Accuracy(threshold=0.5), SCORES, TARGETS, "with threshold, one score per sample"),
        (Accuracy(), SCORES[0], TARGETS[0], r"predictions of shape \[3\] do not fit targets of \[\]"),
        (Accuracy(2), SCORES.argmax(1), TARGETS, r"expected for k=2, scores \[N, C, ...\]"),
        (Accuracy(4), SCORES, TARGETS, "k=4 and only 3 classes"),
        (ConfusionCounts(2), SCORES, TARGETS, "target 2 with prediction 2 is outside the classes 0 to 1"),
        (ConfusionCounts(3), SCORES, TARGETS - 2, "target -1 with prediction 1 is outside the classes 0 to 2"),
    ],
)
def test_predictions_that_do_not_fit(metric, predictions, targets, message):
    with pytest.raises(ValueError, match=message):
        metric.update(predictions, targets)
    assert metric.compute() is not None  # nothing was counted by halves


@pytest.mark.parametrize("seed", range(3))
def test_precision_recall_and_f1_are_those_of_scikit_learn(seed):
    torch.manual_seed(seed)
    found, wanted = torch.randint(0, 5, (40,)), torch.randint(0, 4, (40,))
    counts = ConfusionCounts(6)
    for part in range(0, 40, 7):
        counts.update(found[part : part + 7], wanted[part : part + 7])
    table = counts.compute()
    for average in ("macro", "micro", "weighted"):
        expected = sklearn_metrics.precision_recall_fscore_support(wanted, found, average=average, zero_division=0)[:3]
        ours = [getattr(table, name)(average) for name in ("precision", "recall", "f1")]
        assert ours == pytest.approx(expected)
    each = sklearn_metrics.precision_recall_fscore_support(wanted, found, labels=range(6), zero_division=0)
    for name, expected in zip(("precision", "recall", "f1"), each[:3], strict=True):
        assert getattr(table, name)(None).tolist() == pytest.approx(expected)
    assert table.support.tolist() == each[3].tolist()
    assert table.accuracy.total == int((found == wanted).sum()) and table.accuracy.count == 40
    with pytest.raises(ValueError, match="average='mean' must be"):
        table.f1("mean")


def test_confusions_of_two_classes_and_ignored_targets():
    counts = ConfusionCounts(2, threshold=0.5, ignore_index=-1)
    counts.update(torch.tensor([0.9, 0.2, 0.7, 0.6]), torch.tensor([1, 1, 0, -1]))
    assert counts.compute().matrix.tolist() == [[0, 1], [1, 1]]
    with pytest.raises(ValueError, match=r"threshold=0\.5 is for two classes, and num_classes=3"):
        ConfusionCounts(3, threshold=0.5)


def test_a_collection_is_updated_by_name_and_keeps_its_state():
    meters = Metrics(loss=Mean(), top1=Accuracy(), table=ConfusionCounts(3))
    meters.update(loss=(0.5, 4), top1=(SCORES, TARGETS))
    meters["table"].update(SCORES, TARGETS)
    again = Metrics(loss=Mean(), top1=Accuracy(), table=ConfusionCounts(3))
    again.load_state_dict(pickle.loads(pickle.dumps(meters.state_dict())))
    for metrics in (meters, again):
        metrics.update(loss=(1.0, 4), top1=(SCORES, TARGETS))
        values = metrics.compute()
        assert repr(values["loss"]) == "Average(6.0, 8.0)" and repr(values["top1"]) == "Average(4, 8)"
        assert values["table"].matrix.sum() == 4
    assert list(meters) == ["loss", "top1", "table"] and len(meters) == 3
    with pytest.raises(KeyError, match=r"'acc' is none of the metrics \['loss', 'top1', 'table'\]"):
        meters.update(loss=1, acc=1)
    assert repr(meters["loss"].compute()) == "Average(6.0, 8.0)"  # it was not counted either
    with pytest.raises(ValueError, match=r"state of \['loss', 'table', 'top1'\], and the metrics are \['loss'\]"):
        Metrics(loss=Mean()).load_state_dict(meters.state_dict())
    with pytest.raises(ValueError, match=r"state of Accuracy\(k=1.*the metric is Accuracy\(k=5"):
        Accuracy(5).load_state_dict(meters["top1"].state_dict())
    with pytest.raises(TypeError, match=r"auroc is BinaryAUROC: give metrics, such as Mean\(\) or TorchMetric"):
        Metrics(auroc=torchmetrics.AUROC(task="binary"))
    meters.reset()
    assert meters.compute()["loss"].count == 0
    assert Metrics().compute() == {}


def test_one_rank_of_several_needs_the_group(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    mean = Mean()
    mean.update(1.0)
    with pytest.raises(GroupError, match=r"rank 1 of 2.*unisono.init"):
        mean.compute()
    assert mean.local() == 1


def test_torchmetrics_in_one_process():
    ours, theirs = TorchMetric(torchmetrics.AUROC(task="binary")), torchmetrics.AUROC(task="binary")
    scores, wanted = torch.rand(30), torch.randint(0, 2, (30,))
    for metric in (ours, theirs):
        metric.update(scores[:20], wanted[:20])
        metric.update(preds=scores[20:], target=wanted[20:])
    assert torch.equal(ours.compute(), theirs.compute())
    assert torch.equal(ours.local(), theirs.compute())
    again = TorchMetric(torchmetrics.AUROC(task="binary"))
    again.load_state_dict(ours.state_dict())
    assert torch.equal(again.compute(), theirs.compute())
    with pytest.raises(ValueError, match=r"state of TorchMetric\(BinaryAUROC\(\)\)"):
        TorchMetric(torchmetrics.MeanSquaredError()).load_state_dict(ours.state_dict())
    ours.reset()
    assert not ours.metric.preds


@pytest.mark.parametrize(
    "make",
    [
        lambda: torchmetrics.MetricCollection([torchmetrics.MeanSquaredError()]),
        lambda: torchmetrics.MinMaxMetric(torchmetrics.MeanSquaredError()),
        lambda: torchmetrics.MeanSquaredError() + 1,
        Mean,
    ],
    ids=["collection", "extremes", "sum", "ours"],
)
def test_what_is_no_single_metric_of_torchmetrics(make):
    metric = make()
    with pytest.raises(TypeError, match=f"{type(metric).__name__} is no single metric with states of its own"):
        TorchMetric(metric)


def test_classes_may_be_of_any_whole_type():
    counts, accuracy = ConfusionCounts(300, ignore_index=255), Accuracy(ignore_index=255)
    for metric in (counts, accuracy):
        metric.update(torch.tensor([200, 7, 3]), torch.tensor([200, 255, 4], dtype=torch.uint8))
        metric.update(torch.tensor([True, False]), torch.tensor([1, 1], dtype=torch.int32))
    assert counts.compute().accuracy.total == 2 and repr(accuracy.compute()) == "Average(2, 4)"
    assert counts.compute().matrix[200, 200] == 1 and counts.compute().matrix[4, 3] == 1
