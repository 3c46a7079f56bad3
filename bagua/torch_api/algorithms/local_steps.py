"""Local steps: every rank trains by itself, and the replicas are brought together after every so many steps.

local_sgd            the mean of the weights                    Stich, "Local SGD Converges Fast and Communicates
                                                                Little", ICLR 2019, arXiv:1805.09767
diloco               an outer optimizer steps on the mean of    Douillard et al., "DiLoCo", 2023, arXiv:2311.08105
                     what the ranks have moved
streaming_diloco     a fragment of the model at a time, while   Douillard et al., "Streaming DiLoCo", 2025,
                     training goes on                           arXiv:2501.18512

bagua.torch_api.algorithms.fragments has the formulas. A step is one of the listed optimizers; see
bagua.torch_api.algorithms.after_steps for what counts as one. With `warmup_steps`, training begins with gradient
all-reduce (bagua.torch_api.algorithms.warm_up), and the first round with the weights that this leaves. Buffers, such as
the statistics of BatchNorm, stay each rank's own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from bagua.codecs import Codec, get_codec
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.engine.speed_shares import shares_of
from bagua.torch_api.algorithms.base import Algorithm
from bagua.torch_api.algorithms.fragment_rounds import FragmentRounds
from bagua.torch_api.algorithms.fragments import OuterOptimizer
from bagua.torch_api.algorithms.warm_up import WarmUp, check_warm_up

default_outer_optimizer: OuterOptimizer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""Of DiLoCo, as in its paper."""


def _check_steps(name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: must be a whole number of at least {least}")


class LocalSGDAlgorithm(Algorithm):
    """
    Args:
        sync_every: the weights are averaged when step number H, 2H, ... of the optimizers returns, H being this.
            With `shares`, those of the fastest rank.
        warmup_steps: the first steps, which all-reduce gradients, and from which steps are counted. Backward passes
            outside of `no_sync` count.
        warmup_codec: the name of a codec by which these gradients are sent (bagua.codecs); None: as they are.
        shares: of the steps of a round. None: all ranks make as many. "auto": by the speeds at which ranks compute, in
            the rounds before. Or a positive number for each rank: with [2, 1], the first makes twice as many.
            Replicas count by the samples, or without batch weights by the steps, that they were trained on.

    Raises:
        ValueError: `sync_every` is not a whole number of at least 1, or `warmup_steps` not one of at least 0; an
            unknown codec; or `shares` are not positive numbers. When a module is wrapped: not one for each rank.
        RuntimeError: when a module is wrapped: a parameter is in none of the optimizers.
    """

    weighs_batches = True

    # Of the algorithms below, which give them other values.
    fragments, delay, alpha, momentum_rounds = 1, 0, 0.0, 0
    _make_outer: OuterOptimizer | None = None
    _codec: Codec | None = None

    def __init__(
        self,
        sync_every: int,
        warmup_steps: int = 0,
        warmup_codec: str | Codec | None = None,
        *,
        shares: str | Sequence[float] | None = None,
    ) -> None:
        _check_steps("sync_every", sync_every)
        check_warm_up(warmup_steps)
        self.sync_every, self.warmup_steps = sync_every, warmup_steps
        self._warmup_codec = None if warmup_codec is None else get_codec(warmup_codec)
        self.warmup_codec = None if self._warmup_codec is None else self._warmup_codec.name
        given = None if shares is None else shares_of(shares)
        self.shares = shares if isinstance(shares, str) else given

    def shared_settings(self) -> Mapping[str, object]:
        settings = super().shared_settings()
        return settings if self.shares is None else {**settings, "shares": self.shares}

    def reify(self, process_group: BaguaProcessGroup) -> FragmentRounds:
        return FragmentRounds(
            process_group,
            WarmUp(process_group, self.warmup_steps, self._warmup_codec),
            self.sync_every // self.fragments,
            self.fragments,
            self.delay,
            self.alpha,
            self._make_outer,
            self.momentum_rounds,
            self._codec,
            self.shares,
        )


class DiLoCoAlgorithm(LocalSGDAlgorithm):
    """
    Args:
        sync_every: the outer optimizer steps when step number H, 2H, ... of the optimizers returns, H being this; then
            the weights are the same on all ranks.
        outer_optimizer: a function that makes the outer optimizer of the parameters that it is given. Default:
            torch.optim.SGD(lr=0.7, momentum=0.9, nesterov=True). Its gradient is the weights of the last round minus
            the mean of the weights now.
        warmup_steps: as of LocalSGDAlgorithm.
        warmup_codec: likewise.
        momentum_rounds: over which the momentum of the outer optimizer rises linearly to its value; 0: it begins with
            it.
        shares: as of LocalSGDAlgorithm.

    Raises:
        ValueError: as of LocalSGDAlgorithm; or `momentum_rounds` is not a whole number of at least 0.
        TypeError: `outer_optimizer` is not a function.
        RuntimeError: when a module is wrapped: a parameter is in none of the optimizers.
    """

    weighs_batches = True

    def __init__(
        self,
        sync_every: int,
        outer_optimizer: OuterOptimizer | None = None,
        warmup_steps: int = 0,
        warmup_codec: str | Codec | None = None,
        momentum_rounds: int = 0,
        *,
        shares: str | Sequence[float] | None = None,
    ) -> None:
        super().__init__(sync_every, warmup_steps, warmup_codec, shares=shares)
        _check_steps("momentum_rounds", momentum_rounds, least=0)
        self.momentum_rounds = momentum_rounds
        if outer_optimizer is not None and not callable(outer_optimizer):
            raise TypeError(
                f"outer_optimizer is {outer_optimizer!r}. Pass a function of the parameters:"
                " lambda parameters: torch.optim.SGD(parameters, lr=0.7)."
            )
        self.outer_optimizer = outer_optimizer
        self._make_outer = outer_optimizer or default_outer_optimizer


class StreamingDiLoCoAlgorithm(DiLoCoAlgorithm):
    """
    Args:
        sync_every: each fragment is exchanged once in so many steps of the optimizers; a multiple of `fragments`.
        fragments: into which the model is divided, in the order of its parameters from the last to the first.
        delay: steps between the beginning of an exchange and its effect, in which training goes on; less than
            sync_every / fragments. As torchft's fragment_sync_delay.
        alpha: the share of this rank's own weights that a fragment keeps when an exchange takes effect: 0 none, 1 all.
            As torchft's fragment_update_alpha.
        codec: the name of a codec by which differences are sent (bagua.codecs); None: as they are.
        outer_optimizer: as of DiLoCoAlgorithm. Every fragment has its own.
        warmup_steps: as of LocalSGDAlgorithm.
        warmup_codec: likewise.
        momentum_rounds: as of DiLoCoAlgorithm.
        shares: as of LocalSGDAlgorithm.

    Raises:
        ValueError: numbers that do not fit together, or an unknown codec.
        TypeError: `outer_optimizer` is not a function.
        RuntimeError: when a module is wrapped: a parameter is in none of the optimizers.
    """

    weighs_batches = True

    def __init__(
        self,
        sync_every: int,
        fragments: int = 2,
        delay: int = 0,
        alpha: float = 0.0,
        codec: str | Codec | None = None,
        outer_optimizer: OuterOptimizer | None = None,
        warmup_steps: int = 0,
        warmup_codec: str | Codec | None = None,
        momentum_rounds: int = 0,
        *,
        shares: str | Sequence[float] | None = None,
    ) -> None:
        super().__init__(sync_every, outer_optimizer, warmup_steps, warmup_codec, momentum_rounds, shares=shares)
        _check_steps("fragments", fragments)
        if sync_every % fragments:
            raise ValueError(
                f"sync_every={sync_every} is not a multiple of fragments={fragments}; use"
                f" {_nearest(sync_every, fragments)}"
            )
        interval = sync_every // fragments
        _check_steps("delay", delay, least=0)
        if delay >= interval:
            raise ValueError(
                f"delay={delay} is too long: it must be less than sync_every / fragments, which is {interval}"
            )
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha={alpha!r}: must be from 0 to 1")
        self.fragments, self.delay, self.alpha = fragments, delay, alpha
        self._codec = None if codec is None else get_codec(codec)
        self.codec = None if self._codec is None else self._codec.name


def _nearest(sync_every: int, fragments: int) -> str:
    below = sync_every // fragments * fragments
    above = f"{below + fragments}"
    return f"{below} or {above}" if below else above
