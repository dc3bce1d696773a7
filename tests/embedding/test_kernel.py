"""Tables in a loop of one's own: what torch computes, and what is refused."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from unisono.embedding import (
    SGD,
    Adagrad,
    Adam,
    RowwiseAdagrad,
    RowwiseAdam,
    Table,
    TableOptimizer,
    Tables,
    dense_parameters,
)

# torch's own Adagrad and SparseAdam make tensors in a way that torch 2.13 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

ROWS, DIM = 50, 4


def one(pooling=None, *, optimizer=None, rows=ROWS, dim=DIM, dtype=torch.float64, **options):
    table = Table(rows=rows, dim=dim, pooling=pooling, optimizer=optimizer or SGD(lr=0.5), dtype=dtype, **options)
    return Tables({"item": table})


def gradient(module, *given, **named):
    out = module(*given, **named)
    torch.manual_seed(1)
    out.mul(torch.randn(out.shape, dtype=out.dtype)).sum().backward()
    return out.detach(), module.weight.grad.coalesce()


BAGS = [
    pytest.param((torch.tensor([[3, 7, 3], [0, 0, 49]]),), {}, id="of one width"),
    pytest.param((torch.tensor([3, 7, 3, 0, 49], dtype=torch.int32), torch.tensor([0, 0, 3])), {}, id="ragged, int32"),
    pytest.param((torch.tensor([1, 2, 1]), torch.tensor([0, 2, 3])), {"include_last_offset": True}, id="last offset"),
    pytest.param((torch.tensor([[3, 7, 3], [7, 7, 7]]),), {"padding_idx": 7}, id="padded"),
    pytest.param((torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0])), {}, id="only empty bags"),
]


@pytest.mark.parametrize("pooling", [None, "sum", "mean"])
def test_ids_that_change_between_a_lookup_and_backward_are_an_error(pooling):
    """As with nn.EmbeddingBag: otherwise other rows would get the gradient."""
    for ids, offsets in ((torch.tensor([[3, 7], [0, 1]]), None), (torch.tensor([3, 7, 0]), torch.tensor([0, 2]))):
        for changed in (ids, offsets):
            if changed is None or (offsets is not None and pooling is None):
                continue
            out = one(pooling)["item"](ids, *([] if offsets is None else [offsets]))
            changed.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
            changed.sub_(1)


@pytest.mark.parametrize(("given", "options"), BAGS)
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_bags_give_what_embedding_bag_gives(pooling, given, options):
    module = one(pooling, **options)["item"]
    theirs = nn.EmbeddingBag(ROWS, DIM, mode=pooling, dtype=torch.float64, **options)
    theirs.load_state_dict(module.state_dict())
    wide = tuple(part.long() for part in given)
    out = module(*given)
    torch.testing.assert_close(out, theirs(*wide))
    scale = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    (out * scale).sum().backward()
    (theirs(*wide) * scale).sum().backward()
    rows = module.weight.grad._indices()[0].tolist()
    assert rows == sorted(set(given[0].flatten().tolist()) - {options.get("padding_idx")})
    torch.testing.assert_close(module.weight.grad.to_dense(), theirs.weight.grad)


def test_bags_of_width_0_are_zeros_without_a_gradient():
    out, grad = gradient(one("mean")["item"], torch.zeros(3, 0, dtype=torch.int64))
    assert torch.equal(out, torch.zeros(3, DIM, dtype=torch.float64)) and grad._nnz() == 0


def test_weights_of_samples_get_gradients_too():
    module = one("sum", padding_idx=2)["item"]
    ids, weights = torch.tensor([[3, 7, 3], [2, 0, 49]]), torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    theirs = nn.EmbeddingBag(ROWS, DIM, mode="sum", dtype=torch.float64, padding_idx=2)
    theirs.load_state_dict(module.state_dict())
    copied = weights.detach().clone().requires_grad_()
    module(ids, per_sample_weights=weights).square().sum().backward()
    theirs(ids, per_sample_weights=copied).square().sum().backward()
    torch.testing.assert_close(weights.grad, copied.grad)
    torch.testing.assert_close(module.weight.grad.to_dense(), theirs.weight.grad)


def test_ids_of_any_shape_give_rows_and_numerically_right_gradients():
    module = one(padding_idx=5)["item"]
    ids = torch.tensor([[[4], [5]], [[4], [0]]])
    theirs = nn.Embedding(ROWS, DIM, dtype=torch.float64, padding_idx=5)
    theirs.load_state_dict(module.state_dict())
    assert torch.equal(module(ids), theirs(ids)) and module(torch.tensor(4)).shape == (DIM,)
    before = module.weight.detach().clone()
    module(ids).sin().sum().backward()
    exact = module.weight.grad.to_dense()
    assert exact[5].abs().sum() == 0
    for row, column in ((4, 1), (0, 3)):
        change = torch.zeros_like(before)
        change[row, column] = 1e-6
        with torch.no_grad():
            up, down = (F.embedding(ids, before + sign * change).sin().sum() for sign in (1, -1))
        assert abs((up - down).item() / 2e-6 - exact[row, column].item()) < 1e-6


@pytest.mark.parametrize("n", [3, 9000, 40000])
def test_sums_do_not_depend_on_threads_and_equal_those_of_torch(n):
    """The three sizes are sorted in three ways."""
    generator = torch.Generator().manual_seed(n)
    ids = torch.randint(0, ROWS * 20, (n, 2), generator=generator)
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            torch.manual_seed(0)
            found.append(gradient(one("sum", rows=ROWS * 20, dtype=torch.float32)["item"], ids)[1])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0]._indices(), found[1]._indices()) and torch.equal(found[0]._values(), found[1]._values())
    torch.manual_seed(0)
    theirs = nn.EmbeddingBag(ROWS * 20, DIM, mode="sum", sparse=True)
    torch.testing.assert_close(found[0].to_dense(), gradient(theirs, ids)[1].to_dense(), rtol=1e-4, atol=1e-4)


def rowwise(kind, weight, steps):
    """The row-wise rules in plain words."""
    weight, sums, means = weight.clone(), torch.zeros(ROWS).double(), torch.zeros_like(weight)
    for number, (rows, values) in enumerate(steps, start=1):
        for row, g in zip(rows, values, strict=True):
            if kind == "adagrad":
                sums[row] += (g * g).mean()
                weight[row] -= 0.1 * g / (sums[row].sqrt() + 1e-8)
            else:
                means[row] = 0.9 * means[row] + 0.1 * g
                sums[row] = 0.999 * sums[row] + 0.001 * (g * g).mean()
                rate = 0.1 * (1 - 0.999**number) ** 0.5 / (1 - 0.9**number)
                weight[row] -= rate * means[row] / (sums[row].sqrt() + 1e-8)
    return weight


@pytest.mark.parametrize(
    ("rule", "theirs"),
    [
        (SGD(lr=0.1), partial(optim.SGD, lr=0.1)),
        (SGD(lr=0.1, weight_decay=0.3), "decayed"),
        (SGD(lr=0.1, clip_row_norm=0.5), "clipped"),
        (Adagrad(lr=0.1), partial(optim.Adagrad, lr=0.1)),
        (Adam(lr=0.1), partial(optim.SparseAdam, lr=0.1)),
        (RowwiseAdagrad(lr=0.1), "adagrad"),
        (RowwiseAdam(lr=0.1), "adam"),
    ],
    ids=["SGD", "decayed", "clipped", "Adagrad", "Adam", "RowwiseAdagrad", "RowwiseAdam"],
)
def test_rules_do_what_torch_or_their_formula_does(rule, theirs):
    tables = one("sum", optimizer=rule)
    module = tables["item"]
    before = module.weight.detach().clone()
    plain, steps = nn.Parameter(before.clone()), []
    optimizer = None if isinstance(theirs, str) else theirs([plain])
    for step in range(4):
        tables.zero_grad()
        ids = torch.tensor([[3, 7, 3], [step, 0, 49]])
        _, grad = gradient(module, ids)
        steps.append((grad.indices()[0], grad.values().clone()))
        if optimizer is not None:
            plain.grad = grad.clone()
            optimizer.step()
        tables.step()
    if theirs in ("adagrad", "adam"):
        expected = rowwise(theirs, before, steps)
    elif theirs == "decayed":
        expected = before.clone()
        for rows, values in steps:
            expected[rows] -= 0.1 * (values + 0.3 * expected[rows])
    elif theirs == "clipped":
        expected = before.clone()
        for rows, values in steps:
            expected[rows] -= 0.1 * values * (0.5 / values.norm(dim=1, keepdim=True)).clamp(max=1)
    else:
        expected = plain.detach()
    torch.testing.assert_close(module.weight.detach(), expected, rtol=1e-5, atol=1e-5)
    untouched = [row for row in range(ROWS) if row not in {0, 1, 2, 3, 7, 49}]
    assert torch.equal(module.weight.detach()[untouched], before[untouched])


@pytest.mark.parametrize("dim", [1, 2, 6, 8])
def test_many_rows_are_updated_in_groups_as_one_by_one(dim):
    """Rows are written as wider elements where their length allows it."""
    torch.manual_seed(0)
    few, many = (one("sum", rows=20000, dim=dim, dtype=torch.float32, optimizer=Adam(lr=0.1)) for _ in range(2))
    many["item"].load_state_dict(few["item"].state_dict())
    ids = torch.randperm(20000).view(-1, 2)
    gradient(few["item"], ids)
    whole = few["item"].weight.grad
    few.step()
    values = whole.to_dense()
    for part in torch.arange(20000).split(7000):
        many["item"].weight.grad = torch.sparse_coo_tensor(part.view(1, -1), values[part], whole.shape)
        many.step()
        many.optimizer.state[many["item"].weight]["step"] = 0
    torch.testing.assert_close(few["item"].weight, many["item"].weight)


def test_a_model_with_tables_is_copied_stored_and_stepped_beside_a_dense_optimizer():
    torch.manual_seed(0)
    tables = one("sum", dtype=torch.float32, optimizer=RowwiseAdagrad(lr=0.2))
    model = nn.Sequential(tables["item"], nn.Linear(DIM, 1))
    dense = dense_parameters(model)
    assert len(dense) == 2
    optimizer = optim.AdamW(dense, lr=0.05)
    ids, wanted = torch.randint(0, ROWS, (64, 3)), torch.randn(64, 1)
    losses = []
    for _ in range(60):
        loss = F.mse_loss(model(ids), wanted)
        optimizer.zero_grad(), tables.zero_grad()
        loss.backward()
        optimizer.step(), tables.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
    again = copy.deepcopy(model)
    assert torch.equal(again(ids), model(ids)) and list(model.state_dict()) == ["0.weight", "1.weight", "1.bias"]
    state = tables.optimizer.state_dict()
    other = one("sum", dtype=torch.float32, optimizer=RowwiseAdagrad(lr=0.2))
    other.optimizer.load_state_dict(state)
    assert torch.equal(
        other.optimizer.state[other["item"].weight]["sum"], tables.optimizer.state[tables["item"].weight]["sum"]
    )


BAG = one("sum")["item"]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: BAG(torch.tensor([[1, 2], [3, 50]])),
            IndexError,
            "'item' has ids 0 to 49, and id 50 .* sample 1, pos",
        ),
        (
            lambda: BAG(torch.tensor([1, -2, 3]), torch.tensor([0, 1])),
            IndexError,
            "id -2 .*position 1, in bag 1",
        ),
        (lambda: one()["item"](torch.tensor(60)), IndexError, "id 60 was looked up at the only position"),
        (lambda: BAG(torch.rand(2, 2)), TypeError, r"the ids are float32; give int32 or int64, as ids.long\(\) does"),
        (lambda: BAG([[1]]), TypeError, "the ids are a list; give a tensor"),
        (lambda: BAG(torch.tensor([1, 2])), ValueError, r"shape \[2\]: give \[bags, width\], or one dimension and off"),
        (lambda: BAG(torch.tensor([1, 2]), torch.tensor([0, 2, 1])), ValueError, "offset 2 is 1 after 2"),
        (lambda: BAG(torch.tensor([1, 2]), torch.tensor([0, 3])), ValueError, "there are 2 ids, and the offsets go up"),
        (lambda: BAG(torch.tensor([1, 2]), torch.tensor([1])), ValueError, "the first offset is 1, and must be 0"),
        (lambda: BAG(torch.tensor([[1]]), torch.tensor([0])), ValueError, "leave offsets out"),
        (
            lambda: BAG(torch.tensor([[1]]), per_sample_weights=torch.rand(2)),
            ValueError,
            r"and the ids \[1, 1\]",
        ),
        (
            lambda: one("mean")["item"](torch.tensor([[1]]), per_sample_weights=torch.rand(1, 1)),
            ValueError,
            'with pooling="sum" only',
        ),
        (
            lambda: one("sum", include_last_offset=True)["item"](torch.tensor([1, 2]), torch.tensor([0, 1])),
            ValueError,
            "the last offset is 1 and there are 2 ids",
        ),
        (lambda: one("max"), ValueError, "pooling='max'"),
        (lambda: one(rows=0), ValueError, "rows=0 must be at least 1"),
        (lambda: one(padding_idx=50), ValueError, "padding_idx=50 is no id of a table with ids 0 to 49"),
        (lambda: one(optimizer=optim.SGD), TypeError, "give one of unisono.embedding, such as RowwiseAdagrad"),
        (lambda: Tables({}), ValueError, "there is no table"),
        (lambda: SGD(lr=-1.0), ValueError, "lr=-1.0: give a finite number of 0 or more"),
        (lambda: SGD(lr=0.1, clip_row_norm=0.0), ValueError, "of more than 0"),
        (lambda: Adam(betas=(0.9, 1.0)), ValueError, "betas"),
        (
            lambda: one(rows=10**10, dim=64, optimizer=Adam()),
            MemoryError,
            r"take 1.54e.04 GB, .* are available. Table 'item', 1\d+ rows × 64, .* RowwiseAdagrad, .* or directory=",
        ),
    ],
)
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_dense_gradient_is_refused_in_the_step():
    tables = one()
    (tables["item"](torch.tensor([1])).sum() + tables["item"].weight.sum()).backward()
    with pytest.raises(ValueError, match=r"of shape \[50, 4\] is dense"):
        tables.step()


@pytest.mark.parametrize("dim", [3, 6, 15, 64])
@pytest.mark.parametrize(
    "rule", [SGD(lr=0.1, weight_decay=0.1, clip_row_norm=0.5), Adagrad(lr=0.1), RowwiseAdagrad(lr=0.1),
             Adam(lr=0.1), RowwiseAdam(lr=0.1)], ids=lambda rule: type(rule).__name__,
)  # fmt: skip
def test_the_bits_of_a_row_do_not_depend_on_the_rows_that_are_updated_with_it(rule, dim):
    """Ranks divide rows, and vector code must round as the scalar code for what is left over does."""
    generator = torch.Generator().manual_seed(dim)
    rows, gradients = torch.randn(97, dim, generator=generator), torch.randn(4, 97, dim, generator=generator) ** 3

    def updated(ranges):
        found = []
        for part in ranges:
            weight = rows[part].clone()
            optimizer = TableOptimizer([(weight, rule)])
            for gradient in gradients:
                which = torch.arange(len(weight)).view(1, -1)
                weight.grad = torch.sparse_coo_tensor(which, gradient[part], weight.shape, check_invariants=False)
                optimizer.step()
            found.append(weight)
        return torch.cat(found)

    whole = updated([slice(97)])
    for ranges in ([slice(50), slice(50, 97)], [slice(33), slice(33, 34), slice(34, 97)]):
        assert torch.equal(updated(ranges), whole)
