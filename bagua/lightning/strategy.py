"""The strategy for Lightning's Trainer: its DDP strategy, with Bagua's wrapper and algorithms.

[Note: a training step] Lightning calls `training_step` as the forward pass of the wrapper, so that the engine's hooks
see one forward pass for each step, whatever the step calls. With manual optimization the backward passes run inside of
it, each perhaps of other parameters (toggle_optimizer): the engine looks at them in front of every backward pass.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import inspect
import itertools
import logging
import uuid
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bagua.collectives.process_group import is_initialized
from bagua.contrib.checkpoint.agreement import ranks_of
from bagua.engine.data_parallel import DataParallelEngine
from bagua.lightning.packages import ForPackage, subclass_for
from bagua.lightning.rank_files import STATE, load_own, rank_file
from bagua.misuse import check_flags, nearest
from bagua.regroup import coordinator
from bagua.torch_api import init_process_group
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithmImpl
from bagua.torch_api.algorithms.base import resolve_algorithm
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from bagua.torch_api.data_parallel import DistributedDataParallel
from bagua.torch_api.data_parallel.arguments import cap_of
from bagua.torch_api.wrapping import weighted_loss

NAME = "bagua"
_MEANS = ("mean", "avg")

_logger = logging.getLogger("bagua")


@dataclass
class _Training:
    """Where this rank left a training whose ranks differ.

    Attributes:
        algorithm: with its options.
        versions: of the parameters: another one if somebody has changed it since.
        engine: its state.
    """

    algorithm: str
    versions: list[int]
    engine: dict[str, Any]


# By the module; the next one may be another Trainer's.
_left: weakref.WeakKeyDictionary[nn.Module, _Training] = weakref.WeakKeyDictionary()


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """What wrapping broadcasts, and more."""
    return itertools.chain(module.parameters(), module.buffers())


def _versions(module: nn.Module) -> list[int]:
    return [parameter._version for parameter in module.parameters()]


@functools.cache
def strategy_for(package: str) -> Any:
    """The class for one of Lightning's packages, registered there as "bagua".

    Args:
        package: "lightning.pytorch" or "pytorch_lightning".

    Raises:
        ImportError: it is not installed.
    """
    made = subclass_for(package, "BaguaStrategy", BaguaParallel, strategy_for, "strategies", "DDPStrategy")
    made.misconfiguration = importlib.import_module(f"{package}.utilities.exceptions").MisconfigurationException
    made.accumulation_scheduler = importlib.import_module(f"{package}.callbacks").GradientAccumulationScheduler
    registry = importlib.import_module(f"{package}.strategies").StrategyRegistry
    registry.register(NAME, made, description="Bagua's algorithms", override=True)
    return made


class BaguaParallel(ForPackage):
    """Data parallelism by one of Bagua's algorithms: `Trainer(strategy=BaguaStrategy(algorithm="bytegrad"))`, or
    `Trainer(strategy="bagua")` for gradient all-reduce.

    Args:
        algorithm: the name of an algorithm, or an Algorithm.
        flatten: gradients are views of their buckets, which saves copies and memory.
        accelerator: as in DDPStrategy, and so are the next four.
        parallel_devices: of this node.
        cluster_environment: which launcher has started the ranks.
        checkpoint_io: writes and reads checkpoints.
        precision_plugin: mixed precision.
        find_unused_parameters: parameters that a backward pass does not reach count as zeros.
        bucket_cap_mb: the size at which a bucket is closed, in MiB.
        process_group_backend: "nccl" or "gloo"; None: by the device.
        timeout: of a collective on the CPU, and of NCCL's watchdog.
        start_method: how Lightning starts ranks that no launcher has started: "popen", "spawn", "fork", "forkserver".
        batch_weights: as of DistributedDataParallel: each sample counts the same, whatever the sizes of the ranks'
            batches. Steps call `self.bagua_ddp.set_batch_weight(n)`.
        count_batch: the same, where the first dimension of the first tensor of a batch is n.
        loss: with one of these two, what the loss is of the samples of a rank's batch: their "mean" or their "sum".
        **bagua_kwargs: options of the algorithm.

    Raises:
        MisconfigurationException: an unknown algorithm or option, or an optimizer that the algorithm cannot use. When
            training begins: batch weights with `accumulate_grad_batches` or a GradientAccumulationScheduler, by which
            Lightning divides losses.
        NotImplementedError: when training begins: the job regroups, and Lightning's passes are within optimizer steps.
    """

    strategy_name = NAME
    misconfiguration: type[Exception]
    accumulation_scheduler: type[Any]
    # Of Lightning's class.
    model: Any
    lightning_module: Any
    optimizers: list[torch.optim.Optimizer]
    lr_scheduler_configs: list[Any]
    root_device: torch.device
    global_rank: int
    world_size: int
    checkpoint_io: Any

    def __init__(
        self,
        algorithm: str | Algorithm = "gradient_allreduce",
        flatten: bool = True,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        *,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float | None = None,
        process_group_backend: str | None = None,
        timeout: datetime.timedelta = datetime.timedelta(minutes=30),
        start_method: str = "popen",
        batch_weights: bool = False,
        count_batch: bool = False,
        loss: str = "mean",
        **bagua_kwargs: Any,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._algorithm, self._options = algorithm, bagua_kwargs
        self._flatten = flatten
        self._find_unused_parameters = find_unused_parameters
        self._bucket_cap_mb = bucket_cap_mb
        self._weights: dict[str, Any] = {"batch_weights": batch_weights, "count_batch": count_batch, "loss": loss}
        self._forward_redirection = self._redirect
        # Of the last training, also after it.
        self._trained: DataParallelEngine | None = None
        self._engine_state: dict[str, Any] | None = None
        # In it: by the algorithm, or in experts and excluded parameters.
        self._ranks_differ = False
        # Of a training and the saves in it, the same on all ranks: together they name one save.
        self._run, self._saves = "", 0
        self._ranks_with_files = 0
        self._is_own = False  # the checkpoint that was loaded
        self._has_failed = False
        self._check_options()

    def _check_options(self) -> None:
        """Before ranks are started; QAdam's optimizer exists only later."""
        if self._bucket_cap_mb is not None:
            try:
                cap_of(self._bucket_cap_mb)
            except (TypeError, ValueError) as error:
                raise self.misconfiguration(f"BaguaStrategy: {error}") from error
        try:
            weighted_loss(**self._weights)
            check_flags(flatten=self._flatten, find_unused_parameters=self._find_unused_parameters)
        except (TypeError, ValueError) as error:
            raise self.misconfiguration(f"BaguaStrategy: {error}") from error
        if isinstance(self._algorithm, Algorithm):
            if self._options:
                raise self.misconfiguration(
                    f"BaguaStrategy got the options {', '.join(self._options)} and an algorithm that is made already.\n"
                    f"Give them to {type(self._algorithm).__name__}, or name the algorithm: algorithm='bytegrad'."
                )
            return
        if not isinstance(self._algorithm, str):
            raise self.misconfiguration(
                f"algorithm={self._algorithm!r} is neither the name of an algorithm nor an Algorithm.\n"
                "For example: BaguaStrategy(algorithm='bytegrad')."
            )
        if self._algorithm != "qadam":
            self._make_algorithm([])

    def _make_algorithm(self, optimizers: list[torch.optim.Optimizer]) -> Algorithm:
        try:
            return resolve_algorithm(self._algorithm, optimizers, **self._options)
        except (TypeError, ValueError) as error:
            own = [name for name in inspect.signature(BaguaParallel).parameters if name not in self._options]
            near = "".join(nearest(option, own) for option in self._options)
            raise self.misconfiguration(f"BaguaStrategy: {error.args[0]}{near}") from error

    # --- set-up and end ----------------------------------------------------------------------------------------------

    def setup_distributed(self) -> None:
        super().setup_distributed()  # type: ignore[misc]
        if not is_initialized():  # by a Trainer before this one
            init_process_group()

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)  # type: ignore[misc]
        if trainer.state.fn == "fit":
            self._wrap()

    def configure_ddp(self) -> None:
        """Not torch's wrapper: `setup` wraps when there are optimizers."""

    def _wrap(self) -> None:
        module = self.lightning_module
        coordinator.refuse("Lightning's Trainer", "Write the training loop yourself")
        self._refuse_divided_losses(module.trainer.accumulate_grad_batches)
        for callback in module.trainer.callbacks:
            if isinstance(callback, self.accumulation_scheduler):
                self._refuse_divided_losses(max(callback.scheduling.values()))
        algorithm = self._algorithm_for(self.optimizers)
        left = self._left_by_all(module, algorithm)
        own = [tensor.detach().clone() for tensor in _tensors(module)] if left is not None else []
        self.model = DistributedDataParallel(
            module,
            device_ids=self.determine_ddp_device_ids(),  # type: ignore[attr-defined]
            find_unused_parameters=self._find_unused_parameters,
            gradient_as_bucket_view=self._flatten,
            bucket_cap_mb=self._bucket_cap_mb,
            optimizers=self.optimizers,
            algorithm=algorithm,
            **self._weights,
        )
        engine = self._trained = self.model.inner
        engine.replans_before_backward = not module.automatic_optimization
        synchronized = {id(parameter) for _, parameter in engine.synchronized_parameters}
        self._ranks_differ = not engine.bagua_algorithm.keeps_replicas_equal or any(
            parameter.requires_grad and id(parameter) not in synchronized for parameter in module.parameters()
        )
        if self._ranks_differ:
            self._run = self.broadcast(uuid.uuid4().hex)  # type: ignore[attr-defined]
            self._ranks_with_files = max(self._ranks_with_files, self.world_size)
        if left is not None:
            # Wrapping has overwritten them with those of rank 0.
            with torch.no_grad():
                for tensor, mine in zip(_tensors(module), own, strict=True):
                    tensor.copy_(mine)
            engine.load_state_dict(left.engine)

    def _refuse_divided_losses(self, passes: int) -> None:
        # With batch weights, all samples of the passes of a step have one mean.
        if passes > 1 and (self._weights["batch_weights"] or self._weights["count_batch"]):
            raise self.misconfiguration(
                f"accumulate_grad_batches={passes}: Lightning divides losses by it, and batch weights make the mean"
                f" already, so that gradients would be {passes} times too small.\n"
                "Accumulate by manual optimization, or leave out one of the two."
            )

    def _left_by_all(self, module: nn.Module, algorithm: Algorithm) -> _Training | None:
        """Where the training before this one ended, if every rank can go on from there."""
        left = _left.pop(module, None)
        goes_on = left is not None and (left.algorithm, left.versions) == (algorithm.label, _versions(module))
        everywhere = self.reduce(torch.tensor(float(goes_on), device=self.root_device), reduce_op="min")
        if left is not None and not everywhere and self.global_rank == 0:
            _logger.warning(
                f"{type(module).__name__}: the ranks begin with the weights of rank 0, because the algorithm or weights"
                " were changed after the last fit. What other ranks trained since the last exchange is lost."
            )
        return left if everywhere else None

    def _algorithm_for(self, optimizers: list[torch.optim.Optimizer]) -> Algorithm:
        algorithm = self._checked_algorithm(optimizers)
        scaler = getattr(self.precision_plugin, "scaler", None)  # type: ignore[attr-defined]
        if scaler is None or getattr(algorithm, "grad_scaler", scaler) is not None:
            return algorithm
        # Another Trainer that is given the user's object has a scaler of its own. copy.copy drops options.
        told: Algorithm = object.__new__(type(algorithm))
        vars(told).update(vars(algorithm), grad_scaler=scaler)
        return told

    def _checked_algorithm(self, optimizers: list[torch.optim.Optimizer]) -> Algorithm:
        is_qadam = self._algorithm == "qadam" or isinstance(self._algorithm, QAdamAlgorithm)
        if not is_qadam:
            return self._make_algorithm(optimizers)
        kinds = [type(optimizer).__name__ for optimizer in optimizers]
        if len(optimizers) != 1 or not isinstance(optimizers[0], QAdamOptimizer):
            raise self.misconfiguration(
                f"The algorithm qadam needs one QAdamOptimizer; configure_optimizers() returned {kinds}.\n"
                "Return QAdamOptimizer(self.parameters(), lr=1e-3, warmup_steps=100) from it"
                " (bagua.torch_api.algorithms.q_adam)."
            )
        if len(self.lr_scheduler_configs) > 1:
            raise self.misconfiguration(
                f"The algorithm qadam takes at most one learning rate scheduler; there are"
                f" {len(self.lr_scheduler_configs)}.\nReturn one from configure_optimizers()."
            )
        return self._make_algorithm(optimizers)

    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = True
        super().on_exception(exception)  # type: ignore[misc]

    def teardown(self) -> None:
        wrapper, self.model = self.model, self.lightning_module
        if isinstance(wrapper, DistributedDataParallel):
            algorithm = wrapper.bagua_algorithm
            if isinstance(algorithm, AsyncModelAverageAlgorithmImpl) and not self._has_failed:
                algorithm.abort(self.lightning_module)  # after which all ranks have the mean
                wrapper.inner.detach()
            elif not algorithm.keeps_replicas_equal and not self._has_failed:
                # Copies: those at work end with the engine, and a module that is not trained needs no GPU.
                state = pytree.tree_map_only(
                    Tensor, lambda one: one.detach().to("cpu", copy=True), wrapper.inner.state_dict()
                )
                wrapper.inner.detach()
                _left[self.model] = _Training(wrapper.inner.setup.algorithm.label, _versions(self.model), state)
            else:
                wrapper.inner.detach()
        super().teardown()  # type: ignore[misc]

    # --- steps -------------------------------------------------------------------------------------------------------

    def _redirect(
        self, wrapper: nn.Module, module: nn.Module, method_name: str, *arguments: Any, **keywords: Any
    ) -> Any:
        """Calls a step of the module as its forward pass, see [Note: a training step]."""
        original = module.forward
        engine = module.__dict__["bagua_ddp"]

        def step(*arguments: Any, **keywords: Any) -> Any:
            module.forward = original
            with engine.within_forward():
                return getattr(module, method_name)(*arguments, **keywords)

        module.forward = step
        return wrapper(*arguments, **keywords)

    def pre_backward(self, closure_loss: Tensor) -> None:
        self._refuse_divided_losses(self.lightning_module.trainer.accumulate_grad_batches)  # a callback may change it
        if isinstance(self.model, DistributedDataParallel) and self.model.inner.replans_before_backward:
            self.model.inner.before_backward(closure_loss)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backward passes in this block accumulate gradients without communication."""
        if isinstance(self.model, DistributedDataParallel):
            with self.model.no_sync():
                yield
        else:
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The reduction of a tensor over all ranks, in place; anything else is returned as it is.

        Args:
            tensor: of any shape.
            group: None.
            reduce_op: "mean", "avg", "sum" or another of torch's ReduceOp; None: the mean.

        Raises:
            ValueError: a group, or an unknown operation.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        if group is not None:
            raise ValueError(
                f"reduce(group={group!r}): BaguaStrategy reduces over all ranks.\n"
                "Leave sync_dist_group out of self.log, or call torch.distributed.all_reduce with the group."
            )
        operation = "mean" if reduce_op is None else reduce_op
        if isinstance(operation, str) and operation.lower() not in _MEANS:
            if not hasattr(torch.distributed.ReduceOp, operation.upper()):
                raise ValueError(f"reduce_op={reduce_op!r} is unknown. Use 'mean', 'sum', 'min', 'max' or 'product'.")
            operation = operation.upper()
        return super().reduce(tensor, None, operation)  # type: ignore[misc]

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Wrapping broadcasts the parameters of rank 0. States of ranks that differ are loaded after it."""
        return True

    @property
    def _engine(self) -> DataParallelEngine | None:
        return self.model.inner if isinstance(self.model, DistributedDataParallel) else None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        # First: an algorithm may owe its peers an exchange, which changes weights.
        engine = self._trained_engine()
        self._engine_state = None if engine is None else engine.state_dict()
        state: dict[str, Any] = super().lightning_module_state_dict()  # type: ignore[misc]
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """One file, by rank 0. Where ranks differ, each other rank writes its own in the same folder."""
        engine, self._saves = self._trained_engine(), self._saves + 1
        if engine is not None:
            checkpoint[STATE] = {
                "engine": self._engine_state if "optimizer_states" in checkpoint else None,
                "algorithm": engine.setup.algorithm_name,
                "world_size": self.world_size,
            }
            if self._ranks_differ:
                checkpoint[STATE] |= {"save": f"{self._run} {self._saves}", "file": Path(filepath).name}
                if self.global_rank > 0:
                    own = rank_file(filepath, self.global_rank)
                    self.checkpoint_io.save_checkpoint(checkpoint, own, storage_options=storage_options)
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]

    def load_checkpoint(self, checkpoint_path: Any, **keywords: Any) -> dict[str, Any]:
        """This rank's own file, if training goes on where ranks differ, with the algorithm and ranks that saved it.

        Raises:
            RuntimeError: a rank cannot read a file, or the files of the ranks are of different saves; on all of them.
        """

        def read(path: Any) -> dict[str, Any]:
            read_one: dict[str, Any] = super(BaguaParallel, self).load_checkpoint(path, **keywords)  # type: ignore[misc]
            return read_one

        engine = self._engine
        if engine is None or not self._ranks_differ:
            checkpoint = read(checkpoint_path)
        else:
            ranks, algorithm = ranks_of(None, engine.process_group), engine.setup.algorithm_name
            checkpoint, self._is_own = load_own(checkpoint_path, ranks, algorithm, read)
        if "save" in (state := checkpoint.get(STATE) or {}):
            self._ranks_with_files = max(self._ranks_with_files, state["world_size"])
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], *arguments: Any, **keywords: Any) -> None:
        if self._engine is None:
            self._trained = None  # what is loaded, to be tested, replaces what was trained
        super().load_model_state_dict(checkpoint, *arguments, **keywords)  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        engine, state = self._engine, checkpoint.get(STATE) or {}
        if engine is None:
            return
        if self._ranks_differ and not self._is_own:
            # All have the file of rank 0. What an algorithm knows of its peers is made of that, too.
            engine.initialize_again()
        elif state.get("algorithm") == engine.setup.algorithm_name:
            engine.load_state_dict(state["engine"])

    def remove_checkpoint(self, filepath: Any) -> None:
        """With the files of all ranks, also if there were more ranks than now."""
        first = self.global_rank or self.world_size
        for rank in range(first, self._ranks_with_files, self.world_size):
            with contextlib.suppress(FileNotFoundError):
                self.checkpoint_io.remove_checkpoint(rank_file(filepath, rank))
        super().remove_checkpoint(filepath)  # type: ignore[misc]

    def _trained_engine(self) -> DataParallelEngine | None:
        """That of the module, during training and after it."""
        return self._trained if self._trained is not None and self._trained.module is self.lightning_module else None
