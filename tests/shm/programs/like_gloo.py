"""Every collective of torch.distributed on shared memory and on gloo, with the same data: prints what differs.

Rounding may differ in floating-point sums, whose order gloo does not specify: small whole numbers have none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
GLOO, SHM = dist.group.WORLD, dist.new_group(backend="shm")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
CALLS: dict[str, Callable[[Any], Any]] = {}
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.AVG]
BITS = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64,
]  # fmt: skip


def call(function):
    CALLS[function.__name__] = function
    return function


def own(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(RANK)
    return torch.randint(1, 5, shape, generator=generator).to(dtype)


def ends(work: Any) -> Any:
    """Wait for an asynchronous call in three ways."""
    future = work.get_future().then(lambda done: len(done.value()))
    assert work.wait()
    assert work.is_completed()
    return future.wait()


@call
def all_reduce(group):
    found = []
    for op in OPS:
        for dtype in DTYPES if op != dist.ReduceOp.AVG else DTYPES[:4]:
            tensor = own(7, 3, dtype=dtype)
            dist.all_reduce(tensor, op, group=group)
            found.append(tensor)
    for op in BITS:
        for dtype in DTYPES[4:]:
            tensor = own(5, dtype=dtype)
            dist.all_reduce(tensor, op, group=group)
            found.append(tensor)
    for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.SUM):
        tensor = own(5) > 2
        dist.all_reduce(tensor, op, group=group)
        found.append(tensor)
    tensor = own(5) + 1j * own(5)
    dist.all_reduce(tensor, group=group)
    strided = own(4, 3).t()
    dist.all_reduce(strided, group=group)
    empty = own(0)
    dist.all_reduce(empty, group=group)
    scalar = own(1)[0]
    dist.all_reduce(scalar, group=group)
    leaf = torch.nn.Parameter(own(3))
    dist.all_reduce(leaf, group=group)
    one = own(1).expand(3)
    dist.all_reduce(one, group=group)
    return [*found, tensor, strided, empty, scalar, leaf.detach(), one]


@call
def all_reduce_async(group):
    tensors = [own(4) + i for i in range(5)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    return [*tensors, [ends(work) for work in reversed(works)]]


@call
def all_reduce_coalesced(group):
    tensors = [own(4), own(2, 3), own(0)]
    dist.all_reduce_coalesced(tensors, group=group)
    future = dist.all_reduce_coalesced(tensors, group=group, async_op=True)
    future.wait()
    return tensors


@call
def all_reduce_sparse(group):
    indices, values = torch.tensor([[0, 1 + RANK, 1 + RANK]]), torch.tensor([1.0, 2.0, 4.0])
    tensor = torch.sparse_coo_tensor(indices, values, (9,))
    dist.all_reduce(tensor, group=group)
    rows = torch.sparse_coo_tensor(indices, own(3, 4), (9, 4)).coalesce()
    work = dist.all_reduce(rows, group=group, async_op=True)
    work.wait()
    return [tensor.is_coalesced(), tensor.to_dense(), rows.to_dense(), work.get_future().value()[0].to_dense()]


@call
def broadcast(group):
    found = []
    for dtype in [*DTYPES, torch.bool, torch.complex64]:
        tensor = own(3, 2, dtype=dtype)
        dist.broadcast(tensor, 1, group=group)
        found.append(tensor)
    dist.broadcast(strided := own(4, 3).t(), group_src=2, group=group)
    ends(dist.broadcast(late := own(4), 0, group=group, async_op=True))
    return [*found, strided, late]


@call
def reduce(group):
    tensor, other = own(6), own(6)
    dist.reduce(tensor, 1, group=group)
    ends(dist.reduce(other, 0, dist.ReduceOp.MAX, group=group, async_op=True))
    return [tensor if RANK == 1 else None, other if RANK == 0 else None]


@call
def all_gather(group):
    outputs = [torch.zeros(4) for _ in range(SIZE)]
    dist.all_gather(outputs, own(4), group=group)
    pairs = [torch.zeros(2, dtype=torch.complex64) for _ in range(SIZE)]
    dist.all_gather(pairs, own(2) + 1j * own(2), group=group)
    return [*outputs, *pairs]


@call
def all_gather_into_tensor(group):
    together, late = torch.zeros(4 * SIZE), torch.zeros(4 * SIZE)
    dist.all_gather_into_tensor(together, own(4), group=group)
    ends(dist.all_gather_into_tensor(late, own(4), group=group, async_op=True))
    return [together, late]


@call
def all_gather_coalesced(group):
    outputs = [[torch.zeros(2), torch.zeros(3)] for _ in range(SIZE)]
    dist.all_gather_coalesced(outputs, [own(2), own(3)], group=group)
    return [tensor for of_rank in outputs for tensor in of_rank]


@call
def gather(group):
    outputs = [torch.zeros(3) for _ in range(SIZE)] if RANK == 1 else None
    dist.gather(own(3), outputs, 1, group=group)
    return outputs


@call
def scatter(group):
    output = torch.zeros(3)
    dist.scatter(output, [own(3) + i for i in range(SIZE)] if RANK == 2 else None, 2, group=group)
    return output


@call
def reduce_scatter(group):
    output = torch.zeros(3)
    dist.reduce_scatter(output, [own(3) + i for i in range(SIZE)], group=group)
    return output


@call
def reduce_scatter_tensor(group):
    output, late = torch.zeros(3), torch.zeros(3)
    dist.reduce_scatter_tensor(output, own(3 * SIZE), group=group)
    dist.reduce_scatter_tensor(late, own(3 * SIZE), dist.ReduceOp.MAX, group=group, async_op=True).wait()
    return [output, late]


@call
def all_to_all(group):
    outputs = [torch.zeros(2) for _ in range(SIZE)]
    dist.all_to_all(outputs, [own(2) + i for i in range(SIZE)], group=group)
    return outputs


@call
def all_to_all_single(group):
    equal, late = torch.zeros(2 * SIZE, 2), torch.zeros(2 * SIZE)
    dist.all_to_all_single(equal, own(2 * SIZE, 2), group=group)
    ends(dist.all_to_all_single(late, own(2 * SIZE), group=group, async_op=True))
    uneven = torch.zeros(sum(range(SIZE)), 3)
    dist.all_to_all_single(uneven, own(RANK * SIZE, 3), list(range(SIZE)), [RANK] * SIZE, group=group)
    return [equal, late, uneven]


@call
def barrier(group):
    dist.barrier(group=group)
    return ends(dist.barrier(group=group, async_op=True)) is not None


@call
def coalescing_manager(group):
    first, second = own(3), own(4)
    with dist._coalescing_manager(group):
        dist.all_reduce(first, group=group)
        dist.all_reduce(second, group=group)
    with dist._coalescing_manager(group, async_ops=True) as manager:
        dist.all_reduce(first, group=group)
    manager.wait()
    return [first, second]


@call
def coalesced_gather_and_scatter(group):
    gathered, scattered = [torch.zeros(2 * SIZE), torch.zeros(SIZE)], [torch.zeros(2), torch.zeros(1)]
    with dist._coalescing_manager(group):
        for output, source in zip(gathered, [own(2), own(1)], strict=True):
            dist.all_gather_single(output, source, group=group)
    with dist._coalescing_manager(group):
        for output, source in zip(scattered, [own(2 * SIZE), own(SIZE)], strict=True):
            dist.reduce_scatter_single(output, source, group=group)
    return [*gathered, *scattered]


@call
def objects(group):
    everyone: list[Any] = [None] * SIZE
    dist.all_gather_object(everyone, {"rank": RANK}, group=group)
    at_root: list[Any] | None = [None] * SIZE if RANK == 0 else None
    dist.gather_object("x" * RANK, at_root, 0, group=group)
    given: list[Any] = [RANK, "a"] if RANK == 1 else [None, None]
    dist.broadcast_object_list(given, 1, group=group)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, list(range(SIZE)) if RANK == 0 else None, 0, group=group)
    return [everyone, at_root, given, mine]


@call
def functional_collectives(group):
    found = [
        functional.all_reduce(own(3), "sum", group),
        functional.all_gather_tensor(own(2), 0, group),
        functional.reduce_scatter_tensor(own(2 * SIZE), "sum", 0, group),
        functional.all_to_all_single(own(SIZE), None, None, group),
        functional.broadcast(own(3), 1, group),
        *functional.all_reduce_coalesced([own(2), own(3)], "sum", group),
        *functional.all_gather_into_tensor_coalesced([own(2), own(3)], group),
        *functional.reduce_scatter_tensor_coalesced([own(SIZE), own(SIZE)], "sum", [0, 0], group),
    ]
    return [functional.wait_tensor(tensor) for tensor in found]


WRONG: dict[str, Callable[[Any], Any]] = {
    "root": lambda g: dist.broadcast(torch.ones(3), group_src=7, group=g),
    "negative root": lambda g: dist.reduce(torch.ones(3), group_dst=-1, group=g),
    "bits of floats": lambda g: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND, group=g),
    "largest complex": lambda g: dist.all_reduce(torch.ones(3).cfloat(), dist.ReduceOp.MAX, group=g),
    "mean of integers": lambda g: dist.all_reduce(torch.ones(3).int(), dist.ReduceOp.AVG, group=g),
    "sum of unsigned": lambda g: dist.all_reduce(torch.ones(3).to(torch.uint16), group=g),
    "short list": lambda g: dist.all_gather([torch.ones(3)], torch.ones(3), group=g),
    "own place": lambda g: dist.all_gather([torch.ones(2)] * SIZE, torch.ones(3), group=g),
    "large output": lambda g: dist.all_gather_into_tensor(torch.ones(5), torch.ones(3), group=g),
    "split sum": lambda g: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1] * SIZE, [2] * SIZE, group=g),
    "split count": lambda g: dist.all_to_all_single(torch.ones(4), torch.ones(4), [4], [4], group=g),
    "short all_to_all": lambda g: dist.all_to_all([torch.ones(2)], [torch.ones(2)] * SIZE, group=g),
    "types": lambda g: dist.all_gather([torch.ones(3).double()] * SIZE, torch.ones(3), group=g),
    "gather": lambda g: dist.gather(torch.ones(3), [torch.ones(3)], RANK, group=g),
    "scatter": lambda g: dist.scatter(torch.ones(3), [torch.ones(3)], RANK, group=g),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def error_of(function: Callable[[Any], Any], group: Any) -> type | None:
    try:
        function(group)
    except Exception as error:
        return type(error)
    return None


for name, function in CALLS.items():
    wanted, found = function(GLOO), function(SHM)
    if not same(wanted, found):
        print(f"rank {RANK}, {name}: {found} instead of {wanted}")
for name, function in WRONG.items():
    wanted, found = error_of(function, GLOO), error_of(function, SHM)
    if wanted != found:
        print(f"rank {RANK}, wrong {name}: {found} instead of {wanted}")
dist.barrier(group=SHM)
print(f"compared {len(CALLS)} calls and {len(WRONG)} errors")
dist.destroy_process_group()
