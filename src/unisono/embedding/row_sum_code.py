"""Texts of compiled functions that sort ids, and add rows up. They add in the order in which torch's operations do."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.embedding.vector_code import LANES, Code, Numbers

__all__ = ["MOST_POOLED", "bags_code", "sort_code", "sum_code"]

MOST_POOLED = 8 * LANES
"""The longest rows of `bags_code`, whose sums are in registers."""


def sort_code() -> str:
    """Return the text of the function that sorts integers by some of their bits, keeping the order of equal ones.

    It is called `sort` and has the arguments n, the integers, memory for the result, memory for mask + 2 integers, the
    number of the lowest of the bits, and their mask once they are shifted down. It returns n.
    """
    arguments = [("n", "i64"), ("keys", "ptr"), ("out", "ptr"), ("counts", "ptr"), ("shift", "i64"), ("mask", "i64")]
    code = Code("sort", arguments, itemsize=4)
    size = code.let("add i64 %mask, 1")

    def digit(key: str) -> str:
        return code.let(f"and i64 {code.let(f'lshr i64 {key}, %shift')}, %mask")

    def clear(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        code.put_integer("%counts", index, "0")
        return carried

    def count(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        own = digit(code.integer("%keys", index))
        code.put_integer("%counts", own, code.let(f"add i64 {code.integer('%counts', own)}, 1"))
        return carried

    def begin(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        before, found = code.integer("%counts", size), code.integer("%counts", index)
        code.put_integer("%counts", index, before)
        code.put_integer("%counts", size, code.let(f"add i64 {before}, {found}"))
        return carried

    def move(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        key = code.integer("%keys", index)
        own = digit(key)
        to = code.integer("%counts", own)
        code.put_integer("%out", to, key)
        code.put_integer("%counts", own, code.let(f"add i64 {to}, 1"))
        return carried

    code.repeat(0, size, clear)
    code.put_integer("%counts", size, "0")
    code.repeat(0, "%n", count)
    code.repeat(0, size, begin)
    code.repeat(0, "%n", move)
    code.end("%n")
    return code.text()


def sum_code(*, itemsize: int, dim: int) -> str:
    """Return the text of the function that adds up the rows of equal ids.

    It is called `sum` and has the arguments n, the ids in ascending order, their places before, the number of places in
    turn that take the same row, the rows, an integer that is 0, and memory for the distinct ids and for their sums.
    It returns n, and leaves the number of distinct ids in the integer.

    Args:
        itemsize: The bytes of a number.
        dim: The numbers of a row.
    """
    arguments = [("n", "i64"), ("ordered", "ptr"), ("order", "ptr"), ("width", "i64"), ("source", "ptr")]
    code = Code("sum", [*arguments, ("found", "ptr"), ("ids", "ptr"), ("sums", "ptr")], itemsize=itemsize)
    last = code.let("sub i64 %n, 1")

    def source(index: str) -> str:
        row = code.let(f"udiv i64 {code.integer('%order', index)}, %width")
        return code.place("%source", code.times(row, dim))

    def entry(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        code.fetch(source(code.ahead(index, last, dim * itemsize)), dim)
        added, own = source(index), code.integer("%ordered", index)
        is_first = code.let(f"icmp eq i64 {index}, 0")
        before = code.let(f"sub i64 {index}, {code.let(f'select i1 {is_first}, i64 0, i64 1')}")
        is_other = code.let(f"icmp ne i64 {own}, {code.integer('%ordered', before)}")
        is_new = code.let(f"or i1 {is_first}, {is_other}")
        so_far = code.integer("%found", "0")
        found = code.let(f"add i64 {so_far}, {code.let(f'zext i1 {is_new} to i64')}")
        number = code.let(f"sub i64 {found}, 1")
        to = code.place("%sums", code.times(number, dim))

        def put(at: str | int, lanes: int, total: Numbers) -> Numbers:
            # Zeros are added as torch does, which makes -0.0 to 0.0.
            code.write(to, at, code.read(added, at, lanes) + code.zeros(lanes))
            return total

        def add(at: str | int, lanes: int, total: Numbers) -> Numbers:
            code.write(to, at, code.read(to, at, lanes) + code.read(added, at, lanes))
            return total

        def begin() -> None:
            code.put_integer("%found", "0", found)
            code.put_integer("%ids", number, own)
            code.over_row(dim, put)

        def go_on() -> None:
            code.over_row(dim, add)

        code.choose(is_new, begin, go_on)
        return carried

    code.repeat(0, "%n", entry)
    code.end("%n")
    return code.text()


def bags_code(*, itemsize: int, dim: int, id_nbytes: int) -> str:
    """Return the text of the function that adds up the rows of bags.

    It is called `bags` and has the arguments n, the number of bags, the rows of the table, all n ids, the number of the
    first id of each bag, the table with the distance of its rows, and memory for the sums. It returns n, or the number
    of the first id that is no row.

    Args:
        itemsize: The bytes of a number.
        dim: The numbers of a row, at most `MOST_POOLED`.
        id_nbytes: The bytes of ids and first numbers: 4 or 8.
    """
    arguments = [("n", "i64"), ("bags", "i64"), ("rows", "i64"), ("ids", "ptr"), ("begins", "ptr"), ("weight", "ptr")]
    code = Code("bags", [*arguments, ("stride", "i64"), ("sums", "ptr")], itemsize=itemsize)
    last = code.let("sub i64 %n, 1")
    last_bag = code.let("sub i64 %bags, 1")
    parts = [(LANES * block, LANES) for block in range(dim // LANES)]
    if dim % LANES:
        parts.append((dim - dim % LANES, dim % LANES))

    def row(index: str) -> tuple[str, str]:
        number = code.integer("%ids", index, nbytes=id_nbytes)
        return number, code.place("%weight", code.times(number, "%stride"))

    def add(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        code.fetch(row(code.ahead(index, last, dim * itemsize))[1], dim)
        number, place = row(index)
        code.need(code.let(f"icmp ult i64 {number}, %rows"), index)
        return [total + code.read(place, at, lanes) for total, (at, lanes) in zip(carried, parts, strict=True)]

    def bag(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        begin = code.integer("%begins", index, nbytes=id_nbytes)
        is_last = code.let(f"icmp eq i64 {index}, {last_bag}")
        after = code.let(f"select i1 {is_last}, i64 {index}, i64 {code.let(f'add i64 {index}, 1')}")
        end = code.let(f"select i1 {is_last}, i64 %n, i64 {code.integer('%begins', after, nbytes=id_nbytes)}")
        to = code.place("%sums", code.times(index, dim))
        zeros = [code.zeros(lanes) for _, lanes in parts]

        def write(sums: Sequence[Numbers]) -> None:
            for (at, _), value in zip(parts, sums, strict=True):
                code.write(to, at, value)

        has_ids = code.let(f"icmp slt i64 {begin}, {end}")
        code.choose(has_ids, lambda: write(code.repeat(begin, end, add, zeros)), lambda: write(zeros))
        return carried

    code.repeat(0, "%bags", bag)
    code.end("%n")
    return code.text()
