"""What the parts of a state in a user's loop have in common: their heads, and how all ranks load all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pickle import UnpicklingError
from typing import Any

from unisono.collectives.construction import construct_on_all
from unisono.collectives.group import known_group
from unisono.collectives.world import World
from unisono.errors import CheckpointError, RankMismatchError
from unisono.mismatch import by_value
from unisono.text import a_type, name_ranks

__all__ = ["PartHeads", "load_on_all", "refuse_single_part"]

_GIVE = "give load_state_dict what state_dict returned on each rank, all at one moment"
_ERRORS_OF_FILES = (TypeError, ValueError, CheckpointError, OSError, RuntimeError, EOFError, UnpicklingError)
"""Errors that reading parts may raise."""


class PartHeads:
    """The heads of the parts that are loaded, which must be those of all ranks at one moment.

    Args:
        form: What all of them have under "form".
        version: The version of the form that can be read.
        what: What a part is one of, for messages, such as " of tables"; "" if there is no more to say.
        otherwise: What to do with parts of other versions, for messages.
    """

    def __init__(self, form: str, version: int, *, what: str = "", otherwise: str) -> None:
        self._form, self._version, self._what, self._otherwise = form, version, what, otherwise
        self._head: tuple[int, int] | None = None
        """The number of ranks, and of steps."""
        self._ranks: set[int] = set()

    @staticmethod
    def make(form: str, version: int, *, rank: int, ranks: int, steps: int) -> dict[str, Any]:
        """Return the head of a part."""
        return {"form": form, "version": version, "rank": rank, "ranks": ranks, "steps": steps}

    @property
    def count(self) -> int:
        """The number of parts that have come."""
        return len(self._ranks)

    def add(self, part: Any) -> None:
        """Check the next part.

        Raises:
            CheckpointError: It is none, or does not belong to those before.
        """
        if not isinstance(part, Mapping) or part.get("form") != self._form:
            raise CheckpointError(f"{a_type(part)} among the parts is not one{self._what}: {_GIVE}")
        if part["version"] != self._version:
            raise CheckpointError(
                f"a part has version {part['version']} of the form, and this version of unisono reads {self._version}: "
                f"load it with the one that wrote it, and {self._otherwise}"
            )
        head = part["ranks"], part["steps"]
        if self._head is not None and head != self._head:
            raise CheckpointError(
                f"there is a part of {self._head[0]} ranks after {self._head[1]} steps, and one of {head[0]} ranks "
                f"after {head[1]}: {_GIVE}, into a directory of its own"
            )
        if part["rank"] in self._ranks:
            raise CheckpointError(f"the part of rank {part['rank']} is there twice: {_GIVE}")
        self._head = head
        self._ranks.add(part["rank"])

    def complete(self) -> int:
        """Return the number of steps that had been made, after the last part.

        Raises:
            CheckpointError: There are no parts, or some are missing.
        """
        if self._head is None:
            raise CheckpointError(f"there are no parts: {_GIVE}")
        ranks, steps = self._head
        missing = sorted({*range(ranks)} - self._ranks)
        if missing:
            raise CheckpointError(
                f"the state is that of {ranks} ranks, and the parts of {name_ranks(missing)} are missing: {_GIVE}"
            )
        return steps


def refuse_single_part(parts: object) -> None:
    """Raise TypeError if what is to be loaded is the part of one rank."""
    if isinstance(parts, Mapping):
        raise TypeError(
            "parts is a dict, as of one rank: give load_state_dict a list of what state_dict returned on all ranks"
        )


def load_on_all(world: World, call: str, load: Callable[[], int]) -> int:
    """Load parts on all ranks, and return the number of steps that had been made. Every rank must call it.

    Args:
        world: The ranks.
        call: The name of the call, for messages.
        load: Loads the parts on this rank, and returns that number.

    Raises:
        RankMismatchError: On all ranks, if they have loaded different states.
        PeerError: Another rank could not load them; that rank raises the error itself.
    """
    if world.group is None:
        return load()
    steps: int
    steps, everyone = construct_on_all(
        known_group(world.group), call, load, lambda steps: steps, errors=_ERRORS_OF_FILES
    )
    if len({*everyone}) > 1:
        told = by_value({rank: f"one after {steps} steps" for rank, steps in enumerate(everyone)})
        raise RankMismatchError(f"ranks have loaded different states: {told}. Give all ranks the same parts")
    return steps
