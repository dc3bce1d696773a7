import itertools
import subprocess
import sys

import pytest

from unisono.plan import derive_key


def test_key_is_a_63_bit_integer():
    keys = [derive_key(0, "model", step) for step in range(1000)]
    assert all(0 <= key < 2**63 for key in keys)
    # All 63 bits are in use: each is set in about half of the keys.
    assert all(400 < sum(key >> bit & 1 for key in keys) < 600 for bit in range(63))


def test_every_argument_matters_and_their_order_too():
    points = [
        (seed, stream, *coordinates)
        for seed in (-1, 0, 1, 2**70)
        for stream in ("", "model", "model/", "data")
        for length in range(3)
        for coordinates in itertools.product((0, 1, 10, 11), repeat=length)
    ]
    keys = {derive_key(*point) for point in points}
    assert len(keys) == len(points)


@pytest.mark.parametrize(
    ("left", "right"), [((0, "a", 1, 23), (0, "a", 12, 3)), ((0, "a", 1), (0, "a1")), ((1, "a"), (11, "a"))]
)
def test_points_that_read_alike_have_different_keys(left, right):
    assert derive_key(*left) != derive_key(*right)


@pytest.mark.soak  # the test of versions has the same key in a process whose hashes are salted, too
def test_key_is_the_same_in_every_process():
    # A hash that is salted per process, as Python's own is, would give every rank another key.
    code = "from unisono.plan import derive_key; print(derive_key(3, 'model', 1, 4))"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert int(printed) == derive_key(3, "model", 1, 4)


def test_keys_stay_as_they_are_between_versions():
    # A checkpoint resumes under the same random numbers only if these never change.
    assert derive_key(0, "model") == KEY_OF_MODEL
    assert derive_key(3, "model", 1, 4) == KEY_OF_STEP


KEY_OF_MODEL = 4155416747587159865
KEY_OF_STEP = 3544263028318062216
