"""with_bagua: what starts data parallelism of a module. It is a function, and a method of torch.nn.Module."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from bagua.collectives.process_group import BaguaProcessGroup, to_bagua_process_group
from bagua.engine.bucket_plan import FIRST_BUCKET_BYTES
from bagua.engine.data_parallel import DataParallelEngine, engine_named
from bagua.env import read_text
from bagua.misuse import check_flags, check_given_flags, explains_calls, shown
from bagua.torch_api.algorithms.base import allowed_algorithms, resolve_algorithm
from bagua.torch_api.env import get_autotune_level, get_default_bucket_size
from bagua.torch_api.wrap_summary import configure_logging, log_wrap

if TYPE_CHECKING:
    from bagua.torch_api.algorithms.base import Algorithm

__all__ = ["with_bagua"]

M = TypeVar("M", bound=nn.Module)


@explains_calls(
    "Call with_bagua(model, [optimizer], 'bytegrad'), or model.with_bagua([optimizer], 'bytegrad').",
    codec="A codec is an option of an algorithm: algorithm=Algorithm.init('bytegrad', codec='int4').",
)
def with_bagua(
    model: M,
    optimizers: Sequence[torch.optim.Optimizer],
    algorithm: str | Algorithm = "gradient_allreduce",
    process_group: BaguaProcessGroup | dist.ProcessGroup | None = None,
    do_flatten: bool = True,
    *,
    find_unused_parameters: bool = False,
    autotune: bool | None = None,
    allow: Sequence[str | Algorithm] = (),
    batch_weights: bool = False,
    count_batch: bool = False,
    loss: str = "mean",
) -> M:
    """Train this module in parallel with the same module of the other ranks.

    `bagua.torch_api.with_bagua(model, [optimizer])` and `model.with_bagua([optimizer])` are the same. Type checkers
    know only the function, because the method is added to torch.nn.Module at run time.

    Parameters and optimizer states are broadcast from group rank 0. From then on `forward`, `backward` and `step` of
    the listed optimizers communicate as `algorithm` says. Called again, it replaces what the last call set up.

    Args:
        model: The module to train.
        optimizers: All optimizers that step parameters of this module; at least one.
        algorithm: What is communicated, and when: the name of an algorithm, such as "bytegrad", or an Algorithm; see
            bagua.torch_api.algorithms. "qadam" finds its QAdamOptimizer among `optimizers`.
        process_group: Bagua's or torch's; None: the default group.
        do_flatten: What is communicated lies in the memory of its bucket, which saves copies.
        find_unused_parameters: Parameters that a backward pass does not reach count as zeros. This costs a small
            all-reduce in each step.
        autotune: Find the fastest way to communicate with the same results in the first steps; None: if
            BAGUA_AUTOTUNE is 1 or more.
        allow: Algorithms that tuning may choose although results differ, by name or constructed:
            ["gradient_allreduce", "bytegrad"].
        batch_weights: Whether ranks count by the sizes of their batches: the gradient is that of the mean over the
            samples of all ranks, instead of the mean over ranks. Call `model.set_batch_weight(n)` before each backward
            pass, in `no_sync` too. Not for decentralized, low_precision_decentralized and async.
        count_batch: The same, where the first dimension of the first tensor that the module is called with is n.
        loss: With one of these two, what the loss is of the samples of a rank's batch: their "mean" or their "sum".
            Do not divide it by a number of accumulated passes.

    Returns:
        This same module.

    Raises:
        RuntimeError: No process group is initialized, or the ranks' modules or optimizers differ.
        TypeError: `model` is not a module, `optimizers` is not a list of optimizers, `algorithm` is neither a name nor
            an Algorithm, `allow` is not a list of them, or what is to be True or False is something else.
        ValueError: `algorithm` or `allow` has a name that is not registered, `optimizers` is empty, there is nothing to
            train, the state of an optimizer cannot be synchronized (LBFGS), ranks divide the steps of an optimizer
            (ZeroRedundancyOptimizer) and `algorithm` does not average gradients, training cannot change to an
            algorithm of `allow`, or `loss` is unknown, or given without batch weights.
        NotImplementedError: batch weights with an algorithm that does not support them.
    """
    check_module("model", model)
    check_flags(do_flatten=do_flatten, find_unused_parameters=find_unused_parameters)
    check_given_flags(autotune=autotune)
    given = check_optimizers(optimizers)
    recipe = resolve_algorithm(algorithm, given)
    allowed = allowed_algorithms(recipe, allow)
    weighted = weighted_loss(batch_weights, count_batch, loss)
    group = to_bagua_process_group(process_group)
    configure_logging()  # before anything is sent: what it refuses, one rank alone may have in its environment
    previous: DataParallelEngine | None = model.__dict__.get("bagua_ddp")

    def replace_previous() -> None:
        if not given:  # only now: the ranks have compared their lists, so that all of them raise
            raise ValueError(
                "optimizers is empty.\n"
                f"with_bagua() on {type(model).__name__} needs every optimizer that steps its parameters, to"
                " broadcast its state and to communicate around its steps.\n"
                "Pass them: model.with_bagua([optimizer], algorithm)."
            )
        if previous is not None:
            model.__dict__.pop("bagua_ddp", None)
            previous.detach()

    if previous is not None:
        previous.wait_pending_comm_ops()
        # Before the ranks compare anything: those that do not owe an exchange may be waiting for it.
        previous.bagua_algorithm.complete_exchange(previous)
    _warn_of_same_name(model)
    bucket_bytes, first_bucket_bytes = _bucket_limits()
    engine = DataParallelEngine(
        model,
        given,
        recipe,
        group,
        bagua_module_name=model.__dict__.get("bagua_module_name"),
        gradient_as_bucket_view=do_flatten,
        find_unused_parameters=find_unused_parameters,
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=first_bucket_bytes,
        autotune=get_autotune_level() > 0 if autotune is None else autotune,
        allow=allowed,
        once_compared=replace_previous,
        loss=weighted,
        counts_batch=count_batch,
    )
    engine.join_job()
    model.__dict__["bagua_ddp"] = engine
    log_wrap(engine)
    return model


def check_module(argument: str, module: object) -> None:
    """
    Args:
        argument: its name, for the error.

    Raises:
        TypeError: it is not a torch.nn.Module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"{argument} is {shown(module)}. Pass an instance of torch.nn.Module.")


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """The optimizers as a list. Of one that only calls another, as Accelerate's, that other one: it is the one that has
    state and hooks.

    Raises:
        TypeError: something else than a list of optimizers.
    """
    if isinstance(optimizers, torch.optim.Optimizer):
        raise TypeError(f"optimizers is a single {type(optimizers).__name__}. Pass a list: [optimizer].")
    if not isinstance(optimizers, Iterable):
        raise TypeError(f"optimizers is {optimizers!r}. Pass a list: [optimizer].")
    given = list(optimizers)
    for one in given:
        if not isinstance(one, torch.optim.Optimizer):
            raise TypeError(f"optimizers contains a {type(one).__name__}. Each must be a torch.optim.Optimizer.")
    return [_stepping(one) for one in given]


def weighted_loss(batch_weights: bool, count_batch: bool, loss: str) -> str | None:
    """What the loss is of its samples; None: without batch weights.

    Raises:
        TypeError: one of the first two is neither True nor False.
        ValueError: `loss` has no effect.
    """
    check_flags(batch_weights=batch_weights, count_batch=count_batch)
    if batch_weights or count_batch:
        return loss
    if loss != "mean":
        raise ValueError(
            f"loss={loss!r} has no effect without batch weights. Pass batch_weights=True, or leave it out."
        )
    return None


def _stepping(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    inner = getattr(optimizer, "optimizer", None)
    # One that was never initialized as an optimizer. Others may have an attribute of this name for their own use.
    if isinstance(inner, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" not in vars(optimizer):
        return _stepping(inner)
    return optimizer


def _warn_of_same_name(module: nn.Module) -> None:
    name = module.__dict__.get("bagua_module_name")
    other = engine_named(name)
    # No error: a module that nobody uses any more may not have been collected yet.
    if other is not None and other.is_attached and other.module is not module:
        warnings.warn(
            f"Another wrapped module also has the bagua_module_name {name!r}; get_backend({name!r}) now returns this"
            " module's. Give each module a name of its own.",
            stacklevel=4,  # the caller of with_bagua, behind what explains wrong calls
        )


def _bucket_limits() -> tuple[int | None, int | None]:
    """Of all buckets, and of the first: the user's, if BAGUA_DEFAULT_BUCKET_SIZE is set; else the engine's."""
    if read_text(os.environ, "BAGUA_DEFAULT_BUCKET_SIZE") is None:
        return None, FIRST_BUCKET_BYTES
    return get_default_bucket_size(), None
