"""The line that says what was wrapped, and how it will communicate. Level INFO of the logger `bagua`, on group rank 0;
BAGUA_LOG_LEVEL chooses the level (docs/reference/environment.md)."""

from __future__ import annotations

import functools
import logging
import os

import torch.distributed as dist

from bagua.engine.data_parallel import DataParallelEngine
from bagua.env import EnvironmentValueError, read_text
from bagua.net.activation import nccl_finds_plugin

_LEVELS = ("debug", "info", "warning", "error")

# Variables of Bagua 0.9 for what is not here.
_WITHOUT_EFFECT = ("BAGUA_REPORT_METRICS", "BAGUA_IS_OUTPUT_AUTOTUNE_LOG")

_logger = logging.getLogger("bagua")


def configure_logging() -> None:
    """Give the logger `bagua` the level of BAGUA_LOG_LEVEL or, if it has none, INFO, and a handler if nobody has set up
    logging.

    Raises:
        EnvironmentValueError: another word than debug, info, warning or error.
    """
    given = read_text(os.environ, "BAGUA_LOG_LEVEL")
    word = (given or "info").lower()
    if word not in _LEVELS:
        raise EnvironmentValueError(f"BAGUA_LOG_LEVEL={word}: must be one of {', '.join(_LEVELS)}")
    if given or _logger.level == logging.NOTSET:
        _logger.setLevel(word.upper())
    if not _logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("bagua: %(message)s"))
        _logger.addHandler(handler)


def log_wrap(engine: DataParallelEngine) -> None:
    """One line about the engine and, at level debug, one about each of its buckets."""
    configure_logging()
    if engine.communicator.rank() != 0:
        return
    _warn_of_variables()
    _warn_of_other_models(engine)
    _logger.info(summary(engine))
    if engine.kept_bytes:
        size = _size(engine.kept_bytes)
        _logger.info(f'{type(engine.module).__name__}: on_loss="repeat" keeps copies of gradients, {size} on each rank')
    for one in engine.bagua_algorithm.options_without_effect(engine):
        _logger.warning(one)
    if _logger.isEnabledFor(logging.DEBUG):
        for bucket in engine.bagua_buckets:
            names = [record.name for record in bucket.records]
            _logger.debug(
                f"bucket {bucket.name}: {len(names)} tensors, {_size(bucket.bytes())}, {bucket.dtype},"
                f" {names[0]} to {names[-1]}"
            )


def _warn_of_other_models(engine: DataParallelEngine) -> None:
    """Warns if none of the optimizers steps a parameter of the module. One that steps a part of it, or other modules as
    well, is fine. No error: it may step copies of the parameters, or get its parameters later."""
    known = {id(parameter) for parameter in engine.module.parameters()}
    groups = [group for optimizer in engine.bagua_optimizers for group in optimizer.param_groups]
    if groups and not any(id(one) in known for group in groups for one in group["params"]):
        names = ", ".join(type(optimizer).__name__ for optimizer in engine.bagua_optimizers)
        _logger.warning(
            f"No optimizer that was given with {type(engine.module).__name__} steps any of its parameters ({names}), so"
            " that it will not be trained.\nPass an optimizer that was made with this module's parameters()."
        )


@functools.cache  # once
def _warn_of_variables() -> None:
    found = [f"{name}={text}" for name in _WITHOUT_EFFECT if (text := read_text(os.environ, name)) not in (None, "0")]
    if found:
        _logger.warning(f"{', '.join(found)}: no effect, for training uses no autotune service")


def summary(engine: DataParallelEngine) -> str:
    """For example: VGG: 138.4 M parameters in 32 tensors, 7 buckets, 527.8 MiB; gradient_allreduce over 4 ranks, nccl,
    Bagua-Net on."""
    parameters = [parameter for _, parameter in engine.synchronized_parameters]
    group = engine.process_group
    device = parameters[0].device
    backend = dist.get_backend(group.torch_group) if group.torch_group is not None else "no group"
    if ":" in backend:
        backend = dict(part.split(":") for part in backend.split(",")).get(device.type, backend)
    count = sum(parameter.numel() for parameter in parameters)
    buckets = engine.bagua_buckets
    size = sum(bucket.bytes() for bucket in buckets)
    is_on = nccl_finds_plugin(os.environ)
    if device.type == "cuda":
        network = f", Bagua-Net {'on' if is_on else 'off'}"
    else:
        network = ", which does not use Bagua-Net" if is_on else ""
    return (
        f"{type(engine.module).__name__}: {_count(count)} parameters in {len(parameters)} tensors,"
        f" {len(buckets)} bucket{'s' * (len(buckets) != 1)}, {_size(size)};"
        f" {engine.setup.algorithm_name} over {group.size} rank{'s' * (group.size != 1)}, {backend}{network}"
    )


def _count(number: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
