"""Which tensors lie one after another in memory. Pure functions; any thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from bagua.engine.flat_views import is_dense


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
    spans = [_span(tensor) for tensor in tensors]
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
_Span = tuple[int, int, int, object, bool]


def _span(tensor: Tensor) -> _Span:
    begin = tensor.data_ptr()
    return (
        tensor.untyped_storage().data_ptr(),
        begin,
        begin + tensor.numel() * tensor.element_size(),
        tensor.dtype,
        tensor.numel() > 0 and is_dense(tensor),
    )


def _follows(first: _Span, second: _Span) -> bool:
    return first[0] == second[0] and first[2] == second[1] and first[3:] == second[3:] and first[4]
