"""Whether all ranks have built the same model and the same optimizers, with the same settings. Called on the training
thread, before any broadcast and before buckets change.

Ranks whose parameters differ would exchange messages of different sizes: gloo fails then with a text about buffers,
NCCL hangs or mixes values up. So would ranks with unequally many optimizers, another algorithm or buckets of another
size; and an optimizer of another class than rank 0's would be given options that mean nothing to it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.object_collectives import all_gather_object, broadcast_object, start_all_gather_bytes
from bagua.rank_list import rank_list

MAX_NAME_LENGTH = 120  # characters
MAX_VARIANTS = 3  # of what ranks have instead of what rank 0 has
DIGEST_BYTES = hashlib.sha256().digest_size

_T = TypeVar("_T")

# One parameter: name, then "float32 [3, 4], trainable, on cpu".
_Entry = tuple[str, str]
# Entries of parameters, the classes of the optimizers, and settings.
_Lists = tuple[list[_Entry], list[str], list[str]]
# Where a rank first differs from rank 0, and what is there: None if its list ends before.
_Difference = tuple[int, _T | None]
# In parameters, in optimizers, how many optimizers it has, and in settings.
_Differences = tuple[_Difference[_Entry] | None, _Difference[str] | None, int, _Difference[str] | None]


class ReplicasDifferError(RuntimeError):
    """On every rank, which have agreed on it: they may go on to communicate."""


class Replica:
    """What this rank has built. To describe a model of thousands of parameters takes as long as a step of it, so that
    a description is kept with what depends on it.

    Args:
        named_parameters: described are names, shapes, dtypes, requires_grad and the kind of device, in this order.
        kind: of tensors that they are, in the plural; for the message.
        optimizers: described are their number and their classes, in this order. `broadcast_optimizer_state` compares
            their groups and parameters.
        settings: as they are; as many on every rank.

    Attributes:
        digest: of all this, DIGEST_BYTES long.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        kind: str = "parameters",
        optimizers: Sequence[torch.optim.Optimizer] = (),
        settings: Sequence[str] = (),
    ) -> None:
        self._kind = kind
        self._entries = [(name, _describe(parameter)) for name, parameter in named_parameters]
        self._classes = [_class_name(optimizer) for optimizer in optimizers]
        self._settings = list(settings)
        digest = hashlib.sha256(repr((self._entries, self._classes, self._settings)).encode()).digest()
        self.digest = torch.frombuffer(bytearray(digest), dtype=torch.uint8)

    def check(self, communicator: BaguaCommunicator) -> None:
        """Compare it with those of the other ranks. Every rank calls it. Costs one exchange of a digest if all is well.

        Raises:
            ReplicasDifferError: on every rank, with the same text: the first difference, and the ranks that have it.
        """
        self.start_check(communicator)()

    def start_check(self, communicator: BaguaCommunicator) -> Callable[[], None]:
        """As `check`, with the exchange in the background. Every rank calls it, and what it returns."""
        if communicator.nranks() == 1:
            return lambda: None
        digests = start_all_gather_bytes(self.digest, communicator)

        def finish() -> None:
            if len({bytes(one) for one in digests()}) > 1:
                self._tell_difference(communicator)

        return finish

    def difference(self, other: Replica, ranks: Sequence[int]) -> str:
        """The message of `check`, where only `ranks` compare what they have: this, and `other` with other tensors."""
        found = [None, _first_difference(self._entries, other._entries)]
        return _parameters_message(self._entries, found, ranks, self._kind)

    def _tell_difference(self, communicator: BaguaCommunicator) -> None:
        # Rank 0's lists go out and only the first differences of each rank come back: memory stays bounded on large
        # jobs.
        reference: _Lists = broadcast_object(self.lists, 0, communicator)
        found: list[_Differences] = all_gather_object(_differences(reference, self.lists), communicator)
        raise ReplicasDifferError(_message(reference, found, communicator.ranks, self._kind))

    @property
    def lists(self) -> _Lists:
        """What is compared. Travels as JSON, too."""
        return self._entries, self._classes, self._settings

    def difference_of(self, lists: Sequence[Sequence[Any]], rank: int) -> str | None:
        """The message of `check` where rank 0 has this, and another rank alone has other `lists`; None: it has not."""
        entries, classes, settings = lists
        theirs = [(name, text) for name, text in entries], list(classes), list(settings)
        if theirs == self.lists:
            return None
        found = [_differences(self.lists, one) for one in (self.lists, theirs)]
        return _message(self.lists, found, [0, rank], self._kind)


def _differences(reference: _Lists, mine: _Lists) -> _Differences:
    return (
        _first_difference(reference[0], mine[0]),
        _first_difference(reference[1], mine[1]),
        len(mine[1]),
        _first_difference(reference[2], mine[2]),
    )


def _message(reference: _Lists, found: Sequence[_Differences], ranks: Sequence[int], kind: str) -> str:
    in_parameters, in_optimizers, counts, in_settings = zip(*found, strict=True)
    if any(one is not None for one in in_parameters):
        return _parameters_message(reference[0], in_parameters, ranks, kind)
    if any(one is not None for one in in_optimizers):
        return _optimizers_message(reference[1], in_optimizers, counts, ranks)
    return _settings_message(reference[2], in_settings, ranks)


def _describe(parameter: torch.Tensor) -> str:
    is_lazy = isinstance(parameter, UninitializedParameter | UninitializedBuffer)
    shape = "not initialized" if is_lazy else str(list(parameter.shape))
    dtype = str(parameter.dtype).removeprefix("torch.")
    return f"{dtype} {shape}, {'trainable' if parameter.requires_grad else 'frozen'}, on {parameter.device.type}"


def _class_name(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    # What one rank runs as its main program another may have been spawned with (multiprocessing).
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    return f"{module}.{kind.__qualname__}"


def _first_difference(reference: Sequence[_T], entries: Sequence[_T]) -> _Difference[_T] | None:
    for index, (theirs, ours) in enumerate(zip(reference, entries, strict=False)):
        if theirs != ours:
            return index, ours
    if len(reference) == len(entries):
        return None
    index = min(len(reference), len(entries))
    return index, entries[index] if index < len(entries) else None


def _parameters_message(
    reference: Sequence[_Entry], differences: Sequence[_Difference[_Entry] | None], ranks: Sequence[int], kind: str
) -> str:
    first, told = _told(reference, differences, ranks, lambda entry: _name(entry, kind))
    return (
        f"The ranks have different {kind}. At position {first}, {told}.\n"
        f"Build the same model on every rank, with the same {kind} in the same order, before you wrap it, and change it"
        " on all ranks alike."
    )


def _optimizers_message(
    reference: Sequence[str],
    differences: Sequence[_Difference[str] | None],
    counts: Sequence[int],
    ranks: Sequence[int],
) -> str:
    # Told before any class: where one is left out, those behind it only seem to be others.
    if len(set(counts)) > 1:
        numbers: list[_Difference[int] | None] = [None if count == counts[0] else (0, count) for count in counts]
        _, told = _told([counts[0]], numbers, ranks, str)
        said = f"The ranks have different numbers of optimizers: {told}"
    else:
        first, told = _told(reference, differences, ranks, _shortened)
        said = f"The ranks have different optimizers. At position {first}, {told}"
    return f"{said}.\nPass the same number of optimizers on every rank, of the same classes in the same order."


def _settings_message(
    reference: Sequence[str], differences: Sequence[_Difference[str] | None], ranks: Sequence[int]
) -> str:
    _, told = _told(reference, differences, ranks, _shortened)
    return (
        f"The ranks have different settings: {told}.\n"
        "Use the same algorithm or hook with the same options on every rank. Sizes of buckets may come from"
        " BAGUA_DEFAULT_BUCKET_SIZE."
    )


def _told(
    reference: Sequence[_T],
    differences: Sequence[_Difference[_T] | None],
    ranks: Sequence[int],
    name: Callable[[_T | None], str],
) -> tuple[int, str]:
    """The first position at which any rank differs, and which ranks have what there."""
    first = min(difference[0] for difference in differences if difference is not None)
    variants: dict[_T | None, list[int]] = defaultdict(list)
    later = []
    for rank, difference in zip(ranks, differences, strict=True):
        if difference is None:
            continue
        if difference[0] == first:
            variants[difference[1]].append(rank)
        else:
            later.append(rank)
    expected = reference[first] if first < len(reference) else None
    told = [f"{_have(having)} {name(entry)}" for entry, having in list(variants.items())[:MAX_VARIANTS]]
    if len(variants) > MAX_VARIANTS:
        rest = sorted(rank for having in list(variants.values())[MAX_VARIANTS:] for rank in having)
        told.append(f"{_have(rest)} other values")
    if later:
        told.append(f"{_have(later)} the first difference at a later position")
    # Ranks that are as rank 0 is are not listed: on a large job they are most.
    told.insert(0, f"{_have(ranks[:1])} {name(expected)}")
    return first, "; ".join(told)


def _name(entry: _Entry | None, kind: str) -> str:
    if entry is None:
        return f"no {kind} there"
    return f"{_shortened(entry[0])!r} ({entry[1][:MAX_NAME_LENGTH]})"


def _shortened(name: str | None) -> str:
    text = str(name)
    return text if len(text) <= MAX_NAME_LENGTH else text[:MAX_NAME_LENGTH] + "..."


def _have(ranks: Sequence[int]) -> str:
    return f"{rank_list(ranks)} {'has' if len(ranks) == 1 else 'have'}"
