"""Where a process stands in its job, and how ranks come together: placement, hosts, rendezvous, process groups.

Files, in reading order:

    placement.py           where this process stands, as its launcher says
    ranks.py               rank() and the like, for asking anywhere and at any time
    initialize.py          init(): from what the launcher, the arguments and the other ranks know to a process group
    rendezvous.py          where ranks meet: a store, and an exchange of small values over it
    hosts.py               ranks by host, and the backend that follows from hosts and GPUs
    current.py             the job of this process, how it is found again, and how it ends
    subgroups.py           groups of some of the ranks
    user_function.py       refuses collectives where only some ranks may come, such as in a loss function

Every rank must call `init`, `subgroup` and `split`, also one that ends up in no group, in the same order. Asking where
this process stands concerns no other rank.

Nothing here moves tensors. To begin a job each rank writes some values of a few hundred bytes to the store, and reads
those of all ranks once; the first process group takes what its backend takes, with shm memory as `unisono.shm` says.
"""
