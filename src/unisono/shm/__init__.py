"""The backend `shm` of torch.distributed: process groups over memory that the ranks of one host share.

`init_process_group("shm")` gives a group whose collectives combine values in the order of ranks, so that all ranks get
the same bits, and take some microseconds. It needs Linux: memory without a name, process descriptors, POSIX semaphores.

Files, in reading order:

    process_group.py       what torch calls, by torch's names
    runtime.py             what a group consists of, and its end
    reduce_calls.py, movement_calls.py, tensor_checks.py, flat.py
                           a call is checked, and prepared as an operation on flat tensors
    slot_ring.py           slots through which ranks exchange data, in rounds
    collective_context.py, fingerprint.py
                           the slots of a group, and the check that all ranks call the same
    data_movement.py, reduce_algorithms.py, divided_all_reduce.py, arithmetic.py
                           the operations: generators that yield what they wait for
    executor.py, work.py   in which order and thread operations run, and what the caller gets
    point_to_point.py, progress_engine.py, ring_buffer.py
                           messages between two ranks
    peer_wait.py, peers.py, abort_flag.py, semaphore.py
                           how a rank waits, and learns that another has ended or given up
    handshake.py, segment_layout.py, segment.py
                           how ranks come to share memory, and what lies where in it

Every rank of a group must create it and call the same collectives in the same order, with equal sizes and types.
Otherwise all ranks get a `DistBackendError` that names both sides, and the group cannot be used any more.

A group has one segment of at most 64 MiB, shared by its ranks (`segment_layout.Options`): half for messages, the rest
for eight slots of each rank, of at most 256 KiB. Pages come into being when they are first written. Larger tensors
travel in pieces, without memory of their own. In an all_reduce every rank writes its tensor once and reads those of all
others; from four ranks on, tensors larger than a slot are divided, and a rank reads twice the size of its tensor.

The launcher and `import unisono` read names here: nothing is imported until a module is asked for.
"""
