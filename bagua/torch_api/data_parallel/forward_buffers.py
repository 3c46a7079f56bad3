"""When the buffers of a wrapped module are synchronized, and by what: a broadcast, or a function of the user.

Owned by one wrapper; runs on the thread of forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bagua.engine.data_parallel import DataParallelEngine
from bagua.replicas.buffer_broadcast import BufferBroadcast


@dataclass(frozen=True, eq=False)
class BufferHook:
    """A function that synchronizes buffers instead of the broadcast, as torch's _register_buffer_comm_hook takes it.

    Attributes:
        state: the first argument of `function`.
        function: `function(state, {name: buffer})` changes the buffers, or returns futures of what it has begun.
        runs_after_forward: otherwise in front of it.
    """

    state: object
    function: Callable[[Any, Mapping[str, Tensor]], Any]
    runs_after_forward: bool


class ForwardBuffers:
    """
    Args:
        engine: of the module.

    Attributes:
        differ: whether the ranks' buffers may be different, so that the next forward pass synchronizes them.
    """

    def __init__(self, engine: DataParallelEngine) -> None:
        self._engine = engine
        # They are broadcast here, and may be changed before the first forward pass, as `load_state_dict` does.
        self.differ = True
        self._hook: BufferHook | None = None
        self._runs_after_forward = False
        self._futures: list[torch.futures.Future[Any]] = []
        self.lay_out()

    def lay_out(self) -> None:
        """Buffers have changed their dtypes, on all ranks alike."""
        engine = self._engine
        self._broadcast = BufferBroadcast(
            engine.module, engine.parameters_to_ignore, engine.process_group, engine.communicator
        )

    def use(self, hook: BufferHook) -> None:
        """Synchronize by `hook` from now on."""
        if self._hook is None:
            self._engine.after_backward.append(self._wait)
        self._hook = hook

    @property
    def has_buffers(self) -> bool:
        """Whether the ranks have any."""
        return self._broadcast.has_buffers

    def named(self) -> list[tuple[str, Tensor]]:
        """(name, buffer), each once."""
        return self._broadcast.named_buffers()

    def will_run(self, is_wanted: bool) -> bool:
        """Whether the next forward pass synchronizes them, if the wrapper is to do that at all."""
        return is_wanted and self.differ and self._broadcast.has_buffers and self._engine.bagua_algorithm.ranks_in_step

    def before_forward(self, is_wanted: bool, source: int, will_differ: bool) -> None:
        """
        Args:
            is_wanted: as `will_run`.
            source: group rank whose buffers are broadcast.
            will_differ: after this forward pass.
        """
        runs = self.will_run(is_wanted)
        self._runs_after_forward = runs and self._hook is not None and self._hook.runs_after_forward
        if runs and not self._runs_after_forward:
            self.run(source)
        self.differ = will_differ

    def after_forward(self, source: int) -> None:
        """Likewise."""
        if self._runs_after_forward:
            self._runs_after_forward = False
            self.run(source)

    def run(self, source: int) -> None:
        """Collective."""
        hook = self._hook
        if hook is None:
            self._broadcast.run(source)
            return
        named = dict(self.named())
        keep_versions = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
        with torch.no_grad(), keep_versions(tuple(named.values())):
            self._futures += hook.function(hook.state, named) or ()

    def broadcast_from(self, source: int) -> None:
        """Collective: those of group rank `source`, whatever the hook."""
        self._broadcast.run(source)

    def _wait(self) -> None:
        """At the end of the backward pass."""
        futures, self._futures = self._futures, []
        for one in futures:
            one.wait()
