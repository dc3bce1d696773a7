"""Metrics on several ranks against the same samples in one process. Prints ok at the end.

metrics.py BACKEND
"""

from __future__ import annotations

import math
import random
import sys

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor

from unisono.errors import PeerError, RankMismatchError
from unisono.metrics import Accuracy, ConfusionCounts, Max, Mean, Metric, Metrics, Min, TorchMetric, Total

dist.init_process_group(sys.argv[1])
RANK, SIZE = dist.get_rank(), dist.get_world_size()
CLASSES = 4
CALLS: list[str] = []
# Samples in each batch of each rank: uneven, and the last rank has none.
SHARES = [
    [(3 * rank + 2 * batch) % 5 * 3 for batch in range(4 - rank)] if rank < SIZE - 1 else [] for rank in range(SIZE)
]


def samples() -> list[list[Tensor]]:
    torch.manual_seed(0)
    return [[torch.randn(size, CLASSES) for size in batches] for batches in SHARES]


def targets() -> list[list[Tensor]]:
    torch.manual_seed(1)
    return [[torch.randint(0, CLASSES, (size,)) for size in batches] for batches in SHARES]


SCORES, TARGETS = samples(), targets()
ALL_SCORES = torch.cat([each for batches in SCORES for each in batches])
ALL_TARGETS = torch.cat([each for batches in TARGETS for each in batches])


def meters() -> Metrics:
    return Metrics(
        mean=Mean(), weighted=Mean(), total=Total(), whole=Total(), low=Min(), high=Max(), first=Max(),
        top1=Accuracy(), top2=Accuracy(2, ignore_index=3), table=ConfusionCounts(CLASSES),
    )  # fmt: skip


def count(into: Metrics, scores: Tensor, wanted: Tensor) -> None:
    into.update(
        mean=scores.mean(1), weighted=(scores, scores > 0), total=scores, whole=wanted, low=scores, high=scores,
        first=wanted, top1=(scores, wanted), top2=(scores, wanted), table=(scores, wanted),
    )  # fmt: skip


def same(found: dict, expected: dict) -> None:
    for name, value in expected.items():
        if name == "table":
            assert torch.equal(found[name].matrix, value.matrix)
        elif name in ("mean", "weighted", "total"):
            assert found[name] == pytest.approx(value, rel=1e-13)
            assert getattr(found[name], "count", 0) == getattr(value, "count", 0)
        else:
            assert found[name] == value and type(found[name]) is type(value), name


def uneven_shares_equal_one_process() -> None:
    ours, alone = meters(), meters()
    for scores, wanted in zip(SCORES[RANK], TARGETS[RANK], strict=True):
        count(ours, scores, wanted)
    count(alone, ALL_SCORES, ALL_TARGETS)
    before, reduce = len(CALLS), dist.all_reduce
    dist.all_reduce = lambda *args, **options: (CALLS.append("all_reduce"), reduce(*args, **options))[1]
    found = ours.compute()
    dist.all_reduce = reduce
    assert len(CALLS) == before + 1
    same(found, alone.local())
    same(ours.compute(), alone.local())  # nothing is counted twice
    for name in ours:
        same({name: ours[name].compute()}, {name: alone[name].local()})
    assert ours.local()["top1"].count == sum(SHARES[RANK])
    values = [None] * SIZE
    dist.all_gather_object(values, {name: value for name, value in found.items() if name != "table"})
    assert all(repr(value) == repr(values[0]) for value in values)


def random_streams() -> None:
    """Any mix of updates, in any division among ranks."""
    dice = random.Random(5)
    for _ in range(20):
        alone, ours = Metrics(mean=Mean(), sum=Total(), low=Min()), Metrics(mean=Mean(), sum=Total(), low=Min())
        for _ in range(dice.randrange(12)):
            rank, values = dice.randrange(SIZE), dice.choice([3, -2.5, True, 7, 2**40])
            if dice.random() < 0.5:
                values = torch.tensor([dice.randrange(-9, 9) for _ in range(dice.randrange(4))])
                values = values / 4 if dice.random() < 0.5 else values
            weight = dice.choice([None, 0, 2, 0.5])
            for metrics in (alone, *([ours] if rank == RANK else [])):
                metrics.update(mean=(values, weight), sum=values, low=values)
        found, expected = ours.compute(), alone.local()
        assert repr(found) == repr(expected), (found, expected)  # these numbers have no rounding


def nothing_and_infinities() -> None:
    empty = meters().compute()
    assert math.isnan(empty["mean"]) and empty["mean"].count == 0 and math.isnan(empty["low"])
    assert empty["total"] == 0 and empty["table"].f1() == 0 and empty["table"].accuracy.count == 0
    values = Metrics(mean=Mean(), low=Min(), high=Max())
    bad = math.nan if RANK == 0 else 1.0
    values.update(mean=bad, low=bad, high=bad)
    assert all(math.isnan(value) for value in values.compute().values())
    total = Total()
    total.update(math.inf if RANK == 0 else -math.inf if RANK == 1 else 1)
    assert math.isnan(total.compute())
    share = Mean()  # a rank with no sample has no mean
    share.update(math.nan if RANK else 0.5, weight=0 if RANK else 4)
    assert repr(share.compute()) == "Average(2.0, 4.0)"
    large = Total()
    large.update(2**62)
    assert large.compute() == SIZE * 2**62


def collected_on_rank_0() -> None:
    """The state of all ranks is saved by rank 0, and counted on from there on another number of ranks."""
    ours, alone, again = meters(), meters(), meters()
    for scores, wanted in zip(SCORES[RANK], TARGETS[RANK], strict=True):
        count(ours, scores, wanted)
    count(alone, ALL_SCORES, ALL_TARGETS)
    ours.collect()
    same(ours.compute(), alone.local())
    assert (ours.local()["mean"].count > 0) == (RANK == 0)
    if RANK == 0:
        same(ours.local(), alone.local())
        again.load_state_dict(ours.state_dict())
    same(again.compute(), alone.local())


def ranks_with_other_metrics() -> None:
    """Also of other sizes: all ranks are told alike, and the group works afterwards."""
    mine = Metrics(a=Accuracy(k=1 if RANK else 2))
    with pytest.raises(
        RankMismatchError, match=r"different metrics: a Accuracy\(k=2.* on rank 0; a Accuracy\(k=1.* on ranks? 1"
    ):
        mine.compute()
    with pytest.raises(RankMismatchError, match=r"a Mean\(\), b Mean\(\) on ranks? 1"):
        Metrics(**({"a": Mean(), "b": Mean()} if RANK else {"b": Mean(), "a": Mean()})).compute()
    with pytest.raises(RankMismatchError, match=r"ConfusionCounts\(4.* on rank 1"):
        ConfusionCounts(4 if RANK == 1 else 3).compute()
    with pytest.raises(RankMismatchError, match=r"none on rank 1"):
        Metrics(**({} if RANK == 1 else {"a": Total()})).compute()
    huge = Total()
    huge.update(2**95 if RANK == 1 else 1)
    with pytest.raises(OverflowError if RANK == 1 else PeerError, match="does not fit 95 bits"):
        huge.compute()
    huge.reset()
    huge.update(1)
    assert huge.compute() == SIZE


class Words(Metric[int]):
    """A metric of one's own, whose pack() returns what it is given."""

    def __init__(self, packed):
        self.packed, self.seen = packed, None

    def reset(self):
        self.seen = None

    def pack(self):
        return self.packed

    def unpack(self, added, apart):
        self.seen = added.tolist(), apart.tolist()

    def local(self):
        return self.seen

    def __repr__(self):
        return "Words()"


def metrics_of_ones_own() -> None:
    def words(*numbers):
        return torch.tensor(numbers, dtype=torch.int64)

    assert Words((words(RANK, 1), words(RANK))).compute() == (
        [SIZE * (SIZE - 1) // 2, SIZE],
        [[r] for r in range(SIZE)],
    )
    with pytest.raises(RankMismatchError, match=r"pack\(\) of Words\(\) .* 3 to add and 0 apart on rank 1"):
        Words((words(*[1] * (3 if RANK == 1 else 2)), words())).compute()
    for packed, shown in (
        (words(1), r"one tensor, torch\.int64 of shape \[1\]"),
        ((words(1), torch.ones(2)), "float32"),
    ):
        with pytest.raises(TypeError if RANK == 1 else PeerError, match=rf"pack\(\) of Words\(\) returned .*{shown}"):
            Words(packed if RANK == 1 else (words(1), words())).compute()


def groups() -> None:
    pair = dist.new_group([0, 1])
    mean = Mean()
    mean.update(RANK)
    if RANK < 2:
        assert mean.compute(pair) == 0.5
    assert mean.compute() == (SIZE - 1) / 2


def torchmetrics_of_all_kinds() -> None:
    made = {
        "accuracy": lambda: torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES),
        "auroc": lambda: torchmetrics.AUROC(task="multiclass", num_classes=CLASSES),  # lists of samples
        "error": torchmetrics.MeanSquaredError,
        "pearson": torchmetrics.PearsonCorrCoef,  # neither added nor concatenated
        "high": torchmetrics.MaxMetric,
        "mean": torchmetrics.MeanMetric,
    }

    def fed(make, batches):
        metric = make()
        for scores, wanted in batches:
            if scores.numel():
                kind = type(metric).__name__
                if "Accuracy" in kind or "AUROC" in kind:
                    metric.update(scores.softmax(1), wanted)
                elif kind in ("MaxMetric", "MeanMetric"):
                    metric.update(scores[:, 0])
                else:
                    metric.update(scores[:, 0], wanted.float())
        return metric

    own = list(zip(SCORES[RANK], TARGETS[RANK], strict=True))
    whole = [pair for scores, wanted in zip(SCORES, TARGETS, strict=True) for pair in zip(scores, wanted, strict=True)]
    ours = Metrics(steps=Total(), **{name: TorchMetric(fed(make, own)) for name, make in made.items()})
    ours.update(steps=len(own))
    alone = {name: fed(make, whole) for name, make in made.items()}
    for metric in alone.values():
        metric._to_sync = False
    expected = {name: float(metric.compute()) for name, metric in alone.items()}
    for _ in range(2):
        found = ours.compute()
        assert found.pop("steps") == sum(map(len, SHARES))
        assert {name: float(value) for name, value in found.items()} == pytest.approx(expected, rel=1e-5)
    ours.collect()
    again = Metrics(steps=Total(), **{name: TorchMetric(make()) for name, make in made.items()})
    if RANK == 0:
        again.load_state_dict(ours.state_dict())
    found = again.compute()
    assert float(found["auroc"]) == pytest.approx(expected["auroc"], rel=1e-5)


for check in (
    uneven_shares_equal_one_process, random_streams, nothing_and_infinities, collected_on_rank_0,
    ranks_with_other_metrics, metrics_of_ones_own, groups, torchmetrics_of_all_kinds,
):  # fmt: skip
    check()
    print("passed", check.__name__, flush=True)
dist.destroy_process_group()
print("ok", flush=True)
