"""Loads a checkpoint. Called by all ranks, on the thread that trains.

Of replicas that differ it can make the mean: one file at a time is in memory in addition to the sums.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bagua.collectives.process_group import BaguaProcessGroup
from bagua.contrib.checkpoint import durable_files, state_names
from bagua.contrib.checkpoint.agreement import ranks_of
from bagua.contrib.checkpoint.contents import (
    ABOUT,
    Subject,
    complete_exchange,
    engine_states_of,
    parameter_names,
    refuse_shards,
)
from bagua.contrib.checkpoint.saving import finish_last
from bagua.contrib.checkpoint.state_names import plain_state, rename_for
from bagua.job.torch_internals import without_wrappers

_logger = logging.getLogger("bagua")
_UNCHANGED = "Nothing was loaded from {root}, on any rank.\nCorrect the cause on that rank, and load again."
_HALF_LOADED = (
    "Checkpoint: {folder}; on other ranks it may be loaded by now.\n"
    "Correct the cause, make model and optimizer anew, and load again. strict=False ignores names that do not fit."
)


def load(
    subject: Subject,
    root: Path,
    optimizer: Any,
    lr_scheduler: Any,
    strict: bool,
    iteration: int | None,
    average_replicas: bool,
    weights_only: bool,
    process_group: BaguaProcessGroup | dist.ProcessGroup | None,
) -> int:
    """`bagua.torch_api.checkpoint.load_checkpoint`, into `subject`.

    Raises:
        RuntimeError: a rank could not load; on all ranks.
        CollectiveError: a rank is gone; names it.
    """
    complete_exchange(subject)
    error = finish_last()
    ranks = ranks_of(process_group, subject.process_group)
    unchanged = _UNCHANGED.format(root=root)
    ranks.agree("finish the save in the background", error, unchanged)
    found = ranks.by_first("find the checkpoint", lambda: _find(root, iteration, weights_only), unchanged)
    if found is None:
        if ranks.rank == 0:
            where = f"{root}{'' if root.exists() else ', which does not exist'}"
            _logger.info(f"no checkpoint in {where}: nothing was loaded")
        return 0
    number, name, about = found
    folder = root / name
    reader = _Reader(folder, about, ranks.rank, ranks.size, weights_only)
    try:
        refuse_shards(subject.module.state_dict(), optimizer, f"loading {type(subject.module).__name__}")
        if about["per_rank"] and average_replicas:
            _check_starts_equal(subject)
            state = mean_of_replicas(folder, about["world_size"], reader.read)
        else:
            _check_algorithm(about, subject, ranks.size)
            state = reader.read_own(subject.module, optimizer)
        refuse_shards(state, None, f"reading {folder}, which an earlier version wrote: shards of other ranks are lost")
        _adapt(state, subject.module)
        _check_parts(state, about, optimizer, lr_scheduler, strict)
    except Exception as problem:
        error = problem
    ranks.agree(f"read checkpoint {number}", error, unchanged)
    try:
        _apply(state, subject, optimizer, lr_scheduler, strict)
    except Exception as problem:
        error = problem
    ranks.agree(f"load checkpoint {number}", error, _HALF_LOADED.format(folder=folder))
    if ranks.rank == 0:
        given = {"model": subject, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
        _logger.info(f"loaded {', '.join(name for name, one in given.items() if one is not None)} from {folder}")
    return number


def _find(root: Path, iteration: int | None, weights_only: bool) -> tuple[int, str, dict[str, Any]] | None:
    """Iteration, folder and what the checkpoint says of itself. None: nothing was saved.

    Raises:
        ValueError: root is the folder of one iteration.
    """
    durable_files.check_is_folder(root)
    if iteration is None:
        iteration = durable_files.latest_iteration(root)
        if iteration is None:
            if (root / durable_files.MODEL_FILE).exists():
                raise ValueError(f"{root} is the folder of one iteration; pass {root.parent}, and iteration=...")
            return None
    folder = durable_files.complete_folder(root, iteration)
    file = _read(folder / durable_files.MODEL_FILE, weights_only, mmap=True)  # without the tensors' values
    if not isinstance(file, dict) or "model" not in file:
        raise ValueError(f"{folder / durable_files.MODEL_FILE} is not of save_checkpoint: it has no state of a model")
    about = {
        "world_size": None,
        "per_rank": False,
        "algorithm": None,
        "optimizer": None,
        "experts": {},
        **file.get(ABOUT, {}),
    }
    about.pop("engine", None)
    return iteration, folder.name, about


def _read(path: Path, weights_only: bool, mmap: bool = False) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=mmap)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is not there; all ranks need the same file system at this path") from None
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors and plain values; if you trust it, pass weights_only=False"
        ) from error
    except (EOFError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged: {error}; pass iteration=... to load another checkpoint") from error


class _Reader:
    """Reads the files that a rank needs."""

    def __init__(self, folder: Path, about: dict[str, Any], rank: int, size: int, weights_only: bool) -> None:
        self._folder, self._about = folder, about
        self._rank, self._size, self._weights_only = rank, size, weights_only

    def read(self, name: str) -> Any:
        return _read(self._folder / name, self._weights_only)

    def read_own(self, module: nn.Module, optimizer: Any) -> dict[str, Any]:
        """The states of this rank, under local names."""
        if self._about["per_rank"] and self._rank > 0:
            own: dict[str, Any] = self.read(durable_files.replica_file(self._rank))
            return own
        state: dict[str, Any] = self.read(durable_files.MODEL_FILE)
        names = list(plain_state(module))
        counts = {} if self._about["per_rank"] else state_names.local_counts(names)
        totals: dict[str, int] = self._about["experts"]
        if not counts and not totals:
            return state
        self._check_experts(counts, totals)
        self._add_experts(state["model"], names, counts)
        if optimizer is not None and (self._folder / durable_files.expert_optimizer_file(0)).exists():
            state.update(self._read_optimizer(module, optimizer, counts))
        return state

    def _check_experts(self, counts: Mapping[str, int], totals: Mapping[str, int]) -> None:
        here = {layer: count * self._size for layer, count in counts.items()}
        if totals and here != dict(totals):
            raise ValueError(
                f"the checkpoint has {dict(totals)} experts, by layer, and this model {here} on {self._size} ranks; "
                "the numbers of all ranks together must be the same: change num_local_experts"
            )

    def _add_experts(self, model_state: dict[str, Any], names: list[str], counts: Mapping[str, int]) -> None:
        files: dict[int, dict[str, Any]] = {}
        for name in names:
            expert = state_names.expert_of(name, self._rank, counts)
            if expert is None:
                continue
            if expert not in files:
                file: dict[str, Any] = self.read(durable_files.expert_file(expert))
                files[expert] = {without_wrappers(name): value for name, value in file.items()}
            written = state_names.global_name(name, self._rank, counts)
            if written in files[expert]:
                model_state[name] = files[expert][written]

    def _read_optimizer(self, module: nn.Module, optimizer: Any, counts: dict[str, int]) -> dict[str, Any]:
        old_size = self._about["world_size"]
        if old_size in (None, self._size):
            file: dict[str, Any] = self.read(durable_files.expert_optimizer_file(self._rank))
            return {"optimizer": file["optimizer"]}
        old_counts = {layer: total // old_size for layer, total in self._about["experts"].items()}
        names = parameter_names(module, optimizer, self._rank, counts)
        files: dict[int, dict[str, Any]] = {}
        for name in names:
            owner = 0 if name is None else state_names.owner_of(name, old_counts)
            if owner not in files:
                files[owner] = self.read(durable_files.expert_optimizer_file(owner))
        if 0 not in files:
            files[0] = self.read(durable_files.expert_optimizer_file(0))
        positions = {
            owner: {one and without_wrappers(one): at for at, one in enumerate(file["parameter_names"])}
            for owner, file in files.items()
        }
        state = {}
        for position, name in enumerate(names):
            if name is None:
                raise ValueError(
                    "the optimizer has parameters that the model has not: another number of ranks needs names"
                )
            owner = state_names.owner_of(name, old_counts)
            old = files[owner]["optimizer"]["state"]
            at = positions[owner].get(name)
            if at in old:
                state[position] = old[at]
        groups = _regrouped(files[0]["optimizer"]["param_groups"], optimizer)
        return {"optimizer": {"state": state, "param_groups": groups}}


def _regrouped(old_groups: list[dict[str, Any]], optimizer: Any) -> list[dict[str, Any]]:
    """The options of the old groups, for the parameters that the groups have now.

    Raises:
        ValueError: the optimizer has another number of groups.
    """
    if len(old_groups) != len(optimizer.param_groups):
        raise ValueError(
            f"the optimizer of the checkpoint has {len(old_groups)} parameter groups, this one has "
            f"{len(optimizer.param_groups)}"
        )
    groups, first = [], 0
    for old, group in zip(old_groups, optimizer.param_groups, strict=True):
        count = len(group["params"])
        groups.append({**old, "params": list(range(first, first + count))})
        first += count
    return groups


def _check_starts_equal(subject: Subject) -> None:
    if not subject.keeps_replicas_equal:
        raise ValueError(f"{subject.algorithm} does not start from loaded replicas; load before wrapping the model")


def _check_algorithm(about: dict[str, Any], subject: Subject, size: int) -> None:
    saved, here = about["algorithm"], subject.algorithm
    if about["per_rank"]:
        if about["world_size"] != size:
            raise ValueError(
                f"it holds a state for each of {about['world_size']} ranks, and here are {size}; load it on as many, "
                "or their mean on any number with average_replicas=True"
            )
        if saved != here:
            raise ValueError(
                f"it holds a state for each rank, of {saved or 'a model that was not wrapped'}, and here is "
                f"{here or 'a model that is not wrapped'}; load it after wrapping with the same algorithm, or the mean "
                "of all ranks with average_replicas=True"
            )
    elif not subject.keeps_replicas_equal:
        raise ValueError(f"it has no state of {here} for each rank; load it before wrapping the model")


def _check_parts(
    state: Mapping[str, Any], about: Mapping[str, Any], optimizer: Any, lr_scheduler: Any, strict: bool
) -> None:
    saved, here = about["optimizer"], type(optimizer).__name__
    if strict and None not in (saved, optimizer) and saved != here:
        raise ValueError(
            f"it holds the state of an optimizer of class {saved}, and here is {here}; make one of class {saved}, or "
            "pass optimizer=None to go on with a new one, or strict=False to load the state all the same"
        )
    for name, wanted in (("optimizer", optimizer), ("lr_scheduler", lr_scheduler)):
        if strict and wanted is not None and state.get(name) is None:
            raise ValueError(f"it was saved without {name}; pass {name}=None, or strict=False to keep that of this run")


def _apply(state: dict[str, Any], subject: Subject, optimizer: Any, lr_scheduler: Any, strict: bool) -> None:
    for engine in subject.engines:
        engine.wait_pending_comm_ops()
    subject.module.load_state_dict(state["model"], strict=strict)
    if optimizer is not None and state.get("optimizer") is not None:
        optimizer.load_state_dict(state["optimizer"])
    if lr_scheduler is not None and state.get("lr_scheduler") is not None:
        lr_scheduler.load_state_dict(state["lr_scheduler"])
    about = state.get(ABOUT) or {}
    states = engine_states_of(about)
    if states and about["algorithm"] == subject.algorithm:
        for engine, one in zip(subject.inner_engines, states, strict=True):
            engine.load_state_dict(one)  # last: it depends on the others


def _adapt(state: dict[str, Any], module: nn.Module) -> None:
    """States in files that Bagua 0.9 wrote, or that were converted by torch.distributed.checkpoint, as those of
    `save_checkpoint` are; in place."""
    rename_for(module, state["model"])
    _with_numbers(state.get("optimizer"))
    # The conversion leaves empty containers out.
    for engine in engine_states_of(state.get(ABOUT) or {}):
        engine.setdefault("algorithm", {})


def _with_numbers(optimizer_state: dict[str, Any] | None) -> None:
    """The conversion makes strings of the positions of parameters, which an optimizer would ignore."""
    if optimizer_state is None or "param_groups" not in optimizer_state:
        return
    states = optimizer_state.setdefault("state", {})
    if all(isinstance(key, str) and key.isdecimal() for key in states):
        optimizer_state["state"] = {int(key): value for key, value in states.items()}


def mean_of_replicas(folder: Path, world_size: int, read: Callable[[str], Any]) -> dict[str, Any]:
    """
    Floating-point tensors of model and optimizer become the mean over the ranks, computed in float32 at least; the rest
    is that of rank 0. The same bits wherever it is called.

    Args:
        folder: of the checkpoint, for errors.
        world_size: how many replicas there are.
        read: of the folder's file of this name.

    Raises:
        ValueError: the files differ in more than values.
    """
    total: dict[str, Any] = {}
    for rank in range(world_size):
        state = read(durable_files.MODEL_FILE if rank == 0 else durable_files.replica_file(rank))
        about = state.pop(ABOUT)
        try:
            total = _mapped(state, None, _widened) if rank == 0 else _mapped(total, state, _added)
        except (KeyError, TypeError, RuntimeError, IndexError) as error:
            raise ValueError(f"the replicas of ranks 0 and {rank} in {folder} differ in more than values") from error
        if rank == 0:
            first, first_about = state, about
    mean: dict[str, Any] = _mapped(total, first, lambda one, like: _narrowed(one, like, world_size))
    # No algorithm's state: it begins anew.
    mean[ABOUT] = {**first_about, "engine": None}
    return mean


def _is_averaged(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _widened(one: Tensor, _: Any) -> Tensor:
    return one.to(torch.promote_types(one.dtype, torch.float32)) if _is_averaged(one) else one


def _added(total: Tensor, one: Tensor) -> Tensor:
    return total + one if _is_averaged(total) else total


def _narrowed(total: Tensor, like: Tensor, count: int) -> Tensor:
    return (total / count).to(like.dtype) if _is_averaged(total) else total


def _mapped(one: Any, other: Any, function: Callable[[Tensor, Any], Tensor]) -> Any:
    """`one` with each tensor replaced; `other` has the same structure, or is None."""
    if isinstance(one, Tensor):
        return function(one, other)
    if isinstance(one, dict):
        return {key: _mapped(value, None if other is None else other[key], function) for key, value in one.items()}
    if isinstance(one, list | tuple):
        return type(one)(
            _mapped(value, None if other is None else other[index], function) for index, value in enumerate(one)
        )
    return one
