"""Reads the digests that a program printed, one `name = sha` a line."""

import re


def digests(lines: list[str], *, least: int = 25) -> dict[str, str]:
    found = dict(re.findall(r"^(.+) = ([0-9a-f]{64})$", "\n".join(lines), re.MULTILINE))
    assert len(found) >= least
    return found
