"""Rows updated by compiled functions: what torch computes to rounding, the same bits however rows lie, and when."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from unisono.embedding import SGD, Adagrad, Adam, RowwiseAdagrad, RowwiseAdam, Table, TableOptimizer, Tables
from unisono.embedding.compiled_sums import copy_by_compiled
from unisono.embedding.id_index import IdIndex
from unisono.embedding.id_order import ordered_ids
from unisono.embedding.row_sums import SummedRows, add_row_gradients, embed_bags, rows_of, sum_by_row

pytest.importorskip("llvmlite", reason="the extra `tables` is not installed")

ROWS = 40
RULES = [SGD, Adagrad, RowwiseAdagrad, Adam, RowwiseAdam]
DIMS = [1, 3, 16, 17, 64, 150]  # shorter than a vector, whole vectors, with a rest, and with a loop
TRAIN = """
import sys
if sys.argv[2] == "without":
    sys.modules["llvmlite"] = None
import torch
from unisono.embedding import SGD, Adagrad, Adam, RowwiseAdagrad, RowwiseAdam, Table, Tables
from unisono.embedding.compiler import has_compiler

DECAY, CLIP = {"weight_decay": 0.1}, {"clip_row_norm": 0.5}
SETTINGS = [{}, DECAY, CLIP, {**DECAY, "clip_row_norm": 2.0}]
found = {}
for dtype in (torch.float32, torch.float64):
    for rule in (SGD, Adagrad, RowwiseAdagrad, Adam, RowwiseAdam):
        for number, dim in enumerate((1, 3, 16, 17, 64, 150)):
            # Each length with half of the settings for each type, and the other half for the other.
            for options in SETTINGS[(number + (dtype == torch.float64)) % 2 :: 2]:
                torch.manual_seed(dim)
                table = Table(rows=40, dim=dim, pooling="sum", optimizer=rule(lr=0.1, **options), dtype=dtype)
                tables = Tables({"item": table})
                for _ in range(2):
                    tables.zero_grad()
                    out = tables["item"](torch.randint(0, 30, (8, 3)))
                    out.backward(torch.randn(out.shape, dtype=dtype))
                    tables.step()
                state = tables.optimizer.state[tables["item"].weight]
                name = f"{rule.__name__} {dtype} {dim} {options}"
                found[name] = [tables["item"].weight.detach(), *(state[key] for key in sorted(state) if key != "step")]
torch.save(found, sys.argv[1])
print(has_compiler())
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory, fork_python):
    """The tables and their state after some steps, compiled and by torch, by rule, type, length and settings."""
    folder = tmp_path_factory.mktemp("both")
    (script := folder / "train.py").write_text(TRAIN)
    assert fork_python(script, folder / "compiled", "with") == ["True"]
    assert fork_python(script, folder / "torch", "without") == ["False"]
    return torch.load(folder / "compiled"), torch.load(folder / "torch")


def test_rules_do_what_operations_of_torch_do_and_round_otherwise(both):
    compiled, by_torch = both
    assert compiled.keys() == by_torch.keys() and len(compiled) == 2 * len(RULES) * len(DIMS) * 2
    for name, tensors in compiled.items():
        tolerance = {"rtol": 1e-4, "atol": 1e-4} if "float32" in name else {"rtol": 1e-10, "atol": 1e-10}
        for mine, theirs in zip(tensors, by_torch[name], strict=True):
            torch.testing.assert_close(mine, theirs, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def stepped(weight, rule, *, which=None, steps=3):
    """Return a table after steps with seeded gradients, and its state."""
    optimizer = TableOptimizer([(weight, rule)])
    generator = torch.Generator().manual_seed(1)
    which = torch.arange(0, len(weight), 3) if which is None else which
    for _ in range(steps):
        values = torch.randn(len(which), weight.shape[1], dtype=weight.dtype, generator=generator)
        weight.grad = torch.sparse_coo_tensor(which.view(1, -1), values, weight.shape, check_invariants=False)
        optimizer.step()
    return weight, optimizer.state[weight]


@pytest.mark.parametrize("dim", [1, 5, 32])
@pytest.mark.parametrize("rule", RULES)
def test_the_bits_do_not_depend_on_how_a_table_lies_in_memory(rule, dim):
    torch.manual_seed(dim)
    rows, settings = torch.randn(ROWS, dim), rule(lr=0.1, weight_decay=0.01, clip_row_norm=1.0)
    wide = torch.zeros(ROWS, dim + 3)[:, 1 : dim + 1].copy_(rows)
    turned = torch.empty(dim, ROWS).t().copy_(rows)
    assert not wide.is_contiguous() and turned.stride(1) == ROWS
    expected = stepped(rows.clone(), settings)[0]
    assert not torch.equal(expected, rows)
    for other in (wide, turned):
        assert torch.equal(stepped(other, settings)[0], expected)


def test_rows_beyond_two_billion_elements_are_found(tmp_path):
    """The file has holes: only what is touched takes room."""
    rows, dim = 2**25 + 40, 64
    table = torch.from_file(str(tmp_path / "table"), shared=True, size=rows * dim, dtype=torch.float32).view(rows, dim)
    which = torch.tensor([0, 5, 2**24, rows - 1])
    stepped(table, SGD(lr=0.1), which=which)
    small = stepped(torch.zeros(4, dim), SGD(lr=0.1), which=torch.arange(4))[0]
    assert torch.equal(table[which], small)
    assert torch.equal(embed_bags(table, which, torch.tensor([0, 3])), torch.stack([small[:3].sum(0), small[3]]))


@pytest.mark.parametrize("rule", RULES)
def test_steps_of_no_rows_and_of_no_rate_leave_values(rule):
    rows = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(stepped(rows.clone(), rule(lr=0.0))[0], rows)
    weight, state = stepped(rows.clone(), rule(lr=1.0), which=torch.arange(0))
    assert torch.equal(weight, rows) and state["step"] == 3


@pytest.mark.parametrize("dim", [1, 2, 16])
def test_a_row_that_does_not_exist_is_refused(dim):
    with pytest.raises(IndexError, match="row 40 is to be updated, and the table has 40 rows"):
        stepped(torch.zeros(ROWS, dim), SGD(lr=1.0), which=torch.tensor([1, 40]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types_without_compiled_functions_are_updated_by_torch(dtype):
    weight, _ = stepped(torch.zeros(ROWS, 4, dtype=dtype), SGD(lr=1.0), steps=1)
    assert int((weight != 0).any(1).sum()) == 14


def test_an_update_is_a_change_for_autograd():
    """What was saved for backward before an update must not be used after it."""
    weight = torch.zeros(ROWS, 4)
    before = weight._version
    stepped(weight, Adam(lr=0.1), steps=1)
    assert weight._version > before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [1, 3, 16, 17, 128, 130])
def test_lookups_and_sums_have_the_bits_of_embedding_bag(dim, dtype):
    torch.manual_seed(dim)
    tables = Tables({"item": Table(rows=500, dim=dim, pooling="sum", optimizer=SGD(lr=0.1), dtype=dtype)})
    weight = tables["item"].weight.detach()
    weight[3] = -0.0
    for kind in (torch.int32, torch.int64):
        ids, offsets = torch.randint(0, 500, (300,), dtype=kind), torch.tensor([0, 4, 4, 9, 100, 300], dtype=kind)
        ids[:4] = 3
        expected = F.embedding_bag(ids, weight, offsets, mode="sum")
        found = tables["item"](ids, offsets).detach()
        assert torch.equal(found, expected) and torch.equal(torch.signbit(found), torch.signbit(expected))
        rows, values = sum_by_row(ids, weight[:100].contiguous(), width=3)
        ordered, order = torch.sort(ids.long(), stable=True)
        distinct, counts = torch.unique_consecutive(ordered, return_counts=True)
        sums = F.embedding_bag(order // 3, weight[:100], counts.cumsum(0) - counts, mode="sum")
        assert torch.equal(rows, distinct) and torch.equal(values, sums)
        assert torch.equal(torch.signbit(values), torch.signbit(sums))


@pytest.mark.parametrize("span", [1, 2, 50, 2047, 2048, 3000, 2**22, 2**33 - 1, 2**40, 2**52, 2**62])
def test_ids_are_sorted_as_torch_sorts_them(span):
    torch.manual_seed(0)
    for n in (1, 2, 7, 1000, 9000):
        ids = torch.randint(0, span, (n,)) - 3
        ordered, order = torch.sort(ids, stable=True)
        for kind in (torch.int64, torch.int32) if span < 2**31 else (torch.int64,):
            found = ordered_ids(ids.to(kind))
            assert torch.equal(found.ids, ordered) and torch.equal(found.places, order)
            assert found.distinct in {None, len(torch.unique(ids))}
        within = ordered_ids(ids + 3, rows=span)  # with a bound, no id needs to be looked at
        assert torch.equal(within.ids, ordered + 3) and torch.equal(within.places, order)
        for width in (2, 5, n):
            if n % width == 0:
                assert torch.equal(ordered_ids(ids, width=width).places, order // width)


@pytest.mark.parametrize("n", [1, 2, 7, 1000, 9000, 40_000])
def test_ids_of_all_64_bits_are_sorted_as_torch_sorts_them(n):
    generator = torch.Generator().manual_seed(n)
    ids = torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator)
    ids[n // 2 :] = ids[torch.randint(0, n, (n - n // 2,), generator=generator)]
    ids[:: n // 3 + 1] = 2**63 - 1
    ids[1 :: n // 3 + 1] = -(2**63)
    ordered, order = torch.sort(ids, stable=True)
    found = ordered_ids(ids)
    assert torch.equal(found.ids, ordered) and torch.equal(found.places, order)
    assert found.distinct in {None, len(torch.unique(ids))}
    if n % 2 == 0:
        assert torch.equal(ordered_ids(ids, width=2).places, order // 2)


@pytest.mark.parametrize("capacity", [1, 3, 50, 6000])
@pytest.mark.parametrize("kind", ["random", "in turn", "equal below"])
def test_ids_are_found_where_a_list_has_them(kind, capacity):
    generator = torch.Generator().manual_seed(capacity)
    listed = torch.randint(-(2**63), 2**63 - 1, (capacity,), generator=generator)
    if kind != "random":  # small numbers, or those that differ in their upper bits alone
        listed = (torch.randperm(capacity, generator=generator) - capacity // 2) << (40 if kind == "equal below" else 0)
    places = torch.randperm(capacity, generator=generator)
    for taken in (0, capacity // 3, capacity):
        index = IdIndex(listed, places[: taken // 2]).added(places[taken // 2 : taken])
        asked = torch.cat([listed, listed[:5], listed + 1, torch.tensor([0, -1, 2**63 - 1, -(2**63)])])
        expected = {int(listed[place]): int(place) for place in places[:taken]}
        assert index.find(asked).tolist() == [expected.get(number, -1) for number in asked.tolist()]
        assert index.find(asked[:0]).tolist() == []
        small = torch.tensor([0, -1, 7], dtype=torch.int32)
        assert index.find(small).tolist() == [expected.get(number, -1) for number in small.tolist()]
        assert torch.equal(index.find(asked[::2]), index.find(asked)[::2])
        with pytest.raises((IndexError, RuntimeError)):
            index.find(asked.view(1, -1))


FIRST_VALUES = """
import sys
if sys.argv[2] == "without":
    sys.modules["llvmlite"] = None
import torch
from unisono.embedding.initial_rows import initial_rows

generator, found = torch.Generator().manual_seed(0), []
ids = torch.cat([torch.randint(-(2**63), 2**63 - 1, (50,), generator=generator), torch.arange(-3, 4)])
for dtype in (torch.float32, torch.float64):
    for dim in (1, 3, 16, 17, 64, 150):
        for seed, std in ((0, 1.0), (-(2**63), 0.37), (2**63 - 1, 1e-30), (5, 0.0)):
            found.append(initial_rows(ids, dim, seed=seed, std=std, dtype=dtype))
torch.save(found, sys.argv[1])
"""


def test_first_values_have_the_bits_of_operations_of_torch(tmp_path, fork_python):
    (script := tmp_path / "first_values.py").write_text(FIRST_VALUES)
    fork_python(script, tmp_path / "compiled", "with")
    fork_python(script, tmp_path / "torch", "without")
    compiled, by_torch = torch.load(tmp_path / "compiled"), torch.load(tmp_path / "torch")
    assert len(compiled) == len(by_torch) == 2 * 6 * 4
    for mine, theirs in zip(compiled, by_torch, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
        assert torch.equal(torch.signbit(mine), torch.signbit(theirs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", DIMS)
def test_two_sums_are_added_up_as_one_after_the_other(dim, dtype):
    torch.manual_seed(dim)

    def some(count, most):
        rows = torch.randperm(most)[:count].sort().values - 5
        return SummedRows(rows, torch.randn(count, dim, dtype=dtype).where(torch.rand(count, 1) < 0.8, -0.0))

    for n, m, most in ((0, 0, 9), (0, 4, 9), (5, 0, 9), (1, 1, 1), (30, 20, 40), (300, 300, 10**6), (7, 90, 100)):
        left, right = some(n, most), some(m, most)
        rows, values = add_row_gradients(left, right, torch.Size([2 * 10**6, dim]))
        expected = sum_by_row(torch.cat([left.rows, right.rows]), torch.cat([left.values, right.values]))
        assert torch.equal(rows, expected.rows) and torch.equal(values, expected.values)
        assert torch.equal(torch.signbit(values), torch.signbit(expected.values))


def test_gradients_whose_rows_do_not_ascend_are_added_up():
    for indices, distinct in (([], []), ([3], [3]), ([1, 2, 5], [1, 2, 5]), ([1, 1], [1]), ([4, 2, 4], [2, 4])):
        which = torch.tensor([indices], dtype=torch.int64)
        values = torch.randn(len(indices), 3)
        rows = rows_of(torch.sparse_coo_tensor(which, values, (9, 3), check_invariants=False))
        assert rows.rows.tolist() == distinct
        assert torch.equal(torch.zeros(9, 3).index_add_(0, *rows), torch.zeros(9, 3).index_add_(0, which[0], values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", DIMS)
def test_rows_are_copied_with_all_their_bits(dim, dtype):
    table = torch.randn(ROWS, dim + 2, dtype=dtype)[:, 1 : dim + 1]
    table[7], table[8] = -0.0, float("nan")
    for which in (torch.arange(0), torch.tensor([7]), torch.randint(0, ROWS, (300,))):
        copies = torch.empty(len(which), dim, dtype=dtype)
        copy_by_compiled(table, which, copies.data_ptr())
        assert copies.numpy().tobytes() == table[which].numpy().tobytes()
    for wrong in (-1, ROWS):
        with pytest.raises(IndexError, match=f"row {wrong} is to be copied, and there are {ROWS}"):
            copy_by_compiled(table, torch.tensor([3, wrong]), copies.data_ptr())


@pytest.mark.parametrize(
    ("ids", "where"), [([[1, 2], [40, 3]], "sample 1, position 0"), ([[-1]], "sample 0, position 0")]
)
def test_a_compiled_lookup_says_which_id_was_out_of_range(ids, where):
    tables = Tables({"item": Table(rows=ROWS, dim=4, pooling="sum", optimizer=SGD(lr=0.1))})
    with pytest.raises(IndexError, match=f"table 'item' has ids 0 to 39, and id .* was looked up at {where}"):
        tables["item"](torch.tensor(ids))
    with pytest.raises(IndexError, match="looked up at position 3, in bag 1"):
        tables["item"](torch.tensor([1, 2, 3, 99]), torch.tensor([0, 2]))


def test_the_compiler_is_imported_when_a_table_is_first_used(fork_python, tmp_path):
    """That an import of unisono does not import it, tests/test_layers.py tests."""
    (script := tmp_path / "first_use.py").write_text("""
import sys
import torch
from unisono.embedding import SGD, Table, Tables
for name in [name for name in sys.modules if name.partition(".")[0] == "llvmlite"]:
    del sys.modules[name]  # as if nothing had imported it
tables = Tables({"item": Table(rows=4, dim=2, pooling="sum", optimizer=SGD(lr=0.1))})
tables.optimizer
print("llvmlite" in sys.modules)
tables["item"](torch.arange(2).view(1, 2)).sum().backward()
tables.step()
print("llvmlite" in sys.modules)
""")
    assert fork_python(script) == ["False", "True"]


MIXED = """
import sys
if sys.argv[1] == "mixed" and int(__import__("os").environ["RANK"]) == 1:
    sys.modules["llvmlite"] = None
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import unisono
from unisono.embedding import RowwiseAdagrad, Table, Tables
from unisono.parallel import share_tables

torch.manual_seed(0)
tables = Tables({"item": Table(rows=5000, dim=17, pooling="sum", optimizer=RowwiseAdagrad(lr=0.1))})
if sys.argv[2] == "loop":
    unisono.init()
    shared = share_tables(tables)
    tables["item"](torch.arange(50).view(5, 10)).sum().backward()
    shared.step()
else:
    data = TensorDataset(torch.randint(0, 5000, (960, 8)), torch.randint(0, 17, (960,)))
    trainer = unisono.Trainer(tables["item"], tables.optimizer, virtual_ranks=6, progress=False)
    for batch in trainer.batches(data, batch_size=240):
        trainer.step(lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"), batch)
    print(trainer.digest())
"""


@pytest.mark.parametrize("how", ["trainer", "loop"])
def test_ranks_of_which_only_some_have_the_compiler_are_refused(run_ranks, how):
    job = run_ranks(2, MIXED, "mixed", how, code=None)
    assert job.code != 0
    for words in ("what updates the rows of tables", "functions compiled by llvmlite", "install unisono[tables]"):
        assert words in job.said, job.said[-3000:]


def test_the_bits_are_the_same_on_any_number_of_ranks_and_servers(run_ranks):
    sums = {run_ranks(n, MIXED, "same", "trainer").out.split()[-1] for n in (1, 2, 3)}
    sums.add(run_ranks(2, MIXED, "same", "trainer", flags=["--servers", "2"]).out.split()[-1])
    assert len(sums) == 1
