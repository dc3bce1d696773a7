"""Collectives of any value over a process group, and the checks that find ranks that make different calls.

Users import them from `unisono.comm`, which describes errors, memory and traffic. A tensor, a structure of tensors or
any object goes in; receivers need not know shapes or types in advance.

Files, in reading order:

    object_collectives.py  broadcast, all_gather, gather, scatter, all_to_all
    object_gradients.py    their backward: gradients on the way back to the ranks that sent the values
    reductions.py          all_reduce, reduce, reduce_scatter
    send_recv.py           messages between two ranks, and the barrier
    group.py               facts about a process group: its ranks, and the devices that its backend supports
    serialization.py, framing.py, object_transport.py, received.py
                           values to payloads and back, envelopes, the transport of both, and the checks of what arrives
    structure.py, reduce_ops.py, argument_checks.py
                           leaves of structures, operations, errors of wrong arguments
    tensor_collectives.py, differentiable.py
                           the collectives of one tensor, without and with a gradient
    check_mode.py, late_call_check.py, call_description.py
                           comparison of calls before they begin, or once they are late
    construction.py, discarded.py, polling_wait.py, world.py
                           parts for the packages above

Every rank of the group must call a collective, in the same order. A value that one rank cannot send, for example
because it cannot be pickled, is an error on all of them.
"""
