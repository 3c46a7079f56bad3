"""Communication hooks of torch's DDP that send gradients compressed: bagua.comm_ops.compressed as a hook.

The hooks are called by autograd's thread, a bucket at a time; bagua.comm_hooks.background says what runs where. A state
belongs to the user; where none is given, one is kept as long as the torch group lives.
"""

# No `from __future__ import annotations`: DDP compares the hooks' annotations with classes, not with their names.

import copy
import logging
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # torch.distributed has it as well, undeclared

from bagua.codecs import Codec, get_codec
from bagua.collectives.process_group import BaguaProcessGroup, to_bagua_process_group
from bagua.comm_hooks.background import Background, background_of
from bagua.comm_ops.compressed import DEFAULT_CODEC, CompressedAllReduce, compressed_alignment, idle_hierarchy
from bagua.kernels.scratch_memory import scratch
from bagua.replicas.replica_check import Replica, ReplicasDifferError


@dataclass(frozen=True)
class _Place:
    """What a state needs for buckets on one kind of device."""

    background: Background
    operation: CompressedAllReduce
    alignment: int


class ByteGradState:
    """Options of the hooks of this module. It has no memory of earlier steps, so several models may share it.

    Args:
        process_group: the ranks that train together, a Bagua or a torch group: the one that DistributedDataParallel was
            made with. None: Bagua's default group or, if only torch is initialized, torch's.
        average: the mean of the ranks' gradients; otherwise their sum.
        hierarchical: reduce within each node first, without compression, so that only one rank per node sends to other
            nodes.
        codec: what is sent: a name of `bagua.codecs.codec_names()`, or a Codec. The same on all ranks.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ValueError: an unknown codec; the error lists the known ones.
        TypeError: `process_group` is no group.
    """

    def __init__(
        self,
        process_group: BaguaProcessGroup | dist.ProcessGroup | None = None,
        average: bool = True,
        hierarchical: bool = False,
        codec: str | Codec = DEFAULT_CODEC,
    ) -> None:
        self.codec = get_codec(codec)
        self.process_group = to_bagua_process_group(process_group)
        self.average = average
        self.hierarchical = hierarchical
        self._places: dict[str, _Place] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Without the process group, as torch's PowerSGDState.
        ranks, all_ranks = (to_bagua_process_group(one).ranks for one in (self.process_group, None))
        return {**self._portable(), "ranks": None if ranks == all_ranks else ranks}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        # In the default group. Raises RuntimeError: none is initialized.
        self._restore({name: value for name, value in state.items() if name != "ranks"}, to_bagua_process_group(None))
        if state["ranks"] is not None:
            warnings.warn(
                f"A {type(self).__name__} that was saved with the process group of ranks {state['ranks']} now has the"
                " default group; set its process_group",
                stacklevel=2,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # In the same group, with a memory of its own.
        duplicate = self.__class__.__new__(self.__class__)
        memo[id(self)] = duplicate
        duplicate._restore(copy.deepcopy(self._portable(), memo), self.process_group)
        return duplicate

    def _portable(self) -> dict[str, Any]:
        """What a copy has, too."""
        return {name: value for name, value in self.__dict__.items() if name not in ("process_group", "_places")}

    def _restore(self, state: dict[str, Any], group: BaguaProcessGroup) -> None:
        self.__dict__.update(state)
        self.process_group = group
        self._places = {}

    def place(self, device: torch.device) -> _Place:
        """Collective at the first call.

        Raises:
            ReplicasDifferError: the ranks have other options.
        """
        found = self._places.get(device.type)
        if found is None:
            background = background_of(to_bagua_process_group(self.process_group), device)
            # Ranks with other codecs would send messages of other sizes, or take each other's for their own.
            options = [f"codec={self.codec.name}", f"average={self.average}", f"hierarchical={self.hierarchical}"]
            found_errors: list[ReplicasDifferError] = []
            background.run(partial(_compare, background.group, options, device, found_errors), device).wait()
            if found_errors:
                raise found_errors[0]
            operation = CompressedAllReduce(background.group, self.average, self.hierarchical, codec=self.codec)
            alignment = compressed_alignment(background.group, self.hierarchical, self.codec)
            if background.group.ranks[0] == dist.get_rank():
                for line in idle_hierarchy(background.group, self.hierarchical, "gradients"):
                    logging.getLogger("bagua").warning(line)
            found = self._places[device.type] = _Place(background, operation, alignment)
        return found

    def start(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The bucket's communication goes on in the background."""
        flat = bucket.buffer()
        place = self.place(flat.device)
        return place.background.run(partial(reduce_flat, flat, place.operation, place, self.average), flat.device)


def _compare(
    group: BaguaProcessGroup, options: list[str], device: torch.device, errors: list[ReplicasDifferError]
) -> torch.Tensor:
    """`errors` gets what is no failure of the group, whose later operations go on."""
    try:
        gpu = device if device.type == "cuda" else None
        Replica((), settings=options).check(group.get_global_communicator().on(gpu))
    except ReplicasDifferError as error:
        errors.append(error)
    return torch.empty(0, device=device)  # what runs in the background has a result


def reduce_flat(flat: torch.Tensor, operation: CompressedAllReduce, place: _Place, average: bool) -> torch.Tensor:
    """`flat`, 1-D, becomes what `operation` makes of it, by way of a padded copy where its length asks for one. What
    cannot be compressed is reduced as it is. Runs in the background."""
    if flat.device.type == "cuda":
        # Whoever drops the model while this is under way must not let others have its memory.
        flat.record_stream(torch.cuda.current_stream(flat.device))
    if flat.dtype not in operation.codec.dtypes:
        return _reduce_exactly(flat, place.background.group, average)
    elements = flat.numel()
    padding = -elements % place.alignment
    padded = scratch((elements + padding,), flat.dtype, flat.device) if padding else flat
    if padding:
        padded[:elements].copy_(flat)
        padded[elements:].zero_()
    if operation.prescale is not None:
        padded.mul_(operation.prescale)
    operation.all_reduce(padded)
    return flat.copy_(padded[:elements]) if padding else flat


def _reduce_exactly(flat: torch.Tensor, group: BaguaProcessGroup, average: bool) -> torch.Tensor:
    if average and group.size > 1:
        flat.mul_(1.0 / group.size)
    dist.all_reduce(flat, group=group.torch_group)
    return flat


def bytegrad(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of all ranks' gradients, sent as a byte per element. For `register_comm_hook`.

    Args:
        state: a ByteGradState, or the process group for one with its defaults: a torch or Bagua group, or None.
        bucket: gradients, of any length. Those that are not of float32, float16 or bfloat16 are sent as they are.
    """
    return _state_of(state, hierarchical=False).start(bucket)


def hierarchical_bytegrad(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """As `bytegrad`, but the ranks of a node add up their gradients first, without compression, so that only one rank
    per node sends to other nodes.

    Args:
        state: as for `bytegrad`; a ByteGradState is one with hierarchical=True.
        bucket: as for `bytegrad`.
    """
    chosen = _state_of(state, hierarchical=True)
    if not chosen.hierarchical:
        raise ValueError("hierarchical_bytegrad was given a ByteGradState with hierarchical=False; make one with True")
    return chosen.start(bucket)


# Of hooks that were given only a group: by torch group, which the values do not hold, and whether hierarchical.
_default_states: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[bool, ByteGradState]] = weakref.WeakKeyDictionary()


def _state_of(state: object, hierarchical: bool) -> ByteGradState:
    if isinstance(state, ByteGradState):
        return state
    group = to_bagua_process_group(state)  # type: ignore[arg-type]
    torch_group = group.torch_group
    if torch_group is None:
        return ByteGradState(group, hierarchical=hierarchical)  # which says what is wrong with it
    by_hierarchy = _default_states.setdefault(torch_group, {})
    if hierarchical not in by_hierarchy:
        by_hierarchy[hierarchical] = ByteGradState(group, hierarchical=hierarchical)
    return by_hierarchy[hierarchical]
