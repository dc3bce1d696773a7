"""Tables with sparse gradients: the same bits on any number of ranks and in each engine, and what is refused."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.errors import LossError

PROGRAM = Path(__file__).parent / "programs" / "sparse.py"
ENGINES = ["collective", "shared"]
SOME = ["SparseAdam and AdamW", "SGD, weighted, 4 virtual ranks", "clipped", "resumed", "aborted", "shown"]
OTHERS = ["SparseAdam and AdamW", "SGD, weighted, 4 virtual ranks", "SGD, bfloat16", "clipped, 4 virtual ranks"]
OTHERS += ["fp16, clipped", "resumed", "frozen", "aborted", "shown", "large"]
"""With each of the others in one of them."""
DATA = TensorDataset(torch.arange(120).view(40, 3) ** 2 % 17, torch.arange(40) % 3)

# torch's own Adagrad and SparseAdam make tensors in a way that torch 2.13 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


@pytest.mark.parametrize(
    ("n", "engines", "names"),
    [
        (2, ENGINES[:1], SOME),
        (3, ENGINES[1:], OTHERS),
        *(pytest.param(n, ENGINES, names, marks=pytest.mark.soak) for n, names in ((2, SOME), (3, []), (4, SOME[::2]))),
    ],
)
def test_tables_have_one_digest_on_any_number_of_ranks_in_each_engine(
    fork_ranks, sparse_on_one_rank, tmp_path, n, engines, names
):
    begun, expected = sparse_on_one_rank
    for engine in engines:
        shutil.copytree(begun, tmp_path / engine)
    lines = fork_ranks(n, PROGRAM, tmp_path, ",".join(engines), *names).lines()
    found = dict(re.findall(r"^(.+) = ([0-9a-f]{64})$", "\n".join(lines), re.MULTILINE))
    assert found == {f"{engine}: {name}": expected[name] for engine in engines for name in names or expected}


def test_what_must_matter_does(sparse_on_one_rank):
    _, sha = sparse_on_one_rank
    assert sha["resumed"] == sha["SparseAdam and AdamW"]
    different = [sha[name] for name in sha if name != "resumed"]
    assert len(set(different)) == len(different)


def build(*, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.EmbeddingBag(17, 4, sparse=True), nn.Linear(4, 3))


def per_sample(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def make_trainer(model, optimizer, **options):
    return unisono.Trainer(model, optimizer, **{"virtual_ranks": 4, "progress": False, **options})


def train(model, optimizer, *, loss=per_sample, dataset=DATA, batch_size=20, names=(None,), **options):
    trainer = make_trainer(model, optimizer, **options)
    for _ in trainer.epochs(2):
        for batch in trainer.batches(dataset, batch_size=batch_size, micro_batch_size=2, shuffle=False):
            for name in names:
                trainer.step(loss, batch, optimizer=name)


def clip(parameters, bound):
    for p in parameters:
        p.grad = p.grad.coalesce() if p.grad.is_sparse else p.grad
    values = [p.grad.values() if p.grad.is_sparse else p.grad for p in parameters]
    norm = torch.stack([value.norm() for value in values]).norm()
    for value in values:
        value.mul_((bound / (norm + 1e-6)).clamp(max=1.0))


@pytest.mark.parametrize("virtual_ranks", [1, 4, 5])
@pytest.mark.parametrize("bound", [None, 0.05])
@pytest.mark.parametrize("make", [partial(optim.SGD, lr=0.5), partial(optim.Adagrad, lr=0.1)])
def test_one_optimizer_for_all_does_what_a_plain_loop_does(make, bound, virtual_ranks):
    model, plain = build(), build()
    train(model, make(model.parameters()), clip_grad_norm=bound, virtual_ranks=virtual_ranks)
    optimizer = make(plain.parameters())
    for step in range(4):
        part = slice(20 * (step % 2), 20 * (step % 2) + 20)
        optimizer.zero_grad()
        per_sample(plain, (DATA.tensors[0][part], DATA.tensors[1][part])).mean().backward()
        if bound:
            clip([*plain.parameters()], bound)
        optimizer.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_an_optimizer_for_the_table_and_one_for_the_rest_do_what_a_plain_loop_does():
    """Each step trains the parameters of one, so a plain loop takes two, too."""

    def optimizers(model):
        return {"table": optim.SparseAdam(model[0].parameters(), lr=0.1), "rest": optim.AdamW(model[1].parameters())}

    model, plain = build(), build()
    train(model, optimizers(model), names=["table", "rest"])
    theirs = optimizers(plain)
    for step in range(4):
        part = slice(20 * (step % 2), 20 * (step % 2) + 20)
        for optimizer in theirs.values():
            plain.zero_grad()
            per_sample(plain, (DATA.tensors[0][part], DATA.tensors[1][part])).mean().backward()
            optimizer.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (partial(optim.AdamW, lr=0.1), "AdamW takes no sparse gradients, and that of '0.weight' is sparse"),
        (partial(optim.SGD, lr=0.1, momentum=0.9), "SGD with momentum=0.9 takes no sparse gradients"),
        (partial(optim.Adagrad, weight_decay=0.1), "Adagrad with weight_decay=0.1 takes no sparse gradients"),
        (partial(optim.SparseAdam, lr=0.1), "SparseAdam takes sparse gradients only, and that of '1.weight' is dense"),
    ],
)
def test_an_optimizer_that_would_fail_in_its_step_is_refused_before(make, words):
    model = build()
    trainer = make_trainer(model, make(model.parameters()))
    before = trainer.digest()
    for batch in trainer.batches(DATA, batch_size=20):
        with pytest.raises(ValueError, match=words):
            trainer.step(per_sample, batch)
    assert trainer.digest() == before


def test_a_sparse_gradient_without_a_module_is_refused_by_name():
    model = build()
    model[0].sparse = False
    function = lambda model, batch: F.cross_entropy(  # noqa: E731
        model[1](F.embedding_bag(batch[0], model[0].weight, sparse=True)), batch[1], reduction="none"
    )
    with pytest.raises(LossError, match=r"'0.weight' of shape \[17, 4\] got a sparse gradient.*no nn.Embedding"):
        train(model, optim.SGD(model.parameters(), lr=0.1), loss=function)


def test_a_table_that_is_tied_to_a_dense_use_is_refused_by_name():
    model = nn.ModuleDict({"table": nn.EmbeddingBag(17, 4, sparse=True), "out": nn.Linear(4, 17, bias=False)})
    model["out"].weight = model["table"].weight
    function = lambda model, batch: F.cross_entropy(  # noqa: E731
        model["out"](model["table"](batch[0])), batch[1], reduction="none"
    )
    with pytest.raises(
        LossError, match=r"'table.weight' of shape \[17, 4\] belongs to a module with sparse=True.*tied"
    ):
        train(model, optim.SGD(model.parameters(), lr=0.1), loss=function)


def test_two_modules_may_share_a_table():
    """The sum over both is sparse, too, and so are bits those of the same model with one module."""
    model, same = build(), build()
    model.append(nn.EmbeddingBag(17, 4, sparse=True))
    model[2].weight = model[0].weight

    def shared(first, second, model, batch):
        y = model[first](batch[0]) * model[second](batch[0].flip(1) // 2)
        return F.cross_entropy(model[1](y), batch[1], reduction="none")

    for each, second in ((model, 2), (same, 0)):
        train(each, optim.SGD(each.parameters(), lr=0.5), loss=partial(shared, 0, second))
    assert torch.equal(model[0].weight, same[0].weight)


def test_a_gradient_of_one_row_belongs_to_one_table():
    """autograd gives both tables the same memory."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Embedding(5, 3, sparse=True) for _ in range(2))
    before = [p.detach().clone() for p in model.parameters()]
    one = TensorDataset(torch.tensor([2]))

    scales = torch.tensor([1.0, 2.0, 4.0])

    def quarter_of_sum(model, batch):
        return unisono.Sum(((model[0](batch[0]) + model[1](batch[0])) * scales).sum(), 4.0)

    train(model, optim.SGD(model.parameters(), lr=1.0), loss=quarter_of_sum, dataset=one, batch_size=1, virtual_ranks=1)
    for p, old in zip(model.parameters(), before, strict=True):
        for _ in range(2):  # steps
            old[2] -= scales / 4
        assert torch.equal(p, old)


ONE_SAMPLE = """
import torch, unisono
for engine in ("shared", "collective"):
    torch.manual_seed(0)
    model = torch.nn.EmbeddingBag(17, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=3, progress=False, engine=engine)
    data = torch.utils.data.TensorDataset(torch.arange(4).view(1, 4))
    for batch in trainer.batches(data, batch_size=3):
        trainer.step(lambda m, b: m(b[0]).square().sum(1), batch)
    print(trainer.digest())
"""


def test_the_first_step_may_leave_ranks_without_a_sample(fork_ranks):
    alone = fork_ranks(1, ONE_SAMPLE).lines()
    together = fork_ranks(3, ONE_SAMPLE)
    assert len(set(alone)) == 1
    assert [together.lines(rank) for rank in range(3)] == [alone] * 3


def test_a_module_that_writes_its_table_in_the_forward_pass_is_refused():
    model = nn.Sequential(nn.EmbeddingBag(17, 4, max_norm=1.0), nn.Linear(4, 3))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"'0' has max_norm=1.0, .*virtual_ranks=4"):
        make_trainer(model, optimizer)
    train(model, optimizer, virtual_ranks=1)
