"""Where a process stands in its job, and how ranks come together: placement, hosts, rendezvous, process groups.

Files, in reading order:

    placement.py           the place of this process in its job, according to its launcher
    ranks.py               rank() and the like, which can be called anywhere and at any time
    initialize.py          init(): makes a process group from the launcher's variables and the arguments of all ranks
    rendezvous.py          the rendezvous: a store that all ranks share
    store_exchange.py      exchanges of small values over it
    local_ranks.py         the placement of ranks on hosts, and the backend that follows from hosts and GPUs
    current.py             the current job of this process, the lookup of groups and stores, and the end of the job
    subgroups.py           groups of some of the ranks
    user_function.py       refuses collectives that only some ranks may reach, such as in a loss function

Every rank must call `init`, `subgroup` and `split` in the same order, also a rank that ends up in no group. The
functions in `ranks` and `placement` involve no other rank.

Nothing here moves tensors. To begin a job each rank writes some values of a few hundred bytes to the store, and reads
those of all ranks once. The first process group uses the memory of its backend; `unisono.shm` states that of shm.
"""
