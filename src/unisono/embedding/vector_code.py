"""Text of functions for LLVM that compute with vectors. Pure: `compiler.py` turns the text into machine code.

Vectors are explicit, so what is added to what is written down here and not decided by a compiler: without the flags of
fast mathematics, LLVM keeps every operation as it is, whatever instructions a machine has. A multiplication and an
addition stay two, so a CPU with fused ones rounds as one without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["LANES", "Code", "Numbers"]

LANES = 16
"""The numbers of a vector. Machines with shorter registers use several for it."""
_LINE_NBYTES = 64
_AHEAD_NBYTES = 4096
"""What is on its way from memory: with rows of 256 bytes, a lookup took 2.3 ms with 1 KB, 1.8 with 4 KB, 2.0 with 8."""
_MOST_LINES = 8
"""The cache lines of a row that are fetched ahead; the machine sees the rest coming."""
_UNROLLED = 8
"""Up to so many vectors of a row are computed without a loop."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """A vector of numbers in a function, or one number."""

    code: Code
    name: str
    lanes: int

    @property
    def type(self) -> str:
        """The type, as LLVM names it."""
        return self.code.type_of(self.lanes)

    def __add__(self, other: Numbers) -> Numbers:
        return self._with("fadd", other)

    def __sub__(self, other: Numbers) -> Numbers:
        return self._with("fsub", other)

    def __mul__(self, other: Numbers) -> Numbers:
        return self._with("fmul", other)

    def __truediv__(self, other: Numbers) -> Numbers:
        return self._with("fdiv", other)

    def sqrt(self) -> Numbers:
        """Return the square roots."""
        suffix = f"f{8 * self.code.itemsize}" if self.lanes == 1 else f"v{self.lanes}f{8 * self.code.itemsize}"
        return self._new(self.code.call(self.type, f"llvm.sqrt.{suffix}", [(self.type, self.name)]))

    def at_most(self, bound: Numbers) -> Numbers:
        """Return the smaller of two numbers. What is no number stays so."""
        is_more = self.code.let(f"fcmp ogt {self.type} {self.name}, {bound.name}")
        return self._new(self.code.let(f"select i1 {is_more}, {self.type} {bound.name}, {self.type} {self.name}"))

    def times(self, lanes: int) -> Numbers:
        """Return a vector with this number in all places."""
        if lanes == 1:
            return self
        vector = self.code.type_of(lanes)
        first = self.code.let(f"insertelement {vector} poison, {self.type} {self.name}, i32 0")
        zeros = ", ".join(["i32 0"] * lanes)
        spread = self.code.let(f"shufflevector {vector} {first}, {vector} poison, <{lanes} x i32> <{zeros}>")
        return Numbers(self.code, spread, lanes)

    def filled(self) -> Numbers:
        """Return a vector of `LANES` numbers: these, and zeros."""
        if self.lanes == LANES:
            return self
        if self.lanes == 1:
            vector = self.code.type_of(LANES)
            filled = self.code.let(f"insertelement {vector} zeroinitializer, {self.type} {self.name}, i32 0")
        else:
            places = ", ".join(f"i32 {min(lane, self.lanes)}" for lane in range(LANES))
            filled = self.code.let(
                f"shufflevector {self.type} {self.name}, {self.type} zeroinitializer, <{LANES} x i32> <{places}>"
            )
        return Numbers(self.code, filled, LANES)

    def sum(self) -> Numbers:
        """Return the sum of a vector of 2**k numbers: the first half plus the second, until one is left."""
        rest = self
        while rest.lanes > 1:
            half = rest.lanes // 2
            rest = rest._part(range(half)) + rest._part(range(half, rest.lanes))
        return rest

    def _part(self, places: range) -> Numbers:
        if len(places) == 1:
            return Numbers(self.code, self.code.let(f"extractelement {self.type} {self.name}, i32 {places[0]}"), 1)
        mask = ", ".join(f"i32 {place}" for place in places)
        part = self.code.let(
            f"shufflevector {self.type} {self.name}, {self.type} poison, <{len(places)} x i32> <{mask}>"
        )
        return Numbers(self.code, part, len(places))

    def _with(self, operation: str, other: Numbers) -> Numbers:
        assert self.lanes == other.lanes, f"{operation} of {self.lanes} and {other.lanes} numbers"
        return self._new(self.code.let(f"{operation} {self.type} {self.name}, {other.name}"))

    def _new(self, name: str) -> Numbers:
        return Numbers(self.code, name, self.lanes)


Body: TypeAlias = Callable[[str, list[Numbers]], Sequence[Numbers]]
"""What a loop repeats: gets the number of the turn and the carried vectors, and returns these for the next turn."""


class Code:
    """The text of a function, as it is written, for numbers of one type.

    Names of values are those of LLVM: "%3", or an integer.

    Args:
        name: The name of the function. It returns an integer of 64 bits.
        arguments: The name and type of each argument: "i64" or "ptr".
        itemsize: The bytes of a number: 4 or 8.
    """

    def __init__(self, name: str, arguments: Sequence[tuple[str, str]], *, itemsize: int) -> None:
        self.itemsize = itemsize
        self._scalar = {4: "float", 8: "double"}[itemsize]
        self._lines: list[str] = []
        self._declared: dict[str, str] = {}
        self._names = 0
        given = ", ".join(f"{kind} %{argument}" for argument, kind in arguments)
        self._head = f"define i64 @{name}({given}) {{"
        self._begin("entry")

    def text(self) -> str:
        """Return the whole module."""
        return "\n".join([*self._declared.values(), self._head, *self._lines, "}", ""])

    def type_of(self, lanes: int) -> str:
        """Return the type of so many numbers."""
        return self._scalar if lanes == 1 else f"<{lanes} x {self._scalar}>"

    def let(self, expression: str) -> str:
        """Compute something, and return its name."""
        name = self._name()
        self._lines.append(f"  {name} = {expression}")
        return name

    def call(self, kind: str, function: str, given: Sequence[tuple[str, str]]) -> str:
        """Call a function of LLVM. Args: given has the type and the name of each argument."""
        self._declare(kind, function, given)
        return self.let(f"call {kind} @{function}({', '.join(f'{of} {name}' for of, name in given)})")

    def zeros(self, lanes: int) -> Numbers:
        """Return zeros."""
        return Numbers(self, "zeroinitializer" if lanes > 1 else "0.0", lanes)

    def times(self, left: str, right: str | int) -> str:
        """Return the product of two integers."""
        return self.let(f"mul i64 {left}, {right}")

    def integer(self, pointer: str, index: str, *, nbytes: int = 8) -> str:
        """Read an integer of an array."""
        kind = f"i{8 * nbytes}"
        place = self.let(f"getelementptr {kind}, ptr {pointer}, i64 {index}")
        read = self.let(f"load {kind}, ptr {place}")
        return read if nbytes == 8 else self.let(f"sext {kind} {read} to i64")

    def put_integer(self, pointer: str, index: str, value: str, *, nbytes: int = 8) -> None:
        """Write an integer to an array, of its lowest bytes."""
        kind = f"i{8 * nbytes}"
        place = self.let(f"getelementptr {kind}, ptr {pointer}, i64 {index}")
        written = value if nbytes == 8 else self.let(f"trunc i64 {value} to {kind}")
        self._lines.append(f"  store {kind} {written}, ptr {place}")

    def integers_type(self, lanes: int) -> str:
        """Return the type of so many integers of 64 bits."""
        return "i64" if lanes == 1 else f"<{lanes} x i64>"

    def integers(self, values: Sequence[int]) -> str:
        """Return constant integers of 64 bits, of which only so many bits count."""
        signed = [(value + 2**63) % 2**64 - 2**63 for value in values]
        return str(signed[0]) if len(signed) == 1 else f"<{', '.join(f'i64 {value}' for value in signed)}>"

    def spread_integer(self, value: str, lanes: int) -> str:
        """Return so many times an integer of 64 bits."""
        if lanes == 1:
            return value
        kind, zeros = self.integers_type(lanes), ", ".join(["i32 0"] * lanes)
        first = self.let(f"insertelement {kind} poison, i64 {value}, i32 0")
        return self.let(f"shufflevector {kind} {first}, {kind} poison, <{lanes} x i32> <{zeros}>")

    def numbers(self, integers: str, lanes: int) -> Numbers:
        """Return integers of 64 bits, that fit into 32, as numbers."""
        short = "i32" if lanes == 1 else f"<{lanes} x i32>"
        reduced = self.let(f"trunc {self.integers_type(lanes)} {integers} to {short}")
        return Numbers(self, self.let(f"sitofp {short} {reduced} to {self.type_of(lanes)}"), lanes)

    def place(self, pointer: str, index: str | int) -> str:
        """Return where a number of an array is."""
        return self.let(f"getelementptr {self._scalar}, ptr {pointer}, i64 {index}")

    def read(self, pointer: str, index: str | int = 0, lanes: int = 1) -> Numbers:
        """Read numbers of an array, from one on."""
        place = self.place(pointer, index)
        return Numbers(self, self.let(f"load {self.type_of(lanes)}, ptr {place}, align {self.itemsize}"), lanes)

    def write(self, pointer: str, index: str | int, value: Numbers) -> None:
        """Write numbers to an array, from one on."""
        place = self.place(pointer, index)
        self._lines.append(f"  store {value.type} {value.name}, ptr {place}, align {self.itemsize}")

    def fetch(self, place: str, count: int) -> None:
        """Ask for numbers that will be needed, without waiting for them."""
        nbytes = count * self.itemsize
        # A row that begins within a line ends in one more.
        offsets = [*range(0, nbytes, _LINE_NBYTES), *([nbytes - 1] if nbytes % _LINE_NBYTES else [])]
        for offset in offsets[:_MOST_LINES]:
            self._fetch_line(self.let(f"getelementptr i8, ptr {place}, i64 {offset}"))

    def fetch_integer(self, pointer: str, index: str, *, nbytes: int = 8) -> None:
        """Ask for an integer of an array that will be needed, without waiting for it."""
        self._fetch_line(self.let(f"getelementptr i{8 * nbytes}, ptr {pointer}, i64 {index}"))

    def ahead(self, index: str, last: str, entry_nbytes: int) -> str:
        """Return the index of the entry that should be fetched while that of `index` is computed, of so many bytes."""
        distance = min(max(_AHEAD_NBYTES // entry_nbytes, 4), 32)
        then = self.let(f"add i64 {index}, {distance}")
        is_within = self.let(f"icmp slt i64 {then}, {last}")
        return self.let(f"select i1 {is_within}, i64 {then}, i64 {last}")

    def need(self, condition: str, otherwise: str) -> None:
        """Return from the function with `otherwise` unless a condition holds."""
        ok, fail = self._label(), self._label()
        self._lines.append(f"  br i1 {condition}, label %{ok}, label %{fail}")
        self._begin(fail)
        self.end(otherwise)
        self._begin(ok)

    def choose(self, condition: str, yes: Callable[[], None], no: Callable[[], None] | None = None) -> None:
        """Do one thing if a condition holds, and another one otherwise."""
        first, second, after = self._label(), self._label(), self._label()
        self._lines.append(f"  br i1 {condition}, label %{first}, label %{second if no else after}")
        for label, action in ((first, yes), (second, no)):
            if action is not None:
                self._begin(label)
                action()
                self._lines.append(f"  br label %{after}")
        self._begin(after)

    def end(self, result: str) -> None:
        """Return from the function."""
        self._lines.append(f"  ret i64 {result}")

    def repeat(self, begin: str | int, end: str | int, body: Body, carried: Sequence[Numbers] = ()) -> list[Numbers]:
        """Repeat something with each number from `begin` to before `end`, at least once.

        Returns:
            The carried vectors at the end.
        """
        before, head, after = self._block, self._label(), self._label()
        self._lines.append(f"  br label %{head}")
        self._begin(head)
        at, index = len(self._lines), self._name()
        inner = [Numbers(self, self._name(), each.lanes) for each in carried]
        results = [*body(index, inner)]
        following = self.let(f"add i64 {index}, 1")
        goes_on = self.let(f"icmp slt i64 {following}, {end}")
        phis = [f"  {index} = phi i64 [{begin}, %{before}], [{following}, %{self._block}]"]
        for first, within, result in zip(carried, inner, results, strict=True):
            phis.append(
                f"  {within.name} = phi {first.type} [{first.name}, %{before}], [{result.name}, %{self._block}]"
            )
        self._lines[at:at] = phis
        self._lines.append(f"  br i1 {goes_on}, label %{head}, label %{after}")
        self._begin(after)
        return results

    def follow(self, first: str, body: Callable[[str], tuple[str, str]]) -> None:
        """Go from one integer to the next.

        Args:
            first: Where to begin.
            body: Gets an integer, and returns whether to go on, and the next one.
        """
        before, head, after = self._block, self._label(), self._label()
        self._lines.append(f"  br label %{head}")
        self._begin(head)
        place, at = len(self._lines), self._name()
        goes_on, following = body(at)
        self._lines.insert(place, f"  {at} = phi i64 [{first}, %{before}], [{following}, %{self._block}]")
        self._lines.append(f"  br i1 {goes_on}, label %{head}, label %{after}")
        self._begin(after)

    def over_row(
        self, dim: int, body: Callable[[str | int, int, Numbers], Numbers], total: Numbers | None = None
    ) -> Numbers:
        """Go through a row by vectors of `LANES` numbers, and a last one of the rest.

        Args:
            dim: The numbers of the row.
            body: Gets the first index of a vector, its lanes and the total so far, and returns the total.
            total: What the total begins with; None: zeros.
        """
        whole, rest = divmod(dim, LANES)
        total = self.zeros(LANES) if total is None else total
        if whole <= _UNROLLED:
            for block in range(whole):
                total = body(LANES * block, LANES, total)
        else:

            def turn(block: str, carried: list[Numbers]) -> list[Numbers]:
                return [body(self.times(block, LANES), LANES, carried[0])]

            (total,) = self.repeat(0, whole, turn, [total])
        return body(LANES * whole, rest, total) if rest else total

    def _fetch_line(self, place: str) -> None:
        given = [("ptr", place), ("i32", "0"), ("i32", "3"), ("i32", "1")]
        self._declare("void", "llvm.prefetch.p0", given)
        self._lines.append(f"  call void @llvm.prefetch.p0({', '.join(f'{of} {name}' for of, name in given)})")

    def _declare(self, kind: str, function: str, given: Sequence[tuple[str, str]]) -> None:
        self._declared[function] = f"declare {kind} @{function}({', '.join(of for of, _ in given)})"

    def _name(self) -> str:
        self._names += 1
        return f"%v{self._names}"

    def _label(self) -> str:
        self._names += 1
        return f"b{self._names}"

    def _begin(self, label: str) -> None:
        self._lines.append(f"{label}:")
        self._block = label
