"""Tables of arguments that a call refuses: one test for each line of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

Case = tuple[dict[str, Any], type[Exception], str]
"""Arguments, the error, and words of its message."""


def each_case(tables: Mapping[Callable[..., object], Sequence[Case]]) -> pytest.MarkDecorator:
    """Run a test with (call, options, error, words) for each line of the tables."""
    cases = [(call, *case) for call, table in tables.items() for case in table]
    names = [f"{call.__name__}-{next(iter(options))}-{i}" for i, (call, options, *_) in enumerate(cases)]
    return pytest.mark.parametrize(("call", "options", "error", "words"), cases, ids=names)


def check_refused(call: Callable[..., object], options: dict[str, Any], error: type[Exception], words: str) -> None:
    """Fail unless a call raises an error with these words."""
    with pytest.raises(error) as caught:
        call(**options)
    assert words in str(caught.value)
