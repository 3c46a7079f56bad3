"""The plan of a fused step: which runs and which single parameters the optimizer is shown in each group.

Made anew when memory, gradients or states are not where it has them, which is looked for before each step.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from bagua.contrib.fuse.block import Block, Lane, is_scalar, is_state
from bagua.contrib.fuse.layout import BreakEven, is_in_bucket
from bagua.contrib.fuse.run import PLAIN, Run, StaleError, gradients_of


class GroupPlan:
    """Of one parameter group.

    Args:
        parameters: of the group.
        blocks: of the group.
        states: of the optimizer, by parameter.
        limits: for a run.
        check_each: see `Run`.

    Attributes:
        runs: parameters that are stepped as one.
        singles: parameters with gradients that are stepped by themselves.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        blocks: Sequence[Block],
        states: dict[Any, Any],
        limits: BreakEven,
        check_each: bool,
    ) -> None:
        self._parameters = list(parameters)
        self.runs: list[Run] = []
        in_group, in_runs = set(map(id, parameters)), set[int]()
        for block in blocks:
            block.drop_unused_lanes(states)
            for begin, end in _intervals(block, states, in_group, limits):
                mine = [states.get(one, {}) for one in block.parameters[begin:end]]
                _bring_states_home(block, begin, mine)
                self.runs.append(Run(block, begin, end, mine, check_each))
                in_runs.update(map(id, block.parameters[begin:end]))
        rest = [one for one in parameters if id(one) not in in_runs]
        self.singles = [one for one in rest if one.grad is not None]
        self._idle = [one for one in rest if one.grad is None]

    def is_current(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are still the group's parameters, and all but the gradients of runs is where it was."""
        if len(parameters) != len(self._parameters) or not all(map(is_, parameters, self._parameters)):
            return False
        if self._idle and any(one is not None for one in map(gradients_of, self._idle)):
            return False
        if self.singles and any(one is None for one in map(gradients_of, self.singles)):
            return False
        return all(map(Run.is_current, self.runs))


class Plan:
    """Of all groups of an optimizer, with the states that it is shown.

    Raises:
        StaleError: by `prepare`: make another plan.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        blocks: Sequence[Sequence[Block]],
        limits: Sequence[BreakEven],
        check_each: bool,
    ) -> None:
        states: dict[Any, Any] = optimizer.state
        self.groups = [
            GroupPlan(group["params"], of_group, states, one, check_each)
            for group, of_group, one in zip(optimizer.param_groups, blocks, limits, strict=True)
        ]
        self._runs = [run for group in self.groups for run in group.runs]
        self._flats = {id(run.flat) for run in self._runs}
        self._lanes: list[Lane] = []
        self._blocks = [block for of_group in blocks for block in of_group]
        self._states = states
        self._known = list(states.values())
        self._not_of_parameters = [key for key in states if not isinstance(key, Tensor)]
        self._shown: defaultdict[Any, Any] = defaultdict(dict)
        for run in self._runs:
            if run.state:
                self._shown[run.flat] = run.state
        self.fused_groups = sum(1 for group in self.groups if group.runs)
        self._note_lanes()

    def fused_parameters(self) -> list[Tensor]:
        """All of the runs."""
        return [one for run in self._runs for one in run.parameters]

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring what was written to the parameters since the last step to the flat ones.

        Raises:
            StaleError: something is not where the plan has it.
        """
        if (
            optimizer.state is not self._states
            or len(self._states) != len(self._known)
            or not all(map(is_, self._states.values(), self._known))
            or len(optimizer.param_groups) != len(self.groups)
        ):
            raise StaleError
        for group, plan in zip(optimizer.param_groups, self.groups, strict=True):
            if not plan.is_current(group["params"]):
                raise StaleError
        for run in self._runs:
            run.read_scalars()
            run.read_gradients()

    def shown_groups(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """What the optimizer sees instead of its groups: with their options of now."""
        shown = []
        for group, plan in zip(groups, self.groups, strict=True):
            one = group.copy()
            one.pop("param_names", None)
            one["params"] = [run.flat for run in plan.runs] + plan.singles
            shown.append(one)
        return shown

    def shown_states(self) -> defaultdict[Any, Any]:
        """What it sees instead of its states."""
        for plan in self.groups:
            for one in plan.singles:
                if one in self._states:
                    self._shown[one] = self._states[one]
        for key in self._not_of_parameters:
            self._shown[key] = self._states[key]
        return self._shown

    def write_back(self, groups: Sequence[dict[str, Any]], shown: Sequence[dict[str, Any]]) -> None:
        """Bring what the step has changed to the optimizer's own groups and states.

        Raises:
            StaleError: everything is where it belongs, but the next step needs another plan.
        """
        for group, seen in zip(groups, shown, strict=True):
            del seen["params"]
            group.update(seen)
        is_changed = False
        of_runs = 0
        for run in self._runs:
            if state := self._shown.get(run.flat):
                of_runs += 1
                if run.write_back(state):
                    is_changed = True
                    self._states.update(zip(run.parameters, run.states, strict=True))
        if len(self._shown) > of_runs:
            for key, state in self._shown.items():
                if id(key) not in self._flats and self._states.get(key) is not state:
                    self._states[key] = state
                    is_changed = True
        if is_changed:
            self._known = list(self._states.values())
            self._not_of_parameters = [key for key in self._shown if not isinstance(key, Tensor)]
            self._note_lanes()
            if any(run.is_stale for run in self._runs):
                raise StaleError
        self.note_versions()

    def _note_lanes(self) -> None:
        self._lanes = [lane for block in self._blocks for lane in block.scalars.values()]

    def note_versions(self) -> None:
        """What the parameters' states of one element hold now is what the runs have."""
        for lane in self._lanes:
            lane.version = lane.flat._version


def _intervals(
    block: Block, states: dict[Any, Any], in_group: set[int], limits: BreakEven
) -> Iterator[tuple[int, int]]:
    """Where runs that pay begin and end."""
    scalars = {name: lane.flat.tolist() for name, lane in block.scalars.items()}
    begin, before = 0, None
    for position in range(len(block.parameters) + 1):
        is_member = position < len(block.parameters) and id(block.parameters[position]) in in_group
        now = _signature(block, position, states, scalars) if is_member else None
        if now is None or now != before:
            if before is not None and limits.pays(block.parameters[begin:position]):
                yield from _pieces(block, begin, position, limits.run_elements)
            begin, before = position, now


def _pieces(block: Block, begin: int, end: int, run_elements: int) -> Iterator[tuple[int, int]]:
    """A run, cut into runs of about so many elements."""
    number = min(end - begin, -(-(block.offsets[end] - block.offsets[begin]) // run_elements))
    return itertools.pairwise(begin + (end - begin) * piece // number for piece in range(number + 1))


def _signature(
    block: Block, position: int, states: dict[Any, Any], scalars: dict[str, list[Any]]
) -> tuple[Any, ...] | None:
    """What parameters of a run have in common: which states, and the values of those of one element. None: it cannot
    be in a run."""
    parameter = block.parameters[position]
    gradient = parameter.grad
    found_at = None if block.owns_gradients or block.gradients is None else block.gradients.addresses[position]
    if (
        gradient is None
        or not block.is_home(parameter)
        or (block.is_apart and is_in_bucket(parameter))
        or gradient.layout is not torch.strided
        or gradient.dtype is not parameter.dtype
        or gradient.requires_grad
        or found_at not in (None, gradient.data_ptr())
    ):
        return None
    found: list[Any] = []
    for name, value in states.get(parameter, {}).items():
        if isinstance(value, PLAIN):
            found.append((name, type(value), value))
        elif isinstance(value, Tensor) and is_state(value, parameter) and block.state(name, value) is not None:
            found.append((name, value.dtype))
        elif is_scalar(value, parameter) and (lane := block.scalar(name, value)) is not None:
            is_view = name in scalars and value.data_ptr() == lane.addresses[position]
            found.append((name, value.dtype, scalars[name][position] if is_view else value.item()))
        else:
            return None
    return parameter.requires_grad, *sorted(found, key=lambda one: str(one[0]))


def _bring_states_home(block: Block, begin: int, states: Sequence[dict[str, Any]]) -> None:
    """Make the tensors of these states views of the block's lanes."""
    for name, example in states[0].items():
        if not isinstance(example, Tensor):
            continue
        lane = block.state(name, example) if is_state(example, block.parameters[begin]) else block.scalar(name, example)
        assert lane is not None
        values = [state[name].detach() for state in states]
        lane.restore(begin, begin + len(states))
        views = lane.views[begin : begin + len(states)]
        away = [position for position, pair in enumerate(zip(views, values, strict=True)) if _differ(*pair)]
        if away:
            torch._foreach_copy_([views[position] for position in away], [values[position] for position in away])
        for state, view in zip(states, views, strict=True):
            state[name] = view


def _differ(first: Tensor, second: Tensor) -> bool:
    return first.data_ptr() != second.data_ptr()
