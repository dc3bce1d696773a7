"""Keys: the one source of every random number of a run.

A key is a 63-bit integer derived from the run's seed, the name of a stream, and the coordinates of the thing that needs
randomness (epoch, step, virtual rank, sample). Ranks and worker processes are no coordinates, so they change nothing.
"""

from __future__ import annotations

import hashlib

__all__ = ["derive_key"]


def derive_key(seed: int, stream: str, *coordinates: int) -> int:
    """Derive the 63-bit key of one point of one stream of random numbers.

    Pure. Keys of different points are independent: BLAKE2b (RFC 7693) of the exact text of all arguments.
    Args: seed is the run's, any integer; stream names the use, without spaces; coordinates are any integers.

    >>> derive_key(0, "model", 3, 1) == derive_key(0, "model", 3, 1)
    True
    >>> derive_key(0, "model", 3, 1) == derive_key(0, "model", 1, 3)
    False
    """
    # "%d" because repr differs between int, bool and NumPy's integers that are equal. One call: steps wait for this.
    text = ("%d %s" + " %d" * len(coordinates)) % (seed, stream, *coordinates)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
