"""Modules that take seconds to import, for tests of which only some use them: each worker imports the files of all."""

from __future__ import annotations

import importlib
from typing import Any


class LateModule:
    """Stands for a module, which is imported when something of it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for fixtures
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
