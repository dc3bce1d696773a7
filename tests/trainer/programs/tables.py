"""Train embedding tables in several ways and print a digest of each: `tables.py DIRECTORY ENGINES [NAME ...]`.

DIRECTORY/begun gets checkpoints of a run that one rank begins. More ranks go on with a copy of it, DIRECTORY/ENGINE.
"""

import copy
import shutil
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

import unisono
from unisono.embedding import SGD, Adagrad, Adam, RowwiseAdagrad, RowwiseAdam, Table, Tables, dense_parameters
from unisono.errors import NonFiniteLossError, TableFullError
from unisono.state.digest import digest

RULES = [SGD(lr=0.1, weight_decay=0.1), Adagrad(lr=0.1), RowwiseAdagrad(lr=0.1), Adam(lr=0.1), RowwiseAdam(lr=0.1)]


class Net(nn.Module):
    """A table of words that is used twice, one of bags, one that some virtual ranks use, or none, and dynamic ones."""

    def __init__(self, rule):
        super().__init__()
        torch.manual_seed(3)
        policy = {"admit_after": 2, "waiting_capacity": 100, "evict_after": 3, "when_full": "evict_rarest"}
        tables = Tables(
            {
                "words": Table(rows=300, dim=6, optimizer=rule),
                "bags": Table(rows=40, dim=6, pooling="mean", padding_idx=0, optimizer=RowwiseAdagrad(lr=0.1)),
                "rare": Table(rows=9, dim=6, optimizer=SGD(lr=0.1, clip_row_norm=0.01)),
                "more": Table(capacity=4, dim=6, optimizer=rule, when_full="grow"),
                "any": Table(capacity=60, dim=6, pooling="sum", padding_idx=0, optimizer=rule, **policy),
            }
        )
        self.any, self.more = tables["any"], tables["more"]
        self.words, self.bags, self.rare = tables["words"], tables["bags"], tables["rare"]
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        y = self.words(x[:, :2]).mean(1) + self.words(x[:, 2]) + self.bags((x[:, 3:] % 40) * (x[:, 3:] % 3 == 0))
        y = y + self.any((x[:, 2:] - 7) * 5**25) + self.more(x[:, 0])
        if x[0, 0] % 8 == 0:
            y = y + self.rare(x[:, 0] % 9)
        return self.last(y)


def data():
    generator = torch.Generator().manual_seed(1)
    # Few words are frequent, and so are in the shares of several virtual ranks. The last batch has 3 samples.
    words = (300 * torch.rand(83, 5, generator=generator) ** 3).long()
    return TensorDataset(words, torch.randint(0, 3, (83,), generator=generator))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def make(rule, **options):
    model = Net(rule)
    optimizer = torch.optim.AdamW(dense_parameters(model), lr=0.01)
    return unisono.Trainer(model, optimizer, virtual_ranks=5, engine=ENGINE, progress=False, **options)


def train(rule, *, steps=6, **options):
    trainer = make(rule, **options)
    for _ in trainer.epochs(9, max_steps=steps):
        for batch in trainer.batches(
            data(), batch_size=20, micro_batch_size=3 if isinstance(rule, RowwiseAdam) else None
        ):
            trainer.step(loss, batch)
    assert steps < 6 or trainer.model.any.rows.evicted > 0
    return trainer


def trained(rule, **options):
    return train(rule, **options).digest()


def resumed():
    """One rank begins the run, any number of them goes on with it."""
    begun, directory = Path(sys.argv[1]) / "begun", Path(sys.argv[1]) / ENGINE
    if ENGINE == "auto":
        train(RowwiseAdam(lr=0.1), directory=begun, steps=3)
        shutil.copytree(begun, directory)
    return train(RowwiseAdam(lr=0.1), directory=directory, resume="must").digest()


def divided(**options):
    """Batches with so many rows that ranks divide them; few words are in most samples, and all have small numbers."""
    torch.manual_seed(3)
    tables = Tables({"words": Table(rows=50_000, dim=6, pooling="sum", optimizer=RowwiseAdam(lr=0.1))})
    model = nn.Sequential(tables["words"], nn.Linear(6, 3))
    words = (50_000 * torch.rand(120, 60) ** 4).long()
    given = {"dense": torch.optim.SGD(dense_parameters(model), lr=0.1), "rows": tables.optimizer}
    trainer = unisono.Trainer(model, given, virtual_ranks=5, engine=ENGINE, progress=False, **options)
    for batch in trainer.batches(TensorDataset(words, torch.arange(120) % 3), batch_size=40):
        if batch.step == 2:
            tables.optimizer.load_state_dict(copy.deepcopy(tables.optimizer.state_dict()))
        trainer.step(loss, batch)
        assert model[0].weight.grad is None  # as no rank has the gradient of all rows
    return trainer.digest()


def divided_dynamic(**options):
    """The same with ids of 64 bits, which first come in different steps and virtual ranks; the table grows twice."""
    torch.manual_seed(3)
    policy = {"init_std": 0.1, "when_full": "grow"}
    tables = Tables({"words": Table(capacity=1500, dim=6, pooling="sum", optimizer=RowwiseAdam(lr=0.1), **policy)})
    model = nn.Sequential(tables["words"], nn.Linear(6, 3))
    ids = (50_000 * torch.rand(120, 60) ** 4).long() * 5**27
    optimizer = torch.optim.SGD(dense_parameters(model), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=5, engine=ENGINE, progress=False, **options)
    for batch in trainer.batches(TensorDataset(ids, torch.arange(120) % 3), batch_size=40):
        trainer.step(loss, batch)
    rows = tables["words"].rows
    assert torch.equal(rows.ids[rows.taken].sort().values, ids.unique())
    assert len(rows.ids) > 3000
    return trainer.digest()


def full():
    """A step with more new ids than there are free rows changes nothing; then training goes on."""
    torch.manual_seed(3)
    tables = Tables({"words": Table(capacity=40, dim=6, pooling="sum", optimizer=RowwiseAdagrad(lr=0.1))})
    model = nn.Sequential(tables["words"], nn.Linear(6, 3))
    optimizer = torch.optim.SGD(dense_parameters(model), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=5, engine=ENGINE, progress=False)
    ids = torch.cat([torch.arange(30), torch.arange(20, 50), torch.arange(10, 40)]) - 25
    for batch in trainer.batches(TensorDataset(ids.view(-1, 3), torch.arange(30) % 3), batch_size=10, shuffle=False):
        before = trainer.digest()
        try:
            trainer.step(loss, batch)
            assert batch.step != 1
        except TableFullError as error:
            assert batch.step == 1 and trainer.digest() == before, error
            assert "'words' is full: 30 of its 40 rows are taken, and this step has 20 ids" in str(error), error
    return trainer.digest()


def aborted():
    """A loss that is NaN on one virtual rank, or an id out of range on all, changes nothing; then training goes on."""
    trainer = make(RowwiseAdagrad(lr=0.1))
    for batch in trainer.batches(Subset(data(), range(40)), batch_size=20):
        before = trainer.digest()
        try:
            trainer.step(lambda model, b: loss(model, b) * torch.where(b[1] > 0, torch.nan, 1.0), batch)
        except NonFiniteLossError:
            assert trainer.digest() == before
        else:
            raise AssertionError("no exception")
        trainer.step(loss, batch)
    return trainer.digest()


def read():
    """Evaluation and prediction read the tables; the digest is that of what they return."""
    trainer = train(RowwiseAdagrad(lr=0.1), steps=2)
    outputs = trainer.predict(lambda model, batch: model(batch[0]), data(), batch_size=20)
    mean = trainer.evaluate(loss, data(), batch_size=20)
    return digest({"outputs": outputs, "mean": float(mean)})


def check_replicas():
    """A loop of one's own with `replicate` trains what one process trains on all samples."""

    def train_on(of_rank, wrap, size):
        torch.manual_seed(3)
        tables = Tables({"item": Table(**size, dim=6, pooling="sum", optimizer=RowwiseAdagrad(lr=0.1))})
        model = nn.Sequential(tables["item"], nn.Linear(6, 3))
        kept = wrap(model)
        optimizer = torch.optim.SGD(dense_parameters(model), lr=0.1)
        for x, y in zip(data().tensors[0][:72].split(24), data().tensors[1][:72].split(24), strict=True):
            F.cross_entropy(model(x[of_rank]), y[of_rank]).backward()
            optimizer.step(), tables.step()
            optimizer.zero_grad(), tables.zero_grad()
        del kept
        return model.state_dict()

    for size in ({"rows": 300}, {"capacity": 20, "when_full": "grow"}):
        whole = train_on(slice(None), lambda model: None, size)
        parts = train_on(slice(unisono.rank(), None, unisono.world_size()), unisono.parallel.replicate, size)
        for name, value in whole.items():
            torch.testing.assert_close(parts[name], value)


unisono.init()
check_replicas()
WAYS = {
    **{type(rule).__name__: partial(trained, rule) for rule in RULES},
    "clipped": partial(trained, RULES[2], clip_grad_norm=0.05),
    "resumed": resumed,
    "aborted": aborted,
    "read": read,
    "divided": divided,
    "divided and clipped": partial(divided, clip_grad_norm=0.05),
    "full": full,
    "dynamic": divided_dynamic,
    "dynamic and clipped": partial(divided_dynamic, clip_grad_norm=0.05),
}
for ENGINE in sys.argv[2].split(","):
    for name in sys.argv[3:] or WAYS:
        unisono.print0(f"{ENGINE}: {name} = {WAYS[name]()}")
