"""Actions wait for the user's import of a module, and leave no trace in it."""

import importlib
import sys

import pytest

from unisono.imports import when_imported


@pytest.fixture
def module(tmp_path, monkeypatch):
    name = "waited_for"
    (tmp_path / f"{name}.py").write_text("WORD = 'there'\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield name
    sys.modules.pop(name, None)
    sys.meta_path[:] = finders


def test_an_imported_module_is_handed_over_at_once():
    found = []
    when_imported("json", found.append)
    assert found == [sys.modules["json"]]


def test_actions_run_after_the_import_in_the_order_given(module):
    seen = []
    when_imported(module, lambda found: seen.append(("first", found.WORD)))
    when_imported(module, lambda found: seen.append(("second", found.WORD)))
    importlib.import_module("colorsys")
    assert seen == []
    importlib.import_module(module)
    assert seen == [("first", "there"), ("second", "there")]


def test_the_module_keeps_its_own_loader_and_the_import_system_is_as_before(module):
    finders = list(sys.meta_path)
    when_imported(module, lambda _: None)
    found = importlib.import_module(module)
    assert sys.meta_path == finders
    assert type(found.__loader__).__name__ == type(found.__spec__.loader).__name__ == "SourceFileLoader"


def test_an_action_waits_on_after_an_import_that_failed(module, tmp_path):
    seen = []
    path = tmp_path / f"{module}.py"
    path.write_text("raise RuntimeError('not yet')\n")
    when_imported(module, lambda found: seen.append(found.WORD))
    with pytest.raises(RuntimeError, match="not yet"):
        importlib.import_module(module)
    assert seen == []
    path.write_text("WORD = 'there at last'\n")
    importlib.invalidate_caches()
    importlib.import_module(module)
    assert seen == ["there at last"]


def test_a_module_that_does_not_exist_is_still_missing():
    when_imported("no_such_module_anywhere", lambda _: None)
    try:
        with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
            importlib.import_module("no_such_module_anywhere")
    finally:
        del sys.meta_path[0]
