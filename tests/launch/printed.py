"""Reads what ranks printed through the launcher, with equal lines of several ranks folded or not."""

import re


def printed(stdout: str) -> dict[int, list[str]]:
    """Give the lines of each rank, without prefixes.

    >>> printed("[0-1] equal\\n[0] own\\n")
    {0: ['equal', 'own'], 1: ['equal']}
    """
    lines: dict[int, list[str]] = {}
    for line in stdout.splitlines():
        prefix, text = re.fullmatch(r"\[([\d,-]+)\] ?(.*)", line).groups()
        for part in prefix.split(","):
            first, _, last = part.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                lines.setdefault(rank, []).append(text)
    return lines
