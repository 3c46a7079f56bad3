"""What a backward pass reaches, and the agreement of all ranks on it. Runs in the pass, on autograd's thread."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node

from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.engine.comm_thread import in_order
from bagua.job.failure_report import failures_named


class Presence(enum.IntEnum):
    """Of a gradient at the end of a backward pass, in the order in which the ranks' answers win over each other."""

    ABSENT = 0  # there is none
    KEPT = 1  # there is one, of an earlier pass
    USED = 2  # this pass reached the parameter


def accumulates_everywhere(root: Node) -> bool:
    """Of the running backward pass, which may be at its end: whether it accumulates gradients in all leaves that `root`
    leads to. So does `backward` unless it is given `inputs`, and torch.autograd.grad does not."""
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        try:
            if not torch._C._will_engine_execute_node(node):
                return False
        except RuntimeError:  # a leaf of which torch.autograd.grad gives the gradient
            return False
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return True


def agree_on_presence(
    presence: Sequence[Presence], communicator: BaguaCommunicator, device: torch.device
) -> list[Presence]:
    """For each position, the most that any rank has. Collective. With CUDA the host waits for it only where this rank
    does not know the answer.

    Args:
        presence: on every rank of the same length.
        device: of the small tensor that travels.
    """
    knows = all(one is Presence.USED for one in presence)
    if knows:
        # Made on the device: a copy to it would wait for all that was queued there, the pass and its communication.
        flags = torch.full((len(presence),), int(Presence.USED), dtype=torch.int32, device=device)
    else:
        flags = torch.tensor([int(one) for one in presence], dtype=torch.int32, device=device)
    group = communicator.torch_group
    in_order(group, device, lambda: dist.all_reduce(flags, dist.ReduceOp.MAX, group=group))
    if knows:
        return list(presence)
    return [Presence(flag) for flag in flags.tolist()]


def agree_on_unused(
    parameters: Sequence[tuple[str, nn.Parameter]], presence: Sequence[Presence], group: BaguaProcessGroup
) -> list[Presence]:
    """As `agree_on_presence`, for these parameters and with an error that says what was done. Collective."""
    with failures_named(group, "finding the parameters that a backward pass used", in_order=True):
        return agree_on_presence(presence, group.get_global_communicator(), parameters[0][1].device)


def forget_unused(parameters: Sequence[tuple[str, nn.Parameter]], anywhere: Sequence[Presence]) -> set[str]:
    """A parameter that has a gradient on no rank keeps none, so that optimizers leave it alone.

    Args:
        anywhere: what the ranks have agreed on.

    Returns:
        the names of those that any rank has used.
    """
    for (_, parameter), one in zip(parameters, anywhere, strict=True):
        if one is Presence.ABSENT:
            parameter.grad = None
    return {name for (name, _), one in zip(parameters, anywhere, strict=True) if one is Presence.USED}


class StaticGraph:
    """How often each gradient is accumulated in a backward pass, where that is always the same (`static_graph=True`).

    Without it, a gradient is complete when it is accumulated for the first time, and one that comes again is refused. A
    reentrant checkpoint, and a module that is used in several of them, accumulate several times in a pass. So the first
    pass counts, and sends everything at its end. In later passes a gradient is complete when it has come as often as
    then.

    Of one plan. Owned by the steps of one engine; called on autograd's threads, for each parameter on the same one.

    Attributes:
        anywhere: what the ranks have agreed on in the first pass: for each parameter, the most that any rank has.
    """

    def __init__(self) -> None:
        self.anywhere: list[Presence] | None = None
        self._expected: Counter[int] | None = None
        self._counted: Counter[int] = Counter()

    def begin_pass(self) -> None:
        self._counted = Counter()

    @property
    def is_counting(self) -> bool:
        """Whether this is the first pass, in which nothing is known to be complete before its end."""
        return self._expected is None

    def count(self, key: int, name: str) -> bool:
        """A gradient was accumulated.

        Returns:
            whether it is complete now.

        Raises:
            RuntimeError: it has come more often than in the first pass.
        """
        self._counted[key] += 1
        if self._expected is None:
            return False
        if self._counted[key] > self._expected[key]:
            raise RuntimeError(_changed({name: (self._counted[key], self._expected[key])}))
        return self._counted[key] == self._expected[key]

    def end_pass(self, names: Mapping[int, str]) -> None:
        """All gradients have been accumulated.

        Raises:
            RuntimeError: some have come less often than in the first pass.
        """
        if self._expected is None:
            self._expected = self._counted
            return
        fewer = {
            name: (self._counted[key], self._expected[key])
            for key, name in names.items()
            if self._counted[key] < self._expected[key]
        }
        if fewer:
            raise RuntimeError(_changed(fewer))


def _changed(counts: Mapping[str, tuple[int, int]]) -> str:
    name, (now, before) = next(iter(counts.items()))
    others = f", and {len(counts) - 1} other parameters also changed" if counts.keys() - {name} else ""
    return (
        "Your training graph has changed in this iteration, although static_graph is True: the gradient of"
        f" {name!r} was accumulated {now} times in this backward pass and {before} times in the first{others}.\n"
        "Use static_graph=False, with find_unused_parameters=True if the loss does not depend on all parameters."
    )
