"""Train tables on servers, and end some of these: `table_servers.py CONSISTENCY STEPS KILLS [RANKS PAUSE PLACEMENT]`.

Prints a digest and what the servers have done. KILLS are steps after which all servers are killed, and RANKS the steps
in which a rank kills itself, as numbers with commas, or "-". PAUSE is how many seconds each step takes longer.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.embedding import SGD, Adam, RowwiseAdagrad, Table, Tables, dense_parameters

MODE, STEPS = sys.argv[1], int(sys.argv[2])
KILLS, DEATHS = ([int(step) for step in text.split(",") if step != "-"] for text in [*sys.argv[3:], "-"][:2])
PAUSE_S = float(sys.argv[5]) if len(sys.argv) > 5 else 0.0
PLACEMENT = sys.argv[6] if len(sys.argv) > 6 else "hash"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        full = {"when_full": "evict_oldest"} if MODE == "sync" else {}
        self.tables = Tables(
            {
                "words": Table(rows=700, dim=3, optimizer=Adam(lr=0.05, clip_row_norm=0.5)),
                "bags": Table(rows=900, dim=8, pooling="sum", optimizer=RowwiseAdagrad(lr=0.1, weight_decay=0.01)),
                "any": Table(capacity=900, dim=4, pooling="mean", optimizer=SGD(lr=0.1), init_std=0.1, **full),
            },
            consistency=MODE,
            placement=PLACEMENT,
        )
        self.out = nn.Linear(15, 2)

    def forward(self, ids):
        words, bags, other = (self.tables[name] for name in ("words", "bags", "any"))
        return self.out(torch.cat([words(ids[:, 0] % 700), bags(ids % 900), other(ids % 800 * 7919)], 1))


def loss(model, batch):
    if unisono.rank() and trainer.steps_done in DEATHS:
        DEATHS.clear()
        if not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(PAUSE_S / 2)  # a rank has two virtual ranks
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


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
trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, seed=1, progress=False)
generator = torch.Generator().manual_seed(5)
data = TensorDataset(
    torch.randint(0, 20_000, (96 * STEPS, 12), generator=generator), torch.randint(0, 2, (96 * STEPS,))
)
for batch in trainer.batches(data, batch_size=96):
    trainer.step(loss, batch)
    if unisono.rank() == 0 and trainer.steps_done in KILLS:
        kill_servers()
digest = trainer.digest()
if unisono.rank() == 0:
    print(f"weights sha256: {digest}")
    print(model.tables.server_counts)
