"""One voice for all ranks: printing, logging and progress.

    unisono run -n 2 examples/notes/rank_zero_output.py

What every rank prints comes out as often as there are ranks, and N progress bars overwrite each other. Here rank 0
speaks for all, warnings of other ranks are still seen, and the one bar counts the work of all ranks.
"""

import time

import unisono

unisono.init()
rank, world_size = unisono.rank(), unisono.world_size()

print("every rank says this")
unisono.print0("rank 0 says this for all")

log = unisono.get_logger("notes")
log.info("starting with %d ranks", world_size)  # rank 0 alone
if rank == world_size - 1:
    log.warning("this rank has found an empty file")  # any rank

# Each rank has 50 batches and says only how far it is itself; nobody waits for anybody.
for _ in unisono.progress(range(50), name="training"):
    time.sleep(0.01)

unisono.print0("done")
