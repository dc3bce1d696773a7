"""Gradients through the collectives, against one process whose loss is the sum of the losses of all ranks.

It is run as `unisono run -n 3 gradients.py`.
"""

import torch
import torch.distributed as dist

import unisono
from unisono import comm

unisono.init("shm")
RANK, SIZE = unisono.rank(), unisono.world_size()


def inputs(shapes, seed=0):
    """One tensor of each rank, as leaves."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def loss_of(result, rank):
    """A loss that differs between ranks, is not linear, and takes every tensor of the result."""
    parts = [t for t in (result if isinstance(result, (list, tuple)) else [result]) if t is not None]
    generator = torch.Generator().manual_seed(100 + rank)
    return sum((torch.randn(t.shape, generator=generator, dtype=t.dtype) * t * t.sin()).sum() for t in parts)


def compare(name, shapes, ours, whole, *, twice=False, rooted=False):
    """Compare the gradient of this rank's tensor.

    Args: ours gives this rank's result of its tensor; whole gives the results of all ranks of all tensors. rooted says
        that ranks but 0 get a zero that stands for their part.
    """
    tensors = inputs(shapes)
    loss = sum(loss_of(result, rank) for rank, result in enumerate(whole(tensors)))
    wanted = torch.autograd.grad(loss, tensors, create_graph=twice, allow_unused=True)
    own = inputs(shapes)[RANK]
    result = ours(own)
    loss = result if rooted and RANK != 0 else loss_of(result, RANK)
    if not twice:
        loss.backward()
        close(name, own.grad, wanted[RANK])
    else:
        (found,) = torch.autograd.grad(loss, own, create_graph=True)
        close(name, found, wanted[RANK])
        second = torch.autograd.grad(sum(loss_of(g, rank) for rank, g in enumerate(wanted)), tensors)
        (found,) = torch.autograd.grad(loss_of(found, RANK), own)
        close(f"{name}, twice", found, second[RANK])
    names.append(name)


def close(name, found, wanted):
    found, wanted = (torch.zeros(()) if t is None else t for t in (found, wanted))
    if not found.any() and not wanted.any():
        return
    torch.testing.assert_close(found, wanted, msg=lambda text: f"{name}: {text}")


def refused_twice(name, call, own):
    (first,) = torch.autograd.grad(loss_of(call(own), RANK), own, create_graph=True)
    try:
        first.sum().backward()
    except RuntimeError as error:
        assert "once_differentiable" in str(error), error
    else:
        raise AssertionError(f"{name} was differentiated twice")


def every(value):
    return [value] * SIZE


def sizes(rank):
    return [rank + other + 1 for other in range(SIZE)]


def reductions(op, reduce, group):
    alike, root, lengths = [(2, 3)] * SIZE, [None] * (SIZE - 1), [r + 1 for r in range(SIZE)]
    call = lambda x: comm.all_reduce(x, op, group=group)  # noqa: E731
    compare(f"all_reduce {op}", alike, call, lambda t: every(reduce(t)), twice=True)
    call = lambda x: comm.all_reduce({"a": x, "b": [1, x[0]]}, op, group=group)["b"][1]  # noqa: E731
    compare(f"all_reduce {op} of a structure", alike, call, lambda t: every(reduce(t)[0]))
    call = lambda x: comm.reduce(x, 0, op, differentiable=True, group=group)  # noqa: E731
    compare(f"reduce {op}", alike, call, lambda t: [reduce(t), *root], rooted=True)
    call = lambda x: comm.reduce_scatter(x, op, group=group)  # noqa: E731
    compare(f"reduce_scatter {op}", [(2 * SIZE, 2)] * SIZE, call, lambda t: reduce(t).chunk(SIZE), twice=True)
    call = lambda x: comm.reduce_scatter(x.split(lengths), op, group=group)  # noqa: E731
    compare(f"reduce_scatter {op} of a list", [(sum(lengths), 2)] * SIZE, call, lambda t: reduce(t).split(lengths))


def roots(last, uniform, group):
    alike = [(2, 3)] * SIZE
    call = lambda x: comm.broadcast(x, last, uniform=uniform, group=group)  # noqa: E731
    compare(f"broadcast {uniform}", alike, call, lambda t: every(t[last]))
    given = lambda x: x.unbind() if last == RANK or not uniform else x[0]  # noqa: E731
    call = lambda x: comm.scatter(given(x), last, uniform=uniform, group=group)  # noqa: E731
    compare(f"scatter {uniform}", [(SIZE, 3)] * SIZE, call, lambda t: t[last].unbind())


def moves(group):
    alike, uneven, root = [(2, 3)] * SIZE, [(r + 1, 2) for r in range(SIZE)], [None] * (SIZE - 1)
    call = lambda x: comm.all_gather(x, group=group)  # noqa: E731
    compare("all_gather", uneven, call, every)
    refused_twice("all_gather", call, inputs(uneven)[RANK])
    call = lambda x: comm.all_gather(x, uniform=True, group=group)  # noqa: E731
    compare("all_gather uniform", alike, call, every, twice=True)
    call = lambda x: comm.all_gather(x, concat=0, group=group)  # noqa: E731
    compare("all_gather concat", uneven, call, lambda t: every(torch.cat(t)))
    call = lambda x: comm.all_gather(x, concat=1, uniform=True, group=group)  # noqa: E731
    compare("all_gather concat uniform", alike, call, lambda t: every(torch.cat(t, 1)), twice=True)
    call = lambda x: [v["x"] for v in comm.all_gather({"x": x, "y": x * 2, "n": RANK}, group=group)]  # noqa: E731
    compare("all_gather of structures, half of it used", uneven, call, every)
    call = lambda x: comm.gather(x, 0, differentiable=True, group=group)  # noqa: E731
    compare("gather", uneven, call, lambda t: [t, *root], rooted=True)
    call = lambda x: comm.broadcast({"k": [x, 3]}, group=group)["k"][0]  # noqa: E731
    compare("broadcast of a structure", alike, call, lambda t: every(t[0]))
    parts = [(sum(sizes(r)), 2) for r in range(SIZE)]
    call = lambda x: comm.all_to_all(x.split(sizes(RANK)), group=group)  # noqa: E731
    refused_twice("all_to_all", call, inputs(parts)[RANK])
    swapped = lambda t: [[t[s].split(sizes(s))[r] for s in range(SIZE)] for r in range(SIZE)]  # noqa: E731
    compare("all_to_all", parts, call, swapped)
    call = lambda x: comm.all_to_all(x, uniform=True, group=group)  # noqa: E731
    swapped = lambda t: [torch.cat([t[s].chunk(SIZE)[r] for s in range(SIZE)]) for r in range(SIZE)]  # noqa: E731
    compare("all_to_all uniform", [(2 * SIZE, 2)] * SIZE, call, swapped, twice=True)


def one_rank_asks(group):
    """A gradient that one rank alone asks for reaches it, though the others have none."""
    x = torch.ones(2, requires_grad=RANK == 0)
    comm.all_gather({"x": x}, group=group)[0]["x"].sum().backward()
    comm.all_reduce([x], group=group)[0].sum().backward()
    if RANK == 0:
        assert x.grad.tolist() == [2.0 * SIZE] * 2, x.grad


def without_gradients(group):
    """Nothing is followed where nothing is asked for."""
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not any(t.requires_grad for t in comm.all_gather(x, group=group))
        assert not comm.all_reduce(x, group=group).requires_grad
    assert not comm.broadcast(x.detach(), group=group).requires_grad
    for gathered in (comm.gather(x, group=group), comm.reduce(x, group=group)):
        assert gathered is None or not any(t.requires_grad for t in gathered)


REDUCTIONS = {
    "sum": lambda t: torch.stack(t).sum(0),
    "mean": lambda t: torch.stack(t).mean(0),
    "min": lambda t: torch.stack(t).amin(0),
    "max": lambda t: torch.stack(t).amax(0),
    "product": lambda t: torch.stack(t).prod(0),
}

for which in (None, dist.new_group(backend="gloo")):
    names: list[str] = []
    for name, function in REDUCTIONS.items():
        reductions(name, function, which)
    moves(which)
    for same in (False, True):
        roots(SIZE - 1, same, which)
    one_rank_asks(which)
    without_gradients(which)
comm.barrier()
print(f"{len(names)} kinds have the gradients of one process")
