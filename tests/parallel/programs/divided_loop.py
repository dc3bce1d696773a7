"""Train divided tables in a loop of one's own, and print what came: `divided_loop.py ENGINE KIND STEPS FROM TO`.

It begins with the state in FROM and leaves its own in TO; "-" is none. If KIND is "ddp", torch's DDP has the dense
part; if it is "still", that is not trained, since its sums depend on what ranks are connected by. With FILES in the
environment, tables are in files in that folder, and rows are read ahead. With DEVICE, the dense part is there.
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono.embedding import SGD, Adam, RowwiseAdagrad, Table, Tables, export_rows
from unisono.parallel import replicate, share_tables
from unisono.state.digest import digest

device = os.environ.get("DEVICE", "cpu")
engine, kind, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
start, end = (None if name == "-" else Path(name) for name in sys.argv[4:6])
SIZES = {
    "fixed": ({"rows": 50_000, "init_std": 0.1}, {"rows": 500, "init_std": 1.0}),
    "dynamic": ({"capacity": 300, "when_full": "evict_oldest"}, {"capacity": 500, "admit_after": 2}),
}
SIZES["ddp"] = SIZES["still"] = SIZES["fixed"]


def merged(folder, table):
    """The rows in all parts, by number."""
    parts = [torch.load(path) for path in sorted(folder.glob("*.pt"))]
    tables = [part["tables"][table] for part in parts]
    order = torch.argsort(torch.cat([each["rows"] for each in tables]))
    columns = {key: torch.cat([each["state"][key] for each in tables])[order] for key in tables[0]["state"]}
    columns |= {key: torch.cat([each[key] for each in tables])[order] for key in ("rows", "weight")}
    return columns | tables[0]["map"]


def main():
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        unisono.init()
    rank, size = unisono.rank(), unisono.world_size()
    torch.manual_seed(rank)  # first values are rank 0's
    settings = zip(SIZES[kind], (Adam(lr=0.05), RowwiseAdagrad(lr=0.1), SGD(lr=0.1)), strict=False)
    common = {"dim": 4, "pooling": "sum", "directory": os.environ.get("FILES")}
    first, second = (Table(**of, **common, optimizer=rule) for of, rule in settings)
    tables = Tables({"items": first, "users": second}, divided=True)
    torch.manual_seed(1)
    dense = nn.Linear(8, 3)
    nn.ModuleList([dense, tables]).to(device)
    model = dense
    if size > 1:
        model = DistributedDataParallel(dense) if kind == "ddp" else dense
        if model is dense and kind != "still":
            replicate(dense)
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1 * (kind != "still"))
    shared = share_tables(tables, engine=engine)
    schedule = torch.optim.lr_scheduler.ExponentialLR(tables.optimizer, 0.9)
    done = 0
    if start is not None:
        shared.load_state_dict(torch.load(path, mmap=True) for path in start.glob("*.pt"))
        saved = torch.load(start / "dense", weights_only=True)
        dense.load_state_dict(saved["model"])
        schedule.load_state_dict(saved["schedule"])
        done = saved["done"]
    generator = torch.Generator().manual_seed(2)
    all_ids, all_labels = (torch.randint(0, most, (20, 64, 6), generator=generator) for most in (400, 3))
    for step in range(done, done + count):
        ids, labels = (of_all[step].chunk(size)[rank].to(device) for of_all in (all_ids, all_labels))
        optimizer.zero_grad()
        tables.prefetch({"items": ids * 97 % 40_000})
        for some, targets in zip(ids.chunk(2), labels.chunk(2), strict=True):
            found = torch.cat([tables["items"](some * 97 % 40_000), tables["users"](some[:, :3])], 1)
            F.cross_entropy(model(found), targets[:, 0]).backward()
        optimizer.step()
        shared.step()
        schedule.step()
        assert all(p.grad is None for p in tables.parameters())
    with shared.evaluation(), torch.no_grad():  # ranks look up differently often
        every = torch.arange(300, device=device)
        values = [tables["users"](every[7 * i :].view(1, -1)).sum().item() for i in range(3 * (1 - rank))]
    if end is None:
        return
    end.mkdir(exist_ok=True)
    torch.save(shared.state_dict(), end / f"{rank}.pt")
    for name in tables:
        if shared.is_divided or not rank:
            export_rows(tables[name], end / f"{name}.npz")
    if size > 1:
        unisono.comm.barrier()
    if not rank:
        saved = {"model": dense.cpu().state_dict(), "schedule": schedule.state_dict(), "done": done + count}
        torch.save(saved, end / "dense")
        exported = [{k: torch.from_numpy(v) for k, v in np.load(end / f"{name}.npz").items()} for name in tables]
        rows = [digest(merged(end, table))[:16] for table in range(2)]
        print("rows", *rows, *(digest(each)[:16] for each in exported))
        print("dense", digest(dense.state_dict())[:16], values, schedule.get_last_lr())


if __name__ == "__main__":
    main()
