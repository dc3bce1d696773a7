"""Collectives of any value over a process group, and the checks that find ranks which call different things.

Users get them from `unisono.comm`. A tensor, a structure of tensors or any object goes in; receivers need to know
neither shapes nor types before.

Files, in reading order:

    object_collectives.py  broadcast, all_gather, gather, scatter, all_to_all
    reductions.py          all_reduce, reduce, reduce_scatter
    send_recv.py           messages between two ranks, and the barrier
    group.py               what is known of a process group: its ranks, and the devices that its backend takes
    serialization.py, framing.py, object_transport.py
                           a value becomes a payload, travels with an envelope, and is made again
    structure.py, reduce_ops.py, argument_checks.py
                           structures taken apart, the operations, the errors of wrong arguments
    tensor_collectives.py, differentiable.py
                           the collectives of one tensor, without and with a gradient
    check_mode.py, watchdog.py, call_description.py
                           calls are compared before they begin, or once they are late
    construction.py, discarded.py, polling_wait.py, world.py
                           parts for the packages above

Every rank of the group must call a collective, in the same order. What only some ranks know to be wrong, such as a
value that cannot be pickled, is an error on all of them.

Traffic: a tensor alone takes the backend's own collective. Any other value takes one collective of 1 KiB for each rank,
which is all if the value fits into it, and a second one for the rest; rests are filled up to the largest as long as
that at most doubles what travels. A reduction of a structure compares it in the first, then sums one vector for each
dtype. Check mode (`unisono run --check`) adds a few messages to the store for each call.

Memory: results share none with arguments; on the way there is one copy of what is sent and of what is received, and
tensors that autograd follows are kept until the backward.
"""
