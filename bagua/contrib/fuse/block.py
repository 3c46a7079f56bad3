"""A block: parameters of one group whose weights lie in one piece of memory, with gradients and states laid out alike.

Owned by the fusion of one optimizer; used by the thread that steps it. Every run of parameters that lie one after
another in a block is a slice of each of its tensors, so a parameter without a gradient moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bagua.kernels.flat_views import ALIGNED_BYTES, flat_views, offsets_of

addresses_of = Tensor.data_ptr


class Lane:
    """One kind of tensor of all parameters of a block: the gradients, or the states of one name.

    Args:
        flat: 1-D. Of a lane of scalars an element for each parameter, otherwise laid out like the weights.
        views: of each parameter; those of scalars share the version counter of `flat`.

    Attributes:
        addresses: of the views, as they are made.
        version: that of `flat` when its values were last known to be those of the runs.
    """

    def __init__(self, flat: Tensor, views: list[Tensor]) -> None:
        self.flat = flat
        self.views = views
        self.addresses = [view.data_ptr() for view in views]
        self.version = -1
        self._strides = [view.stride() for view in views]

    def restore(self, begin: int, end: int) -> None:
        """Make views anew that were given other memory: `p.grad.data = ...`, where the gradient is a view."""
        for position in range(begin, end):
            view, address = self.views[position], self.addresses[position]
            if view.data_ptr() != address:
                offset = (address - self.flat.data_ptr()) // self.flat.element_size() + self.flat.storage_offset()
                again = self.flat.as_strided(view.shape, self._strides[position], offset)
                self.views[position] = again if view._is_view() else again.data


class Block:
    """
    Args:
        parameters: dense, of one dtype and device, each with at least one dimension and one element.
        flat: the memory in which their weights lie one after another; None: they are moved into memory of their own.
        gradients: the memory in which their gradients lie one after another; None: made when it is needed.

    Attributes:
        offsets: where each parameter begins in the flat tensors, and where the last one ends. In elements.
        weights: the lane of weights.
        gradients: the lane of gradients; None before the first is needed.
        is_apart: all memory is that of this block.
        owns_gradients: its memory is that of this block, to be written.
        gave_gradients: parameters have its views as their gradients.
        states: by name, those of which each parameter has as many elements as weights.
        scalars: by name, those of which each parameter has one element.
    """

    def __init__(
        self, parameters: Sequence[Tensor], flat: Tensor | None = None, gradients: Tensor | None = None
    ) -> None:
        self.parameters = list(parameters)
        self.position = {id(parameter): position for position, parameter in enumerate(parameters)}
        first = self.parameters[0]
        is_moved = flat is None
        self.is_apart = is_moved and gradients is None
        # Gaps would be in nobody's way, but memory that another owns has none.
        aligned_bytes = ALIGNED_BYTES.get(first.device.type, 1) if self.is_apart else 1
        begins, end = offsets_of(self.parameters, max(1, aligned_bytes // first.dtype.itemsize))
        self.offsets = [*begins, end]
        if flat is None:
            flat = torch.zeros(end, dtype=first.dtype, device=first.device)
        self.weights = Lane(flat, flat_views(flat, self.parameters, begins))
        if is_moved:
            for parameter, view in zip(self.parameters, self.weights.views, strict=True):
                view.copy_(parameter.detach())
                parameter.data = view
        self.owns_gradients = gradients is None
        self.gradients: Lane | None = None if gradients is None else self._lane(gradients)
        self.gave_gradients = False
        self.states: dict[str, Lane] = {}
        self.scalars: dict[str, Lane] = {}

    def _lane(self, flat: Tensor) -> Lane:
        return Lane(flat, flat_views(flat, self.parameters, self.offsets[:-1]))

    def lane_of_gradients(self) -> Lane:
        """The gradients, for which there is memory from now on."""
        if self.gradients is None:
            self.gradients = self._lane(torch.zeros_like(self.weights.flat))
        return self.gradients

    def is_home(self, parameter: Tensor) -> bool:
        """Whether the weights are where this block has them."""
        return parameter.data_ptr() == self.weights.addresses[self.position[id(parameter)]]

    def bring_home(self, parameter: Tensor) -> bool:
        """Move the weights back into the block, if they still fit. Whether they did."""
        view = self.weights.views[self.position[id(parameter)]]
        weights = parameter.detach()
        if (weights.dtype, weights.device, weights.shape, weights.stride()) != (
            view.dtype,
            view.device,
            view.shape,
            view.stride(),
        ):
            return False
        view.copy_(weights)
        parameter.data = view
        return True

    def slice_of(self, lane: Lane, begin: int, end: int) -> Tensor:
        """The part of a lane laid out like the weights that belongs to positions `begin` to `end`: 1-D."""
        return lane.flat[self.offsets[begin] : self.offsets[end - 1] + self.parameters[end - 1].numel()]

    def state(self, name: str, like: Tensor) -> Lane | None:
        """The lane of a state whose tensors are laid out like the weights; None: there is one of another dtype or
        device, which other parameters use."""
        lane = self.states.get(name)
        if lane is None:
            flat = torch.zeros(self.weights.flat.shape, dtype=like.dtype, device=like.device)
            lane = self.states[name] = self._lane(flat)
        return lane if (lane.flat.dtype, lane.flat.device) == (like.dtype, like.device) else None

    def scalar(self, name: str, like: Tensor) -> Lane | None:
        """As `state`, of a state with one element for each parameter."""
        lane = self.scalars.get(name)
        if lane is None:
            flat = torch.zeros(len(self.parameters), dtype=like.dtype, device=like.device)
            views = [flat.narrow(0, position, 1).view(like.shape) for position in range(len(self.parameters))]
            lane = self.scalars[name] = Lane(flat, views)
        is_alike = (lane.flat.dtype, lane.flat.device, lane.views[0].shape) == (like.dtype, like.device, like.shape)
        return lane if is_alike else None

    def drop_unused_lanes(self, states: Mapping[Any, Mapping[str, Any]]) -> None:
        """Free those that no state of a parameter is a view of: states were loaded, or have another dtype now."""
        known = [states.get(parameter, {}) for parameter in self.parameters]
        for lanes in (self.states, self.scalars):
            for name, lane in list(lanes.items()):
                if not any(state.get(name) is view for state, view in zip(known, lane.views, strict=True)):
                    del lanes[name]


def is_state(value: Tensor, parameter: Tensor) -> bool:
    """Whether it is laid out like the weights: an element for each."""
    return value.shape == parameter.shape and value.layout is torch.strided


def is_scalar(value: Any, parameter: Tensor) -> bool:
    """Whether it is a tensor of one element that belongs to the parameter as a whole: a step counter."""
    return isinstance(value, Tensor) and value.numel() == 1 and value.shape != parameter.shape
