"""Files that survive a crash of the process, and of the machine. Any thread; one process writes a folder's entries.

A folder becomes visible under its final name when all its files are on the disk, and the file that names the latest
checkpoint changes after that. At every moment it names a complete checkpoint: until the last rename, the former one.
Each step is on the disk before the next: a file's bytes (fsync), then its name (fsync of the folder).
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from bagua.torch_api.checkpoint import layout

# torch does not say why it could not write. With less room than this, the disk was full: what it had begun to write is
# in the file already.
_NEARLY_FULL_BYTES = 1 << 20


def write_state(path: Path, state: Any) -> None:
    """As torch.save.

    Raises:
        OSError: as the operating system says; ENOSPC where the disk is full, of which torch's error says nothing.
        RuntimeError: any other error of torch.save.
    """
    try:
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:
        free = os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize
        if free < _NEARLY_FULL_BYTES:
            text = f"{os.strerror(errno.ENOSPC)}: {free} bytes are free. Make room, or pass keep_last"
            raise OSError(errno.ENOSPC, text, str(path)) from error
        raise


def begin(root: Path, iteration: int) -> None:
    """Make an empty folder, layout.PARTIAL, to write the checkpoint into. What crashes have left is removed.

    Raises:
        OSError: as the operating system says.
    """
    layout.check_is_folder(root)
    if not root.exists():
        root.mkdir(parents=True)
        _sync(root.parent)
    for path in list(root.iterdir()):
        if path.name.startswith("iter_") and path.name.endswith((layout.PARTIAL, layout.DELETING)):
            shutil.rmtree(path)
    layout.folder_of(root, iteration, layout.PARTIAL).mkdir()


def publish(root: Path, iteration: int, keep_last: int | None) -> None:
    """What was written becomes the latest checkpoint.

    Args:
        keep_last: how many of those up to this iteration remain; None: all.

    Raises:
        OSError: as the operating system says.
    """
    partial, final, replaced = (
        layout.folder_of(root, iteration, suffix) for suffix in (layout.PARTIAL, "", layout.REPLACED)
    )
    _sync(partial)
    if final.exists():
        # Saved before, and possibly the latest: a reader takes the one set aside while there is no other.
        _discard(replaced)
        final.rename(replaced)
    partial.rename(final)
    _sync(root)
    _replace_text(root / layout.LATEST_FILE, f"{iteration}\n")
    _discard(replaced)
    if keep_last is not None:
        # Later ones are of a run that was given up for an earlier checkpoint: only their owner knows what they are.
        kept = [one for one in layout.saved_iterations(root) if one <= iteration]
        for old in kept[:-keep_last]:
            for suffix in ("", layout.REPLACED):
                _discard(layout.folder_of(root, old, suffix))


def give_up(root: Path, iteration: int) -> None:
    """Nothing is published; free the space."""
    shutil.rmtree(layout.folder_of(root, iteration, layout.PARTIAL), ignore_errors=True)


def _replace_text(path: Path, text: str) -> None:
    written = path.with_name(path.name + layout.PARTIAL)
    with written.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)
    _sync(path.parent)


def _discard(folder: Path) -> None:
    """Half of a checkpoint must never look like one."""
    if folder.exists():
        rubbish = folder.with_name(folder.name.removesuffix(layout.REPLACED) + layout.DELETING)
        if rubbish.exists():
            shutil.rmtree(rubbish)
        folder.rename(rubbish)
        _sync(folder.parent)
        shutil.rmtree(rubbish)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
