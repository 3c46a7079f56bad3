"""DistributedDataParallel: torch's wrapper, argument for argument, over Bagua's engine and algorithms."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP
from torch.utils import _pytree as pytree

from bagua.collectives.process_group import BaguaProcessGroup, to_bagua_process_group
from bagua.engine.bucket_plan import FIRST_BUCKET_BYTES
from bagua.engine.data_parallel import DataParallelEngine
from bagua.engine.module_hooks import HookCallable
from bagua.job.sharded_parameters import refuse_sharded
from bagua.job.torch_internals import is_in_backward
from bagua.misuse import check_given_flags, explains_calls
from bagua.regroup import coordinator
from bagua.replicas.replica_check import Replica
from bagua.replicas.state_broadcast import broadcast_parameters
from bagua.torch_api.algorithms.base import Algorithm, resolve_algorithm
from bagua.torch_api.data_parallel import arguments
from bagua.torch_api.data_parallel.after_backward import leave_out_unused_after_first_pass, take_over_optimizers
from bagua.torch_api.data_parallel.forward_buffers import ForwardBuffers
from bagua.torch_api.data_parallel.mixed_precision import MixedPrecision
from bagua.torch_api.data_parallel.torch_methods import Reducer, TorchMethods
from bagua.torch_api.data_parallel.tuned_all_reduce import AllReduceOptions, TunedAllReduceAlgorithm
from bagua.torch_api.data_parallel.uneven_inputs import JoinableWrapper, UnevenInputs
from bagua.torch_api.wrap_summary import configure_logging, log_wrap
from bagua.torch_api.wrapping import check_module, check_optimizers, weighted_loss


class SplitGraphs:
    """torch.compile of a whole wrapper: its graph is cut where a bucket is full, as torch does for its own wrapper.

    A compiled graph returns all its gradients at its end. So one graph for the whole model would send the first bucket
    when the backward pass is nearly over. torch's compiler asks torch's wrapper class whether a forward pass of a
    wrapper runs, and how large its buckets are (`torch._dynamo.config.optimize_ddp`, on by default).

    Attributes:
        bucket_bytes_cap: the name that the compiler reads: parameters of so many bytes make a graph.
        call: `call(module, inputs, kwargs)` is `module(*inputs, **kwargs)`.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes_cap = max(bucket_bytes, FIRST_BUCKET_BYTES)  # the compiler takes no smaller one
        # This call runs as it is, so that what it sets is there when the compiler meets the module.
        self.call: Any = torch.compiler.disable(self._call, recursive=False)  # type: ignore[no-untyped-call]

    def _call(self, module: nn.Module, inputs: Any, kwargs: Any) -> Any:
        ddp: Any = TorchDDP
        outer = ddp._active_ddp_module
        ddp._active_ddp_module = self
        try:
            return module(*inputs, **kwargs)
        finally:
            ddp._active_ddp_module = outer


__all__ = ["DistributedDataParallel", "to_bagua_process_group"]


# What a copy or a pickle does not have.
_OF_THIS_OBJECT = frozenset(
    (
        *("_engine", "_group", "_recipe", "_uneven", "forward_buffers", "_before_forward", "_after_forward"),
        *("_join_config", "device_mesh", "_split_graphs", "_has_buffer_hook", "_mixed", "_has_looked_for_optimizers"),
    )
)


class DistributedDataParallel(TorchMethods, nn.Module, JoinableWrapper):
    """Trains `module` in parallel with the same module of the other ranks, each on one device.

    Parameters and buffers are broadcast from group rank 0 when the wrapper is made. Buffers are broadcast again before
    the first forward pass, and before each one that follows a forward pass whose backward pass communicates. The
    backward pass communicates gradients while it runs, by default their mean. `state_dict` has the prefix `module.`.

    Arguments up to `gradient_as_bucket_view` have the positions and the defaults of Bagua 0.9; pass them by name.
    Arguments that follow the `*` have torch's names and defaults.

    Args:
        module: The module to train. Calls are forwarded to it. All its parameters are on one device, a CPU or a GPU.
        device_ids: The one GPU of the module, to which inputs are moved, as `[rank]`. None: inputs are not moved.
        output_device: The device to which outputs are moved. None: they are not moved.
        dim: Ignored. Kept for compatibility with torch.
        broadcast_buffers: Whether forward passes begin with a broadcast of the buffers. None: True.
        process_group: The ranks that train together: a group of torch or of Bagua. None: the default group.
        bucket_cap_mb: The size at which a bucket of gradients is closed, in MiB. None: 25.
        find_unused_parameters: Whether parameters that a backward pass does not reach count as zeros. It costs a small
            all-reduce per step. Without it, a missing gradient is an error.
        check_reduction: Ignored. Kept for compatibility with torch: missing gradients are always found.
        gradient_as_bucket_view: Whether `.grad` is a view of its bucket, which saves copies and memory.
        optimizers: The optimizers that step the parameters. Their states are broadcast too, and `step` raises an error
            if gradients are missing. Algorithms other than gradient all-reduce may need them. None: none.
        algorithm: What is communicated, and when: the name of an algorithm, such as "bytegrad", or an Algorithm.
        static_graph: Whether all backward passes are like the first one. Parameters may get their gradients in several
            parts then, as with reentrant checkpoints of a module that is used several times, and unused parameters are
            found once. For algorithms that only average gradients.
        delay_all_reduce_named_params: A list of (name, parameter) whose gradients are communicated after that of
            `param_to_hook_all_reduce`. For gradient all-reduce.
        param_to_hook_all_reduce: See `delay_all_reduce_named_params`; both or none are given.
        mixed_precision: The dtypes in which forward and backward passes compute (`param_dtype`), in which gradients
            travel (`reduce_dtype`; None: as `param_dtype`) and which buffers have (`buffer_dtype`), as torch's
            `_MixedPrecision`. Parameters, gradients and optimizer states keep their own. For gradient all-reduce.
        device_mesh: A mesh of one dimension, instead of `process_group`.
        skip_all_reduce_unused_params: Whether parameters that no rank uses in the first backward pass are left out of
            the communication from then on. With `find_unused_parameters` or `static_graph`. For algorithms that only
            average gradients.
        bucket_cap_mb_list: The sizes of the buckets in launch order, in MiB, instead of `bucket_cap_mb`. The last one
            counts for all that follow. For gradient all-reduce.
        batched_grad_copy: Ignored. Kept for compatibility with torch: on GPUs a bucket is always filled with one copy.
        forward_sync_buffers: The same as `broadcast_buffers`, which it overrides. None: as `broadcast_buffers`.
        init_sync: Whether ranks compare their modules and take the values of rank 0 when the wrapper is made. If False,
            nothing is communicated, and you ensure that the values are the same. For algorithms that only average
            gradients.
        batch_weights: Whether ranks count by the sizes of their batches: the gradient is that of the mean over the
            samples of all ranks, instead of the mean over ranks. Call `model.set_batch_weight(n)` before each backward
            pass, in `no_sync` too. Not for decentralized, low_precision_decentralized and async.
        count_batch: The same, where the first dimension of the first tensor that the module is called with is n.
        loss: With one of these two, what the loss is of the samples of a rank's batch: their "mean" or their "sum".
            Do not divide it by a number of accumulated passes.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There are several devices or types of device, a size of a bucket is not above 0, the name of an
            algorithm is not registered, one of `delay_all_reduce_named_params` and `param_to_hook_all_reduce` is
            missing, an optimizer is LBFGS, or ranks divide the steps of one (ZeroRedundancyOptimizer) and `algorithm`
            does not average gradients.
        NotImplementedError: The algorithm cannot do what an argument asks for.
        RuntimeError: No parameter requires a gradient, no process group is initialized, the ranks' modules or
            optimizers differ, or both `process_group` and `device_mesh` are given.
    """

    _bagua_is_parallel = True  # for checkpoints, which do not import this class

    @explains_calls(
        "Call DistributedDataParallel(module), with arguments by their names.",
        codec="A codec is an option of an algorithm: algorithm=Algorithm.init('bytegrad', codec='int4').",
    )
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
        *,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        init_sync: bool = True,
        batch_weights: bool = False,
        count_batch: bool = False,
        loss: str = "mean",
    ) -> None:
        check_module("module", module)
        check_given_flags(  # torch takes None, too
            broadcast_buffers=broadcast_buffers,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            forward_sync_buffers=forward_sync_buffers,
            init_sync=init_sync,
        )
        nn.Module.__init__(self)
        JoinableWrapper.__init__(self)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise RuntimeError(
                f"{type(module).__name__} has no parameter that requires a gradient: it needs no data parallelism"
            )
        self.device = arguments.device_of(module)
        self.device_type = self.device.type
        self.device_ids = arguments.device_ids_of(device_ids, self.device)
        self.output_device = arguments.output_device_of(output_device, self.device)
        self.dim = dim
        # None is torch's own default of these two.
        self.broadcast_buffers = True if broadcast_buffers is None else broadcast_buffers
        if forward_sync_buffers is not None:
            self.broadcast_buffers = forward_sync_buffers
        self.bucket_cap_mb = arguments.cap_of(arguments.DEFAULT_CAP_MB if bucket_cap_mb is None else bucket_cap_mb)
        self.bucket_bytes_cap_list = arguments.cap_list_of(bucket_cap_mb_list)
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.find_unused_parameters = find_unused_parameters
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.static_graph = static_graph
        self.mixed_precision = mixed_precision
        self.init_sync = init_sync
        self.batch_weights, self.count_batch, self.loss = batch_weights, count_batch, loss
        self._weighted_loss = weighted_loss(batch_weights, count_batch, loss)
        self.reducer = Reducer()
        self.is_multi_device_module = False
        self.module = module
        self._delayed = arguments.delayed_of(module, delay_all_reduce_named_params, param_to_hook_all_reduce)
        given = check_optimizers([] if optimizers is None else optimizers)
        self._given_algorithm = resolve_algorithm(algorithm, given)
        self._recipe = self._make_recipe()
        self._engine: DataParallelEngine | None = None
        self._prepare_forward()
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self._start_engine(given, arguments.group_of(process_group, device_mesh))

    def _make_recipe(self) -> Algorithm:
        """The algorithm with what the other arguments ask of it.

        Raises:
            NotImplementedError: it cannot do that.
        """
        given = self._given_algorithm
        for name, is_used in (
            ("static_graph=True", self.static_graph),
            ("skip_all_reduce_unused_params=True", self.skip_all_reduce_unused_params),
            ("init_sync=False", not self.init_sync),
        ):
            if is_used:
                arguments.refuse_without_gradients(name, given, f"Leave {name.partition('=')[0]} out")
        config = self.mixed_precision
        options = AllReduceOptions(
            self.bucket_bytes_cap_list,
            *self._delayed,
            reduce_dtype=None if config is None else config.reduce_dtype or config.param_dtype,
        )
        if config is None and options.is_default:
            return given
        name = "mixed_precision" if config is not None else "bucket_cap_mb_list"
        if self._delayed[0]:
            name = "delay_all_reduce_named_params"
        instead = "Use torch.autocast" if config is not None else f"Leave {name} out"
        return TunedAllReduceAlgorithm(arguments.refuse_without_all_reduce(name, given, instead), options)

    def _prepare_forward(self) -> None:
        self._uneven = UnevenInputs(self)
        self._before_forward = HookCallable(self._begin_forward)
        self._after_forward = HookCallable(self._end_forward)
        self._split_graphs = SplitGraphs(int(self.bucket_cap_mb * arguments.MIB))
        self._has_buffer_hook = False
        self._mixed: MixedPrecision | None = None
        self._has_looked_for_optimizers = False

    def _start_engine(self, optimizers: list[torch.optim.Optimizer], group: BaguaProcessGroup) -> None:
        self._group = group
        configure_logging()  # before anything is sent: what it refuses, one rank alone may have in its environment
        if self.skip_all_reduce_unused_params:
            coordinator.refuse("skip_all_reduce_unused_params=True", "Use find_unused_parameters=True alone")
        previous: DataParallelEngine | None = self.module.__dict__.pop("bagua_ddp", None)
        if previous is not None:
            previous.detach()
        bucket_bytes = max(1, int(self.bucket_cap_mb * arguments.MIB))
        engine = self._engine = DataParallelEngine(
            self.module,
            optimizers,
            self._recipe,
            group,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            find_unused_parameters=self.find_unused_parameters,
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=min(FIRST_BUCKET_BYTES, bucket_bytes),
            static_graph=self.static_graph,
            synchronizes_first=self.init_sync,
            active_ranks=self._uneven.active_ranks,
            loss=self._weighted_loss,
            counts_batch=self.count_batch,
        )
        try:
            self.forward_buffers = ForwardBuffers(engine)
            regrouping = coordinator.current()
            if self.init_sync and regrouping is not None:
                regrouping.repeat(self._broadcast_what_is_not_trained)
            elif self.init_sync:
                self._broadcast_what_is_not_trained()
            if self.mixed_precision is not None:
                self._mixed = MixedPrecision(self.module, self.mixed_precision, engine.parameters_to_ignore)
                self.forward_buffers.lay_out()
            log_wrap(engine)
        except BaseException:
            engine.detach()  # so that the module can be wrapped by something that works
            self._engine = None
            raise
        if self.skip_all_reduce_unused_params:
            leave_out_unused_after_first_pass(engine)
        self.module.__dict__["bagua_ddp"] = engine
        if regrouping is not None:
            # Ranks may be at different forward passes of a step that is dropped.
            engine.on_regroup(self._expect_other_buffers)
            self._expect_other_buffers(None)
            engine.join_job()

    def _expect_other_buffers(self, _: object) -> None:
        self.forward_buffers.differ = True

    @property
    def inner(self) -> DataParallelEngine:
        """The engine. A copy of a wrapper gets its own here: all ranks have to ask for the first time."""
        if self._engine is None:
            self._start_engine([], self._group)
            assert self._engine is not None
        return self._engine

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The torch group of all ranks that train together. `bagua_pg` of it is the Bagua group."""
        group = self._group.torch_group
        assert group is not None
        return group

    def _broadcast_what_is_not_trained(self) -> None:
        frozen = [one for one in self.replicated_parameters() if not one[1].requires_grad]
        others = [*frozen, *self.forward_buffers.named()]
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
        if self._mixed is None:
            output = self._split_graphs.call(self.module, inputs, kwargs)
        else:
            inputs, kwargs = self._mixed.cast_inputs((inputs, kwargs))
            with self._mixed.cast_parameters():
                output = self.module(*inputs, **kwargs)
        if self._has_buffer_hook:
            self._after_forward()
        return output if self.output_device is None else _moved(output, self.output_device)

    def _begin_forward(self) -> None:
        has_graph, inner = torch.is_grad_enabled(), self._engine
        if inner is None:
            if not has_graph:
                return  # a copy that is evaluated, on one rank perhaps
            inner = self.inner
        makes_them_differ = has_graph and inner.require_backward_grad_sync
        if is_in_backward():
            # Of a forward pass that is repeated. The first time, gradients may have been off.
            self.forward_buffers.differ |= makes_them_differ
            return
        if not inner.is_attached:
            raise RuntimeError(
                f"{type(self.module).__name__} was wrapped again. This wrapper no longer communicates.\n"
                "Use the new wrapper."
            )
        if not self._has_looked_for_optimizers:
            self._has_looked_for_optimizers = True
            take_over_optimizers(inner, self._given_algorithm)
        if self._join_config.enable:
            self._uneven.before_forward()
        given = self.broadcast_buffers, self._uneven.source, makes_them_differ
        regrouping = coordinator.current()
        if regrouping is None:
            self.forward_buffers.before_forward(*given)
            return
        if self.module.training and has_graph:
            regrouping.begin_forward()
        # The broadcast alone is repeated; what else is done before a forward pass communicates nothing then.
        regrouping.repeat_in_forward(lambda: self.forward_buffers.before_forward(*given))

    def _end_forward(self) -> None:
        self.forward_buffers.after_forward(self._uneven.source)

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward pass begins with a broadcast of the buffers."""
        return self.inner.is_attached and self.forward_buffers.will_run(self.broadcast_buffers)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within accumulate gradients without communication; the next one outside sends their sum."""
        with self.inner.no_sync():
            yield

    # --- copies ------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        # A replica of its own, in the same group. It has no optimizers: they step the original. Nothing is sent: one
        # rank alone may copy, to average or to save. All ranks take part in the copy's first forward pass that makes a
        # graph, which broadcasts the parameters of group rank 0.
        duplicate = self.__class__.__new__(self.__class__)
        memo[id(self)] = duplicate
        duplicate._restore(copy.deepcopy(self.__getstate__(), memo), self._group)
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_THIS_OBJECT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # As a copy, in the default group. Raises RuntimeError: no process group is initialized.
        self._restore(state, to_bagua_process_group(None))

    def _restore(self, state: dict[str, Any], group: BaguaProcessGroup) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        JoinableWrapper.__init__(self)
        self._group = group
        self._engine = None
        self._recipe = self._make_recipe()  # without a communication hook
        self._prepare_forward()


# isinstance(wrapper, torch's DistributedDataParallel) tells torch.distributed.checkpoint, Accelerate and others that
# the model is in `module`. So checkpoints name its parameters without that prefix, as those of torch's wrapper do.
nn.parallel.DistributedDataParallel.register(DistributedDataParallel)

# Otherwise `help` would show what nn.Module says of its own.
DistributedDataParallel.__init__.__doc__ = DistributedDataParallel.__doc__


def _moved(tree: Any, device: torch.device) -> Any:
    # Not to the CPU: whoever reads there does not wait for the stream that writes.
    goes_on = device.type != "cpu"
    return pytree.tree_map(
        lambda leaf: leaf.to(device, non_blocking=goes_on) if isinstance(leaf, Tensor) else leaf, tree
    )
