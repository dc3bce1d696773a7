"""Run code when the user's program imports a module, without importing it for the program.

Unisono's additions to torch wait for torch in this way: `import unisono` and a rank's interpreter start without it, and
a program that never imports it does not pay for it. Start reading at `when_imported`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["when_imported"]

Action = Callable[[ModuleType], None]


def when_imported(name: str, action: Action) -> None:
    """Call the action with a module: at once if it is imported already, otherwise right after its import.

    Actions for one module run in the order in which they were given. They run before the module becomes an attribute of
    its package, so they take it from their argument. An import that fails leaves the action waiting for the next one.

    >>> when_imported("sys", lambda module: print(module.__name__))
    sys
    """
    module = sys.modules.get(name)
    if module is not None:
        action(module)
    else:
        sys.meta_path.insert(0, _Finder(name, action))


class _Finder(MetaPathFinder):
    """Finds one module as the finders after it do, and makes its loader call the action."""

    def __init__(self, name: str, action: Action) -> None:
        self._name, self._action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Return the spec of the module, with a loader that calls the action; None for every other module."""
        if fullname != self._name:
            return None
        # Python has asked the finders before this one. One of those after it may be another `_Finder` for this module.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _AnnouncingLoader(spec.loader, self._done)
                return spec
        return None

    def _done(self, module: ModuleType) -> None:
        if self in sys.meta_path:  # otherwise another thread's import was faster
            sys.meta_path.remove(self)
            self._action(module)


class _AnnouncingLoader(Loader):
    """Wraps a module's loader and calls a function after it. The module does not keep the wrapper."""

    def __init__(self, loader: Loader, done: Action) -> None:
        self._loader, self._done = loader, done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module with its own loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code, then the action."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._done(module)
