"""Files with weights alone, which other programs read and write: safetensors files and those of torch.save.

Only data is read: torch's restricted unpickler, which executes nothing, reads the files of torch.save. A file that is
written appears under its name complete or not at all. Start reading at `read_weights` and `write_weights`.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from unisono.errors import CheckpointError
from unisono.state.digest import check_storable, copy_each, memory
from unisono.state.durable_files import flush_folder, make_folder, open_file, remedy, write_file
from unisono.state.npz_format import write_arrays
from unisono.state.regions import CHUNK
from unisono.state.row_column import RowColumn
from unisono.state.safetensors_format import lay_out, plan_file, read_tensors
from unisono.state.temporary_paths import temporary_path
from unisono.state.tensor_file import TensorFile
from unisono.text import a_type

__all__ = ["SUFFIXES", "open_weights", "read_weights", "write_rows", "write_weights"]

SUFFIXES = {".safetensors": True, ".pt": False, ".pth": False, ".bin": False}
"""By the suffix of a file's name, True for safetensors and False for a file of torch.save."""
_TORCH_MAGIC = (b"PK\x03\x04", b"\x80")
"""The first bytes of a zip archive, and of a pickle, which torch.save wrote before version 1.6."""
_MANY = 10


def read_weights(path: Path, *, key: str | None = None) -> dict[str, Tensor]:
    """Return the tensors of a file by name, on the CPU. The content of the file decides on its format, not its name.

    Nested dicts of a torch.save file are flattened, with a dot between the names. Module state other than tensors
    (`_extra_state`) is left out.

    Args:
        path: The file.
        key: The entry of a torch.save file in which the weights are. None: it holds nothing else.

    Raises:
        CheckpointError: The file cannot be read, has neither format, or holds other things than tensors.
    """
    try:
        with open_file(path, lambda size: True, "a file of weights") as file:
            size, head = os.fstat(file.fileno()).st_size, file.read(9)
            if not head.startswith(_TORCH_MAGIC):
                if key is not None:
                    raise CheckpointError(f"key={key!r} is for files of torch.save, and {path} is none: leave key out")
                file.seek(0)

                return read_tensors(partial(_fill, file), size, None)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Check the path and its rights.") from error
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} ({size:,} bytes) is neither a safetensors file nor one of torch.save: {error}. It was cut off, or "
            "it is something else."
        ) from error
    return _flat(_unpickle(path), path, key)


def open_weights(path: Path) -> TensorFile | None:
    """Return a safetensors file of which tensors can be read one at a time; None for a file of torch.save.

    It is read once as a whole, in constant memory, so that what cannot be read is found before anything is changed.

    Raises:
        CheckpointError: The file cannot be read, or has neither format.
    """
    try:
        with open_file(path, lambda size: True, "a file of weights") as file:
            if file.read(9).startswith(_TORCH_MAGIC):
                return None
            found, buffer = TensorFile(path), bytearray(CHUNK)
            while file.readinto(buffer):
                pass
            return found
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Check the path and its rights.") from error


def _fill(file: io.FileIO, view: memoryview) -> None:
    """Fill a view with the next bytes of a file."""
    while view:
        count = file.readinto(view)
        if not count:
            raise ValueError("the file ended early")
        view = view[count:]


def _unpickle(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch refuses the things that it warns about here
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's message advises to execute the file, and says in one of its lines what it found.
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise CheckpointError(
            f"{path} is no file of weights alone{f' (it names {found[1]})' if found else ''}, and no code in a file is "
            "executed here. Save the weights where it was made: torch.save(model.state_dict(), ...). Or it is damaged."
        ) from error
    except (OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} looks like a file of torch.save, but torch cannot read it: {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}. It was cut off, or it is something else."
        ) from error


def _flat(content: Any, path: Path, key: str | None) -> dict[str, Tensor]:
    """Return the tensors of nested dicts by names with dots."""
    if key is not None:
        if not isinstance(content, Mapping) or key not in content:
            raise CheckpointError(f"{path} holds no {key!r}, but {_described(content)}")
        content = content[key]
    where = str(path) if key is None else f"{key!r} in {path}"
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{where} holds {a_type(content)}; expected tensors by name, a state_dict")
    tensors: dict[str, Tensor] = {}
    levels: list[tuple[str, Mapping[Any, Any]]] = [("", content)]
    while levels:
        prefix, level = levels.pop()
        for name, value in level.items():
            if str(name).endswith("_extra_state"):
                continue
            if isinstance(value, Tensor):
                check_storable(value, f"{prefix}{name}")
                tensors[f"{prefix}{name}"] = value.detach()
            elif isinstance(value, Mapping) and all(isinstance(each, str) for each in value):
                levels.append((f"{prefix}{name}.", value))
            else:
                advice = "" if key else f' If the weights are one of them, name it, as by key="{_guess(content)}".'
                raise CheckpointError(
                    f"{where} holds {prefix}{name}, {a_type(value)}, and not weights alone. It has "
                    f"{_described(content)}.{advice}"
                )
    return tensors


def _described(content: Any) -> str:
    if not isinstance(content, Mapping):
        return a_type(content)
    more = f", … {len(content) - _MANY} more" if len(content) > _MANY else ""
    return f"the entries {', '.join(map(repr, [*content][:_MANY]))}{more}"


def _guess(content: Mapping[Any, Any]) -> str:
    """Return the name of the entry that looks most like weights."""
    usual = ("model", "state_dict", "model_state_dict")
    return next((name for name in usual if name in content), usual[0])


def write_weights(path: Path, tensors: Mapping[str, Tensor], others: Mapping[str, Any] | None = None) -> None:
    """Write tensors into a file whose suffix says the format, and return when it is on the disk.

    A file of that name is replaced at the end, by a rename. Memory: a copy of the tensors for a file of torch.save, and
    none for a safetensors file. Tied tensors stay tied.

    Args:
        path: The file. A missing folder is made.
        tensors: The tensors by name.
        others: Further entries of a file of torch.save.

    Raises:
        CheckpointError: A tensor cannot be stored in this format, or the file cannot be written.
    """
    with _replacing(path) as work:
        if SUFFIXES[path.suffix]:
            _write_safetensors(path, tensors, work)
            return
        # Copies, since torch.save writes the whole memory that a tensor views.
        content = {**copy_each(tensors, {}), **(others or {})}
        make_folder(path.absolute().parent)
        with work.open("xb") as file:
            try:
                torch.save(content, file)
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # torch's error while it closes the file hides it
                    raise error.__context__ from None
                raise
            file.flush()
            os.fsync(file.fileno())


def write_rows(path: Path, columns: Mapping[str, RowColumn], aliases: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write the rows of a table, as `write_weights` writes weights, into a file for safetensors or for numpy.load.

    Memory: a chunk.

    Args:
        path: The file: .safetensors or .npz.
        columns: Its tensors by name; for .npz float32, float64, int32 or int64.
        aliases: See `safetensors_format.lay_out`; for .safetensors alone.

    Raises:
        CheckpointError: The file cannot be written.
    """
    with _replacing(path) as work:
        forms = {name: column.form for name, column in columns.items()}
        make_folder(path.absolute().parent)
        with work.open("xb") as file:
            if path.suffix == ".npz":
                write_arrays(file, forms, {name: column.chunks for name, column in columns.items()})
            else:
                layout = lay_out(forms, aliases, path.stem)
                _refuse_other_types(layout.described)
                file.write(layout.header)
                for name in layout.starts:
                    file.writelines(map(memory, columns[name].chunks()))
            file.flush()
            os.fsync(file.fileno())


def _write_safetensors(path: Path, tensors: Mapping[str, Tensor], work: Path) -> None:
    pieces, described = plan_file(tensors, path.stem)
    _refuse_other_types(described)
    make_folder(path.absolute().parent)
    write_file(work, pieces)


def _refuse_other_types(described: Mapping[str, Any]) -> None:
    kinds = described["dtypes"]
    if kinds:
        name, kind = next(iter(kinds.items()))
        raise CheckpointError(
            f"{name!r} is {kind}, which other readers of safetensors do not know. Export to a name that "
            "ends in .pt, or convert it."
        )


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Return the name of a file to write, which takes the place of another one at the end."""
    work = temporary_path(path)
    try:
        yield work
        work.replace(path)
        flush_folder(path.absolute().parent)
    except OSError as error:
        raise CheckpointError(
            f"the weights were not written to {path}: {error}. A file of that name is untouched. "
            f"{remedy(error, path.parent)}"
        ) from error
    finally:
        if work.exists():
            work.unlink()
