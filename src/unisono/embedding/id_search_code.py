"""Texts of compiled functions that search ids in a hash table, and that compute first values of rows from a hash."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.embedding.vector_code import Code, Numbers

__all__ = [
    "FIRST_FACTOR",
    "GOLDEN",
    "PARTS",
    "PART_BITS",
    "SECOND_FACTOR",
    "SHIFTS",
    "find_code",
    "initial_code",
    "insert_code",
]

GOLDEN, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SHIFTS = 30, 27, 31
"""The constants of SplitMix64."""
PARTS, PART_BITS = 4, 16
"""How many parts of a hash are added up for a value, and the bits of one."""

_AHEAD = 24
"""How many ids later a slot or an id of the list is wanted that is asked for now."""
_EMPTY = -1


def find_code() -> str:
    """Return the text of the function that finds ids in a list, by an index as that of `id_index.py`.

    It is called `find` and has the arguments n, at least 1, the ids, the slots and the number of slots less 1, the
    list, and memory for the places and for n integers. It returns n. The place of an id that is not in the list is -1.
    """
    arguments = [("n", "i64"), ("ids", "ptr"), ("slots", "ptr"), ("mask", "i64"), ("listed", "ptr")]
    code = Code("find", [*arguments, ("found", "ptr"), ("begins", "ptr")], itemsize=4)
    last = code.let("sub i64 %n, 1")

    def begin(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        slot = code.let(f"and i64 {_mixed(code, code.integer('%ids', index))}, %mask")
        code.put_integer("%begins", index, slot)
        return carried

    def look(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        code.fetch_integer("%slots", code.integer("%begins", _later(code, index, last)), nbytes=4)
        code.put_integer("%found", index, code.integer("%slots", code.integer("%begins", index), nbytes=4))
        return carried

    def compare(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        # Beside an empty slot, what is asked for is before the list: that is allowed, and not read.
        code.fetch_integer("%listed", code.integer("%found", _later(code, index, last)))
        own = code.integer("%ids", index)

        def probe(slot: str) -> tuple[str, str]:
            place = code.integer("%slots", slot, nbytes=4)
            code.put_integer("%found", index, place)
            is_taken = code.let(f"icmp ne i64 {place}, {_EMPTY}")
            read = code.let(f"select i1 {is_taken}, i64 {place}, i64 0")
            is_other = code.let(f"icmp ne i64 {code.integer('%listed', read)}, {own}")
            return code.let(f"and i1 {is_taken}, {is_other}"), _next(code, slot)

        code.follow(code.integer("%begins", index), probe)
        return carried

    for body in (begin, look, compare):
        code.repeat(0, "%n", body)
    code.end("%n")
    return code.text()


def insert_code() -> str:
    """Return the text of the function that puts places into an index as that of `id_index.py`.

    It is called `insert` and has the arguments n, at least 1, the places, whose ids are not in the index, the slots,
    of which more than n are empty, the number of slots less 1, and the list. It returns n.
    """
    arguments = [("n", "i64"), ("places", "ptr"), ("slots", "ptr"), ("mask", "i64"), ("listed", "ptr")]
    code = Code("insert", arguments, itemsize=4)
    last = code.let("sub i64 %n, 1")

    def slot_of(index: str) -> str:
        own = code.integer("%listed", code.integer("%places", index))
        return code.let(f"and i64 {_mixed(code, own)}, %mask")

    def entry(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        code.fetch_integer("%slots", slot_of(_later(code, index, last)), nbytes=4)
        own = code.integer("%places", index)

        def probe(slot: str) -> tuple[str, str]:
            place = code.integer("%slots", slot, nbytes=4)
            is_taken = code.let(f"icmp ne i64 {place}, {_EMPTY}")
            code.put_integer("%slots", slot, code.let(f"select i1 {is_taken}, i64 {place}, i64 {own}"), nbytes=4)
            return is_taken, _next(code, slot)

        code.follow(slot_of(index), probe)
        return carried

    code.repeat(0, "%n", entry)
    code.end("%n")
    return code.text()


def initial_code(*, itemsize: int, dim: int) -> str:
    """Return the text of the function that computes first values of rows, as `initial_rows` does.

    It is called `initial` and has the arguments n, at least 1, the ids, the seed, what the sum of the parts of a hash
    has to be reduced by, the factor after that, and memory for the rows. It returns n.

    Args:
        itemsize: The bytes of a number.
        dim: The numbers of a row.
    """
    arguments = [("n", "i64"), ("ids", "ptr"), ("seed", "i64"), ("mean", "i64"), ("factor", "ptr"), ("rows", "ptr")]
    code = Code("initial", arguments, itemsize=itemsize)
    factor = code.read("%factor")

    def entry(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        of_id = _mixed(code, code.let(f"xor i64 {code.integer('%ids', index)}, %seed"))
        to = code.place("%rows", code.times(index, dim))

        def put(at: str | int, lanes: int, total: Numbers) -> Numbers:
            first = code.let(f"add i64 {of_id}, {code.times(str(at), GOLDEN)}")
            steps = code.integers([GOLDEN * (lane + 1) for lane in range(lanes)])
            kind = code.integers_type(lanes)
            bits = _mixed(code, code.let(f"add {kind} {code.spread_integer(first, lanes)}, {steps}"), lanes)
            low, parts = code.integers([(1 << PART_BITS) - 1] * lanes), []
            for part in range(PARTS):
                shifted = code.let(f"lshr {kind} {bits}, {code.integers([PART_BITS * part] * lanes)}")
                parts.append(code.let(f"and {kind} {shifted}, {low}"))
            summed = parts[0]
            for each in parts[1:]:
                summed = code.let(f"add {kind} {summed}, {each}")
            centred = code.let(f"sub {kind} {summed}, {code.spread_integer('%mean', lanes)}")
            code.write(to, at, code.numbers(centred, lanes) * factor.times(lanes))
            return total

        code.over_row(dim, put)
        return carried

    code.repeat(0, "%n", entry)
    code.end("%n")
    return code.text()


def _mixed(code: Code, bits: str, lanes: int = 1) -> str:
    """Return what `initial_rows.mixed` does of integers of 64 bits."""
    kind = code.integers_type(lanes)
    for shift, factor in zip(SHIFTS, (FIRST_FACTOR, SECOND_FACTOR, None), strict=True):
        upper = code.let(f"lshr {kind} {bits}, {code.integers([shift] * lanes)}")
        bits = code.let(f"xor {kind} {bits}, {upper}")
        if factor is not None:
            bits = code.let(f"mul {kind} {bits}, {code.integers([factor] * lanes)}")
    return bits


def _later(code: Code, index: str, last: str) -> str:
    then = code.let(f"add i64 {index}, {_AHEAD}")
    is_within = code.let(f"icmp slt i64 {then}, {last}")
    return code.let(f"select i1 {is_within}, i64 {then}, i64 {last}")


def _next(code: Code, slot: str) -> str:
    return code.let(f"and i64 {code.let(f'add i64 {slot}, 1')}, %mask")
