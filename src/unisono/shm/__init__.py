"""The backend `shm` of torch.distributed: process groups over memory that the ranks of one host share.

`init_process_group("shm")` creates a group whose collectives combine values in the order of ranks, so all ranks get the
same bits, and take a few microseconds. It requires Linux: anonymous memory, process descriptors, POSIX semaphores.

Files, in reading order:

    process_group.py       the methods that torch calls, by torch's names
    runtime.py             the parts of a group, from creation to shutdown
    reduce_calls.py, movement_calls.py, tensor_checks.py, flat.py
                           check a call and prepare it as an operation on flat tensors
    slot_ring.py           slots through which ranks exchange data, in rounds
    collective_context.py, fingerprint.py
                           the slots of a group, and the check that all ranks make the same call
    data_movement.py, reduce_algorithms.py, divided_all_reduce.py, arithmetic.py
                           the operations: generators that yield the rounds and ranks that they wait for
    collective_executor.py, work.py
                           the order and thread in which operations run, and the work returned to the caller
    point_to_point.py, point_to_point_progress.py, ring_buffer.py
                           messages between two ranks, the threads that move them, and the memory they go through
    peer_wait.py, peers.py, abort_flag.py, semaphore.py
                           waiting for other ranks, and detecting that one has ended or given up
    handshake.py, segment_layout.py, segment.py
                           how ranks come to share memory, and its layout

Every rank of a group must create it and call the same collectives in the same order, with equal sizes and types.
Otherwise all ranks get a `DistBackendError` that names both sides, and the group can no longer be used.

The ranks of a group share one segment, by default of at most 64 MiB for up to 32 ranks (`segment_layout.Options`): half
for messages, the rest for eight slots of each rank, of at most 256 KiB. Pages are allocated at first use. Larger
tensors are sent in pieces, without additional memory. In an all_reduce every rank writes its tensor once and reads
those of all others. From four ranks on, tensors larger than a slot are divided, and a rank reads twice the size of its
tensor.

The launcher and `import unisono` read names here: no module of this package is imported before it is needed.
"""
