"""The first steps of algorithms whose replicas drift apart: gradient all-reduce, exact or compressed.

A step of it is a backward pass that communicated, so that all ranks count alike: forward passes without a backward
pass, in `eval()` or in `no_sync` are none.
"""

from __future__ import annotations

from bagua.codecs import Codec, get_codec
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.engine.algorithm_facade import AlgorithmFacade
from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithmImpl
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithmImpl


class WarmUp:
    """
    Args:
        process_group: the ranks that train together.
        steps: how long it lasts; 0: there is none.
        codec: by which gradients are compressed; None: not at all.

    Attributes:
        codec: as given.
        algorithm: whose tensors, buckets and operations are those of these steps.
        steps: as given.
        done: steps so far.
    """

    def __init__(self, process_group: BaguaProcessGroup, steps: int, codec: str | Codec | None = None) -> None:
        self.codec = None if codec is None else get_codec(codec)
        self.algorithm = (
            GradientAllReduceAlgorithmImpl(process_group)
            if self.codec is None
            else ByteGradAlgorithmImpl(process_group, hierarchical=False, codec=self.codec)
        )
        self.steps = steps
        self.done = 0

    @property
    def is_over(self) -> bool:
        """Whether the next step is not one of it."""
        return self.done >= self.steps

    def end_pass(self, bagua_ddp: AlgorithmFacade) -> None:
        """At the end of each backward pass: waits for the gradients, and counts."""
        bagua_ddp.scheduler.wait_pending_comm_ops()
        if bagua_ddp.scheduler.sent:  # otherwise it made a part of the gradients, and another pass makes the rest
            self.done += 1

    def load(self, done: int, was_over: bool) -> None:
        """Go on as a training that has made so many steps, and `was_over` or was not.

        Raises:
            RuntimeError: it is over here, and was not there.
        """
        if self.is_over and not was_over:
            raise RuntimeError(
                f"The state has made {done} of {self.steps} warm-up steps, but warm-up is over here.\n"
                "Wrap the module again before loading the state."
            )
        self.done = max(done, self.steps) if was_over else done


def check_warm_up(steps: object) -> None:
    """
    Raises:
        ValueError: negative, or no whole number.
    """
    if isinstance(steps, bool) or not isinstance(steps, int | float) or steps < 0 or steps % 1 != 0:
        raise ValueError(
            f"warmup_steps={steps!r}: must be a whole number of at least 0; they are the first steps, which all-reduce"
            " gradients"
        )
