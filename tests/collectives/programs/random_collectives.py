"""Random values through every collective of unisono.comm, against what one process computes from all ranks' values.

It is run as `unisono run -n 3 random_collectives.py SEED CASES`.

Every rank can make the values of all ranks from the seed. Numbers are small whole ones, so that sums are exact in any
type and any order.
"""

import functools
import math
import operator
import os
import random
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import unisono
from unisono import comm
from unisono.errors import GroupError

FLOATING = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
MOVED = [*FLOATING, *WHOLE, torch.complex64, torch.complex128, torch.uint16, torch.uint64, torch.float8_e4m3fn]
SHAPES = [(), (1,), (3,), (0,), (2, 3), (2, 0, 2), (3, 1, 2), (70, 5)]


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    one: Any
    other: Any = None


@dataclass(frozen=True)
class Frozen:
    inner: Any


class Thing:
    """No structure that is known: it travels as an object, with its tensor."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __eq__(self, other):
        return type(other) is Thing and same(self.tensor, other.tensor)

    __hash__ = None


def tensor(rng, dtype, shape, values):
    """A tensor of values from `values`, sometimes not contiguous."""
    numel = functools.reduce(operator.mul, shape, 1)
    made = torch.tensor([values.choice([0, 1, 2, 3]) for _ in range(numel)]).reshape(shape).to(dtype)
    how = rng.random()
    if how < 0.25 and len(shape) > 1:
        made = made.transpose(0, 1).contiguous().transpose(0, 1)
    elif how < 0.4 and len(shape) > 0 and dtype != torch.float8_e4m3fn:
        made = torch.stack([made, made], -1)[..., 0]
    return made


def structure(rng, leaf, depth=0):
    """A nested value. Args: leaf makes the leaves."""
    kind = rng.choice(["leaf", "leaf", "dict", "list", "tuple", "pair", "record", "frozen"]) if depth < 3 else "leaf"

    def below():
        return structure(rng, leaf, depth + 1)

    if kind == "dict":
        return {key: below() for key in rng.sample(["a", "b", 1, (2, "x"), "."], rng.randint(0, 4))}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(below() for _ in range(rng.randint(0, 3)))
    if kind == "pair":
        return Pair(below(), below())
    if kind == "record":
        return Record(below(), below())
    return Frozen(below()) if kind == "frozen" else leaf()


def alike(seed, op, ranks):
    """Values of one structure, one for each rank, that op can combine."""
    types = {"mean": FLOATING, "band": WHOLE, "bor": WHOLE, "bxor": WHOLE}.get(op, FLOATING + WHOLE)

    def make(rank):
        rng, values = random.Random(seed), random.Random(f"{seed} {rank}")

        def leaf():
            kind = rng.random()
            if kind < 0.6:
                return tensor(rng, rng.choice(types), rng.choice(SHAPES), values)
            if kind < 0.7:
                return None
            number = rng.choice([bool, int] if op in ("band", "bor", "bxor") else [bool, int, float])
            return number(values.randint(-3, 3)) if number is not bool else values.random() < 0.5

        return structure(rng, leaf)

    return [make(rank) for rank in range(ranks)]


def different(seed, ranks):
    """Values of any kind, one for each rank."""

    def make(rank):
        rng = random.Random(f"{seed} {rank}")

        def leaf():
            kind = rng.random()
            if kind < 0.5:
                return tensor(rng, rng.choice(MOVED), rng.choice(SHAPES), rng)
            if kind < 0.6:
                return Thing(tensor(rng, torch.float32, rng.choice(SHAPES), rng))
            return rng.choice(
                [None, "word", b"bytes" * rng.choice([1, 1000]), {1, 2}, 1 << 90, 1.5, range(3), "é" * 700]
            )

        return structure(rng, leaf)

    return [make(rank) for rank in range(ranks)]


def combined(values, op):
    """What one process makes of the values of all ranks."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        whole = torch.stack(values)
        if op == "mean":
            return whole.to(torch.float64).mean(0).to(first.dtype)
        if op in ("sum", "product"):
            total = (whole.sum(0) if op == "sum" else whole.prod(0)) if first.dtype == torch.bool else None
            add = operator.add if op == "sum" else operator.mul
            return functools.reduce(add, values) if total is None else total
        if op in ("min", "max"):
            return whole.amin(0) if op == "min" else whole.amax(0)
        return functools.reduce({"band": operator.and_, "bor": operator.or_, "bxor": operator.xor}[op], values)
    if first is None:
        return None
    if isinstance(first, dict):
        return {key: combined([value[key] for value in values], op) for key in first}
    if isinstance(first, Pair):
        return Pair(*(combined(list(column), op) for column in zip(*values, strict=True)))
    if isinstance(first, (list, tuple)):
        return type(first)(combined(list(column), op) for column in zip(*values, strict=True))
    if isinstance(first, Record):
        return Record(combined([v.one for v in values], op), combined([v.other for v in values], op))
    if isinstance(first, Frozen):
        return Frozen(combined([v.inner for v in values], op))
    if op == "mean":
        return sum(values) / len(values)
    if op in ("sum", "product"):
        return sum(values) if op == "sum" else math.prod(values)
    function = {"min": min, "max": max, "band": operator.and_, "bor": operator.or_, "bxor": operator.xor}[op]
    return functools.reduce(function, values)


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
            return False
        if a.dtype in (torch.float16, torch.bfloat16):
            return torch.allclose(a.float(), b.float(), rtol=1e-2)
        if a.is_floating_point() and a.element_size() > 1:
            return torch.allclose(a, b, rtol=1e-6)
        return torch.equal(bits(a), bits(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Record):
        return same(a.one, b.one) and same(a.other, b.other)
    if isinstance(a, Frozen):
        return same(a.inner, b.inner)
    return a == b


def bits(t):
    return t.contiguous().as_strided((t.numel(),), (1,)).view(torch.uint8)


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for child in value.values() for t in tensors(child)]
    if isinstance(value, (list, tuple)):
        return [t for child in value for t in tensors(child)]
    return (
        [t for child in vars(value).values() for t in tensors(child)]
        if isinstance(value, (Record, Frozen, Thing))
        else []
    )


def expect(found, wanted, what, given=()):
    assert same(found, wanted), f"{what}:\nfound  {found}\nwanted {wanted}"
    theirs = {t.untyped_storage().data_ptr() for t in tensors(given) if t.numel()}
    own = [t.untyped_storage().data_ptr() for t in tensors(found) if t.numel()]
    assert not theirs & set(own), f"{what}: the result shares memory with what was given"
    assert len(own) == len(set(own)), f"{what}: results share memory with each other"
    assert all(t.is_contiguous() for t in tensors(found)), what


def one_case(seed, group, ranks):
    rank, size = ranks.index(unisono.rank()), len(ranks)
    rng = random.Random(f"case {seed}")
    op = rng.choice(["sum", "mean", "min", "max", "product", "band", "bor", "bxor"])
    root = rng.randrange(size)
    values = alike(f"{seed} alike", op, size)
    expect(comm.all_reduce(values[rank], op, group=group), combined(values, op), f"all_reduce {op}", values[rank])
    found = comm.reduce(values[rank], ranks[root], op, group=group)
    expect(found, combined(values, op) if rank == root else None, f"reduce {op}", values[rank])
    columns = [alike(f"{seed} part {part}", op, size) for part in range(size)]
    given = [column[rank] for column in columns]
    expect(comm.reduce_scatter(given, op, group=group), combined(columns[rank], op), f"reduce_scatter {op}", given)

    values = different(f"{seed} different", size)
    expect(comm.all_gather(values[rank], group=group), values, "all_gather", values[rank])
    found = comm.gather(values[rank], ranks[root], group=group)
    expect(found, values if rank == root else None, "gather", values[rank])
    found = comm.broadcast(values[root] if rank == root else None, ranks[root], group=group)
    expect(found, values[root], "broadcast", values[root])
    found = comm.scatter(values if rank == root else None, ranks[root], group=group)
    expect(found, values[rank], "scatter", values)
    table = [different(f"{seed} from {source}", size) for source in range(size)]
    expect(comm.all_to_all(table[rank], group=group), [row[rank] for row in table], "all_to_all", table[rank])
    if size > 1:
        to, by = (rank + 1) % size, (rank - 1) % size
        for sends in ((0, 1) if rank % 2 == 0 else (1, 0)) if size % 2 == 0 or rank < size - 1 else (1, 0):
            if sends == 0:
                comm.send(values[rank], ranks[to], tag=3, group=group)
            else:
                expect(comm.recv(ranks[by], tag=3, group=group), values[by], "recv")
    comm.barrier(group=group)

    # One tensor each, of one shape or joined along a dimension.
    dtype, shape = rng.choice(FLOATING + WHOLE + [torch.complex64]), rng.choice(SHAPES)
    own = [tensor(rng, dtype, shape, random.Random(f"{seed} {r}")) for r in range(size)]
    mine = own[rank]
    expect(comm.all_gather(mine, uniform=True, group=group), own, "all_gather uniform", mine)
    expect(
        comm.gather(mine, ranks[root], uniform=True, group=group), own if rank == root else None, "gather uniform", mine
    )
    expect(comm.broadcast(mine, ranks[root], uniform=True, group=group), own[root], "broadcast uniform", mine)
    given = own if rank == root else mine
    expect(comm.scatter(given, ranks[root], uniform=True, group=group), mine, "scatter uniform", own)
    if shape:
        dim = rng.randrange(len(shape))
        expect(
            comm.all_gather(mine, concat=dim, uniform=True, group=group), torch.cat(own, dim), "concat uniform", mine
        )
        lengths = [rng.randint(0, 4) for _ in range(size)]
        uneven = [torch.full((*shape[:dim], lengths[r], *shape[dim + 1 :]), r + 1).to(dtype) for r in range(size)]
        joined = {"x": torch.cat(uneven, dim), "y": [torch.cat(uneven, dim)]}
        expect(comm.all_gather({"x": uneven[rank], "y": [uneven[rank]]}, concat=dim, group=group), joined, "concat")
        found = comm.gather(uneven[rank], ranks[root], concat=dim, group=group)
        expect(found, torch.cat(uneven, dim) if rank == root else None, "gather concat")
    whole = [tensor(rng, dtype, (2 * size, 3), random.Random(f"{seed} w{r}")) for r in range(size)]
    exchanged = torch.cat([w.chunk(size)[rank] for w in whole])
    expect(comm.all_to_all(whole[rank], uniform=True, group=group), exchanged, "all_to_all uniform", whole[rank])
    expect(comm.all_to_all(whole[rank], group=group), exchanged, "all_to_all of a tensor", whole[rank])
    found = comm.scatter(whole[root][:-1] if rank == root else None, ranks[root], group=group)
    expect(found, whole[root][:-1].tensor_split(size)[rank], "scatter of a tensor", whole[root])
    if op in ("sum", "product") or (dtype in FLOATING if op == "mean" else dtype in WHOLE):
        expect(comm.all_reduce(mine, op, group=group), combined(own, op), f"all_reduce {op} of a tensor", mine)
        found = comm.reduce(mine, ranks[root], op, group=group)
        expect(found, combined(own, op) if rank == root else None, f"reduce {op} of a tensor", mine)
        found = comm.reduce_scatter(whole[rank], op, group=group)
        expect(found, combined([w.chunk(size)[rank] for w in whole], op), f"reduce_scatter {op} of a tensor")


def large_and_uneven(group, ranks):
    """Values that do not travel in one piece of equal size: one rank has a megabyte, the others a few bytes."""
    rank, size = ranks.index(unisono.rank()), len(ranks)
    for big in {0, size - 1}:
        values = [{"x": torch.arange(250_000 if r == big else 3) * (r + 1), "y": "w" * r} for r in range(size)]
        expect(comm.all_gather(values[rank], group=group), values, "large all_gather", values[rank])
        found = comm.gather(values[rank], ranks[0], group=group)
        expect(found, values if rank == 0 else None, "large gather")
        expect(comm.scatter(values if rank == 0 else None, ranks[0], group=group), values[rank], "large scatter")
        expect(comm.broadcast(values[big] if rank == big else None, ranks[big], group=group), values[big], "large")
        given = [values[big if r == big else rank] for r in range(size)]
        wanted = [values[big if rank == big else r] for r in range(size)]
        expect(comm.all_to_all(given, group=group), wanted, "large all_to_all", given)


def objects(group, ranks):
    """A module stays one, also on the way; a tensor that an object has twice is one there."""
    rank = ranks.index(unisono.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    torch.nn.init.constant_(model[0].weight, rank)
    sent = comm.broadcast(model if rank == 0 else None, ranks[0], group=group)
    assert isinstance(sent[0].weight, torch.nn.Parameter) and sent[0].weight.is_leaf and not sent[0].weight.any()
    assert [name for name, _ in sent.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert comm.broadcast(model[0].weight, ranks[0], group=group).grad_fn is not None  # a structure of one tensor
    shared = torch.ones(3)
    first, second = comm.all_gather([shared, shared], group=group)[0]
    assert first is second
    stacked = comm.all_reduce(torch.ones(2, 2).to_sparse(), group=group)
    assert stacked.to_dense().sum() == 4 * len(ranks)


def from_anybody(group, ranks):
    rank = ranks.index(unisono.rank())
    if rank == 0:
        found = [comm.recv(tag=5, group=group) for _ in ranks[1:]]
        assert sorted(found) == [f"rank {r}" * 1000 for r in ranks[1:]]
    else:
        comm.send(f"rank {ranks[rank]}" * 1000, ranks[0], tag=5, group=group)


def in_a_forked_process():
    """A worker of a DataLoader is no rank."""
    child = os.fork()
    if child == 0:
        try:
            comm.barrier()
        except GroupError as error:
            os._exit(0 if "forked from rank" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def main(seed, cases):
    unisono.init("shm")
    ranks = list(range(unisono.world_size()))
    groups = [("shm", None, ranks), ("gloo", dist.new_group(backend="gloo"), ranks)]
    if len(ranks) > 2:
        some = ranks[1:]
        groups.append(("shm, some ranks", unisono.subgroup(some), some))
    for name, group, members in groups:
        if unisono.rank() in members:
            large_and_uneven(group, members)
            objects(group, members)
            from_anybody(group, members)
            for case in range(cases):
                try:
                    one_case(f"{seed}.{case}", group, members)
                except AssertionError as error:
                    raise AssertionError(f"{name}, seed {seed}, case {case}: {error}") from None
    in_a_forked_process()
    comm.barrier()
    print(f"{cases} cases over {', '.join(name for name, _, _ in groups)}")


main(sys.argv[1], int(sys.argv[2]))
