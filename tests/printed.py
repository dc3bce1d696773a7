"""Reads what ranks printed through the launcher, with equal lines of several ranks folded or not."""

import re


def ranks_of(line):
    """Read the ranks in front of a line, such as [0-2,5]; none if it is of the launcher.

    >>> ranks_of("[0-2,5] epoch 1")
    {0, 1, 2, 5}
    """
    found = re.match(r"\[([\d,-]+)\] ?", line)
    spans = [part.split("-") for part in found[1].split(",")] if found else []
    return {rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1)}


def printed(stdout: str) -> dict[int, list[str]]:
    """Give the lines of each rank, without prefixes. Every line must have one.

    >>> printed("[0-1] equal\\n[0] own\\n")
    {0: ['equal', 'own'], 1: ['equal']}
    """
    lines: dict[int, list[str]] = {}
    for line in stdout.splitlines():
        ranks = ranks_of(line)
        assert ranks, line
        for rank in sorted(ranks):
            lines.setdefault(rank, []).append(line.partition("]")[2].removeprefix(" "))
    return lines


def lines_of_all(job, ranks: int) -> list[str]:
    """Give the lines of rank 0 of a job, of which all ranks have printed the same."""
    found = {tuple(job.lines(rank)) for rank in range(ranks)}
    assert len(found) == 1, found
    return [*found.pop()]
