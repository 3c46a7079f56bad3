"""What rank 0 sends of an optimizer: everything but the values of its tensors, pickled entry by entry.

Owned by nobody: functions, which communicate nothing. bagua.replicas.state_broadcast sends the description and makes
the optimizer of another rank like it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bagua.error_text import one_line
from bagua.replicas.tensor_broadcast import why_unsendable

MAX_PROBLEM_LENGTH = 300  # characters

# What of an optimizer an entry belongs to, and its position there: ("group", index), ("defaults", 0),
# ("state", position of the parameter) or ("shared", key of state that belongs to no parameter).
EntryKey = tuple[str, Hashable]
# None: of a parameter that is left out.
Shape = tuple[int, ...] | None


@dataclass(frozen=True)
class Slot:
    """Place of a tensor in rank 0's optimizer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    entry: EntryKey
    name: Hashable  # under which the entry, a dict, holds the tensor itself; None: it lies deeper


@dataclass(frozen=True)
class Kept:
    """A value that is not sent."""

    entry: EntryKey
    name: Hashable  # in the entry; None: all of it
    reason: str  # empty: it is, or holds, a module

    def __str__(self) -> str:
        kind, key = self.entry
        place = {"group": f"param_groups[{key}]", "defaults": "defaults"}.get(kind, f"{kind} {key}")
        return place if self.name is None else f"{place}[{self.name!r}]"


@dataclass
class Description:
    """Rank 0's optimizer without the values of its tensors. Travels pickled."""

    shapes: list[list[Shape]]  # of the parameters, by group
    entries: list[bytes]  # each a pair of EntryKey and value
    slots: list[Slot]
    kept: list[Kept]  # what stays as each rank has it


class _SlotTable:
    """The tensors met while rank 0's optimizer is pickled. Holds them, so that no id is used twice."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.slots: list[Slot] = []
        self._numbers: dict[int, int] = {}

    def number_of(self, tensor: torch.Tensor, entry: EntryKey, name: Hashable) -> int:
        if id(tensor) not in self._numbers:
            problem = why_unsendable(tensor)
            if problem is not None:
                raise _UnsendableTensorError(problem)
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            self.slots.append(Slot(tuple(tensor.shape), tensor.dtype, tensor.device.type, entry, name))
        return self._numbers[id(tensor)]

    def forget_after(self, count: int) -> None:
        """The tensors behind the first so many: of a value that cannot be sent."""
        for tensor in self.tensors[count:]:
            del self._numbers[id(tensor)]
        del self.tensors[count:], self.slots[count:]


class _UnsendableTensorError(ValueError):
    """Replicas would differ without it."""


class _ModuleFoundError(Exception):
    """A value refers to a module, of which each rank has its own."""


class _EntryPickler(pickle.Pickler):
    """Pickles an entry. Tensors in it, however deep, become numbers of slots; a tensor met again is the same slot."""

    def __init__(self, file: io.BytesIO, table: _SlotTable, entry: EntryKey, value: object) -> None:
        super().__init__(file)
        self._table = table
        self._entry = entry
        self._names = {id(item): name for name, item in items_of(value) if isinstance(item, torch.Tensor)}

    def persistent_id(self, value: object) -> int | None:
        if isinstance(value, nn.Module):
            raise _ModuleFoundError
        if not isinstance(value, torch.Tensor):
            return None
        return self._table.number_of(value, self._entry, self._names.get(id(value)))


class _EntryUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        return self._tensors[number]


def describe(
    optimizer: torch.optim.Optimizer, left_out: Collection[int]
) -> tuple[Description | str, list[torch.Tensor]]:
    """The description and the tensors of its slots; a text instead of the description says why there is none."""
    table = _SlotTable()
    pickles: list[bytes] = []
    kept: list[Kept] = []
    for key, value in entries_of(optimizer, left_out).items():
        try:
            kept.extend(_pickled(table, key, value, pickles))
        except _UnsendableTensorError as error:
            return f"{key[0]} {key[1]} cannot be sent: {error}", []
    return Description(shapes_of(optimizer, left_out), pickles, table.slots, kept), table.tensors


def _pickled(table: _SlotTable, key: EntryKey, value: object, pickles: list[bytes]) -> list[Kept]:
    """Adds the pickle of an entry, without what cannot be sent, which it returns."""
    data = _try(table, key, value)
    if isinstance(data, bytes):
        pickles.append(data)
        return []
    if not isinstance(value, dict):
        return [Kept(key, None, data)]
    kept = []
    for name, item in value.items():
        count = len(table.tensors)
        problem = _try(table, key, {name: item})
        table.forget_after(count)
        if isinstance(problem, str):
            kept.append(Kept(key, name, problem))
    if not kept:  # only together
        return [Kept(key, None, data)]
    left = {one.name for one in kept}
    return kept + _pickled(table, key, {name: item for name, item in value.items() if name not in left}, pickles)


def _try(table: _SlotTable, key: EntryKey, value: object) -> bytes | str:
    """Its pickle, or why there is none: nothing, if it refers to a module."""
    file, count = io.BytesIO(), len(table.tensors)
    try:
        _EntryPickler(file, table, key, value).dump((key, value))
    except _UnsendableTensorError:
        raise
    except Exception as error:  # whatever a __reduce__ raises; the other ranks wait for us
        table.forget_after(count)
        return "" if isinstance(error, _ModuleFoundError) else one_line(error, MAX_PROBLEM_LENGTH)
    return file.getvalue()


def entries_in(description: Description, tensors: Sequence[torch.Tensor]) -> dict[EntryKey, Any]:
    """The entries as they were described, with `tensors` in the slots. Raises whatever unpickling raises."""
    return dict(_EntryUnpickler(io.BytesIO(data), tensors).load() for data in description.entries)


def items_of(value: object) -> Iterable[tuple[Any, Any]]:
    """Of an entry that is a dict, (name, value); of another none."""
    return value.items() if isinstance(value, Mapping) else ()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Of all groups, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def shapes_of(optimizer: torch.optim.Optimizer, left_out: Collection[int]) -> list[list[Shape]]:
    """Of the parameters, by group."""
    return [
        [None if id(parameter) in left_out else tuple(parameter.shape) for parameter in group["params"]]
        for group in optimizer.param_groups
    ]


def entries_of(optimizer: torch.optim.Optimizer, left_out: Collection[int]) -> dict[EntryKey, Any]:
    """What the optimizer consists of, as it is: nothing is copied."""
    entries: dict[EntryKey, Any] = {}
    for index, group in enumerate(optimizer.param_groups):
        entries["group", index] = {name: value for name, value in group.items() if name != "params"}
    entries["defaults", 0] = optimizer.defaults
    for position, parameter in enumerate(parameters_of(optimizer)):
        if id(parameter) not in left_out and parameter in optimizer.state:  # reading what is absent would create it
            entries["state", position] = optimizer.state[parameter]
    state: dict[Any, Any] = optimizer.state
    entries.update((("shared", key), value) for key, value in state.items() if not isinstance(key, torch.Tensor))
    return entries
