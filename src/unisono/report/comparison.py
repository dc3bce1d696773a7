"""Runs compared: the first step at which they differ, and the settings in which they do.

Losses are compared by their bits, which events hold with all digits, and weights by the digests of
`Trainer(digest_every=...)`. Start reading at `compare_runs`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from unisono.errors import ReportError
from unisono.report.source import events_of, open_run
from unisono.report.summary import Document
from unisono.watch import Event, read_events

__all__ = ["FORMAT", "Traces", "compare_runs", "differing_settings", "first_difference", "traces_of"]

FORMAT = "unisono compare 1"
_MOST_NAMES = 20
_NO_SETTING = ("directory",)


class Traces:
    """The values of a run that are compared step by step: about 100 bytes for each step in memory."""

    def __init__(self) -> None:
        self.losses: dict[int, bytes] = {}
        """By the number of steps done: the bits of the losses of the steps that ended with this number."""
        self.digests: dict[int, bytes] = {}
        """By the number of steps done: a digest of the digests of all tensors."""

    def rewind(self, step: int) -> None:
        """Forget what came after a step, which a resumed run makes again."""
        for each in (self.losses, self.digests):
            for later in [known for known in each if known > step]:
                del each[later]


def traces_of(events: Iterable[Event]) -> Traces:
    """Return what is to be compared of the events of a run. Pure, in one pass."""
    traces, last = Traces(), 0
    for event in events:
        kind, step = event.get("event"), event.get("total_steps")
        if kind not in ("epoch", "step", "digest") or not isinstance(step, int):
            continue
        if kind == "epoch":
            if step < last:
                traces.rewind(step)
            last = step
        elif kind == "step" and (bits := _bits(event.get("loss"))) is not None:
            # A GAN has several steps of one number, one for each optimizer.
            traces.losses[step] = traces.losses[step] + bits if step == last and step in traces.losses else bits
            last = step
        elif kind == "digest" and isinstance(tensors := event.get("tensors"), Mapping):
            traces.digests[step] = blake2b(repr(sorted(tensors.items())).encode(), digest_size=8).digest()
    return traces


def _bits(value: Any) -> bytes | None:
    if isinstance(value, bool) or not (isinstance(value, int | float) or value in ("nan", "inf", "-inf")):
        return None
    return struct.pack("<d", float(value))


def first_difference(
    ours: Traces, theirs: Traces, tensors: Callable[[int], tuple[Mapping[str, str], Mapping[str, str]]]
) -> dict[str, Any]:
    """Return how two runs differ. Pure.

    Args:
        ours, theirs: The runs.
        tensors: Returns the digests of both runs' tensors after a number of steps.

    Returns:
        `steps` and `digests` that both have, and of the first that differ `loss_step` (None: none does), `digest_step`,
        the last digest before it that is equal (`equal_step`), and the `tensors` that differ then, with their
        `num_tensors`.
    """
    steps, digested = ours.losses.keys() & theirs.losses.keys(), sorted(ours.digests.keys() & theirs.digests.keys())
    loss_step = min((step for step in steps if ours.losses[step] != theirs.losses[step]), default=None)
    digest_step = next((step for step in digested if ours.digests[step] != theirs.digests[step]), None)
    before = [step for step in digested if digest_step is None or step < digest_step]
    names: list[str] = []
    if digest_step is not None:
        own, other = tensors(digest_step)
        # In the order of the model: its first layers come first.
        names = [name for name in {**own, **other} if own.get(name) != other.get(name)]
    return {
        "steps": len(steps),
        "digests": len(digested),
        "loss_step": loss_step,
        "digest_step": digest_step,
        "equal_step": before[-1] if before else None,
        "tensors": names[:_MOST_NAMES],
        "num_tensors": len(names),
    }


def compare_runs(paths: Sequence[Path]) -> Document:
    """Return the comparison of runs with the first of them, as a document that JSON can hold.

    Each run is read once for its summary and once for its steps, and once more where digests differ.

    Raises:
        ReportError: One is no run, or has no step that the first one has, too.
    """
    runs, traces = [open_run(path) for path in paths], [_read_traces(path) for path in paths]
    for document, title in zip(runs, _titles(runs, paths), strict=True):
        document["title"] = title
    pairs = []
    for path, document, found in zip(paths[1:], runs[1:], traces[1:], strict=True):
        if not traces[0].losses.keys() & found.losses.keys():
            raise ReportError(
                f"{paths[0]} and {path} have no step in common: {_extent(traces[0])}, and {_extent(found)}. "
                "Compare runs that were trained from the start, or to the same step"
            )

        def tensors(step: int, path: Path = path) -> tuple[Mapping[str, str], Mapping[str, str]]:
            return _tensors_at(paths[0], step), _tensors_at(path, step)

        difference = first_difference(traces[0], found, tensors)
        difference["digest_at_end"] = _ends_differ(runs[0], document)
        pairs.append(difference)
    return {"format": FORMAT, "runs": runs, "pairs": pairs, "settings": differing_settings(runs)}


def _ends_differ(ours: Document, theirs: Document) -> bool | None:
    """Return True if digests at the end of as many steps differ, False if they are equal, None if there are none."""
    own, other = ours["totals"], theirs["totals"]
    if own["steps_done"] != other["steps_done"] or not own["digest"] or not other["digest"]:
        return None
    return bool(own["digest"] != other["digest"])


def _read_traces(path: Path) -> Traces:
    file = events_of(path)
    try:
        return traces_of(read_events(file))
    except OSError as error:
        raise ReportError(f"{file} cannot be read: {error.strerror}") from error


def _tensors_at(path: Path, step: int) -> Mapping[str, str]:
    found: Mapping[str, str] = {}
    for event in read_events(events_of(path)):
        if event.get("event") == "digest" and event.get("total_steps") == step:
            found = event["tensors"] if isinstance(event.get("tensors"), Mapping) else found
    return found


def _extent(traces: Traces) -> str:
    if not traces.losses:
        return "one has none"
    return f"one has steps {min(traces.losses):,} to {max(traces.losses):,}"


def _titles(runs: Sequence[Document], paths: Sequence[Path]) -> list[str]:
    """Return short names of runs that differ: the names of their folders, or else the paths, or else numbers."""
    for names in ([str(run["title"]) for run in runs], [str(path) for path in paths]):
        if len(set(names)) == len(names):
            return names
    return [f"{i + 1}: {run['title']}" for i, run in enumerate(runs)]


def differing_settings(runs: Sequence[Document]) -> list[dict[str, Any]]:
    """Return the facts in which runs differ: their name, and the value of each run, None where it has none. Pure."""
    flat = [_flat(run["facts"]) for run in runs]
    names = {name: None for each in flat for name in each}
    return [
        {"name": name, "values": [each.get(name) for each in flat]}
        for name in names
        if len({str(each.get(name)) for each in flat}) > 1
    ]


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in facts.items():
        if name == "arguments" and isinstance(value, list):
            found.update(named_arguments([str(each) for each in value]))
        elif name not in _NO_SETTING and isinstance(value, Mapping):
            within = "" if name == "settings" else f"{name} "
            found.update({f"{within}{key}": each for key, each in value.items()})
        elif name not in _NO_SETTING:
            found[name] = value
    return found


def named_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """Return arguments by name: flags by theirs, the others by their number.

    >>> named_arguments(["train.py", "data", "--lr", "0.1", "--fast", "--seed=3"])
    {'program': 'train.py', 'argument 1': 'data', '--lr': '0.1', '--fast': 'given', '--seed': '3'}
    """
    found: dict[str, str] = {}
    flag: str | None = None
    place = 0
    for argument in arguments:
        if argument.startswith("--") and len(argument) > 2:
            name, equals, value = argument.partition("=")
            found[name] = value if equals else "given"
            flag = None if equals else name
        elif flag is not None:
            found[flag], flag = argument, None
        else:
            found["program" if place == 0 else f"argument {place}"] = argument
            place += 1
    return found
