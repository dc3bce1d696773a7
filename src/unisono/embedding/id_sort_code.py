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


def order_code(*, passes: int, id_nbytes: int, is_packed: bool) -> str:
    """Return the text of the function that sorts ids, keeping the order of equal ones.

    It is called `order` and has the arguments n, the ids, how many of them follow each other in a group, the least id,
    the bits of the number of groups, memory for n entries twice, memory for as many integers as a digit has values and
    one more, and the bits of a digit, with which `passes` digits are enough for the greatest difference of two ids. It
    returns the number of distinct ids. Of the first memory and the second, after an even number of passes the second
    has the ids in order and the first their groups; otherwise it is the other way round.

    The sort is by radix, from the lowest digit on. An entry is an integer, of which an id is the upper bits and its
    group the lower ones, so that one integer is moved. Where 64 bits are not enough for both, it is two integers.

    Args:
        passes: The number of digits, 0 or more.
        id_nbytes: The bytes of an id: 4 or 8.
        is_packed: True if an entry is one integer.
    """
    arguments = [("n", "i64"), ("ids", "ptr"), ("width", "i64"), ("least", "i64"), ("low", "i64")]
    code = Code("order", [*arguments, ("a", "ptr"), ("b", "ptr"), ("counts", "ptr"), ("digit", "i64")], itemsize=4)
    entries = _Packed(code) if is_packed else _Pairs(code)
    size = code.let("shl i64 1, %digit")
    mask = code.let(f"sub i64 {size}, 1")

    def build(group: str, carried: list[Numbers]) -> Sequence[Numbers]:
        first = code.times(group, "%width")

        def entry(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
            place = code.let(f"add i64 {first}, {index}")
            number = code.let(f"sub i64 {code.integer('%ids', place, nbytes=id_nbytes)}, %least")
            entries.make("%a", place, number, group)
            return carried

        code.repeat(0, "%width", entry)
        return carried

    code.repeat(0, code.let("udiv i64 %n, %width"), build)
    source, target = "%a", "%b"
    shift = entries.first_shift
    for _ in range(passes):
        _sort_by_digit(code, entries, source, target, shift=shift, size=size, mask=mask)
        source, target = target, source
        shift = code.let(f"add i64 {shift}, %digit")
    _split(code, entries, source, target)
    code.end(code.integer("%counts", "0"))
    return code.text()


class _Packed:
    """Entries that are one integer."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._lowest = code.let(f"sub i64 {code.let('shl i64 1, %low')}, 1")
        self.first_shift = "%low"
        """How far the lowest digit of an id is from the right of a key."""

    def make(self, array: str, index: str, number: str, group: str) -> None:
        """Write an entry."""
        shifted = self._code.let(f"shl i64 {number}, %low")
        self._code.put_integer(array, index, self._code.let(f"or i64 {shifted}, {group}"))

    def key(self, array: str, index: str) -> str:
        """Read what an entry is sorted by."""
        return self._code.integer(array, index)

    def move(self, source: str, index: str, key: str, target: str, to: str) -> None:
        """Write an entry, whose key has been read, to another place."""
        self._code.put_integer(target, to, key)

    def number(self, key: str) -> str:
        """Return what an id is more than the least one."""
        return self._code.let(f"lshr i64 {key}, %low")

    def group(self, array: str, index: str, key: str) -> str:
        """Return the group of an entry."""
        return self._code.let(f"and i64 {key}, {self._lowest}")


class _Pairs:
    """Entries that are two integers: of n, all of the first kind come before those of the second."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self.first_shift = "0"

    def make(self, array: str, index: str, number: str, group: str) -> None:
        """Write an entry."""
        self._code.put_integer(array, index, number)
        self._code.put_integer(array, self._second(index), group)

    def key(self, array: str, index: str) -> str:
        """Read what an entry is sorted by."""
        return self._code.integer(array, index)

    def move(self, source: str, index: str, key: str, target: str, to: str) -> None:
        """Write an entry, whose key has been read, to another place."""
        self._code.put_integer(target, to, key)
        self._code.put_integer(target, self._second(to), self._code.integer(source, self._second(index)))

    def number(self, key: str) -> str:
        """Return what an id is more than the least one."""
        return key

    def group(self, array: str, index: str, key: str) -> str:
        """Return the group of an entry."""
        return self._code.integer(array, self._second(index))

    def _second(self, index: str) -> str:
        return self._code.let(f"add i64 {index}, %n")


def _sort_by_digit(
    code: Code, entries: _Packed | _Pairs, source: str, target: str, *, shift: str, size: str, mask: str
) -> None:
    """Move entries to where they belong by one digit."""

    def digit(key: str) -> str:
        return code.let(f"and i64 {code.let(f'lshr i64 {key}, {shift}')}, {mask}")

    def clear(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        code.put_integer("%counts", index, "0")
        return carried

    def count(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        own = digit(entries.key(source, index))
        code.put_integer("%counts", own, code.let(f"add i64 {code.integer('%counts', own)}, 1"))
        return carried

    def begin(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        before, found = code.integer("%counts", size), code.integer("%counts", index)
        code.put_integer("%counts", index, before)
        code.put_integer("%counts", size, code.let(f"add i64 {before}, {found}"))
        return carried

    def move(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        key = entries.key(source, index)
        own = digit(key)
        to = code.integer("%counts", own)
        entries.move(source, index, key, target, to)
        code.put_integer("%counts", own, code.let(f"add i64 {to}, 1"))
        return carried

    code.repeat(0, size, clear)
    code.put_integer("%counts", size, "0")
    code.repeat(0, "%n", count)
    code.repeat(0, size, begin)
    code.repeat(0, "%n", move)


def _split(code: Code, entries: _Packed | _Pairs, source: str, ids: str) -> None:
    """Write the ids of sorted entries, leave their groups in place, and count the distinct ids."""
    code.put_integer("%counts", "0", "0")

    def entry(index: str, carried: list[Numbers]) -> Sequence[Numbers]:
        key = entries.key(source, index)
        own = code.let(f"add i64 {entries.number(key)}, %least")
        code.put_integer(source, index, entries.group(source, index, key))
        code.put_integer(ids, index, own)
        is_first = code.let(f"icmp eq i64 {index}, 0")
        before = code.let(f"sub i64 {index}, {code.let(f'select i1 {is_first}, i64 0, i64 1')}")
        is_other = code.let(f"icmp ne i64 {own}, {code.integer(ids, before)}")
        is_new = code.let(f"zext i1 {code.let(f'or i1 {is_first}, {is_other}')} to i64")
        code.put_integer("%counts", "0", code.let(f"add i64 {code.integer('%counts', '0')}, {is_new}"))
        return carried

    code.repeat(0, "%n", entry)
