"""What a process that joins follows while the others train: copies of parameters with their optimizer states, some
before each step, and the gradients of each step of those that were copied. It applies the same gradients to the same
state, and so has what the others have.

On the training thread of each. How it travels: bagua.regroup.following.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bagua.engine.parameters import replicated_parameters
from bagua.engine.setup import Setup
from bagua.regroup.following import Record

# Of the time of a step, for copies. At least one parameter is copied.
COPY_SHARE = 0.1
# What a copy from a GPU is taken to need, which goes on when its call has returned.
GPU_BYTES_PER_S = 10e9
MIN_LIMIT_BYTES = 64 << 20


class StateFeed:
    """
    Of a model, for one process that joins, by a member.

    Args:
        share: the number of the share of the parameters, of `of` that are about as large.

    Attributes:
        limit_bytes: of host memory, that copies may use: as much as the share has, or MIN_LIMIT_BYTES.
    """

    def __init__(self, setup: Setup, share: int, of: int) -> None:
        self._optimizers = setup.optimizers
        self._parameters = _parameters_of(setup)
        self._left = _shared_out([self._state_bytes(one) for one in self._parameters], of)[share]
        self._copied: list[int] = []
        self._begin: float | None = None
        share_bytes = sum(self._state_bytes(self._parameters[one]) for one in self._left)
        self.limit_bytes = max(MIN_LIMIT_BYTES, share_bytes)

    def begin_step(self) -> Iterator[Record]:
        """Copies, before a step."""
        begin = time.monotonic()
        budget = 0.0 if self._begin is None else COPY_SHARE * (begin - self._begin)
        self._begin = begin
        spent_on_gpu = 0.0
        while self._left:
            record = self._copy(self._left.pop(0))
            if record.wait is not None:
                spent_on_gpu += record.nbytes / GPU_BYTES_PER_S
            yield record
            if time.monotonic() - begin + spent_on_gpu >= budget:
                break

    def _copy(self, number: int) -> Record:
        parameter = self._parameters[number]
        self._copied.append(number)
        tensors = [parameter.detach()]
        names: list[tuple[Any, ...]] = []
        for position, optimizer in enumerate(self._optimizers):
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    names.append((position, name, tuple(value.shape), value.dtype, value.device.type))
                    tensors.append(value.detach())
                else:
                    names.append((position, name, None, None, value))
        return _record(("state", number, names), tensors)

    def gradients(self, optimizer: torch.optim.Optimizer) -> Record | None:
        """Those that it steps with now. None: it is no optimizer of the model."""
        position = _position_of(optimizer, self._optimizers)
        if position is None:
            return None
        stepped = {id(one) for group in optimizer.param_groups for one in group["params"]}
        numbers, tensors = [], []
        for number in self._copied:
            gradient = self._parameters[number].grad
            if gradient is not None and id(self._parameters[number]) in stepped:
                numbers.append(number)
                tensors.append(gradient)
        return _record(("gradients", numbers, sendable_options(optimizer)), tensors)

    @property
    def is_complete(self) -> bool:
        """Whether all of the share has been copied."""
        return not self._left

    def _state_bytes(self, parameter: Tensor) -> int:
        values = [one for optimizer in self._optimizers for one in optimizer.state.get(parameter, {}).values()]
        return parameter.nbytes + sum(one.nbytes for one in values if isinstance(one, Tensor))


class StateFollower:
    """Of a model of the process that joins."""

    def __init__(self, setup: Setup) -> None:
        self._optimizers = setup.optimizers
        self._parameters = _parameters_of(setup)
        self._gradients: dict[int, Tensor] = {}
        self._has_gradients: list[int] = []
        self._options: list[dict[str, Any]] = []

    def room(self, said: tuple[Any, ...]) -> list[Tensor]:
        """Contiguous tensors for those of a record. Any thread, but one record of a parameter at a time."""
        if said[0] == "state":
            parameter = self._parameters[said[1]]
            shapes = [(tuple(parameter.shape), parameter.dtype)]
            shapes += [(shape, dtype) for _, _, shape, dtype, _ in said[2] if shape is not None]
            return [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in shapes]
        for number in said[1]:
            if number not in self._gradients:
                parameter = self._parameters[number]
                self._gradients[number] = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        return [self._gradients[number] for number in said[1]]

    def take(self, said: tuple[Any, ...], tensors: list[Tensor]) -> None:
        """A record whose tensors are there. Those of the states of a step come before its gradients."""
        if said[0] == "gradients":
            self._has_gradients += said[1]
            self._options = said[2]
            return
        parameter = self._parameters[said[1]]
        with torch.no_grad():
            parameter.copy_(tensors[0])
        rest = iter(tensors[1:])
        states: dict[int, dict[Any, Any]] = {}
        for position, name, shape, _, value in said[2]:  # where it has a shape, the value is the kind of device
            state = states.setdefault(position, {})
            state[name] = value if shape is None else _like(parameter, next(rest), value)
        for position, state in states.items():
            self._optimizers[position].state[parameter] = state

    def set_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Those that were taken, if they are for this optimizer."""
        if _position_of(optimizer, self._optimizers) is None:
            return
        for group, options in zip(optimizer.param_groups, self._options, strict=True):
            group.update(options)
        for number in self._has_gradients:
            self._parameters[number].grad = self._gradients[number].to(self._parameters[number].device)

    def forget_gradients(self) -> None:
        """The optimizer has stepped."""
        for number in self._has_gradients:
            self._parameters[number].grad = None
        self._has_gradients = []


def sendable_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each group, without what cannot be pickled."""
    return [
        {name: value for name, value in group.items() if name != "params" and _can_be_sent(value)}
        for group in optimizer.param_groups
    ]


def _can_be_sent(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # whatever a __reduce__ raises
        return False
    return True


def _position_of(optimizer: torch.optim.Optimizer, optimizers: Sequence[torch.optim.Optimizer]) -> int | None:
    return next((position for position, one in enumerate(optimizers) if one is optimizer), None)


def _parameters_of(setup: Setup) -> list[nn.Parameter]:
    return [one for _, one in replicated_parameters(setup.module, setup.ignored)]


def _shared_out(sizes: Sequence[int], of: int) -> list[list[int]]:
    """Positions, in shares of about the same sum: the same on all ranks."""
    shares: list[list[int]] = [[] for _ in range(of)]
    sums = [0] * of
    for position in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        smallest = sums.index(min(sums))
        shares[smallest].append(position)
        sums[smallest] += sizes[position]
    return shares


def _record(said: tuple[Any, ...], tensors: Sequence[Tensor]) -> Record:
    """With copies of the tensors as they are now for the current stream, in host memory."""
    gpu = next((one.device for one in tensors if one.device.type == "cuda"), None)
    copies = [_copied(one) for one in tensors]
    if gpu is None:
        return Record(said, copies)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(gpu))
    return Record(said, copies, event.synchronize)


def _copied(tensor: Tensor) -> Tensor:
    source = tensor.detach()
    if source.device.type == "cpu":
        return source.clone(memory_format=torch.contiguous_format)
    # Pinned, so that the host does not wait for the copy.
    return torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True).copy_(source, non_blocking=True)


def _like(parameter: Tensor, values: Tensor, kind: str) -> Tensor:
    """On the parameter's device, if of that kind, and with its strides: fused kernels rely on equal ones."""
    if values.device.type != kind:
        values = values.to(parameter.device)
    if values.shape != parameter.shape or parameter.is_contiguous():
        return values
    return torch.empty_like(parameter.detach(), dtype=values.dtype, device=values.device).copy_(values)
