"""DistributedDataParallel: torch's wrapper, argument for argument, over Bagua's engine and algorithms."""

from __future__ import annotations

import contextlib
import copy
import math
import numbers
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, JoinHook
from torch.utils import _pytree as pytree

from bagua.collectives.process_group import BaguaProcessGroup, to_bagua_process_group
from bagua.engine.bucket_plan import FIRST_BUCKET_BYTES
from bagua.engine.data_parallel import DataParallelEngine
from bagua.engine.module_hooks import HookCallable, is_in_backward
from bagua.engine.parameters import replicated_parameters
from bagua.replicas.buffer_broadcast import BufferBroadcast
from bagua.replicas.replica_check import Replica
from bagua.replicas.sharded_parameters import refuse_sharded
from bagua.replicas.state_broadcast import broadcast_parameters
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl
from bagua.torch_api.algorithms.registry import resolve_algorithm
from bagua.torch_api.data_parallel.reducer import Reducer
from bagua.torch_api.data_parallel.uneven_inputs import JoinableWrapper, UnevenInputs
from bagua.torch_api.wrap_summary import configure_logging, log_wrap
from bagua.torch_api.wrapping import check_optimizers

if TYPE_CHECKING:
    from bagua.engine.bucket import Bucket

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallel_V1_9_0",
    "DistributedDataParallel_V1_9_0_Interface",
    "to_bagua_process_group",
]

_MIB = 1 << 20
_DEFAULT_CAP_MB = 25


class DistributedDataParallel(nn.Module, JoinableWrapper):
    """Data parallelism of `module`, whose replicas every rank has on one device.

    Parameters and buffers are broadcast from group rank 0 when it is made, buffers again at the start of the first
    forward pass and of each one that follows a forward pass whose backward pass communicates. `state_dict` has the
    prefix `module.`, as torch's.

    Args:
        module: to train; its `forward` takes what this module's takes.
        device_ids: None, or the one CUDA device of the module; inputs are moved there.
        output_device: where outputs are moved; default: they stay.
        dim: of the batch, where inputs are split over several devices; there is one, so it says nothing.
        broadcast_buffers: whether forward begins with a broadcast of the buffers; None: it does.
        process_group: Bagua's or torch's; None: the default group.
        bucket_cap_mb: the size at which a bucket is closed, in MiB; None: 25.
        find_unused_parameters: parameters that a backward pass does not reach count as zeros; costs a small
            all-reduce a step.
        check_reduction: kept for old code: missing gradients are always found.
        gradient_as_bucket_view: gradients are views of their buckets, which saves copies and memory.
        optimizers: that step the parameters; their states are broadcast too. Algorithms other than gradient
            all-reduce may need them. None: none.
        algorithm: what is communicated, and when: the name of an algorithm, such as "bytegrad", or an Algorithm.

    Raises:
        TypeError: an argument of another type.
        ValueError: several devices, devices of several types, a bucket_cap_mb that is not above 0, or an algorithm's
            name that is not registered.
        RuntimeError: no parameter needs a gradient, no process group is initialized, or the ranks' modules or
            optimizers differ.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = True,
        process_group: BaguaProcessGroup | dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        optimizers: Sequence[torch.optim.Optimizer] | None = [],
        algorithm: str | Algorithm = "gradient_allreduce",
    ) -> None:
        nn.Module.__init__(self)
        JoinableWrapper.__init__(self)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise RuntimeError(
                f"{type(module).__name__} has no parameter that requires a gradient: it needs no data parallelism"
            )
        self.device = _device_of(module)
        self.device_type = self.device.type
        self.device_ids = _checked_device_ids(device_ids, self.device)
        self.output_device = None if output_device is None else _as_device(output_device)
        self.dim = dim
        # None is torch's own default of these two.
        self.broadcast_buffers = True if broadcast_buffers is None else broadcast_buffers
        self.bucket_cap_mb = _checked_cap(_DEFAULT_CAP_MB if bucket_cap_mb is None else bucket_cap_mb)
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.find_unused_parameters = find_unused_parameters
        # Whether the next forward pass may have buffers to broadcast: torch's name, which Accelerate sets.
        self.require_forward_param_sync = True
        self.reducer = Reducer()
        self.is_multi_device_module = False
        self.static_graph = False
        self.module = module
        given = check_optimizers([] if optimizers is None else optimizers)
        self._recipe = resolve_algorithm(algorithm, given)
        self._engine: DataParallelEngine | None = None
        self._prepare_forward()
        self._start_engine(given, to_bagua_process_group(process_group))

    def _prepare_forward(self) -> None:
        self._uneven = UnevenInputs(self)
        self._before_forward = HookCallable(self._begin_forward)

    def _start_engine(self, optimizers: list[torch.optim.Optimizer], group: BaguaProcessGroup) -> None:
        self.process_group = group
        configure_logging()  # before anything is sent: what it refuses, one rank alone may have in its environment
        # They are broadcast here, and may be changed before the first forward pass, as `load_state_dict` does.
        self.require_forward_param_sync = True
        previous: DataParallelEngine | None = self.module.__dict__.pop("bagua_ddp", None)
        if previous is not None:
            previous.detach()
        engine = self._engine = DataParallelEngine(
            self.module,
            optimizers,
            self._recipe,
            group,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            find_unused_parameters=self.find_unused_parameters,
            bucket_bytes=max(1, int(self.bucket_cap_mb * _MIB)),
            first_bucket_bytes=min(FIRST_BUCKET_BYTES, max(1, int(self.bucket_cap_mb * _MIB))),
            attendance=self._uneven.attendance,
        )
        try:
            self._buffer_broadcast = BufferBroadcast(self.module, engine.parameters_to_ignore, group)
            self._broadcast_what_is_not_trained()
            log_wrap(engine)
        except BaseException:
            engine.detach()  # so that the module can be wrapped by something that works
            self._engine = None
            raise
        self.module.__dict__["bagua_ddp"] = engine

    @property
    def inner(self) -> DataParallelEngine:
        """The engine. A copy of a wrapper gets its own here: all ranks have to ask for the first time."""
        if self._engine is None:
            self._start_engine([], self.process_group)
            assert self._engine is not None
        return self._engine

    def _broadcast_what_is_not_trained(self) -> None:
        frozen = [one for one in self.replicated_parameters() if not one[1].requires_grad]
        others = [*frozen, *self._buffer_broadcast.named_buffers()]
        refuse_sharded(others, f"wrapping {type(self.module).__name__}")
        Replica(others, "frozen parameters and buffers").check(self.inner.communicator)
        broadcast_parameters(others, self.inner.communicator)

    # --- forward -----------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward pass.

        Raises:
            RuntimeError: the module has been wrapped again since.
        """
        self._before_forward()
        if self.device_ids:
            inputs, kwargs = _moved((inputs, kwargs), self.device)
        output = self.module(*inputs, **kwargs)
        return output if self.output_device is None else _moved(output, self.output_device)

    def _begin_forward(self) -> None:
        if self._engine is None and not torch.is_grad_enabled():
            return  # a copy that is evaluated, on one rank perhaps
        inner = self.inner
        makes_them_differ = torch.is_grad_enabled() and self.require_backward_grad_sync
        if is_in_backward():
            # Of a forward pass that is repeated. The first time, gradients may have been off.
            self.require_forward_param_sync |= makes_them_differ
            return
        if not inner.is_attached:
            raise RuntimeError(
                f"{type(self.module).__name__} was wrapped again. This wrapper no longer communicates.\n"
                "Use the new wrapper."
            )
        self._uneven.before_forward()
        if self.will_sync_module_buffers():
            self.sync_module_buffers(self._uneven.source)
        self.require_forward_param_sync = makes_them_differ

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward pass begins with a broadcast of the buffers."""
        wanted = self.bagua_algorithm.ranks_in_step and self.broadcast_buffers
        return wanted and self.require_forward_param_sync and self._buffer_broadcast.has_buffers

    def sync_module_buffers(self, source: int) -> None:
        """Make the buffers those of group rank `source`, if there are any. Every rank calls it."""
        if self._buffer_broadcast.has_buffers:
            self._buffer_broadcast.run(source)
        self.require_forward_param_sync = False

    def replicated_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of all that are alike on all ranks, trained or frozen."""
        return replicated_parameters(self.module, self.inner.parameters_to_ignore)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within accumulate gradients without communication; the next one outside sends their sum."""
        with self.inner.no_sync():
            yield

    # --- uneven inputs -----------------------------------------------------------------------------------------------

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """A context in which ranks may run out of inputs at different times: those that have take part with zeros.

        Args:
            divide_by_initial_world_size: gradients are divided by the number of ranks; otherwise by the number of those
                that still have inputs. An algorithm that sums them (average=False) divides by neither.
            enable: False: the context does nothing.
            throw_on_early_termination: all ranks raise as soon as one runs out.

        Raises:
            NotImplementedError: the algorithm communicates something else than gradients.
        """
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Used by torch.distributed.algorithms.Join."""
        return self._uneven.hook(**kwargs)

    @property
    def join_device(self) -> torch.device:
        """Of the small tensors by which the ranks count those that still have inputs."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The torch group of all ranks that train together."""
        return self.inner.communicator.torch_group

    # --- what algorithms and users see -------------------------------------------------------------------------------

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward communicates; see no_sync. May be set, as torch's: False while gradients are accumulated."""
        return self.inner.require_backward_grad_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, communicates: bool) -> None:
        self.inner.require_backward_grad_sync = bool(communicates)

    @property
    def parameters_to_ignore(self) -> list[str]:
        """Names of parameters and buffers that are not synchronized."""
        return self.inner.parameters_to_ignore

    def bagua_build_params(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of all that are synchronized, in the module's order."""
        return self.inner.bagua_build_params()

    @property
    def bagua_module_name(self) -> str:
        """The name by which the ranks know this module."""
        return self.inner.bagua_module_name

    @property
    def bagua_algorithm(self) -> AlgorithmImpl:
        """The algorithm at work."""
        algorithm: AlgorithmImpl = self.inner.bagua_algorithm
        return algorithm

    @property
    def bagua_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that were given."""
        return self.inner.bagua_optimizers

    @property
    def bagua_buckets(self) -> list[Bucket]:
        """The buckets, in launch order."""
        return self.inner.bagua_buckets

    @property
    def bagua_train_step_counter(self) -> int:
        """Forward passes in training so far."""
        return self.inner.bagua_train_step_counter

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Not for Bagua's wrapper: an algorithm is what decides about communication.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "register_comm_hook: the algorithm decides how this wrapper communicates.\n"
            "Pass algorithm='bytegrad' or another one, write a subclass of bagua.torch_api.algorithms.Algorithm, or"
            " register the hook with torch's DistributedDataParallel."
        )

    def scatter(self, inputs: object, kwargs: object, device_ids: object) -> None:
        """Not here: a process has one device, to which `forward` moves inputs.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("scatter: a process trains on one device, to which forward moves its inputs")

    def to_kwargs(self, inputs: object, kwargs: object, device_id: object) -> None:
        """As scatter.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("to_kwargs: a process trains on one device, to which forward moves its inputs")

    def gather(self, outputs: object, output_device: object) -> None:
        """Not here: a process has one device, so that there is nothing to gather.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("gather: a process trains on one device; its outputs are there already")

    # --- copies ------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        # A replica of its own, in the same group. It has no optimizers: they step the original. Nothing is sent: one
        # rank alone may copy, to average or to save. All ranks take part in the copy's first forward pass that makes a
        # graph, which broadcasts the parameters of group rank 0.
        duplicate = self.__class__.__new__(self.__class__)
        memo[id(self)] = duplicate
        duplicate._restore(copy.deepcopy(self.__getstate__(), memo), self.process_group)
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        left_out = {"_engine", "process_group", "_uneven", "_buffer_broadcast", "_before_forward", "_join_config"}
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # As a copy, in the default group. Raises RuntimeError: no process group is initialized.
        self._restore(state, to_bagua_process_group(None))

    def _restore(self, state: dict[str, Any], group: BaguaProcessGroup) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        JoinableWrapper.__init__(self)
        self.process_group = group
        self._engine = None
        self._prepare_forward()


# isinstance(wrapper, torch's DistributedDataParallel) tells torch.distributed.checkpoint, Accelerate and others that
# the model is in `module`. So checkpoints name its parameters without that prefix, as those of torch's wrapper do.
nn.parallel.DistributedDataParallel.register(DistributedDataParallel)

# Otherwise `help` would show what nn.Module says of its own.
DistributedDataParallel.__init__.__doc__ = DistributedDataParallel.__doc__

# The name that Lightning's strategy imports, and in Bagua 0.9 that of its base class.
DistributedDataParallel_V1_9_0 = DistributedDataParallel_V1_9_0_Interface = DistributedDataParallel


def _checked_cap(megabytes: Any) -> float:
    if not isinstance(megabytes, numbers.Real):
        raise TypeError(f"bucket_cap_mb={megabytes!r}: must be a number of MiB, or None for {_DEFAULT_CAP_MB}")
    cap = float(megabytes)
    if not (cap > 0 and math.isfinite(cap * _MIB)):
        raise ValueError(
            f"bucket_cap_mb={megabytes}: must be more than 0 MiB, and finite; for buckets without a limit give the size"
            " of the model"
        )
    return cap


def _device_of(module: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) > 1:
        raise ValueError(
            f"the parameters of {type(module).__name__} are on {sorted(map(str, devices))}; a replica has one device"
        )
    return devices.pop()


def _checked_device_ids(device_ids: Sequence[int | torch.device] | None, device: torch.device) -> list[int] | None:
    """As torch's wrapper has them: the index of the device, or None where inputs are not moved."""
    if not device_ids:
        return None
    ids = [_as_device(one) for one in device_ids]
    if len(ids) > 1:
        raise ValueError(f"device_ids={list(device_ids)}: a process trains on one device; start one process per GPU")
    if device.type != "cuda" or ids[0] != device:
        raise ValueError(
            f"device_ids={list(device_ids)}, but the module is on {device}; move it there, or leave device_ids out"
        )
    return [one.index for one in ids]


def _as_device(one: int | torch.device) -> torch.device:
    return torch.device("cuda", one) if isinstance(one, int) else torch.device(one)


def _moved(tree: Any, device: torch.device) -> Any:
    # Not to the CPU: whoever reads there does not wait for the stream that writes.
    goes_on = device.type != "cpu"
    return pytree.tree_map(
        lambda leaf: leaf.to(device, non_blocking=goes_on) if isinstance(leaf, Tensor) else leaf, tree
    )
