"""Train tables in files, or in memory: `table_files.py WHERE STEPS KILLS RANKS [RUN]`.

WHERE is the folder of the files, or "-" for memory. KILLS are steps after which all servers are killed, and RANKS those
in which each rank kills itself once, as RANK:STEP; numbers with commas, or "-". RUN is the directory of the run. Prints
a digest.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.embedding import Adam, RowwiseAdagrad, Table, Tables, dense_parameters

WHERE, STEPS = sys.argv[1], int(sys.argv[2])
KILLS = [int(step) for step in sys.argv[3].split(",") if step != "-"]
DEATHS = [each for each in sys.argv[4].split(",") if each != "-"]
RUN = sys.argv[5] if len(sys.argv) > 5 else None
ALL = 12


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        here = None if WHERE == "-" else WHERE
        full = {"when_full": "evict_oldest"}
        self.tables = Tables(
            {
                "words": Table(rows=700, dim=3, optimizer=Adam(lr=0.05), init_std=0.5, padding_idx=3, directory=here),
                "bags": Table(
                    rows=9000, dim=8, pooling="sum", optimizer=RowwiseAdagrad(lr=0.1), init_std=0.1, directory=here
                ),
                "any": Table(
                    capacity=900, dim=4, pooling="mean", optimizer=Adam(lr=0.1), init_std=0.1, directory=here, **full
                ),
                "plain": Table(rows=700, dim=3, optimizer=Adam(lr=0.05)),
            }
        )
        self.out = nn.Linear(18, 2)

    def forward(self, ids):
        words, bags, other, plain = (self.tables[name] for name in ("words", "bags", "any", "plain"))
        parts = [words(ids[:, 0] % 700), bags(ids % 9000), other(ids % 800 * 7919), plain(ids[:, 1] % 700)]
        return self.out(torch.cat(parts, 1))


def loss(model, batch):
    rank = unisono.rank()
    if (death := f"{rank}:{trainer.steps_done}") in DEATHS and not Path(f"died.{death}").exists():
        Path(f"died.{death}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def lookups(batch):
    ids = batch[0]
    return {"words": ids[:, 0] % 700, "bags": ids % 9000, "any": ids % 800 * 7919, "plain": ids[:, 1] % 700}


def parent_of(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def kill_servers():
    ranks = {int(path.suffix[1:]) for path in Path().glob("rank.*")}
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        if pid not in ranks and parent_of(pid) == os.getppid():
            os.kill(pid, signal.SIGKILL)


if KILLS:
    Path(f"rank.{os.getpid()}").touch()
model = Net()
optimizer = torch.optim.AdamW(dense_parameters(model), lr=0.01)
checkpoints = unisono.Checkpoints(every_steps=2, every_epoch=False)
options = {} if RUN is None else {"directory": RUN, "checkpoints": checkpoints}
trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, seed=1, progress=False, **options)
generator = torch.Generator().manual_seed(5)
data = TensorDataset(
    torch.randint(0, 20_000, (96 * ALL, 12), generator=generator),
    torch.randint(0, 2, (96 * ALL,), generator=generator),
)
for _ in trainer.epochs(1, max_steps=STEPS):
    for batch in trainer.batches(data, batch_size=96, lookups=lookups):
        trainer.step(loss, batch)
        if unisono.rank() == 0 and trainer.steps_done in KILLS:
            kill_servers()
digest = trainer.digest()
rows = model.tables["bags"](torch.arange(9000).view(-1, 1)).detach()
if unisono.rank() == 0:
    print(f"weights sha256: {digest}")
    print("rows", float(rows.double().sum()))
if WHERE != "-":
    assert model.tables["bags"].file.has(model.tables["bags"].weight)
    assert unisono.world_size() == 1 or model.tables["bags"].file.is_shared
    assert not any(Path(WHERE).iterdir())
