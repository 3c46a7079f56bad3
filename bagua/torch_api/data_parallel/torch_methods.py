"""What algorithms and users read of a wrapper's engine; methods of torch's DistributedDataParallel that change what the
wrapper communicates, and some that libraries call.

A base class of the wrapper, which keeps what they are about. Names with an underscore are torch's: libraries call them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bagua.engine.bucket import Bucket
from bagua.engine.data_parallel import DataParallelEngine
from bagua.engine.parameters import replicated_parameters
from bagua.regroup.job_step import WorldChange
from bagua.torch_api.data_parallel.arguments import MIB, refuse_without_all_reduce, refuse_without_gradients
from bagua.torch_api.data_parallel.comm_hook import CommHook, check_comm_hook
from bagua.torch_api.data_parallel.forward_buffers import BufferHook, ForwardBuffers
from bagua.torch_api.data_parallel.tuned_all_reduce import AllReduceOptions, TunedAllReduceAlgorithm

if TYPE_CHECKING:
    from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl


class Reducer:
    """What programs ask of the `reducer` of torch's wrapper, which is private to torch: Accelerate's
    `trigger_sync_in_backward` does, for one."""

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Expect a backward pass that communicates. Nothing has to be done: whether a backward pass communicates is
        decided when it begins, by `require_backward_grad_sync`, and not in the forward pass as in torch.

        Args:
            outputs: Of the forward pass.
        """


class TorchMethods:
    """Of the wrapper."""

    module: nn.Module
    static_graph: bool
    broadcast_buffers: bool
    _recipe: Algorithm
    forward_buffers: ForwardBuffers
    _has_buffer_hook: bool

    if TYPE_CHECKING:

        @property
        def inner(self) -> DataParallelEngine: ...
        @property
        def process_group(self) -> dist.ProcessGroup: ...

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward communicates; see no_sync. May be set, as torch's: False while gradients are accumulated."""
        return self.inner.require_backward_grad_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, communicates: bool) -> None:
        self.inner.require_backward_grad_sync = bool(communicates)

    @property
    def step_was_dropped(self) -> bool:
        """Whether the last step was dropped, because the job has lost a rank (bagua.torch_api.Regroup)."""
        return self.inner.step_was_dropped

    def set_batch_weight(self, weight: float) -> None:
        """What this rank's batch counts for in the next backward pass, such as its number of samples: see
        bagua.engine.data_parallel.DataParallelEngine.set_batch_weight."""
        self.inner.set_batch_weight(weight)

    def on_regroup(self, callback: Callable[[WorldChange], object]) -> None:
        """Call `callback(change)` each time that the job goes on without ranks that it has lost."""
        self.inner.on_regroup(callback)

    @property
    def parameters_to_ignore(self) -> list[str]:
        """Names of parameters and buffers that are not synchronized."""
        return self.inner.parameters_to_ignore

    def replicated_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of all that are alike on all ranks, trained or frozen."""
        return replicated_parameters(self.module, self.inner.parameters_to_ignore)

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

    # In bytes: what torch's own functions are given that broadcast the states of a module.
    broadcast_bucket_size = 250 * MIB

    @property
    def forward_sync_buffers(self) -> bool:
        """torch's name of `broadcast_buffers`."""
        return self.broadcast_buffers

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the next forward pass may have buffers to broadcast: torch's name, which Accelerate sets."""
        return self.forward_buffers.differ

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, may_differ: bool) -> None:
        self.forward_buffers.differ = bool(may_differ)

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Communicate gradients by a function instead of the all-reduce: `hook(state, bucket)` begins it and returns a
        `torch.futures.Future` of the bucket's tensor, as the hooks of torch.distributed.algorithms.ddp_comm_hooks do.
        The gradients that it gets are not divided by the number of ranks. Every rank calls this, before training.

        Args:
            state: the first argument of `hook`.
            hook: its bucket has the methods of `torch.distributed.GradBucket`: `buffer()` is 1-D and has the gradients
                of `parameters()` in their order, in their dtype.

        Raises:
            TypeError: `hook` cannot be called.
            ValueError: its annotations are not those of a hook.
            RuntimeError: there is a hook already, or training has begun.
            NotImplementedError: `algorithm` is not GradientAllReduceAlgorithm.
        """
        check_comm_hook(hook)
        recipe = self._recipe
        if isinstance(recipe, TunedAllReduceAlgorithm):
            if recipe.options.comm_hook is not None:
                raise RuntimeError(
                    "register_comm_hook or _register_builtin_comm_hook can only be called once.\n"
                    "Combine the two functions, or wrap the module again."
                )
        else:
            base = refuse_without_all_reduce("register_comm_hook", recipe, "Leave the hook out")
            recipe = TunedAllReduceAlgorithm(base, AllReduceOptions())
        if recipe.options.reduce_dtype is not None:
            raise NotImplementedError(
                "register_comm_hook with mixed_precision: the hook would replace the all-reduce in"
                f" {recipe.options.reduce_dtype}.\nLeave one of them out; bf16_compress_hook casts, too."
            )
        self._refuse_after_start("register_comm_hook")
        self._recipe = recipe.with_hook(CommHook(state, hook))
        engine = self.inner
        engine.rebuild_buckets(replace(engine.setup, algorithm=self._recipe))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Hooks that torch has in C++: here the same in Python."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}
        self.register_comm_hook(self.process_group, hooks[comm_hook_type.name])

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Step an optimizer bucket by bucket, as soon as its gradients have been communicated.

        Raises:
            RuntimeError: the optimizer cannot do that; as register_comm_hook.
            NotImplementedError: as register_comm_hook.
        """
        from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim  # type: ignore[attr-defined]

        overlapped: Any = _as_overlapped_optim(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(
                f"{optim.__name__} cannot step in the backward pass: {error}\nStep it after the backward pass."
            ) from error

    def _register_buffer_comm_hook(
        self, state: object, hook: Callable[[Any, Mapping[str, Tensor]], Any], comm_hook_location: Any = None
    ) -> None:
        """Synchronize buffers by a function instead of the broadcast from rank 0: `hook(state, {name: buffer})`. It may
        return futures, which are waited for at the end of the backward pass.

        Args:
            state: the first argument of `hook`.
            hook: changes the buffers in place.
            comm_hook_location: PRE_FORWARD or POST_FORWARD of torch's _BufferCommHookLocation; None: POST_FORWARD.

        Raises:
            TypeError: `hook` cannot be called.
            NotImplementedError: the algorithm's ranks do not make their steps together.
        """
        if not callable(hook):
            raise TypeError(f"hook must be callable, got {type(hook).__name__}.\nPass a function hook(state, buffers).")
        if not self.inner.bagua_algorithm.ranks_in_step:
            raise NotImplementedError(
                f"_register_buffer_comm_hook: the ranks of {type(self._recipe).__name__} do not make their steps"
                " together.\nUse an algorithm that does, such as GradientAllReduceAlgorithm."
            )
        is_before = getattr(comm_hook_location, "name", "POST_FORWARD") == "PRE_FORWARD"
        self._has_buffer_hook = True
        self.forward_buffers.use(BufferHook(state, hook, runs_after_forward=not is_before))

    def _set_static_graph(self) -> None:
        """As `static_graph=True`; every rank calls it, before training.

        Raises:
            RuntimeError: training has begun.
            NotImplementedError: the algorithm does not only average gradients.
        """
        if self.static_graph:
            return
        refuse_without_gradients("static_graph=True", self._recipe, "Leave it out")
        self._refuse_after_start("_set_static_graph")
        self.static_graph = True
        engine = self.inner
        engine.rebuild_buckets(replace(engine.setup, static_graph=True, find_unused_parameters=True))

    def _refuse_after_start(self, what: str) -> None:
        steps = self.inner.bagua_train_step_counter
        if steps:
            raise RuntimeError(
                f"{what} should be called before training loop starts: {steps} forward passes were made in training.\n"
                "Call it right after the module is wrapped."
            )

    def _remove_autograd_hooks(self) -> None:
        """The module is ordinary again: this wrapper does not communicate any more."""
        self.inner.detach()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Nothing: outputs are never copied here."""

    def _default_broadcast_coalesced(
        self, bufs: Sequence[Tensor], bucket_size: int = 250 << 20, authoritative_rank: int = 0
    ) -> None:
        """Overwrite these buffers with those of a group rank: for hooks of buffers."""
        broadcast: Any = dist._broadcast_coalesced  # type: ignore[attr-defined]
        broadcast(self.process_group, list(bufs), bucket_size, authoritative_rank)

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

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Names of parameters and buffers that are not synchronized, as `named_parameters()` has them. Before the
        module is wrapped."""
        names = list(params_and_buffers_to_ignore)
        module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
        named: list[tuple[str, Any]] = [*module.named_parameters(), *module.named_buffers()]
        for name, one in named:
            if name in names:
                one._ddp_ignored = True

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """The parameters of a module that are synchronized; with `named_params` their names, too."""
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter
