"""Files of ranks other than 0, `x.ckpt.rank1`, in the folder of Lightning's checkpoint `x.ckpt`: where ranks differ,
each rank has its own. Functions; all ranks load together, on the thread that trains.

Lightning links or copies a checkpoint under other names (`last.ckpt`), and users move it. So what finds the files is
written in the checkpoint: the name that it was saved under, and an id of the save, which all its files have.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bagua.contrib.checkpoint.agreement import Ranks
from bagua.error_text import listed

STATE = "bagua"  # the key of what is ours in a checkpoint
_MAX_TOLD = 3  # ranks that a warning names
_UNCHANGED = "Nothing was loaded, on any rank.\nMake it readable for all ranks, and load again."

_Read = Callable[[str], dict[str, Any]]


def rank_file(filepath: Any, rank: int) -> str:
    """The checkpoint of a rank other than 0."""
    return f"{filepath}.rank{rank}"


def load_own(filepath: Any, ranks: Ranks, algorithm: str, read: _Read) -> tuple[dict[str, Any], bool]:
    """
    Args:
        filepath: of the checkpoint.
        ranks: that go on with it.
        algorithm: with which they do.
        read: what is under a path; raises FileNotFoundError where nothing is.

    Returns:
        the checkpoint of this rank, and True; or that of rank 0 for all ranks, and False, after a warning.

    Raises:
        RuntimeError: a rank cannot read a file, or the files are of different saves; on all ranks.
    """
    path = str(filepath)
    main: dict[str, Any] | None = None

    def of_first() -> dict[str, Any]:
        nonlocal main
        main = read(path)
        state = main.get(STATE) or {}
        return {"global_step": main.get("global_step", 0), **{name: state[name] for name in state if name != "engine"}}

    about = ranks.by_first(f"read {path}", of_first, _UNCHANGED)
    if (about.get("algorithm"), about.get("world_size")) == (algorithm, ranks.size):
        own, lost = _load_each(path, ranks, about, main, read)
        if own is not None:
            return own, True
        lacks = _missing_files(lost)
        remedy = "To continue where the ranks were, put their files next to the checkpoint, and load it again."
    else:
        lost, lacks = {}, _another_job(about)
        remedy = f"To continue where the ranks were, use its algorithm and number of ranks, not {algorithm}."
    if ranks.rank in (0, *lost):
        warnings.warn(
            f"{path} {lacks}.\n"
            f"{algorithm} begins anew on {ranks.size} ranks, all from the weights of rank 0.\n{remedy}",
            stacklevel=3,
        )
    error: Exception | None = None
    try:
        main = read(path) if main is None else main
    except Exception as problem:
        error = problem
    ranks.agree(f"read {path}", error, _UNCHANGED)
    assert main is not None
    return main, False


def _load_each(
    path: str, ranks: Ranks, about: Mapping[str, Any], main: dict[str, Any] | None, read: _Read
) -> tuple[dict[str, Any] | None, dict[int, str]]:
    """The checkpoint of this rank. None if a rank has none; then by rank, where it would be."""
    own, step, error = main, about["global_step"], None
    places = _places(path, about.get("file"), ranks.rank)
    if ranks.rank > 0:
        try:
            own, step = _find(places, about.get("save"), read)
        except Exception as problem:
            error = problem
    ranks.agree(f"read its file of {path}", error, _UNCHANGED)
    found = ranks.gather((own is not None, step, places[0]), f"comparing the files of {path}")
    steps = [step for _, step, _ in found]
    others = [rank for rank, (is_own, step, _) in enumerate(found) if step is not None and not is_own]
    if others or len({*steps} - {None}) > 1:
        what = f"saves: ranks {others} have only those of another"
        if len({*steps} - {None}) > 1:
            what = f"steps: {steps}, by rank"
        raise RuntimeError(
            f"The files of {path} are of different {what}.\n"
            f"Rank 0 loads this file, the others {rank_file(path, 1)} and so on.\n"
            "Load a checkpoint that all ranks have written, or delete the files of the other ranks: all then start from"
            " that of rank 0."
        )
    lost = {rank: place for rank, (_, step, place) in enumerate(found) if step is None}
    return (None if lost else own), lost


def _find(places: list[str], save: str | None, read: _Read) -> tuple[dict[str, Any] | None, int | None]:
    """What a save has written in one of the places, and its step. None: only another save has, or nobody."""
    step: int | None = None
    for place in places:
        try:
            checkpoint = read(place)
        except FileNotFoundError:
            continue
        step = int(checkpoint.get("global_step", 0))
        if (checkpoint.get(STATE) or {}).get("save") == save:
            return checkpoint, step
    return None, step


def _places(path: str, name: str | None, rank: int) -> list[str]:
    """Where the file of a rank may be: with the checkpoint, or under the name that both were saved under in its folder,
    or in that of the file that it is a link to."""
    local = Path(path)
    found = [path]
    if name is not None:
        found.append(path.removesuffix(local.name) + name)
    if local.exists():
        found.append(str(local.resolve()))
    return [rank_file(one, rank) for one in dict.fromkeys(found)]


def _missing_files(lost: Mapping[int, str]) -> str:
    told = listed([f"rank {rank} has no {place}" for rank, place in lost.items()], _MAX_TOLD)
    return f"was saved with a file for each rank, but {told}"


def _another_job(about: Mapping[str, Any]) -> str:
    if "algorithm" not in about:
        return "has no state of each rank"
    return f"is of {about['algorithm']} on {about['world_size']} ranks"
