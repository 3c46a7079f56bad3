"""Which parameters of a group share a block: laid out by us, or as Bagua's buckets and others have laid them out; and
whether they take less time to step as one flat tensor than one by one.

A run of small parameters saves the calls for each of them, and costs a fixed time and a copy of new gradients. So a
parameter of n elements counts as 1 - n / `elements` of a call, and a run pays if it saves at least `calls`. Larger
parameters are left where they are, and stepped as without fusing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bagua.collectives.tensor import gradient_of, record_of
from bagua.contrib.fuse.block import Block
from bagua.kernels.flat_views import is_dense


class BreakEven(NamedTuple):
    """
    Attributes:
        calls: what a run must save.
        elements: of a parameter whose copy takes as long as what it saves.
        run_elements: longer runs are cut. On CPUs, what a step computes in between would not be in a cache any more.
    """

    calls: int
    elements: int
    run_elements: int

    def is_small(self, parameter: Tensor) -> bool:
        """Whether a run gains from it."""
        return parameter.numel() < self.elements

    def pays(self, parameters: Iterable[Tensor]) -> bool:
        """Whether these take less time as a run."""
        saved = [1 - one.numel() / self.elements for one in parameters]
        return len(saved) > 1 and sum(saved) >= self.calls


# By device type, implementation, and what is computed: SGD without and with momentum, and optimizers with more states.
# Measured with new gradients in each step, on one core of a CPU and on an H100 (`measure optimizers`).
_MEASURED = {
    ("cpu", "for-loop"): {"sgd": (12, 4096), "momentum": (4, 12288), "states": (4, 16384)},
    ("cpu", "foreach"): {"sgd": (32, 2048), "momentum": (8, 8192), "states": (6, 16384)},
    ("cpu", "fused"): {"sgd": (96, 1024), "momentum": (32, 2048), "states": (14, 8192)},
    ("cuda", "for-loop"): {"sgd": (8, 65536), "momentum": (5, 65536), "states": (4, 65536)},
    ("cuda", "foreach"): {"sgd": (64, 131072), "momentum": (32, 131072), "states": (12, 131072)},
    ("cuda", "fused"): {"sgd": (80, 131072), "momentum": (40, 131072), "states": (48, 131072)},
}
_RUN_ELEMENTS = {("cpu", "for-loop"): 1 << 17, ("cpu", "foreach"): 1 << 20, ("cpu", "fused"): 1 << 20}
_ANY = 1 << 62

# Toys are always fused, as by Bagua 0.9, though it takes some microseconds longer: fewer elements in a group than the
# first, in no more parameters than the second.
_TOY = 1024, 8


def break_even(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> BreakEven:
    """
    Args:
        group: of the optimizer. Its options choose the implementation.
    """
    elements, parameters = sum(map(Tensor.numel, group["params"])), len(group["params"])
    if elements < _TOY[0] and parameters <= _TOY[1] and not group.get("fused"):
        return BreakEven(0, _TOY[0], _ANY)
    device = next((one.device.type for one in group["params"]), "cpu")
    if group.get("fused"):
        implementation = "fused"
    elif group.get("foreach") or (group.get("foreach", False) is None and device != "cpu"):
        implementation = "foreach"
    else:
        implementation = "for-loop"
    kind = "states"
    if isinstance(optimizer, torch.optim.SGD):
        kind = "momentum" if group.get("momentum") else "sgd"
    case = "cpu" if device == "cpu" else "cuda", implementation
    return BreakEven(*_MEASURED[case][kind], _RUN_ELEMENTS.get(case, _ANY))


class OwnLayout:
    """Weights lie in the order of the group (`do_flatten`). What a bucket has taken over stays there, unfused."""

    def settle(self, blocks: list[Block], parameters: Sequence[Tensor], limits: BreakEven) -> list[Block]:
        """
        Args:
            blocks: of the group, so far.
            parameters: that are to be in one, and can be.
            limits: for a new block.

        Returns:
            the blocks of the group from now on.
        """
        movable = [one for one in parameters if not is_in_bucket(one)]
        homes = {id(one): block for block in blocks for one in block.parameters}
        flats = {block.weights.flat.untyped_storage().data_ptr() for block in blocks}
        newcomers: dict[Any, list[Tensor]] = {}
        for one in movable:
            block = homes.get(id(one))
            if block is not None and block.is_home(one):
                continue
            if one.untyped_storage().data_ptr() in flats:
                continue  # it was given the memory of another one, to share it
            if block is None or not block.bring_home(one):
                newcomers.setdefault((one.dtype, one.device), []).append(one)
        # All that are outside any block: with what is shared they would not be shared any more.
        made = [Block(alone) for group in newcomers.values() if limits.pays(alone := _without_shared_memory(group))]
        return [block for block in blocks if any(map(block.is_home, block.parameters))] + made


class FoundLayout:
    """Weights or gradients lie one after another already (`do_flatten=False`). Gradients are used where a bucket has
    them, and the weights brought into the same order; weights are used where they are."""

    def settle(self, blocks: list[Block], parameters: Sequence[Tensor], limits: BreakEven) -> list[Block]:
        """As `OwnLayout.settle`."""
        kept = [block for block in blocks if all(map(block.is_home, block.parameters)) and _has_gradients(block)]
        homes = {id(one) for block in kept for one in block.parameters}
        rest = [one for one in parameters if id(one) not in homes and one.grad is not None]
        found: list[Block] = []
        for run in calculate_mutual_groups([rest]):
            tensors = [rest[position] for position in run]
            if limits.pays(tensors):
                found.append(Block(tensors, _span(tensors), _span_of_gradients(tensors)))
        used = {id(one) for block in found for one in block.parameters}
        bucketed = [one for one in rest if id(one) not in used and _is_gradient_in_bucket(one)]
        for run in calculate_mutual_groups([[one.grad for one in bucketed if one.grad is not None]]):
            tensors = [bucketed[position] for position in run]
            if limits.pays(tensors) and len(_without_shared_memory(tensors)) == len(tensors):
                found.append(Block(tensors, gradients=_span_of_gradients(tensors)))
        return kept + found


def can_be_flat(parameter: Tensor) -> bool:
    """Whether it may be a part of a flat tensor. Those without dimensions may not: an optimizer's state has the same
    shape then, whether it is a step counter or has an element for each weight."""
    return (
        type(parameter) in (Tensor, nn.Parameter)
        and parameter.layout is torch.strided
        and parameter.device.type != "meta"
        and (parameter.is_floating_point() or parameter.is_complex())
        and parameter.dim() > 0
        and parameter.numel() > 0
        and is_dense(parameter)
        and not parameter.is_conj()
        and not parameter.is_neg()
    )


def is_in_bucket(parameter: Tensor) -> bool:
    """Whether its weights or gradient, or what else is communicated for it, lie in the memory of a bucket."""
    record = record_of(parameter)
    return record is not None and record.view is not None


def _is_gradient_in_bucket(parameter: Tensor) -> bool:
    record = record_of(parameter)
    return (
        record is not None
        and record.getter is gradient_of
        and record.view is not None
        and parameter.grad is not None
        and parameter.grad.data_ptr() == record.view.data_ptr()
        and parameter.grad.stride() == parameter.stride()
    )


def _without_shared_memory(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Those whose memory no other one of them has a part of."""
    spans = sorted(
        (one.data_ptr(), one.data_ptr() + one.numel() * one.element_size(), position)
        for position, one in enumerate(parameters)
    )
    shared = set()
    reach, reaching = 0, -1  # the end of what has been passed, and whose it is
    for begin, end, position in spans:
        if begin < reach:
            shared |= {reaching, position}
        if end > reach:
            reach, reaching = end, position
    return [one for position, one in enumerate(parameters) if position not in shared]


def _has_gradients(block: Block) -> bool:
    """Whether the block's own memory is there for gradients, or they are in the memory that it has found."""
    if block.owns_gradients or block.gradients is None:
        return True
    return all(
        one.grad is None or (one.grad.layout is torch.strided and one.grad.data_ptr() == address)
        for one, address in zip(block.parameters, block.gradients.addresses, strict=True)
    )


def _span(tensors: Sequence[Tensor]) -> Tensor:
    """The memory of tensors that lie one after another, as one flat tensor."""
    first = tensors[0].data
    return first.as_strided((sum(one.numel() for one in tensors),), (1,), first.storage_offset())


def _span_of_gradients(parameters: Sequence[Tensor]) -> Tensor | None:
    """That of the gradients, if they lie in the order of the parameters, with their strides."""
    gradients = [one.grad for one in parameters if one.grad is not None and one.grad.layout is torch.strided]
    is_alike = len(gradients) == len(parameters) and all(
        one.stride() == parameter.stride() and one.dtype == parameter.dtype
        for one, parameter in zip(gradients, parameters, strict=True)
    )
    if not is_alike or calculate_mutual_groups([gradients]) != [list(range(len(parameters)))]:
        return None
    return _span(gradients)


def calculate_mutual_groups(tensors_list: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Which positions lie one after another in memory, in the same order, in every list.

    Args:
        tensors_list: lists of equal length, for instance the weights and the gradients of the same parameters. Tensors
            of any shape and dtype; strides must be dense for a tensor to be in a run.

    Returns:
        The runs that all lists have: of at least two positions, each in the order of the memory, and the runs by their
        smallest position. The tensors of a run are of one storage and one dtype, and each begins where the one before
        it ends. A run is as long as it can be in its list; one that is longer in another list is not in the result.

    Raises:
        ValueError: the lists differ in length.
    """
    if not tensors_list:
        return []
    lengths = [len(tensors) for tensors in tensors_list]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"The lists of tensors have {lengths} entries.\n"
            "calculate_mutual_groups() compares what stands at the same position of each.\n"
            "Pass lists of equal length."
        )
    common = set.intersection(*(set(_runs(tensors)) for tensors in tensors_list))
    return sorted(map(list, common), key=min)


def _runs(tensors: Sequence[Tensor]) -> Iterator[tuple[int, ...]]:
    """Of at least two positions, in the order of the memory."""
    spans = [_extent(tensor) for tensor in tensors]
    run: list[int] = []
    for position in sorted(range(len(spans)), key=lambda one: spans[one][:2]):
        if run and not _follows(spans[run[-1]], spans[position]):
            if len(run) > 1:
                yield tuple(run)
            run = []
        run.append(position)
    if len(run) > 1:
        yield tuple(run)


# Address of the storage, first and last byte after it, dtype, whether strides are dense.
_Extent = tuple[int, int, int, object, bool]


def _extent(tensor: Tensor) -> _Extent:
    begin = tensor.data_ptr()
    return (
        tensor.untyped_storage().data_ptr(),
        begin,
        begin + tensor.numel() * tensor.element_size(),
        tensor.dtype,
        tensor.numel() > 0 and is_dense(tensor),
    )


def _follows(first: _Extent, second: _Extent) -> bool:
    return first[0] == second[0] and first[2] == second[1] and first[3:] == second[3:] and first[4]
