"""A run: parameters that lie one after another in a block, have gradients, and have had the same steps.

The optimizer sees it as one flat parameter. Its state is a dict of slices of the block's lanes; step counters and other
states of one element are kept once for the run, and written to those of each parameter after the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from bagua.contrib.fuse.block import Block, Lane, addresses_of
from bagua.kernels.flat_views import flat_views

gradients_of = attrgetter("grad")

# States that are values: alike for all parameters of a run.
PLAIN = (int, float, bool, str, type(None))


class StaleError(Exception):
    """Memory, gradients or states are not where the plan has them."""


class Run:
    """
    Args:
        block, begin, end: positions in the block.
        states: of each parameter, by name; their tensors are views of the block's lanes already. Empty dicts, or dicts
            that the optimizer does not know yet, if there is no state.
        check_each: `is_current` looks at each parameter, not only at the first and the last.

    Attributes:
        flat: the weights, 1-D; its gradient is set.
        state: of `flat`, as the optimizer keeps it.
        is_stale: there must be another plan for the next step.
    """

    def __init__(self, block: Block, begin: int, end: int, states: list[dict[str, Any]], check_each: bool) -> None:
        self.block, self.begin, self.end = block, begin, end
        self.parameters = block.parameters[begin:end]
        self.states = states
        self.flat = block.slice_of(block.weights, begin, end).detach().requires_grad_(self.parameters[0].requires_grad)
        gradients = block.lane_of_gradients()
        self.flat.grad = block.slice_of(gradients, begin, end)
        self._gradients = gradients
        self._gradient_addresses = gradients.addresses[begin:end]
        self._restore_gradients()
        self.state: dict[str, Any] = {}
        self.is_stale = False
        self._step = 1 if check_each else max(1, end - begin - 1)
        for name, value in states[0].items():
            if not isinstance(value, Tensor):
                self.state[name] = value
            elif name in block.states and value is block.states[name].views[begin]:
                self.state[name] = block.slice_of(block.states[name], begin, end)
            else:
                self.state[name] = value.clone()
        self._watch()

    def _restore_gradients(self) -> None:
        self._gradients.restore(self.begin, self.end)
        self._gradient_views = self._gradients.views[self.begin : self.end]

    def _watch(self) -> None:
        """Remember where everything is."""
        looked_at = slice(self.begin, self.end, self._step)
        self._watched = self.parameters[:: self._step]
        self._addresses = self.block.weights.addresses[looked_at]
        self._watched_states = self.states[:: self._step]
        self._lanes = []
        self._plain = {}
        self._scalars: dict[str, Tensor] = {}
        self._last = dict(self.state)
        for name, value in self.state.items():
            if isinstance(value, Tensor):
                lane = self._lane(name)
                if value.shape != self.flat.shape:
                    self._scalars[name] = lane.flat[self.begin : self.end]
                self._lanes.append((itemgetter(name), lane.views[looked_at], lane.addresses[looked_at]))
            else:
                self._plain[name] = value

    def _lane(self, name: str) -> Lane:
        lanes = self.block.states if self.state[name].shape == self.flat.shape else self.block.scalars
        return lanes[name]

    # --- before the step ---------------------------------------------------------------------------------------------

    def is_current(self) -> bool:
        """Whether weights and states are where they were."""
        if list(map(addresses_of, self._watched)) != self._addresses:
            return False
        if sum(map(len, self._watched_states)) != len(self._watched_states) * len(self.state):
            return False
        if not self.state:
            return True
        try:
            for get, views, addresses in self._lanes:
                if not all(map(is_, map(get, self._watched_states), views)):
                    return False
                if list(map(addresses_of, views)) != addresses:
                    return False
            for name, value in self._plain.items():
                if any(one[name] != value or type(one[name]) is not type(value) for one in self._watched_states):
                    return False
        except KeyError:
            return False
        return True

    def read_scalars(self) -> None:
        """Take over what was written to the parameters' step counters since the last step.

        Raises:
            StaleError: they are not alike any more.
        """
        for name, each in self._scalars.items():
            lane = self.block.scalars[name]
            if lane.flat._version != lane.version:
                if not bool((each == each[0]).all()):
                    raise StaleError
                with torch.no_grad():
                    self.state[name].copy_(lane.views[self.begin])

    def read_gradients(self) -> None:
        """Copy the gradients to where the flat one is, unless they are there.

        Raises:
            StaleError: a gradient is missing, or in a form that a flat tensor cannot take.
        """
        gradients = list(map(gradients_of, self.parameters))
        try:
            is_here = addresses_of(gradients[0]) == self._gradient_addresses[0]
            if is_here and list(map(addresses_of, gradients)) == self._gradient_addresses:
                return
            if not self.block.owns_gradients:
                raise StaleError
            if self.block.gave_gradients:
                self._restore_gradients()
            with torch.no_grad():
                torch._foreach_copy_(self._gradient_views, gradients)
        except (TypeError, RuntimeError) as error:
            raise StaleError from error
        # The same object as in the last step: the training loop keeps gradients, so they may as well live here.
        if getattr(gradients[0], _SEEN, False):
            self.block.gave_gradients = True
            for parameter, view in zip(self.parameters, self._gradient_views, strict=True):
                parameter.grad = view
        else:
            setattr(gradients[0], _SEEN, True)

    # --- after the step ----------------------------------------------------------------------------------------------

    def write_back(self, state: dict[str, Any]) -> bool:
        """Bring what the optimizer has made of the flat parameter's state to the parameters' states.

        Args:
            state: of `flat`.

        Returns:
            whether the dicts of the parameters have changed.

        Raises:
            RuntimeError: the optimizer keeps something that is neither one element, nor one for each weight.
        """
        is_changed = state is not self.state or state.keys() != self._last.keys()
        for name in [name for name in self._last if name not in state]:
            for one in self.states:
                one.pop(name, None)
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == self.flat.shape:
                if value is not self._last.get(name):
                    state[name] = self._adopt_state(name, value)
                    is_changed = True
            elif isinstance(value, Tensor) and value.numel() == 1:
                is_changed |= self._write_scalar(name, value)
            elif isinstance(value, PLAIN):
                if name not in self._last or self._last[name] != value or type(self._last[name]) is not type(value):
                    self._set(name, [value] * len(self.states))
                    is_changed = True
            else:
                raise RuntimeError(_not_elementwise(name, value, self.flat))
        self.state = state
        if is_changed and not self.is_stale:
            self._watch()
        return is_changed

    def _set(self, name: str, values: Iterable[Any]) -> None:
        for one, value in zip(self.states, values, strict=True):
            one[name] = value

    def _adopt_state(self, name: str, value: Tensor) -> Tensor:
        lane = self.block.state(name, value)
        if lane is None:  # of another dtype than before: the next plan leaves these parameters alone
            begin = self.block.offsets[self.begin]
            offsets = [offset - begin for offset in self.block.offsets[self.begin : self.end]]
            self._set(name, flat_views(value, self.parameters, offsets))
            self.is_stale = True
            return value
        part = self.block.slice_of(lane, self.begin, self.end)
        part.copy_(value.detach())
        self._set(name, lane.views[self.begin : self.end])
        return part

    def _write_scalar(self, name: str, value: Tensor) -> bool:
        lane = self.block.scalar(name, value)
        if lane is None:
            self._set(name, [value.clone() for _ in self.states])
            self.is_stale = True
            return True
        if name in self._scalars:
            self._scalars[name].fill_(value.detach().reshape(()))
            return False
        lane.flat[self.begin : self.end].fill_(value.detach().reshape(()))
        self._set(name, lane.views[self.begin : self.end])
        return True


_SEEN = "_bagua_seen_by_fuse_step"


def _not_elementwise(name: str, value: Any, flat: Tensor) -> str:
    kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    return (
        f"The optimizer keeps {kind} as {name!r} for a flat parameter of {flat.numel()} elements.\n"
        "fuse_step() steps many parameters as one, which such an optimizer cannot do.\n"
        "Use optimizer.step()."
    )
