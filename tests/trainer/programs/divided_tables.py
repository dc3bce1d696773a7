"""Train tables whose rows are divided over ranks, and print digests: `divided_tables.py KINDS [DIRECTORY [STEPS]]`.

With DIVIDED=0 in the environment, each rank has whole tables; with FILES, two tables are in files in that folder. With
"dynamic" among the kinds, tables are dynamic.
"""

import contextlib
import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.embedding import (
    SGD,
    Adagrad,
    Adam,
    RowwiseAdagrad,
    RowwiseAdam,
    Table,
    Tables,
    dense_parameters,
    export_rows,
)
from unisono.errors import NonFiniteLossError
from unisono.state.checkpoint_store import CheckpointStore
from unisono.state.digest import digest

RULES = [SGD(lr=0.1, weight_decay=0.1), Adagrad(lr=0.1), RowwiseAdagrad(lr=0.1), Adam(lr=0.1), RowwiseAdam(lr=0.1)]
DIVIDED = os.environ.get("DIVIDED") != "0"
FILES = os.environ.get("FILES")
DYNAMIC = "dynamic" in sys.argv[1].split(",")
SIZES = [{"rows": 50_000}, {"rows": 400}, {"rows": 2}]
if DYNAMIC:  # rows that stay, some of which have a page of memory; that are given up; and that not all ids get
    SIZES = [
        {"capacity": 60_000},
        {"capacity": 60, "when_full": "evict_oldest", "evict_after": 4},
        {"capacity": 9, "admit_after": 3},
    ]
FACTOR = 0x9E3779B97F4A7C15 - 2**64 if DYNAMIC else 1
"""Ids of dynamic tables have 64 bits."""


class Net(nn.Module):
    """A large table of words that is used twice, one of bags, and one of two rows that only some virtual ranks use."""

    def __init__(self, rule):
        super().__init__()
        torch.manual_seed(3)
        tables = Tables(
            {
                "words": Table(**SIZES[0], dim=6, optimizer=rule, init_std=0.1, padding_idx=5, directory=FILES),
                "bags": Table(
                    **SIZES[1],
                    dim=8,
                    pooling="mean",
                    padding_idx=0,
                    optimizer=RowwiseAdagrad(lr=0.1),
                    init_std=0.2,
                    directory=FILES,
                ),
                "rare": Table(**SIZES[2], dim=6, optimizer=SGD(lr=0.1, clip_row_norm=0.01), init_std=1.0),
            },
            divided=DIVIDED,
        )
        self.words, self.bags, self.rare = tables["words"], tables["bags"], tables["rare"]
        self.middle, self.last = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x):
        y = self.words(x[:, :2] * FACTOR).mean(1) + self.words(x[:, 2] * FACTOR)
        y = y + self.middle(self.bags((x[:, 3:] % 400) * (x[:, 3:] % 3 == 0) * FACTOR))
        if x[0, 0] % 8 == 0:
            y = y + self.rare(x[:, 0] % 2 * FACTOR)
        return self.last(y)


def data():
    generator = torch.Generator().manual_seed(1)
    # Few words are frequent, and so are in the shares of several virtual ranks. The last batch has 3 samples.
    words = (50_000 * torch.rand(83, 5, generator=generator) ** 3).long()
    return TensorDataset(words, torch.randint(0, 3, (83,), generator=generator))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def make(rule, **options):
    model = Net(rule)
    optimizer = torch.optim.AdamW(dense_parameters(model), lr=0.01)
    return unisono.Trainer(model, optimizer, virtual_ranks=5, engine="collective", progress=False, **options)


def train(rule, *, steps=6, micro_batch_size=None, **options):
    trainer = make(rule, **options)
    for _ in trainer.epochs(9, max_steps=steps):
        for batch in trainer.batches(data(), batch_size=20, micro_batch_size=micro_batch_size):
            trainer.step(loss, batch)
    return trainer


def rules():
    """Each rule, one of them with micro-batches."""
    return {
        type(rule).__name__: train(rule, micro_batch_size=2 if isinstance(rule, RowwiseAdam) else None).digest()
        for rule in RULES
    }


def clipped():
    """A step that needs the gradient of all rows."""
    return {"clipped": train(Adam(lr=0.1), clip_grad_norm=0.05).digest()}


def steps():
    """Steps that fail on all ranks change nothing; evaluation, prediction and exports read all rows."""
    trainer = make(RowwiseAdagrad(lr=0.1))
    folder = Path(sys.argv[2])

    def halve(model):
        for p in model.parameters():
            if p.grad is not None:
                (p.grad._values() if p.grad.is_sparse else p.grad).mul_(0.5)

    for batch in trainer.batches(data(), batch_size=20):
        before = trainer.digest()
        for bad, error in (
            (lambda model, b: loss(model, b) * torch.where(b[1] > 0, torch.nan, 1.0), NonFiniteLossError),
            (lambda model, b: loss(model, (b[0] + 50_000, b[1])), IndexError),
        ):
            if batch.step == 1 and not (DYNAMIC and error is IndexError):  # which has a row for any id
                try:
                    trainer.step(bad, batch)
                except error:
                    assert trainer.digest() == before
                else:
                    raise AssertionError("no exception")
        if DIVIDED and trainer.world_size > 1:
            try:
                trainer.step(loss, batch, encode=lambda model, b: model(b[0]))
            except ValueError as error:
                assert "rows of other ranks come in one" in str(error), error
            else:
                raise AssertionError("no exception")
        trainer.step(loss, batch, on_gradients=halve if batch.step == 2 else None)
    outputs = trainer.predict(lambda model, batch: model(batch[0]), data(), batch_size=20)
    read = digest({"outputs": outputs, "mean": float(trainer.evaluate(loss, data(), batch_size=20))})
    trainer.export(folder / "model.safetensors")
    export_rows(trainer.model.words, folder / "words.safetensors")
    files = [hashlib.sha256((folder / f"{name}.safetensors").read_bytes()).hexdigest() for name in ("model", "words")]
    loaded = make(RowwiseAdagrad(lr=0.1))
    loaded.load(folder / "model.safetensors")
    check_parts(trainer)
    return {"steps": trainer.digest(), "read": read, "model": files[0], "words": files[1], "loaded": loaded.digest()}


def check_parts(trainer):
    """Each rank has rows of its own; what needs others by hand is refused."""
    if not DIVIDED or trainer.world_size == 1:
        return
    words, bags = trainer.model.words, trainer.model.bags
    of_tables = []
    for table in (words, bags):
        has_values = table.weight.ne(0).any(1)
        is_present = table.rows.present(0, len(table.weight)).bool()
        # Where rows are given up, some may count as present that have never been taken.
        assert torch.equal(has_values, is_present & has_values if DYNAMIC and table is bags else is_present)
        of_tables.append(unisono.comm.all_gather(int(has_values.sum())))
    counts = of_tables[1 if DYNAMIC else 0]  # rows of dynamic tables are taken in turn: those of words fill a page
    assert all(0 < count < 0.9 * sum(counts) for count in counts), counts
    if DYNAMIC:
        assert sum(of_tables[0]) == words.rows.count and bags.rows.evicted
    for call, text in (
        (lambda: bags((torch.arange(400) * FACTOR).view(-1, 1)), "rows of other ranks come where all ranks look up"),
        (trainer.model.state_dict, "no state_dict has its rows"),
        (lambda: trainer.model.load_state_dict({"words.weight": words.weight.detach()}), "trainer.load"),
    ):
        try:
            call()
        except unisono.errors.UnisonoError as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)


def saved():
    """A run that begins or goes on in a directory, in mid-epoch."""
    return {"saved": train(Adam(lr=0.1), steps=int(sys.argv[3]), directory=sys.argv[2]).digest()}


def hooked():
    """A hook of one rank alone sees the gradient of all rows."""
    trainer, seen = make(RowwiseAdagrad(lr=0.1)), []
    if trainer.rank == 0:
        trainer.optimizer.register_step_pre_hook(lambda *_: seen.append(trainer.model.words.weight.grad.coalesce()))
    for batch in trainer.batches(data(), batch_size=20):
        trainer.step(loss, batch)
    gradients = {str(n): torch.cat([g.indices()[0], g.values().view(-1)]) for n, g in enumerate(seen)}
    return {"hooked": trainer.digest(), "gradients": digest(gradients) if seen else ""}


def watched():
    """A run whose weights are compared with another one's, after some steps and in mid-epoch."""
    return {"watched": train(Adam(lr=0.1), directory=sys.argv[2], digest_every=2).digest()}


def changes():
    """What ranks send for a checkpoint is what has changed since the last whole one, whoever has changed it."""
    directory, sent, original = Path(sys.argv[2]), [], dist.all_to_all_single

    def all_to_all_single(output, tensor, *args, group, **kwargs):
        if group is dist.group.WORLD and sys._getframe(1).f_code.co_filename.endswith("row_transfer.py"):
            sent.append(tensor.nbytes)
        return original(output, tensor, *args, group=group, **kwargs)

    dist.all_to_all_single = all_to_all_single
    trainer = make(Adam(lr=0.1), directory=directory, checkpoints=unisono.Checkpoints(every_steps=1, keep=20))
    words, many, first = trainer.model.words, torch.arange(20_000) * FACTOR, trainer.steps_done

    def with_many(model, batch):
        return loss(model, batch) + model.words(many).square().sum(1).mean()

    of_saves = []
    for _ in trainer.epochs(9, max_steps=first + 6):
        for batch in trainer.batches(data(), batch_size=20):
            of_saves.append(sum(unisono.comm.all_gather(sum(sent))))  # of the save after the step before
            sent.clear()
            trainer.step(with_many if not trainer.steps_done else loss, batch)
            if trainer.steps_done == 3:  # by hand, which no step sees
                rows = torch.tensor([7, 19_999, 11])
                if DIVIDED and trainer.world_size > 1:
                    rows = rows[words.rows.owners.own(rows)]
                words.weight.data[rows] = words.weight.data[rows].neg()
            if trainer.steps_done == 4:
                trainer.load(directory / "checkpoints" / "step-000000002")
    found = {"changed": trainer.digest()}
    store = CheckpointStore(directory / "checkpoints")
    for info in store.list():
        found[f"step{info.step}"] = digest(store.load(info).groups)
    if DIVIDED and trainer.world_size > 1:
        least = 20_000 * (6 + 1 + 12) * 2  # weights, and two numbers of Adam's for each
        assert of_saves[1] > least, of_saves  # the first save of a process
        small = [nbytes for step, nbytes in enumerate(of_saves) if step > 1 and step + first != 4]
        if DYNAMIC and first:  # the ids, which are written as a whole here, make a complete file due
            small.remove(max(small))
        assert small and max(small) < least / 10, of_saves
    return found


def traffic():
    """What ranks send in a step depends on its ids, not on the rows that there are; a row comes once in a step."""
    sent = []
    for rows in (1000, 200_000):
        tables = Tables({"item": Table(rows=rows, dim=16, init_std=0.1, optimizer=SGD(lr=0.1))}, divided=True)
        model = nn.Sequential(tables["item"], nn.Flatten(), nn.Linear(48, 3))
        trainer = unisono.Trainer(model, tables.optimizer, virtual_ranks=4, engine="collective", progress=False)
        ids = torch.arange(1000)[:, None].expand(-1, 3)[torch.arange(400) % 100]
        for batch in trainer.batches(TensorDataset(ids, torch.arange(400) % 3), batch_size=200, micro_batch_size=10):
            trainer.step(lambda model, b: loss(model, b) + loss(model, b), batch)
        sent.append(sum(unisono.comm.all_gather(trainer._run.exchange.sent_nbytes)))
    # Two ranks, two steps: at most 100 ids of 8 bytes and rows of 64 on each.
    assert 0 < min(sent) <= max(sent) <= 2 * 2 * 100 * (8 + 64), sent
    return {}


def named(batch):
    """What a micro-batch looks up."""
    x = batch[0]
    bags = (x[:, 3:] % 400) * (x[:, 3:] % 3 == 0)
    return {"bags": bags * FACTOR, "rare": x[:, 0] % 2 * FACTOR, "words": x[:, :3] * FACTOR}


def ahead():
    """Rows of all lookups of a step are sent ahead if their ids are named; values do not depend on it."""

    def named_in_part(batch):
        return {"bags": named(batch)["bags"][:1], "words": batch[0] * 0 + 7}

    digests = []
    for lookups in (named, named_in_part):
        trainer = make(Adam(lr=0.1))
        exchange, rounds, of_steps = trainer._run.exchange, [], []
        if exchange is not None:
            exchange._ask = lambda wanted, ask=exchange._ask, rounds=rounds: rounds.append(wanted) or ask(wanted)
        for batch in trainer.batches(data(), batch_size=20, lookups=lookups):
            before = len(rounds)
            trainer.step(loss, batch)
            of_steps.append(len(rounds) - before)
            trainer.evaluate(loss, data())
        digests.append(trainer.digest())
        if exchange is not None:  # beside the one in which all hear that all are through
            assert of_steps == [not DYNAMIC, 0, 0, 0, 0] if lookups is named else DYNAMIC or sum(of_steps) > 8, of_steps
    assert digests[0] == digests[1]
    return {"ahead": digests[0]}


def between():
    """What is done between two steps counts, also for rows that were sent ahead."""
    trainer, folder, found = make(Adam(lr=0.1)), Path(sys.argv[2]), []
    words, ids = trainer.model.words, data().tensors[0][:, 0].unique() * FACTOR
    ids = ids[ids != 5]  # padding, which is never written

    def infinite(model, batch):
        return loss(model, batch) * torch.inf

    for epoch in trainer.epochs(3):
        for batch in trainer.batches(data(), batch_size=20, lookups=named):
            place = epoch, batch.step
            if place == (1, 1):  # by hand, alike on all ranks: all these rows have values
                with torch.no_grad():
                    words.weight[words.rows.find(ids)] = 0.25
            if place == (1, 2):
                trainer.export(folder / "early.safetensors")
            if place == (1, 3):
                with contextlib.suppress(NonFiniteLossError):
                    trainer.step(infinite, batch)
            if place == (2, 0):
                trainer.load(folder / "early.safetensors")
            if place == (2, 2):  # two steps of one batch
                trainer.step(loss, batch)
                found.append(float(trainer.evaluate(loss, data(), batch_size=20)))
            trainer.step(loss, batch)
    return {"between": digest({"trainer": trainer.digest(), "found": found})}


def stale():
    """Rows that a rank alone writes, or past torch's counting, after they were sent to others."""
    for at, writers in ((6, [1]), (7, [0, 1, 2])):
        trainer = make(SGD(lr=0.1))
        weight = trainer.model.words.weight
        try:
            for _ in trainer.epochs(2):
                for batch in trainer.batches(data(), batch_size=20, lookups=named):
                    if trainer.steps_done == at and trainer.rank in writers:
                        with torch.no_grad():
                            (weight if len(writers) == 1 else weight.data).mul_(2.0)
                    trainer.step(loss, batch)
        except unisono.errors.RankMismatchError as error:
            print(f"refused in step {trainer.steps_done}: {error}", flush=True)
    return {}


def fails():
    """The loss function of one rank fails, while others still look rows up."""
    trainer = make(SGD(lr=0.1))

    def one_fails(model, batch):
        if trainer.rank == 1:
            raise ValueError("of rank 1 alone")
        return loss(model, batch) + model.words((batch[0][:, 0] * 0 + torch.arange(len(batch[0])) * 999) * FACTOR).sum(
            1
        )

    for batch in trainer.batches(data(), batch_size=20):
        trainer.step(one_fails if batch.step == 2 else loss, batch)
    return {}


def killed():
    """A rank is killed after two checkpoints; the launcher starts all again."""
    directory = Path(sys.argv[2])
    trainer = make(Adam(lr=0.1), directory=directory, checkpoints=unisono.Checkpoints(every_steps=2))
    for _ in trainer.epochs(9, max_steps=9):
        for batch in trainer.batches(data(), batch_size=20):
            trainer.step(loss, batch)
            if trainer.steps_done == 6 and trainer.rank == 1 and not (directory / "killed").exists():
                (directory / "killed").touch()
                os.kill(os.getpid(), 9)
    return {"saved": trainer.digest()}


def full():
    """A step with more new ids than rows is refused on all ranks, before anything is changed."""
    torch.manual_seed(3)
    tables = Tables({"item": Table(capacity=40, dim=4, optimizer=Adam(lr=0.1), admit_after=2)}, divided=DIVIDED)
    model = nn.Sequential(tables["item"], nn.Flatten(), nn.Linear(8, 3))
    optimizer = {"dense": torch.optim.SGD(dense_parameters(model), lr=0.1), "tables": tables.optimizer}
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=5, engine="collective", progress=False)
    ids, dones = torch.arange(48).view(-1, 2) * 977 - 2**62, []
    for number, part in enumerate([ids[:12], ids[:12], ids[5:], ids[5:]]):
        for batch in trainer.batches(TensorDataset(part, torch.arange(len(part)) % 3), batch_size=len(part)):
            before = trainer.digest()
            try:
                trainer.step(loss, batch)
            except unisono.errors.TableFullError as error:
                assert "24 of its 40 rows are taken, and this step has 24 ids without a row" in str(error), error
                assert trainer.digest() == before and number == 3
            dones.append(tables["item"].rows.count)
    assert dones == [0, 24, 24, 24], dones
    return {"full": trainer.digest()}


unisono.init()
KINDS = {
    "dynamic": dict,
    "full": full,
    "rules": rules,
    "clipped": clipped,
    "steps": steps,
    "saved": saved,
    "watched": watched,
    "hooked": hooked,
    "changes": changes,
    "traffic": traffic,
    "ahead": ahead,
    "between": between,
    "stale": stale,
    "fails": fails,
    "killed": killed,
}
for kind in sys.argv[1].split(","):
    for name, sha in KINDS[kind]().items():
        unisono.print0(f"{name} = {sha}")
