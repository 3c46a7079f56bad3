"""Whether all ranks have built the same model. Functions; the training thread calls them once, before any broadcast.

Ranks whose parameters differ would exchange messages of different sizes: gloo fails then with a text about buffers,
NCCL hangs or mixes values up.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.object_collectives import all_gather_object, broadcast_object

MAX_NAME_LENGTH = 120  # characters
MAX_VARIANTS = 3  # of what ranks have instead of what rank 0 has
MAX_RANKS = 16

# One parameter: name, then "float32 [3, 4], trainable, on cpu".
_Entry = tuple[str, str]
# Where a rank first differs from rank 0, and what is there: None if its list ends before.
_Difference = tuple[int, _Entry | None]


def check_replicas(
    named_parameters: Iterable[tuple[str, torch.Tensor]], communicator: BaguaCommunicator, kind: str = ""
) -> None:
    """
    Every rank calls it. Costs one exchange of a digest if all is well.

    Args:
        named_parameters: compared are names, shapes, dtypes, requires_grad and the kind of device, in this order.
        kind: of tensors that they are, if they are not those that are trained; for the message.

    Raises:
        RuntimeError: on every rank, with the same text: the first difference, and the ranks that have it.
    """
    entries = [(name, _describe(parameter)) for name, parameter in named_parameters]
    if communicator.nranks() == 1:
        return
    digest = hashlib.sha256(repr(entries).encode()).digest()
    if len(set(all_gather_object(digest, communicator))) == 1:
        return
    # Rank 0's list goes out and only the first difference of each rank comes back: memory stays bounded on large jobs.
    reference: list[_Entry] = broadcast_object(entries, 0, communicator)
    differences: list[_Difference | None] = all_gather_object(_first_difference(reference, entries), communicator)
    raise RuntimeError(_message(reference, differences, communicator.ranks, kind))


def _describe(parameter: torch.Tensor) -> str:
    is_lazy = isinstance(parameter, UninitializedParameter | UninitializedBuffer)
    shape = "not initialised" if is_lazy else str(list(parameter.shape))
    dtype = str(parameter.dtype).removeprefix("torch.")
    return f"{dtype} {shape}, {'trainable' if parameter.requires_grad else 'frozen'}, on {parameter.device.type}"


def _first_difference(reference: Sequence[_Entry], entries: Sequence[_Entry]) -> _Difference | None:
    for index, (theirs, ours) in enumerate(zip(reference, entries, strict=False)):
        if theirs != ours:
            return index, ours
    if len(reference) == len(entries):
        return None
    index = min(len(reference), len(entries))
    return index, entries[index] if index < len(entries) else None


def _message(
    reference: Sequence[_Entry], differences: Sequence[_Difference | None], ranks: Sequence[int], kind: str
) -> str:
    first = min(difference[0] for difference in differences if difference is not None)
    variants: dict[_Entry | None, list[int]] = defaultdict(list)
    later = []
    for rank, difference in zip(ranks, differences, strict=True):
        if difference is None:
            continue
        if difference[0] == first:
            variants[difference[1]].append(rank)
        else:
            later.append(rank)
    expected = reference[first] if first < len(reference) else None
    told = [f"{_have(having)} {_name(entry)}" for entry, having in list(variants.items())[:MAX_VARIANTS]]
    if len(variants) > MAX_VARIANTS:
        rest = sorted(rank for having in list(variants.values())[MAX_VARIANTS:] for rank in having)
        told.append(f"{_have(rest)} something else again")
    if later:
        told.append(f"{_have(later)} the first difference further down")
    told.insert(0, f"{_have(ranks[:1])} {_name(expected)}")
    place = f"{first} of the {kind}" if kind else str(first)
    return (
        f"the ranks have different parameters. At position {place}, {'; '.join(told)}. Build the same model on every "
        "rank, with the same parameters in the same order, before it is wrapped"
    )


def _name(entry: _Entry | None) -> str:
    if entry is None:
        return "no parameter there"
    name = entry[0] if len(entry[0]) <= MAX_NAME_LENGTH else entry[0][:MAX_NAME_LENGTH] + "..."
    return f"{name!r} ({entry[1][:MAX_NAME_LENGTH]})"


def _have(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:MAX_RANKS]))
    more = f" and {len(ranks) - MAX_RANKS} more" if len(ranks) > MAX_RANKS else ""
    return f"rank {shown} has" if len(ranks) == 1 else f"ranks {shown}{more} have"
