"""Files that survive a crash of the process, and of the machine. Any thread; one process writes a folder's entries.

A folder becomes visible under its final name when all its files are on the disk, and the file that names the latest
checkpoint changes after that. At every moment it names a complete checkpoint: until the last rename, the former one.
Each step is on the disk before the next: a file's bytes (fsync), then its name (fsync of the folder).

Where they are is the layout of Bagua 0.9:

checkpoints/
    latest_checkpointed_iteration.txt       "20": what is loaded
    iter_0000020/                           complete, or it would not have this name
        mp_rank_00_model_states.pt          iteration, model, optimizer, lr_scheduler
        replica_rank_01_states.pt           likewise, of rank 1, where replicas differ
        expert_3_mp_rank_00_model_states.pt                 of a mixture of experts: parameters of expert 3,
        expert_parallel_rank_1_mp_rank_00_optim_states.pt   and the optimizer of rank 1
    iter_0000030.partial/                   being written
    iter_0000020.replaced/                  valid while there is no iter_0000020
    iter_0000010.deleting/                  rubbish
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

LATEST_FILE = "latest_checkpointed_iteration.txt"
MODEL_FILE = "mp_rank_00_model_states.pt"
PARTIAL = ".partial"
REPLACED = ".replaced"
DELETING = ".deleting"

_FOLDER = re.compile(r"iter_(\d{7,})")


def check_is_folder(root: Path) -> None:
    """
    Raises:
        NotADirectoryError: something else is at this path. Nothing at all is fine.
    """
    if root.exists() and not root.is_dir():
        raise NotADirectoryError(f"{root} is a file, and checkpoints_path must be a folder")


def replica_file(rank: int) -> str:
    """Of a rank above 0 whose replica is not that of rank 0."""
    return f"replica_rank_{rank:02d}_states.pt"


def expert_file(expert: int) -> str:
    """Of one expert, by its number among those of all ranks."""
    return f"expert_{expert}_mp_rank_00_model_states.pt"


def expert_optimizer_file(rank: int) -> str:
    """Of the optimizer of a rank that has experts."""
    return f"expert_parallel_rank_{rank}_mp_rank_00_optim_states.pt"


def folder_of(root: Path, iteration: int, suffix: str = "") -> Path:
    """Whether it exists or not."""
    return root / f"iter_{iteration:07d}{suffix}"


def latest_iteration(root: Path) -> int | None:
    """None if nothing was saved.

    Raises:
        ValueError: the file does not hold a number.
    """
    path = root / LATEST_FILE
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return None
    if not text.isascii() or not text.isdecimal():
        raise ValueError(
            f"{path} holds {text[:80]!r} instead of a number.\n"
            f"It names the checkpoint to load; there are {saved_iterations(root)}.\n"
            "Write one of these into it, or pass iteration=..."
        )
    return int(text)


def complete_folder(root: Path, iteration: int) -> Path:
    """The folder that holds this checkpoint.

    Raises:
        FileNotFoundError: there is none.
    """
    for suffix in ("", REPLACED):
        folder = folder_of(root, iteration, suffix)
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"There is no checkpoint of iteration {iteration} in {root}.\n"
        f"It would be {folder_of(root, iteration).name}; there are {saved_iterations(root)}.\n"
        f"Pass one of these as iteration=..., or write it into {LATEST_FILE}."
    )


def saved_iterations(root: Path) -> list[int]:
    """Of all complete checkpoints, ascending."""
    found = {int(match[1]) for path in root.iterdir() if (match := _FOLDER.fullmatch(path.name.removesuffix(REPLACED)))}
    return sorted(found)


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
    """Make an empty folder, PARTIAL, to write the checkpoint into. What crashes have left is removed.

    Raises:
        OSError: as the operating system says.
    """
    check_is_folder(root)
    if not root.exists():
        root.mkdir(parents=True)
        _sync(root.parent)
    for path in list(root.iterdir()):
        if path.name.startswith("iter_") and path.name.endswith((PARTIAL, DELETING)):
            shutil.rmtree(path)
    folder_of(root, iteration, PARTIAL).mkdir()


def publish(root: Path, iteration: int, keep_last: int | None) -> None:
    """What was written becomes the latest checkpoint.

    Args:
        keep_last: how many of those up to this iteration remain; None: all.

    Raises:
        OSError: as the operating system says.
    """
    partial, final, replaced = (folder_of(root, iteration, suffix) for suffix in (PARTIAL, "", REPLACED))
    _sync(partial)
    if final.exists():
        # Saved before, and possibly the latest: a reader takes the one set aside while there is no other.
        _discard(replaced)
        final.rename(replaced)
    partial.rename(final)
    _sync(root)
    _replace_text(root / LATEST_FILE, f"{iteration}\n")
    _discard(replaced)
    if keep_last is not None:
        # Later ones are of a run that was given up for an earlier checkpoint: only their owner knows what they are.
        kept = [one for one in saved_iterations(root) if one <= iteration]
        for old in kept[:-keep_last]:
            for suffix in ("", REPLACED):
                _discard(folder_of(root, old, suffix))


def give_up(root: Path, iteration: int) -> None:
    """Nothing is published; free the space."""
    shutil.rmtree(folder_of(root, iteration, PARTIAL), ignore_errors=True)


def _replace_text(path: Path, text: str) -> None:
    written = path.with_name(path.name + PARTIAL)
    with written.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)
    _sync(path.parent)


def _discard(folder: Path) -> None:
    """Half of a checkpoint must never look like one."""
    if folder.exists():
        rubbish = folder.with_name(folder.name.removesuffix(REPLACED) + DELETING)
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
