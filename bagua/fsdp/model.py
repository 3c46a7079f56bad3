"""A model that FSDP2 has sharded, as it is now: which modules are sharded, when a forward pass in training begins, and
which shards this rank holds. What compresses, measures or exchanges asks here, because torch and users go on changing
the model.

[Note: passes] A pass begins where one of torch's roots is entered in training mode, called or by a method that
`register_fsdp_forward_method` has named, and lasts until its backward pass: so `encode` and `decode`, the parts of a
LightningModule, or two calls for one loss are one pass. Where nothing requires gradients, another one begins with a
module that the last one has used. What is called beside its root, as for a loss in chunks, and what activation
checkpointing repeats belongs to the pass. Where the root is not in the model, but the model in it, the first use of the
model after a backward pass begins one.

Runs in the threads of forward and of autograd, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from bagua.fsdp.torch_internals import (
    ForwardEntry,
    ShardedModule,
    forward_entries,
    local_tensor,
    need_gradients,
    outermost_sharded,
    require_sharded,
)
from bagua.job.torch_internals import is_in_backward, without_wrappers


class ShardedModel:
    """
    Args:
        model: a sharded module, or what contains such modules.

    Attributes:
        modules: those with parameters, one for each `fully_shard` call.
        passes: forward passes in training with gradients, from 1 in the first one.

    Raises:
        ValueError: no module is sharded, or one over several meshes.
        RuntimeError: this version of torch is not supported.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = require_sharded(model)
        self.passes = 0
        self._model = model
        self._check: Callable[[], None] = _nothing
        self._begin: Callable[[], None] = _nothing
        self._takes_back: list[Callable[[], None]] = []
        # Of the pass: where it was entered, which modules it has used, and whether a backward pass has followed.
        self._entered: set[ForwardEntry] = set()
        self._top: set[nn.Module] = set()  # in no other sharded module of the model
        self._used: set[ShardedModule] = set()
        self._is_over = True
        self._has_gradients = False  # an input of the pass requires them
        # Was entered, and has not yet used a module, which tells whether that is a new pass.
        self._undecided: ForwardEntry | None = None

    def follow_passes(self, check: Callable[[], None] | None = None, begin: Callable[[], None] | None = None) -> None:
        """Counts passes from now on, until `remove`.

        Args:
            check: called before each pass, and may refuse it by an error; FSDP is then as if it had not been called.
            begin: called where a pass begins, before weights are gathered for it.
        """
        self._check, self._begin = check or _nothing, begin or _nothing
        self._top = set(outermost_sharded(self._model))
        for entry in forward_entries(self._model):
            self._takes_back.append(entry.surround(partial(self._enter, entry)))
        for one in self.modules:
            self.surround(one, "pre_forward", partial(self._use, one))
            self.surround(one, "post_backward", self._end)

    def surround(self, one: ShardedModule, step: str, around: Callable[..., Any]) -> None:
        """As `ShardedModule.surround`, until `remove`."""
        self._takes_back.append(one.surround(step, around))

    def remove(self) -> None:
        """Nothing stands around FSDP's steps any more."""
        for take_back in self._takes_back:
            take_back()
        self._takes_back = []

    def resume(self, passes: int) -> None:
        """So many have been; the next one is a new one."""
        self.passes, self._is_over = passes, True

    def _enter(self, entry: ForwardEntry, run: Callable[[], Any], inputs: Any) -> Any:
        is_outermost = entry.is_outermost
        result = run()
        if is_in_backward() or not (is_outermost if entry.is_root else entry.module in self._top):
            return result
        # Activation checkpointing in its reentrant form computes the first time without gradients.
        is_trained = entry.module.training and (torch.is_grad_enabled() or need_gradients(inputs))
        self._undecided = None
        if is_trained and (self._is_over or (entry in self._entered and entry.is_root)):
            try:
                self._check()
            except Exception:
                entry.leave(is_outermost)
                raise
        if is_trained:
            self._entered.add(entry)
            self._undecided = entry
            self._has_gradients |= need_gradients(inputs)
        return result

    def _use(self, one: ShardedModule, run: Callable[[], Any], _: Any) -> Any:
        entry, self._undecided = self._undecided, None
        if entry is not None and (self._is_over or (entry.is_root and one in self._used and not self._needs_backward)):
            self._is_over = False
            self._used.clear()
            self._entered.clear()
            self.passes += 1
            self._begin()
        if not is_in_backward():
            self._used.add(one)
        return run()

    @property
    def _needs_backward(self) -> bool:
        return self._has_gradients or any(one.is_trained for one in self.modules)

    def _end(self, run: Callable[[], Any], _: Any) -> Any:
        self._is_over, self._has_gradients = True, False
        return run()


def _nothing() -> None:
    return None


def replicated_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """What this rank has of a replica, by name: its shards and its buffers. Of a parameter that is not sharded, all of
    it. FSDP frees weights that it has gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    named = (*model.named_parameters(), *model.named_buffers())
    return [(without_wrappers(name), local_tensor(one)) for name, one in named]


@dataclass(frozen=True)
class Shard:
    """Of one parameter, on this rank.

    Attributes:
        name: the parameter's.
        parameter: as it stands in the module.
        tensor: its elements here, which a step of an optimizer changes.
        is_trained: it is not frozen.
    """

    name: str
    parameter: nn.Parameter
    tensor: Tensor
    is_trained: bool

    @property
    def is_sharded(self) -> bool:
        """False for a parameter that FSDP does not know, or has gathered at the moment."""
        return isinstance(self.parameter, DTensor)


class Shards:
    """Of all parameters of a model, and which of them are exchanged between replicas. FSDP, loading and conversion
    replace them, and users freeze and unfreeze them.

    Args:
        model: the model; what is not sharded counts as a whole.

    Attributes:
        all: as they were last looked at.
        covered: names of those that were trained at some time: they are exchanged, if they were trained since their
            last exchange.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.all = self._now()
        self.covered = set(self.trained)

    @property
    def trained(self) -> list[str]:
        """Names of what is not frozen."""
        return [one.name for one in self.all if one.is_trained]

    def look(self) -> Sequence[Shard] | None:
        """Called before each step. Takes note of what changes no exchange, as freezing does.

        Returns:
            the shards as they are now, where some were replaced or converted, or one was unfrozen that never was
            trained: they are to be taken. None: the exchange goes on.
        """
        known = {one.name: one for one in self.all}
        now = self._now()
        for place, one in enumerate(now):
            former = known.get(one.name)
            if former is not None and former.is_sharded and not one.is_sharded:
                now[place] = former  # gathered by FSDP, and comes back as it was
        trained = {one.name for one in now if one.is_trained}
        if _tensors(now) == _tensors(self.all) and trained <= self.covered:
            self.all = now
            return None
        return now

    def take(self, now: Sequence[Shard], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """These are the shards. What was trained and is in no optimizer any more is not exchanged any more."""
        self.all = list(now)
        listed = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
        self.covered = {
            one.name for one in now if one.is_trained or (one.name in self.covered and id(one.parameter) in listed)
        }

    def cover(self, names: Collection[str]) -> None:
        """A state covers these, which may be frozen now."""
        self.covered = {*names, *self.trained}

    def _now(self) -> list[Shard]:
        return [
            Shard(without_wrappers(name), one, local_tensor(one), one.requires_grad)
            for name, one in self.model.named_parameters()
        ]


def _tensors(found: Iterable[Shard]) -> list[int]:
    """Another list where one was replaced or converted."""
    return [id(one.tensor) if one.is_sharded else id(one.parameter) for one in found]
