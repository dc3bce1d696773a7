"""Texts of compiled functions that put ids in order, and say where each of them was."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.embedding.vector_code import Code, Numbers

__all__ = ["ascending_code", "order_code"]


def ascending_code() -> str:
    """Return the text of the function that counts how many of the first of n ids ascend strictly.

    It is called `ascending` and has the arguments n, at least 1, and the ids, of 64 bits. It returns n if all do.
    """
    code = Code("ascending", [("n", "i64"), ("ids", "ptr")], itemsize=4)
    code.choose(code.let("icmp slt i64 %n, 2"), lambda: None, lambda: _compare_pairs(code))
    code.end("%n")
    return code.text()


def _compare_pairs(code: Code) -> None:
    def entry(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        before = code.integer("%ids", code.let(f"sub i64 {index}, 1"))
        code.need(code.let(f"icmp slt i64 {before}, {code.integer('%ids', index)}"), index)
        return carried

    code.repeat(1, "%n", entry)


def order_code(*, passes: int, id_nbytes: int) -> str:
    """Return the text of the function that sorts ids, keeping the order of equal ones.

    It is called `order` and has the arguments n, the ids, how many of them follow each other in a group, the least id,
    the bits of the number of groups, memory for n integers twice, memory for as many integers as a digit has values and
    one more, and the bits of a digit, with which `passes` digits are enough for the greatest difference of two ids. It
    returns the number of distinct ids. Of the first memory and the second, after an even number of passes the second
    has the ids in order and the first their groups; otherwise it is the other way round.

    The sort is by radix, from the lowest digit on. Each id is the upper bits of an integer whose lower ones are its
    group, so what is moved is one integer.

    Args:
        passes: The number of digits, 0 or more.
        id_nbytes: The bytes of an id: 4 or 8.
    """
    arguments = [("n", "i64"), ("ids", "ptr"), ("width", "i64"), ("least", "i64"), ("low", "i64")]
    code = Code("order", [*arguments, ("a", "ptr"), ("b", "ptr"), ("counts", "ptr"), ("digit", "i64")], itemsize=4)
    size = code.let("shl i64 1, %digit")
    mask = code.let(f"sub i64 {size}, 1")

    def build(group: str, carried: list[Numbers]) -> Sequence[Numbers]:
        first = code.times(group, "%width")

        def entry(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
            place = code.let(f"add i64 {first}, {index}")
            number = code.let(f"sub i64 {code.integer('%ids', place, nbytes=id_nbytes)}, %least")
            code.put_integer("%a", place, code.let(f"or i64 {code.let(f'shl i64 {number}, %low')}, {group}"))
            return carried

        code.repeat(0, "%width", entry)
        return carried

    code.repeat(0, code.let("udiv i64 %n, %width"), build)
    source, target = "%a", "%b"
    shift = "%low"
    for _ in range(passes):
        _sort_by_digit(code, source, target, shift=shift, size=size, mask=mask)
        source, target = target, source
        shift = code.let(f"add i64 {shift}, %digit")
    _split(code, source, target)
    code.end(code.integer("%counts", "0"))
    return code.text()


def _sort_by_digit(code: Code, source: str, target: str, *, shift: str, size: str, mask: str) -> None:
    """Move integers to where they belong by one digit."""

    def digit(key: str) -> str:
        return code.let(f"and i64 {code.let(f'lshr i64 {key}, {shift}')}, {mask}")

    def clear(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        code.put_integer("%counts", index, "0")
        return carried

    def count(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        own = digit(code.integer(source, index))
        code.put_integer("%counts", own, code.let(f"add i64 {code.integer('%counts', own)}, 1"))
        return carried

    def begin(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        before, found = code.integer("%counts", size), code.integer("%counts", index)
        code.put_integer("%counts", index, before)
        code.put_integer("%counts", size, code.let(f"add i64 {before}, {found}"))
        return carried

    def move(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        key = code.integer(source, index)
        own = digit(key)
        to = code.integer("%counts", own)
        code.put_integer(target, to, key)
        code.put_integer("%counts", own, code.let(f"add i64 {to}, 1"))
        return carried

    code.repeat(0, size, clear)
    code.put_integer("%counts", size, "0")
    code.repeat(0, "%n", count)
    code.repeat(0, size, begin)
    code.repeat(0, "%n", move)


def _split(code: Code, keys: str, ids: str) -> None:
    """Write the ids of sorted integers, leave their groups in place, and count the distinct ones."""
    lowest = code.let(f"sub i64 {code.let('shl i64 1, %low')}, 1")
    code.put_integer("%counts", "0", "0")

    def entry(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        key = code.integer(keys, index)
        own = code.let(f"add i64 {code.let(f'lshr i64 {key}, %low')}, %least")
        code.put_integer(keys, index, code.let(f"and i64 {key}, {lowest}"))
        code.put_integer(ids, index, own)
        is_first = code.let(f"icmp eq i64 {index}, 0")
        before = code.let(f"sub i64 {index}, {code.let(f'select i1 {is_first}, i64 0, i64 1')}")
        is_other = code.let(f"icmp ne i64 {own}, {code.integer(ids, before)}")
        is_new = code.let(f"zext i1 {code.let(f'or i1 {is_first}, {is_other}')} to i64")
        code.put_integer("%counts", "0", code.let(f"add i64 {code.integer('%counts', '0')}, {is_new}"))
        return carried

    code.repeat(0, "%n", entry)
