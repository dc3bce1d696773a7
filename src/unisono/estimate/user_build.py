"""The user's function that is planned: it returns model, optimizer, loss function and data.

Start reading at `find_build`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from unisono.errors import EstimateError
from unisono.text import a_type

__all__ = ["Subject", "UserCodeError", "batch_of", "build_subject", "find_build"]

_FORM = "return model, optimizer, loss, data, as they are given to Trainer, step and batches"


class UserCodeError(Exception):
    """An exception of the user's own code, which is its cause."""


class Subject(NamedTuple):
    """The training that is planned."""

    model: nn.Module
    optimizer: Optimizer
    loss_fn: Callable[[nn.Module, Any], Any]
    sample: Any
    """The first sample of the data."""


def find_build(target: str) -> Callable[[], Any]:
    """Return the function that a text names, as FILE.py:FUNCTION or MODULE:FUNCTION. The file is imported.

    Args:
        target: The text. Without a function, it is `build`.

    Raises:
        EstimateError: There is no such file, module or function; the message names the nearest one.
        UserCodeError: Importing the file failed.
    """
    where, _, name = target.partition(":")
    name = name or "build"
    if where.endswith(".py"):
        module = _import_file(Path(where))
    else:
        sys.path.insert(0, "")
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{where}.".startswith(f"{error.name}."):
                raise UserCodeError from error
            near = difflib.get_close_matches(f"{where}.py", [path.name for path in Path().glob("*.py")], n=1)
            hint = f"did you mean {near[0]}:{name}?" if near else "give a file, as in model.py:build"
            raise EstimateError(f"there is no module {where!r}; {hint}") from None
        except Exception as error:
            raise UserCodeError from error
    found = getattr(module, name, None)
    if found is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(name, functions, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"write one that ends with: {_FORM}"
        raise EstimateError(f"{where} has no function {name!r}; {hint}")
    if not callable(found):
        raise EstimateError(f"{name!r} of {where} is {a_type(found)}, where a function is due that ends with: {_FORM}")
    build: Callable[[], Any] = found
    return build


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path()
        near = difflib.get_close_matches(path.name, [each.name for each in folder.glob("*.py")], n=1)
        hint = f"; did you mean {folder / near[0]}?" if near else ""
        raise EstimateError(f"there is no file {str(path)!r}{hint}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[path.stem] = module  # dataclasses and pickles of the file look for it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserCodeError from error
    return module


def build_subject(build: Callable[[], Any]) -> Subject:
    """Call a build function, and check what it returns.

    Raises:
        EstimateError: It returns something else than model, optimizer, loss function and data.
        UserCodeError: It failed.
    """
    try:
        result = build()
    except Exception as error:
        raise UserCodeError from error
    if not isinstance(result, (tuple, list)) or len(result) != len(Subject._fields):
        found = f"{len(result)} values" if isinstance(result, (tuple, list)) else a_type(result)
        raise EstimateError(f"the build function returned {found}: {_FORM}")
    model, optimizer, loss_fn, data = result
    if not isinstance(model, nn.Module):
        raise EstimateError(f"the model is {a_type(model)}, not an nn.Module: {_FORM}")
    if not isinstance(optimizer, Optimizer):
        raise EstimateError(f"the optimizer is {a_type(optimizer)}, not one of torch.optim: {_FORM}")
    if not callable(loss_fn):
        raise EstimateError(f"the loss function is {a_type(loss_fn)}, which cannot be called: {_FORM}")
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise EstimateError("the optimizer has none of the model's parameters: make it of model.parameters()")
    try:
        sample = data[0]
    except (TypeError, KeyError, IndexError) as error:
        raise EstimateError(
            f"the data, {a_type(data)}, has no sample data[0] ({type(error).__name__}): return the dataset, or a list "
            "with one sample in it"
        ) from None
    except Exception as error:
        raise UserCodeError from error
    return Subject(model, optimizer, loss_fn, sample)


def batch_of(sample: Any, count: int) -> Any:
    """Return a micro-batch of equal samples, collated as a DataLoader does."""
    return default_collate([sample] * count)


def tensors_in(value: Any) -> Sequence[Tensor]:
    """Return the tensors in a nested value."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
