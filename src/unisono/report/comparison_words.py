"""The words of a comparison of runs. Pure functions of its document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.report.summary import Document
from unisono.report.verdict import format_short_time, state_word
from unisono.text import clip
from unisono.watch.figures import format_count, format_value, plural

__all__ = ["are_equal", "figures_of_runs", "hint", "is_equal", "sentences"]


def is_equal(pair: Mapping[str, Any]) -> bool:
    """Return True if no loss and no digest differs."""
    return pair["loss_step"] is None and pair["digest_step"] is None and pair["digest_at_end"] is not True


def are_equal(comparison: Document) -> bool:
    """Return True if all runs are equal to the first one, as far as both have come."""
    return all(map(is_equal, comparison["pairs"]))


def sentences(comparison: Document) -> list[str]:
    """Return a sentence, or two, for each run but the first."""
    first, *others = comparison["runs"]
    return [_sentence(first, run, pair) for run, pair in zip(others, comparison["pairs"], strict=True)]


def _sentence(ours: Document, theirs: Document, pair: Mapping[str, Any]) -> str:
    both = f"{ours['title']} and {theirs['title']}"
    if is_equal(pair):
        same = [f"the losses of {plural(pair['steps'], 'step')}"]
        if pair["digests"]:
            same.append(f"the weights at {plural(pair['digests'], 'place')}")
        if pair["digest_at_end"] is False:
            same.append("the digest at the end")
        listed = ", ".join(same[:-1]) + " and " + same[-1] if len(same) > 1 else same[0]
        longer = [run for run in (ours, theirs) if run["totals"]["steps_done"] > pair["steps"]]
        more = f" {longer[0]['title']} has {format_count(longer[0]['totals']['steps_done'])} steps." if longer else ""
        return f"{both} are equal: {listed}.{more}"
    told = []
    if pair["loss_step"] is not None:
        told.append(f"the first loss that differs is that of step {format_count(pair['loss_step'])}")
    if pair["digest_step"] is not None:
        names = pair["tensors"]
        count = pair["num_tensors"] - 1
        others = f" and {plural(count, 'other tensor')}" if count > 0 else ""
        since = f", and were equal after step {format_count(pair['equal_step'])}" if pair["equal_step"] else ""
        told.append(
            f"weights differ after step {format_count(pair['digest_step'])}: {clip(names[0], 60, at='middle')}"
            f"{others}{since}"
        )
    if not told:
        told.append("the losses are equal, but not the digests at the end")
    return f"{both} differ: {'; '.join(told)}."


def hint(comparison: Document) -> str | None:
    """Return how to find out more, if losses differ and there are no digests."""
    if any(pair["loss_step"] is not None and not pair["digests"] for pair in comparison["pairs"]):
        return "Trainer(digest_every=1) records which parameter differs first."
    return None


def figures_of_runs(comparison: Document) -> list[tuple[str, list[str]]]:
    """Return rows with a value for each run: what became of it, and its latest values."""
    runs = comparison["runs"]
    rows = [
        ("state", [state_word(run).lower() for run in runs]),
        ("steps", [format_count(run["totals"]["steps_done"]) for run in runs]),
        ("ranks", [format_count(run["ranks"][-1][1]) if run["ranks"] else "" for run in runs]),
        ("step takes", [format_short_time(s) if (s := run["step_s"]["median"]) else "" for run in runs]),
    ]
    names = {name: None for run in runs for name in run["curves"] if _is_result(name)}
    for name in [*names][:12]:
        last = [run["curves"].get(name, {}).get("last") for run in runs]
        rows.append(
            (clip(f"last {name}", 30, at="middle"), ["" if each is None else format_value(each) for each in last])
        )
    return rows


def _is_result(name: str) -> bool:
    return name.startswith("loss") or ("/" in name and not name.startswith(("train/", "log/", "samples/")))
