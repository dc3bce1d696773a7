"""The rules of `row_optimizers.py` as formulas of a compiled function, which computes a row while it is in registers.

What is computed is what the rules say of tensors; operations are rounded one by one, so results differ by rounding. A
sum over a row has `LANES` parts: part l adds the elements l, l + 16, l + 32, ... from left to right, and then the first
half of the parts is added to the second, until one is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from unisono.embedding.row_optimizers import RowOptimizer, corrected_rate
from unisono.embedding.vector_code import LANES, Code, Numbers

__all__ = ["Part", "settings_of", "stores_of", "update_code"]

_Settings = Mapping[str, Numbers]
_Group = Mapping[str, Any]


class _Formula(NamedTuple):
    """A rule. Gradients are those after clipping and weight decay."""

    settings: Callable[[_Group, float], dict[str, float]]
    """Returns the numbers that the formula reads, from the optimizer's settings and the number of the update."""
    elements: Callable[[_Settings, Numbers, Numbers, list[Numbers], Numbers], tuple[Numbers, list[Numbers]]]
    """Returns new values and state from settings, values, gradients, state of elements, and the rate of the row."""
    row: Callable[[_Settings, Numbers, Numbers], Numbers] | None = None
    """Returns the new state of the row from settings, the mean square of gradients, and state. Its rate is
    `lr / (sqrt(state) + eps)`; without state of rows, it is `lr`."""


def _sgd(c: _Settings, w: Numbers, g: Numbers, state: list[Numbers], rate: Numbers) -> tuple[Numbers, list[Numbers]]:
    return w - c["lr"] * g, []


def _adagrad(
    c: _Settings, w: Numbers, g: Numbers, state: list[Numbers], rate: Numbers
) -> tuple[Numbers, list[Numbers]]:
    total = state[0] + g * g
    return w - c["lr"] * g / (total.sqrt() + c["eps"]), [total]


def _rowwise_adagrad(
    c: _Settings, w: Numbers, g: Numbers, state: list[Numbers], rate: Numbers
) -> tuple[Numbers, list[Numbers]]:
    return w - rate * g, []


def _rowwise_adagrad_row(c: _Settings, mean_square: Numbers, total: Numbers) -> Numbers:
    return total + mean_square


def _adam(c: _Settings, w: Numbers, g: Numbers, state: list[Numbers], rate: Numbers) -> tuple[Numbers, list[Numbers]]:
    mean = state[0] + (g - state[0]) * c["new1"]
    square = state[1] * c["old2"] + g * g * c["new2"]
    return w - c["lr"] * mean / (square.sqrt() + c["eps"]), [mean, square]


def _rowwise_adam(
    c: _Settings, w: Numbers, g: Numbers, state: list[Numbers], rate: Numbers
) -> tuple[Numbers, list[Numbers]]:
    mean = state[0] + (g - state[0]) * c["new1"]
    return w - rate * mean, [mean]


def _rowwise_adam_row(c: _Settings, mean_square: Numbers, square: Numbers) -> Numbers:
    return square * c["old2"] + mean_square * c["new2"]


def _of_sgd(group: _Group, step: float) -> dict[str, float]:
    return {"lr": group["lr"]}


def _of_adagrad(group: _Group, step: float) -> dict[str, float]:
    return {"lr": group["lr"], "eps": group["eps"]}


def _of_adam(group: _Group, step: float) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    rate = corrected_rate(group["lr"], beta1, beta2, step)
    return {"lr": rate, "eps": group["eps"], "new1": 1 - beta1, "old2": beta2, "new2": 1 - beta2}


_FORMULAS = {
    "SGD": _Formula(_of_sgd, _sgd),
    "Adagrad": _Formula(_of_adagrad, _adagrad),
    "RowwiseAdagrad": _Formula(_of_adagrad, _rowwise_adagrad, _rowwise_adagrad_row),
    "Adam": _Formula(_of_adam, _adam),
    "RowwiseAdam": _Formula(_of_adam, _rowwise_adam, _rowwise_adam_row),
}


def settings_of(rule: type[RowOptimizer], dim: int, group: _Group, step: float) -> dict[str, float]:
    """Return the numbers that the function of a rule gets, in their order.

    Args:
        rule: The rule.
        dim: The numbers of a row.
        group: The settings of the optimizer.
        step: The number of this update, from 1.
    """
    clip, decay = group["clip_row_norm"], group["weight_decay"]
    common = {"dim": dim, "one": 1.0, "tiny": 1e-6, "clip": 0.0 if clip is None else clip, "decay": decay}
    return {**common, **_FORMULAS[rule.__name__].settings(group, step)}


Part = Literal["all", "row numbers", "columns"]
"""What a function does: the whole update; what it makes of whole rows, which are the factor by which they are clipped
and their new state; or the rest of the update, which may be that of some columns."""


def stores_of(rule: type[RowOptimizer], part: Part, *, decays: bool) -> list[str]:
    """Return what a function reads and writes for each row: "weight", "factors", and state by its name, in order."""
    if part == "all":
        return ["weight", *rule.per_row, *rule.per_element]
    if part == "row numbers":
        return [*(["weight"] if decays else []), "factors", *rule.per_row]
    return ["weight", "factors", *rule.per_row, *rule.per_element]


def update_code(rule: type[RowOptimizer], part: Part, *, itemsize: int, dim: int, clips: bool, decays: bool) -> str:
    """Return the text of a function that updates rows of a table.

    It is called `update` and has the arguments n, the rows of the table, the row numbers of the entries, their
    gradients with the distance of two of them, the settings as an array of numbers, and each of `stores_of` with the
    distance of its rows. It returns n, or the number of the first entry whose row does not exist.

    Args:
        rule: The rule.
        part: What it does.
        itemsize: The bytes of a number.
        dim: The numbers of a row, or of its columns.
        clips: True if `clip_row_norm` is set.
        decays: True if `weight_decay` is not 0.
    """
    return _UpdateText(rule, part, itemsize=itemsize, dim=dim, clips=clips, decays=decays).text()


class _UpdateText:
    def __init__(
        self, rule: type[RowOptimizer], part: Part, *, itemsize: int, dim: int, clips: bool, decays: bool
    ) -> None:
        self._rule, self._formula, self._dim, self._part = rule, _FORMULAS[rule.__name__], dim, part
        self._clips, self._decays = clips, decays
        self._stores = stores_of(rule, part, decays=decays)
        arguments = [("n", "i64"), ("rows", "i64"), ("which", "ptr"), ("gradient", "ptr"), ("gradient.stride", "i64")]
        arguments.append(("settings", "ptr"))
        for store in self._stores:
            arguments += [(store, "ptr"), (f"{store}.stride", "i64")]
        self._code = Code("update", arguments, itemsize=itemsize)

    def text(self) -> str:
        code = self._code
        names = settings_of(self._rule, self._dim, _SAMPLE, 1)
        single = {name: code.read("%settings", i) for i, name in enumerate(names)}
        self._settings = {
            lanes: {name: number.times(lanes) for name, number in single.items()}
            for lanes in {1, LANES, self._dim % LANES} - {0}
        }
        last = code.let("sub i64 %n, 1")

        def entry(index: str, carried: list[Numbers]) -> list[Numbers]:
            numbers = (1 + len(self._rule.per_element)) * self._dim + len(self._rule.per_row)
            self._fetch(code.ahead(index, last, numbers * code.itemsize))
            row = code.integer("%which", index)
            code.need(code.let(f"icmp ult i64 {row}, %rows"), index)
            self._change(row, code.place("%gradient", code.times(index, "%gradient.stride")))
            return []

        code.repeat(0, "%n", entry)
        code.end("%n")
        return code.text()

    def _fetch(self, index: str) -> None:
        code = self._code
        row = code.integer("%which", index)
        for store in self._stores:
            place = code.place(f"%{store}", code.times(row, f"%{store}.stride"))
            code.fetch(place, 1 if store in ("factors", *self._rule.per_row) else self._dim)

    def _change(self, row: str, gradient: str) -> None:
        code, formula = self._code, self._formula
        one = self._settings[1]
        places = {store: code.place(f"%{store}", code.times(row, f"%{store}.stride")) for store in self._stores}
        factor = None
        if self._clips and self._part == "columns":
            factor = code.read(places["factors"])
        elif self._clips:

            def add_square(at: str | int, lanes: int, total: Numbers) -> Numbers:
                g = code.read(gradient, at, lanes)
                return total + (g * g).filled()

            norm = code.over_row(self._dim, add_square).sum().sqrt()
            factor = (one["clip"] / (norm + one["tiny"])).at_most(one["one"])
            if self._part == "row numbers":
                code.write(places["factors"], 0, factor)
        by_lanes = {lanes: None if factor is None else factor.times(lanes) for lanes in self._settings}

        def read_gradient(at: str | int, lanes: int) -> Numbers:
            g, factors = code.read(gradient, at, lanes), by_lanes[lanes]
            if factors is not None:
                g = g * factors
            if self._decays:
                g = g + code.read(places["weight"], at, lanes) * self._settings[lanes]["decay"]
            return g

        rate = one["lr"]
        if formula.row is not None:
            (of_row,) = self._rule.per_row
            state_of_row = code.read(places[of_row])
            if self._part != "columns":

                def add_changed_square(at: str | int, lanes: int, total: Numbers) -> Numbers:
                    g = read_gradient(at, lanes)
                    return total + (g * g).filled()

                mean_square = code.over_row(self._dim, add_changed_square).sum() / one["dim"]
                state_of_row = formula.row(one, mean_square, state_of_row)
                code.write(places[of_row], 0, state_of_row)
            rate = one["lr"] / (state_of_row.sqrt() + one["eps"])
        if self._part == "row numbers":
            return
        rates = {lanes: rate.times(lanes) for lanes in self._settings}

        def change(at: str | int, lanes: int, total: Numbers) -> Numbers:
            g, w = read_gradient(at, lanes), code.read(places["weight"], at, lanes)
            state = [code.read(places[store], at, lanes) for store in self._rule.per_element]
            w, state = formula.elements(self._settings[lanes], w, g, state, rates[lanes])
            for store, new in zip(self._rule.per_element, state, strict=True):
                code.write(places[store], at, new)
            code.write(places["weight"], at, w)
            return total

        code.over_row(self._dim, change)


_SAMPLE = {"clip_row_norm": None, "weight_decay": 0.0, "lr": 0.0, "eps": 0.0, "betas": (0.0, 0.0)}
"""Settings of any rule, to learn the names of the numbers."""
