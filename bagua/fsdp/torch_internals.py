"""What torch keeps private about FSDP2: the parameter groups of a module, the collectives that they call, and where a
forward pass enters it. No other file of this folder uses a private name of torch. Read in torch 2.11 to 2.14; a torch
without these names is refused.

torch's public setters (`set_custom_reduce_scatter`, `set_custom_all_gather`, `set_all_reduce_hook`) tell neither what
was set before, which `remove()` puts back, nor over which ranks a module is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from bagua.job.torch_internals import hide_from_compiler, without_wrappers
from bagua.misuse import shown

# What ShardedModule reads of every module, so that a torch that names it otherwise is noticed at once.
_KNOWN = (
    "has_shards",
    "replica_group",
    "divides_by_factor",
    "device",
    "is_root",
    "reshards_after_forward",
    "reduced_dtypes",
    "reduce_scatter",
    "all_gather",
    "all_reduce_hook",
    "pending_gather",
    "holds_weights",
    "reduces",
)
# Steps of FSDP for one module, that may be surrounded.
_STEPS = ("pre_forward", "unshard", "wait_for_unshard", "post_backward", "finalize_backward")
Around = Callable[[Callable[[], Any], Any], Any]


def _kept_by_group(name: str, doc: str) -> property:
    return property(
        lambda self: getattr(self._group, name), lambda self, value: setattr(self._group, name, value), doc=doc
    )


class ShardedModule:
    """The parameters of one `fully_shard` call, which are gathered and reduced together.

    Attributes:
        name: the module's, without what torch.compile and checkpoint_wrapper put into it.
        module: the module.
    """

    def __init__(self, name: str, module: nn.Module, group: Any) -> None:
        self.name = name
        self.module = module
        self._group = group

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"module {self.name!r}" if self.name else "the model"

    @property
    def subject(self) -> str:
        """The same at the beginning of a sentence."""
        return f"Module {self.name!r}" if self.name else "The model"

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks over which the parameters are sharded. Only where `has_shards`."""
        group: dist.ProcessGroup = self._group.mesh_info.shard_process_group
        return group

    @property
    def has_shards(self) -> bool:
        """False for a module of torch's `replicate`."""
        return self._group.mesh_info.shard_mesh_dim is not None

    @property
    def replica_group(self) -> Any:
        """The ranks between which torch itself all-reduces gradients, by a call of torch.distributed.all_reduce; None
        on a mesh without a dimension for replicas. The group is part of a description of the mesh that each call of
        fully_shard makes."""
        return getattr(self._group.mesh_info, "replicate_process_group", None)

    @replica_group.setter
    def replica_group(self, group: Any) -> None:
        self._group.mesh_info.replicate_process_group = group

    @property
    def divides_by_factor(self) -> bool:
        """Whether `set_gradient_divide_factor` is in force."""
        return self._group.gradient_divide_factor is not None

    @property
    def device(self) -> torch.device:
        """Where parameters are gathered, also those that are kept on the CPU."""
        device: torch.device = self._group.device
        return device

    @property
    def is_root(self) -> bool:
        """Whether torch takes it for the outermost sharded module; before its first pass, whether it is in no other."""
        state = _state_of(self.module)
        if state._is_root is not None:
            return bool(state._is_root)
        known = [one for one in _composable_state._module_state_mapping if isinstance(one, FSDPModule)]
        return not any(self.module in one.modules() for one in known if one is not self.module)

    @property
    def reshards_after_forward(self) -> bool:
        """Whether full weights are freed between forward and backward. Of the root torch decides in its first pass, if
        the caller has not: it keeps them."""
        if _state_of(self.module)._auto_reshard_after_forward and self.is_root:
            return False
        return self._group.post_forward_mesh_info is not None

    @property
    def reduced_dtypes(self) -> set[torch.dtype]:
        """In which dtypes gradients of parameters that are trained now are reduced."""
        policy = self._group.mp_policy
        return {
            policy.reduce_dtype or policy.param_dtype or one.dtype for one in self.parameters() if one.requires_grad
        }

    def gathered_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """In which weights of this parameter are gathered."""
        dtype: torch.dtype = self._group.mp_policy.param_dtype or parameter.dtype
        return dtype

    def parameters(self) -> Iterator[nn.Parameter]:
        """The sharded ones, DTensors."""
        for one in self._group.fsdp_params:
            yield one.sharded_param

    @property
    def is_trained(self) -> bool:
        return any(one.requires_grad for one in self.parameters())

    def trained(self) -> tuple[int, ...]:
        """The positions of those that are trained now."""
        return tuple(position for position, one in enumerate(self.parameters()) if one.requires_grad)

    reduce_scatter = _kept_by_group("_reduce_scatter_comm", "What reduces gradients over the shard group.")
    all_gather = _kept_by_group("_all_gather_comm", "What gathers weights.")
    all_reduce_hook = _kept_by_group("_all_reduce_hook", "What is called with this rank's reduced gradients, or None.")

    @property
    def holds_weights(self) -> bool:
        """Whether a gather has begun, or its result was not freed; a part of it may have been."""
        return self._group._all_gather_result is not None or not self._group.is_sharded

    def free_weights(self) -> None:
        """The next use gathers anew, also for a backward pass that is still to come."""
        self._group.wait_for_unshard()
        self._group._to_sharded()

    # --- what waits.py looks at --------------------------------------------------------------------------------------

    @property
    def pending_gather(self) -> object | None:
        """A gather of weights that was begun and not waited for; None: there is none."""
        pending: object | None = self._group._all_gather_result
        return pending

    @property
    def gather_event(self) -> torch.cuda.Event | None:
        """Of the pending gather, its end; None where its Work is waited for instead."""
        pending = self._group._all_gather_result
        event: torch.cuda.Event | None = pending.all_gather_event if pending.all_gather_work is None else None
        return event

    @property
    def reduces(self) -> bool:
        """Whether backward passes reduce gradients now."""
        return bool(self._group.reduce_grads)

    @property
    def reduce_stream(self) -> torch.cuda.Stream:
        stream: torch.cuda.Stream = self._group.comm_ctx.reduce_scatter_stream
        return stream

    @property
    def reductions_in_flight(self) -> int:
        """How many reduce-scatters may still read their memory when the next one begins; one before torch 2.13."""
        return int(getattr(self._group.comm_ctx, "reduce_scatter_max_input_buffers", 1))

    def surround(self, step: str, around: Around) -> Callable[[], None]:
        """Calls `around` instead of a step of FSDP, with what does the step, and its arguments.

        Returns:
            what takes that back.
        """
        return _surround(self._group, step, around)


class ForwardEntry:
    """Where forward passes enter a `fully_shard`ed module, with parameters of its own or without: called, or by a
    method that `register_fsdp_forward_method` has named.

    Attributes:
        module: the module.
    """

    def __init__(self, module: nn.Module, state: Any) -> None:
        self.module = module
        self._state = state

    def surround(self, around: Around) -> Callable[[], None]:
        """Calls `around` instead of what prepares FSDP for a pass, with what does that and the pass's inputs: before
        weights are gathered, unless torch knows that activation checkpointing repeats the pass."""
        return _surround(self._state, "_root_pre_forward", around)

    @property
    def is_outermost(self) -> bool:
        """No other sharded module has been entered, and this one is about to be."""
        return self._state._state_ctx.iter_forward_root is None

    @property
    def is_root(self) -> bool:
        """Of torch. Known once it has prepared a pass."""
        return bool(self._state._is_root)

    def leave(self, was_outermost: bool) -> None:
        """As if it had not been entered: the pass is refused."""
        if was_outermost:
            self._state._state_ctx.iter_forward_root = None
        self._state._training_state = type(self._state._training_state).IDLE


def forward_entries(model: nn.Module) -> list[ForwardEntry]:
    """Of all its sharded modules."""
    found: dict[int, ForwardEntry] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = _state_of(module)
            found.setdefault(id(state), ForwardEntry(module, state))
    return list(found.values())


def outermost_sharded(model: nn.Module) -> Iterator[nn.Module]:
    """Sharded modules that are in no other one of `model`."""
    if isinstance(model, FSDPModule):
        yield model
        return
    for child in model.children():
        yield from outermost_sharded(child)


def need_gradients(inputs: Any) -> bool:
    """Whether a tensor among the inputs of a pass, however nested, requires gradients."""
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in tree_leaves(inputs))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements on this rank. As `to_local()`, which takes as long as a small kernel."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _surround(owner: Any, step: str, around: Around) -> Callable[[], None]:
    """Several may stand around one step: the first of them is the outermost, and each may go at any time."""
    standing = owner.__dict__.get(step)
    if not hasattr(standing, "arounds"):
        standing = _surrounded(getattr(owner, step))
        setattr(owner, step, standing)
    arounds: list[Around] = standing.arounds
    arounds.append(around)

    def take_back() -> None:
        if around in arounds:
            arounds.remove(around)
        if not arounds and owner.__dict__.get(step) is standing:
            del owner.__dict__[step]

    return take_back


def _surrounded(plain: Callable[..., Any]) -> Any:
    arounds: list[Around] = []

    def surrounded(*arguments: Any, **options: Any) -> Any:
        run: Callable[[], Any] = partial(plain, *arguments, **options)
        for around in reversed(arounds):
            run = partial(around, run, (arguments, options))
        return run()

    surrounded.arounds = arounds  # type: ignore[attr-defined]
    hide_from_compiler(surrounded)
    return surrounded


def require_sharded(model: nn.Module) -> list[ShardedModule]:
    """Those of `model` that have parameters, one for each `fully_shard` call.

    Raises:
        ValueError: there is none, or a module is sharded over several meshes by a `shard_placement_fn`.
        RuntimeError: this torch keeps other things under these names.
    """
    found = _sharded_modules(model)
    if not found:
        raise ValueError(
            f"No module of {type(model).__name__} is fully_shard'ed.\nCall torch.distributed.fsdp.fully_shard on its "
            "layers and on itself first."
        )
    return found


def _state_of(module: nn.Module) -> Any:
    return cast("FSDPModule", module)._get_fsdp_state()


def param_groups(module: FSDPModule) -> list[Any]:
    """torch's groups of the parameters of one `fully_shard` call: one, none, or one for each mesh."""
    state: Any = module._get_fsdp_state()
    # Some versions of torch have one group for each mesh, others have one.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [one for one in groups if one is not None and one.fsdp_params]


def _sharded_modules(model: nn.Module) -> list[ShardedModule]:
    """
    Raises:
        TypeError: `model` is not a module.
        ValueError: a module is sharded over several meshes by a `shard_placement_fn`.
        RuntimeError: this torch keeps other things under these names.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {shown(model)}. Pass the torch.nn.Module that fully_shard was called with.")
    found: list[ShardedModule] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        name = without_wrappers(name)
        try:
            state: Any = module._get_fsdp_state()
            groups = param_groups(module)
            if id(state) in seen or not groups:
                continue
            seen.add(id(state))
            one = ShardedModule(name, cast("nn.Module", module), groups[0])
            for known in _KNOWN:
                getattr(one, known)
            for step in _STEPS:
                getattr(groups[0], step)
            _ = state._root_pre_forward, state._state_ctx.iter_forward_root, state._training_state
        except AttributeError as error:
            raise RuntimeError(
                f"bagua.fsdp does not know the FSDP2 of torch {torch.__version__}: {error}.\n"
                "Use torch 2.11 to 2.14, or train without compress_communication."
            ) from error
        if len(groups) > 1:
            raise ValueError(
                f"{name!r} is sharded over {len(groups)} meshes by its shard_placement_fn (per-parameter meshes), and "
                "compress_communication needs one.\nGive modules of another mesh a fully_shard call of their own."
            )
        found.append(one)
    return found
