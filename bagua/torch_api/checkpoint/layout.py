"""Where a checkpoint's files are: the layout of Bagua 0.9. Functions of paths; they change nothing.

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

import re
from pathlib import Path

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
