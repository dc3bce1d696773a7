"""A barrier: nobody goes on before everybody has come. And what to take where it is used for something else.

    unisono run -n 3 examples/notes/barrier.py

Barriers around "rank 0 does it first" are a common source of hangs: if rank 0 fails, the others wait for ever.
unisono.main_first() lets rank 0 go first, passes its error on, and has no barrier to forget.
"""

import tempfile
import time
from pathlib import Path

import unisono
from unisono import comm
from unisono.errors import PeerError

unisono.init()
rank, world_size = unisono.rank(), unisono.world_size()
folder = Path(comm.broadcast(tempfile.mkdtemp() if unisono.is_main() else None))

# Ranks come one after the other, and each leaves a mark. Behind the barrier all marks are there.
time.sleep(0.1 * rank)
(folder / f"rank-{rank}").touch()
comm.barrier()
print(f"behind the barrier: {len(list(folder.glob('rank-*')))} of {world_size} ranks have come")

# Rank 0 prepares a file, the others use it.
prepared = folder / "dataset.txt"
with unisono.main_first():
    if prepared.exists():
        print("found the file")
    else:
        prepared.write_text("forty-two")
        print("wrote the file")

# What fails on rank 0 fails on all ranks, and at once.
try:
    with unisono.main_first():
        (folder / "missing.txt").read_text()
except (FileNotFoundError, PeerError) as error:
    print(type(error).__name__, "instead of a hang")

comm.barrier()
(folder / f"rank-{rank}").unlink()
comm.barrier()
if unisono.is_main():
    prepared.unlink()
    folder.rmdir()
