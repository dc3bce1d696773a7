"""A checkpoint while it is written: a hidden folder beside the others, which gets its name once it is complete.

Start reading at `CheckpointWork`.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from unisono.errors import CheckpointError
from unisono.state.best import step_folder
from unisono.state.codec import Json
from unisono.state.durable_files import flush_folder, locked, make_folder, remedy, swap_names, write_file
from unisono.state.manifest import MANIFEST, render_manifest
from unisono.state.regions import FileEntry
from unisono.state.temporary_paths import temporary_path

__all__ = ["CheckpointWork"]


class CheckpointWork:
    """The folder of a checkpoint that is written. The calls are `begin`, `commit`, and `close` in any case.

    Args:
        folder: The folder of all checkpoints.
        step: The number of steps done.
        tag: See `CheckpointStore.write`.
        needed: The bytes that are written, for messages.
        mark: See `temporary_path`.
    """

    def __init__(self, folder: Path, step: int, tag: str | None, *, needed: int = 0, mark: str | None = None) -> None:
        if step < 0:
            raise ValueError(f"step={step} must not be negative")
        self._folder, self.step, self._tag, self.needed = folder, step, tag, needed
        self._final = folder / (step_folder(step) if tag is None else f"tag-{tag}")
        self.path = temporary_path(self._final, mark=mark)
        """The folder to write into."""
        self.doing = "creating the folder"
        """The work under way, for messages."""
        self._lock = ExitStack()
        self._has_begun = self._is_committed = False

    def begin(self) -> None:
        """Make the folder, and hold a lock on it. A second call does nothing.

        Raises:
            OSError: It cannot be made.
        """
        if self._has_begun:
            return
        self._has_begun = True
        make_folder(self._folder)
        self.path.mkdir()
        self._lock.enter_context(locked(self.path))

    def commit(self, entries: Sequence[FileEntry], described: Mapping[str, Json]) -> tuple[Path, int]:
        """Write the manifest and rename the folder: from that moment on, the checkpoint exists.

        Args:
            entries: The files, which are on the disk.
            described: By the name of a group, the description of its file.

        Returns:
            Its path, and the size of its files.

        Raises:
            OSError: It cannot be written. A checkpoint of the same name is as it was.
        """
        self.doing = f"writing {MANIFEST}"
        manifest = write_file(self.path / MANIFEST, [render_manifest(self.step, [*entries], {**described})])
        flush_folder(self.path)
        self.doing = f"renaming it to {self._final.name}"
        self._rename_durably()
        self._is_committed = True
        return self._final, sum(entry.nbytes for entry in [*entries, manifest])

    def close(self) -> None:
        """Release the lock, and remove what is left."""
        self._lock.close()
        self._remove()  # after a success: the checkpoint that this one replaced, if any

    def explained(self, error: OSError) -> CheckpointError:
        """Remove what was written, and return an error that explains why it was not completed."""
        self._remove()  # before the free space is read: half a checkpoint is useless
        try:
            there = next(path for path in [self._folder, *self._folder.absolute().parents] if path.exists())
            free = f"{shutil.disk_usage(there).free:,} bytes are free there"
        except OSError as no_answer:
            free = f"the free space is unknown ({no_answer})"
        reason = f"[Errno {error.errno}] {error.strerror}" if error.errno else str(error)
        return CheckpointError(
            f"the checkpoint of {self.told} was not written to {self._folder}: {reason}, while {self.doing}. It needs "
            f"{self.needed:,} bytes and {free}. Older checkpoints are untouched. {remedy(error, self._folder)}"
        )

    @property
    def told(self) -> str:
        """The step and the tag in words."""
        return f"step {self.step}" if self._tag is None else f"step {self.step}, tagged {self._tag!r},"

    def _remove(self) -> None:
        """Remove the folder if it is there. Other ranks may still write into it: by its old name they cannot."""
        aside = self.path
        if not self._is_committed and aside.exists():
            with suppress(OSError):
                aside = aside.rename(temporary_path(self._final, "pruned"))
        for _ in range(2):  # a file that was being made under the old name may have come in between
            shutil.rmtree(aside, ignore_errors=True)  # on failure `clean` removes it at the next start

    def _rename_durably(self) -> None:
        """Rename a complete checkpoint to its final name, and flush that to the disk. It exists from that moment on."""
        work, final = self.path, self._final
        if final.exists() and not final.is_dir():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
        if final.exists() and swap_names(work, final):
            try:
                flush_folder(self._folder)
            except OSError:
                swap_names(work, final)
                raise
            return  # `close` removes the old one
        aside: Path | None = None
        if final.exists():
            aside = temporary_path(self._final, "replaced")
            final.rename(aside)
        try:
            work.rename(final)
            flush_folder(self._folder)
        except OSError:
            if not work.exists():  # the name may not be on the disk: then the checkpoint was not written
                final.rename(work)
            if aside is not None:
                aside.rename(final)
            raise
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)  # on failure `clean` removes it at the next start
