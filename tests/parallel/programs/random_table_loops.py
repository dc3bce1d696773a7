"""Train random tables in a loop of one's own: `random_table_loops.py SEED ENGINE FIRST LAST FROM TO [FILES]`.

It makes the steps FIRST to LAST, begins with the state in FROM unless that is "-", leaves its own in TO, and prints the
digest of that. With DEVICE in the environment, what is looked up goes there.
"""

import os
import random
import sys
from pathlib import Path

import torch

import unisono
from unisono.embedding import SGD, Adagrad, Adam, RowwiseAdagrad, RowwiseAdam, Table, Tables
from unisono.parallel import share_tables
from unisono.state.digest import digest

seed, engine, first, last = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
start, end = Path(sys.argv[5]), Path(sys.argv[6])
files = sys.argv[7] if len(sys.argv) > 7 else None
device = os.environ.get("DEVICE", "cpu")
unisono.init()
rank = unisono.rank()


def settings(draw):
    """Settings of a table."""
    rule = draw.choice([SGD, Adagrad, RowwiseAdagrad, Adam, RowwiseAdam])
    common = {
        "dim": draw.choice([1, 3, 4, 8, 16]),
        "pooling": draw.choice([None, "sum", "mean"]),
        "optimizer": rule(lr=0.1, weight_decay=draw.choice([0.0, 0.1]), clip_row_norm=draw.choice([None, 0.05])),
        "dtype": draw.choice([torch.float32, torch.float32, torch.float64]),
        "padding_idx": draw.choice([None, None, 1]),
        "directory": files,
    }
    if draw.random() < 0.5:
        return {**common, "rows": draw.choice([2, 50, 3000, 200_000]), "init_std": draw.choice([0.0, 0.1, 1.0])}
    common |= {"capacity": draw.choice([600, 5000, 100_000]), "admit_after": draw.choice([1, 1, 2, 3])}
    if draw.random() < 0.5:
        common |= {"when_full": draw.choice(["evict_oldest", "evict_rarest"])}
        common |= {"evict_after": draw.choice([None, 2, 5])}
    return common


def ids_for(table, draw, generator):
    """A few ids, or none."""
    ids = (torch.rand(draw.choice([0, 1, 5, 40]), 3, generator=generator) ** 2 * (table.rows or 500)).long()
    ids = ids.to(device)
    return ids * 0x9E3779B97F4A7C1 - 77 if table.rows is None else ids.int() if draw.random() < 0.3 else ids


def loss_of(table, ids):
    found = table(ids).double()
    scaled = found * torch.arange(1, table.table.dim + 1, device=device)
    return found.square().sum() if table.table.pooling is None else scaled.sum()


def lookups_of(step):
    """What this rank looks up in a step, and in the evaluation behind it: names and ids."""
    of_all, own = random.Random(1000 * seed + step), random.Random(10 * (1000 * seed + step) + rank)
    generator = torch.Generator().manual_seed(own.randint(0, 10**6))
    # Nothing else makes ranks wait here, so they need not look up equally often.
    counts = [of_all.randint(0, 4) if of_all.random() < 0.5 else own.randint(0, 5), own.randint(0, 4)]
    names = [[own.choice([*tables]) for _ in range(count)] for count in counts]
    return [[(name, ids_for(tables[name].table, own, generator)) for name in of_part] for of_part in names]


def by_name(drawn):
    """All ids of some lookups, by name."""
    found = {}
    for name, ids in drawn:
        found[name] = torch.cat([found.get(name, ids[:0].view(-1)), ids.reshape(-1)])
    return found


draw = random.Random(seed)
settings_of = {name: settings(draw) for name in ("a", "b", "c")[: draw.randint(1, 3)]}
torch.manual_seed(seed + draw.choice([0, rank]))  # first values are rank 0's
tables = Tables({name: Table(**each) for name, each in settings_of.items()}, divided=True)
tables.to(device)
shared = share_tables(tables, engine=engine)
if str(start) != "-":
    shared.load_state_dict(torch.load(path, mmap=True) for path in start.glob("*.pt"))
for step in range(first, last):
    of_all, own = random.Random(f"{seed} {step}"), random.Random(f"{seed} {step} {rank}")
    drawn, in_evaluation = lookups_of(step)
    if of_all.random() < 0.3:  # lookups are then no exchanges
        shared.fetch(by_name(drawn))
    if of_all.random() < 0.4 or own.random() < 0.2:  # by all ranks, or by some
        shared.fetch(by_name(lookups_of(step + 1)[0]), ahead=True)
    losses = [loss_of(tables[name], ids) for name, ids in drawn]
    if losses:
        sum(losses).backward()
    shared.step()
    if of_all.random() < 0.3:
        with shared.evaluation(), torch.no_grad():
            for name, ids in in_evaluation:
                loss_of(tables[name], ids)
end.mkdir(exist_ok=True)
torch.save(shared.state_dict(), end / f"{rank}.pt")
unisono.comm.barrier()
if not rank:
    parts = [torch.load(path) for path in sorted(end.glob("*.pt"))]
    found = {}
    for number in range(len(tables)):
        of_ranks = [part["tables"][number] for part in parts]
        order = torch.argsort(torch.cat([each["rows"] for each in of_ranks]))
        columns = {key: torch.cat([each["state"][key] for each in of_ranks])[order] for key in of_ranks[0]["state"]}
        columns |= {key: torch.cat([each[key] for each in of_ranks])[order] for key in ("rows", "weight")}
        found[str(number)] = {**columns, **{f"map {key}": value for key, value in of_ranks[0]["map"].items()}}
    print("state sha256:", digest(found), [part["tables"][0]["state step"] for part in parts])
