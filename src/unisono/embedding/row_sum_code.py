"""Texts of compiled functions that add rows up, in the order in which torch's operations do."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.embedding.vector_code import LANES, Code, Numbers

__all__ = ["MOST_POOLED", "bags_code", "gather_code", "merge_code", "sum_code"]

MOST_POOLED = 8 * LANES
"""The longest rows of `bags_code`, whose sums are in registers."""


def sum_code(*, itemsize: int, dim: int) -> str:
    """Return the text of the function that adds up the rows of equal ids.

    It is called `sum` and has the arguments n, the ids in ascending order, the row that each takes, the rows, an
    integer that is 0, and memory for the distinct ids and for their sums. It returns n, and leaves the number of
    distinct ids in the integer.

    Args:
        itemsize: The bytes of a number.
        dim: The numbers of a row.
    """
    arguments = [("n", "i64"), ("ordered", "ptr"), ("order", "ptr"), ("source", "ptr")]
    code = Code("sum", [*arguments, ("found", "ptr"), ("ids", "ptr"), ("sums", "ptr")], itemsize=itemsize)
    last = code.let("sub i64 %n, 1")

    def source(index: str) -> str:
        return code.place("%source", code.times(code.integer("%order", index), dim))

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


def merge_code(*, itemsize: int, dim: int) -> str:
    """Return the text of the function that adds up two lists of rows, each with distinct ids in ascending order.

    It is called `merge` and has the arguments n and m, the numbers of entries; the ids and the rows of the first list,
    and those of the second; memory for n + m ids and rows; and two integers that are 0. It returns the number of
    distinct ids. Of an id that both have, the row of the first list comes first in the sum.

    Args:
        itemsize: The bytes of a number.
        dim: The numbers of a row.
    """
    arguments = [("n", "i64"), ("m", "i64"), ("left", "ptr"), ("a", "ptr"), ("right", "ptr"), ("b", "ptr")]
    code = Code("merge", [*arguments, ("ids", "ptr"), ("sums", "ptr"), ("at", "ptr")], itemsize=itemsize)

    def entry(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        i, j = code.integer("%at", "0"), code.integer("%at", "1")
        has_left, has_right = code.let(f"icmp slt i64 {i}, %n"), code.let(f"icmp slt i64 {j}, %m")
        code.need(code.let(f"or i1 {has_left}, {has_right}"), index)
        # An entry that is not there is not read: another one of the two lists is, whose id is not used.
        own = code.integer(*_either(code, has_left, ("%left", i), ("%right", j)))
        other = code.integer(*_either(code, has_right, ("%right", j), ("%left", i)))
        is_less, is_more = code.let(f"icmp slt i64 {own}, {other}"), code.let(f"icmp sgt i64 {own}, {other}")
        takes_left = code.let(f"and i1 {has_left}, {code.let(f'xor i1 {is_more}, true')}")
        takes_right = code.let(f"and i1 {has_right}, {code.let(f'xor i1 {is_less}, true')}")
        code.put_integer("%ids", index, code.let(f"select i1 {takes_left}, i64 {own}, i64 {other}"))
        for number, (count, is_taken) in enumerate(((i, takes_left), (j, takes_right))):
            code.put_integer("%at", str(number), code.let(f"add i64 {count}, {code.let(f'zext i1 {is_taken} to i64')}"))
        to = code.place("%sums", code.times(index, dim))
        first, second = code.place("%a", code.times(i, dim)), code.place("%b", code.times(j, dim))

        def put(added: str) -> None:
            def body(at: str | int, lanes: int, total: Numbers) -> Numbers:
                code.write(to, at, code.read(added, at, lanes) + code.zeros(lanes))
                return total

            code.over_row(dim, body)

        def both() -> None:
            def body(at: str | int, lanes: int, total: Numbers) -> Numbers:
                code.write(to, at, code.read(first, at, lanes) + code.zeros(lanes) + code.read(second, at, lanes))
                return total

            code.over_row(dim, body)

        def one() -> None:
            code.choose(takes_left, lambda: put(first), lambda: put(second))

        code.choose(code.let(f"and i1 {takes_left}, {takes_right}"), both, one)
        return carried

    end = code.let("add i64 %n, %m")
    code.repeat(0, end, entry)
    code.end(end)
    return code.text()


def _either(code: Code, condition: str, yes: tuple[str, str], no: tuple[str, str]) -> tuple[str, str]:
    """Return the array and the index of one of two integers."""
    array = code.let(f"select i1 {condition}, ptr {yes[0]}, ptr {no[0]}")
    return array, code.let(f"select i1 {condition}, i64 {yes[1]}, i64 {no[1]}")


def gather_code(*, itemsize: int, dim: int) -> str:
    """Return the text of the function that copies rows of a table.

    It is called `gather` and has the arguments n, at least 1, the rows to copy, the number of rows of the table, the
    table with the distance of its rows, and memory for the copies. It returns n, or the number of the first of the rows
    to copy that is none.

    Args:
        itemsize: The bytes of a number.
        dim: The numbers of a row.
    """
    arguments = [("n", "i64"), ("which", "ptr"), ("rows", "i64"), ("table", "ptr"), ("stride", "i64")]
    code = Code("gather", [*arguments, ("copies", "ptr")], itemsize=itemsize)
    last = code.let("sub i64 %n, 1")

    def row(index: str) -> tuple[str, str]:
        number = code.integer("%which", index)
        return number, code.place("%table", code.times(number, "%stride"))

    def entry(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        code.fetch(row(code.ahead(index, last, dim * itemsize))[1], dim)
        (number, source), to = row(index), code.place("%copies", code.times(index, dim))
        code.need(code.let(f"icmp ult i64 {number}, %rows"), index)

        def copy(at: str | int, lanes: int, total: Numbers) -> Numbers:
            code.write(to, at, code.read(source, at, lanes))
            return total

        code.over_row(dim, copy)
        return carried

    code.repeat(0, "%n", entry)
    code.end("%n")
    return code.text()


def bags_code(*, itemsize: int, dim: int, id_nbytes: int, is_even: bool) -> str:
    """Return the text of the function that adds up the rows of bags.

    It is called `bags` and has the arguments n, the number of bags, the rows of the table, all n ids, the number of the
    first id of each bag (or the number of ids in each), the table with the distance of its rows, and memory for the
    sums. It returns n, or the number of the first id that is no row.

    Args:
        itemsize: The bytes of a number.
        dim: The numbers of a row, at most `MOST_POOLED`.
        id_nbytes: The bytes of ids and first numbers: 4 or 8.
        is_even: True if each bag has as many ids.
    """
    where = ("width", "i64") if is_even else ("begins", "ptr")
    arguments = [("n", "i64"), ("bags", "i64"), ("rows", "i64"), ("ids", "ptr"), where, ("weight", "ptr")]
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

    def bounds(index: str) -> tuple[str, str]:
        if is_even:
            begin = code.times(index, "%width")
            return begin, code.let(f"add i64 {begin}, %width")
        begin = code.integer("%begins", index, nbytes=id_nbytes)
        is_last = code.let(f"icmp eq i64 {index}, {last_bag}")
        after = code.let(f"select i1 {is_last}, i64 {index}, i64 {code.let(f'add i64 {index}, 1')}")
        return begin, code.let(f"select i1 {is_last}, i64 %n, i64 {code.integer('%begins', after, nbytes=id_nbytes)}")

    def bag(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        begin, end = bounds(index)
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
