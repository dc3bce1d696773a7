"""Saving: one rank writes, and names carry no "module." in front.

    unisono run -n 2 examples/notes/save_without_prefix.py

DDP is a module around the model, so its state dict has other names, and a plain model cannot load it: that is why
notes say "save model.module". replicate wraps nothing, so there is nothing to remember.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono import comm
from unisono.parallel import replicate

unisono.init(device="cpu")
folder = Path(comm.broadcast(tempfile.mkdtemp() if unisono.is_main() else None))
path = folder / "model.pt"


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def save(model):
    comm.barrier()  # no rank is still reading
    if unisono.is_main():
        torch.save(model.state_dict(), path)
    comm.barrier()  # no rank reads before the file is there


def load():
    plain = network()
    plain.load_state_dict(torch.load(path))
    return plain


wrapped = DistributedDataParallel(network())
unisono.print0("DDP:      ", list(wrapped.state_dict())[:2])
save(wrapped)
try:
    load()
except RuntimeError as error:
    problem = str(error).splitlines()[1].partition(":")[0].strip()
    unisono.print0("loading it into a plain model:", problem)
save(wrapped.module)
load()
unisono.print0("with model.module: loaded")

model = network()
replicate(model)
unisono.print0("replicate:", list(model.state_dict())[:2])
save(model)
print("loaded on this rank, equal:", torch.equal(load()[0].weight, model[0].weight))

comm.barrier()
if unisono.is_main():
    path.unlink()
    folder.rmdir()
