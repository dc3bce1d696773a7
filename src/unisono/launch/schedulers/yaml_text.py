"""YAML for mappings, lists, strings, integers and flags, which is all that a manifest holds. Pure.

Start reading at `yaml_text`.
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["yaml_text"]

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9./-]*( [A-Za-z][A-Za-z0-9./-]*)*")
_WORDS = frozenset(["true", "false", "yes", "no", "on", "off", "null", "y", "n"])


def yaml_text(value: Any, *, indent: int = 0) -> str:
    """Return a value as YAML in block style, with a newline at its end.

    >>> print(yaml_text({"kind": "Job", "args": ["run", "-n", "2"], "spec": {"suspend": False, "env": []}}), end="")
    kind: Job
    args:
    - run
    - "-n"
    - "2"
    spec:
      suspend: false
      env: []
    """
    blank = " " * indent
    if isinstance(value, dict) and value:
        text = ""
        for name, item in value.items():
            if isinstance(item, dict | list) and item:
                inner = indent + 2 if isinstance(item, dict) else indent
                text += f"{blank}{_scalar(name)}:\n{yaml_text(item, indent=inner)}"
            else:
                text += f"{blank}{_scalar(name)}: {_scalar(item)}\n"
        return text
    if isinstance(value, list) and value:
        return "".join(
            f"{blank}- {yaml_text(item, indent=indent + 2).lstrip(' ')}" if isinstance(item, dict | list) and item
            else f"{blank}- {_scalar(item)}\n"
            for item in value
        )  # fmt: skip
    return f"{blank}{_scalar(value)}\n"


def _scalar(value: Any) -> str:
    """Return a value in one line. JSON's strings are YAML's, too; plain words need no quotes."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value)
