"""Make mistakes with divided tables in a loop of one's own, and print the errors: `mistaken_loops.py told|raises`."""

import sys
from collections.abc import Callable

import torch

import unisono
from unisono.embedding import SGD, Adam, Table, Tables
from unisono.parallel import share_tables

unisono.init()
rank = unisono.rank()


def make(*, rows=50_000, **options):
    torch.manual_seed(0)
    table = Table(rows=rows, dim=8, pooling="sum", init_std=0.1, optimizer=Adam(lr=0.1))
    return Tables({"item": table}, **{"divided": True, **options})


def look_up(tables, seed=0):
    torch.manual_seed(10 * seed + rank)
    return tables["item"](torch.randint(0, 50_000, (16, 4))).sum()


def step(tables, shared, seed=0):
    look_up(tables, seed).backward()
    shared.step()


def told(action: Callable[[], object]) -> None:
    try:
        action()
    except Exception as error:  # whatever it is, the test looks at it
        unisono.print0(f"{type(error).__name__}: {error}")
    else:
        unisono.print0("nothing was refused")


def mistakes():
    tables = make()
    shared = share_tables(tables, engine="collective")
    step(tables, shared)
    own = shared.state_dict()
    parts = unisono.comm.all_gather(own)
    for wrong in (own, [], parts[:1], [parts[0], parts[0]], [parts[0], 3]):
        told(lambda wrong=wrong: shared.load_state_dict(wrong))
    told(shared.step)
    shared.load_state_dict(parts)
    step(tables, shared, 1)
    other = make(rows=60_000)
    told(lambda: share_tables(other, engine="collective").load_state_dict(parts))
    user = Tables({"user": Table(capacity=100, dim=4, optimizer=SGD(lr=0.1))}, divided=True)
    of_users = share_tables(user, engine="collective")
    told(lambda: of_users.load_state_dict(parts))
    of_users.load_state_dict(unisono.comm.all_gather(fresh_part()))
    told(lambda: share_tables(tables, engine="collective"))
    shared.fetch({"item": torch.arange(10)})
    tables["item"](torch.arange(10).view(1, -1))
    told(lambda: tables["item"](torch.arange(20_000).view(1, -1)))
    shared.step()
    told(lambda: shared.fetch({"items": torch.arange(10)}))
    told(tables.state_dict)
    told(tables.step)
    if rank:
        tables.optimizer.param_groups[0]["lr"] = 0.5
    told(lambda: step(tables, shared, 2))
    tables.optimizer.param_groups[0]["lr"] = 0.1
    step(tables, shared, 3)
    told(lambda: shared.step() if not rank else shared.evaluation().__enter__())
    step(tables, shared, 4)
    for i in range(3):
        user["user"](torch.arange(30) + 30 * i + 15 * rank).sum().backward()
        if i < 2:
            of_users.step()
    told(of_users.step)
    user["user"](torch.arange(10)).sum().backward()
    of_users.step()
    assert user["user"].rows.count == 75
    told(lambda: share_tables(make(rows=50_000 + rank), engine="collective"))
    written = make()
    if rank:
        with torch.no_grad():
            written["item"].rows.written[3] = 1
    told(lambda: share_tables(written, engine="collective"))
    told(lambda: share_tables(make(copies=2), engine="collective"))
    told(lambda: share_tables(make(divided=False), engine="collective"))
    told(lambda: share_tables(make(), engine="gpu"))
    told(lambda: share_tables(make().to("meta")))
    with shared.evaluation():  # where rows that were not named come, too
        shared.fetch({"item": torch.arange(10)})
        tables["item"](torch.arange(10 + 5000 * rank).view(1, -1))
    step(tables, shared, 5)


def fresh_part():
    user = Tables({"user": Table(capacity=100, dim=4, optimizer=SGD(lr=0.1))}, divided=True)
    return share_tables(user, engine="collective").state_dict()


def raises():
    tables = make()
    shared = share_tables(tables, engine="collective")
    step(tables, shared)
    with shared.evaluation():
        look_up(tables, 1)
        if rank:
            raise ValueError("of rank 1 alone")
        look_up(tables, 2)
        print("all 2 lookups", flush=True)


if sys.argv[1] == "told":
    mistakes()
    unisono.print0("done")
else:
    raises()
