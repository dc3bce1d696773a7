"""The base of the handles that `replicate`, `shard`, `cut` and `place` return, which leave the model as it is."""

from __future__ import annotations

from typing import ClassVar, NoReturn

__all__ = ["ModelHandle"]


class ModelHandle:
    """A handle of a model, which is no model: what takes it for one is told so."""

    _made_by: ClassVar[str]
    """The call that makes it, as it stands in the documentation; the name of the handle comes first."""

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse the call: the handle is not a model.

        Raises:
            TypeError: Always.
        """
        raise TypeError(f"{self._explain()}, and call the model. {self._mistake()}")

    def __getattr__(self, name: str) -> NoReturn:
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        # Those with an underscore are asked for by Python, such as __deepcopy__.
        raise AttributeError(
            message if name.startswith("_") else f"{message}: {self._explain()}, and use the model. {self._mistake()}"
        )

    def _explain(self) -> str:
        function = self._made_by.partition(" = ")[2].partition("(")[0]
        return f"{function}() returns a handle and leaves the model as it is: keep both, as in {self._made_by}"

    def _mistake(self) -> str:
        return f"model = {self._made_by.partition(' = ')[2]} loses it."
