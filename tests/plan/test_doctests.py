import doctest
import importlib
import pkgutil

import pytest

import unisono.plan

MODULES = [module.name for module in pkgutil.iter_modules(unisono.plan.__path__, "unisono.plan.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_true(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
