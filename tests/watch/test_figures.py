"""The examples in the docstrings hold."""

import doctest

import pytest

from unisono.watch import figures, renderer


@pytest.mark.parametrize("module", [figures, renderer])
def test_examples_in_docstrings_hold(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("value", [0.001, 0.1234567, 9.99996, 9.9999, 99.9996, 999.996, 9999.94, 1.0, 10.0, 1000.0])
def test_ordinary_values_are_six_characters_wide(value):
    assert len(figures.format_value(value)) == 6
