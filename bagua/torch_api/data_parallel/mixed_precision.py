"""mixed_precision of torch's DistributedDataParallel: forward and backward compute with casts of the parameters.

The casts are a part of the graph, so that parameters, gradients and optimizers keep full precision. They take the place
of the parameters while the module's forward runs: its `parameters()` are the casts then, and so are parameters that its
modules keep in attributes, lists, tuples and dicts of their own. A forward pass that activation checkpointing repeats
in the backward pass casts anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bagua.engine.module_hooks import HookCallable
from bagua.job.torch_internals import is_in_backward

_Place = tuple[nn.Module, str]
_MODULES_OWN = frozenset(vars(nn.Module()))  # attributes that torch keeps
_MAX_DEPTH = 4  # of lists in lists


class MixedPrecision:
    """Of one module. Buffers are cast once, when this is made.

    Args:
        module: its floating-point parameters are cast; those that it keeps in lists of its own as well, if they are
            there when this is made.
        config: has param_dtype, reduce_dtype and buffer_dtype; None of a dtype: nothing is cast.
        ignored: names of parameters and buffers that are left alone.
    """

    def __init__(self, module: nn.Module, config: Any, ignored: Collection[str]) -> None:
        self.config = config
        self._module = module
        self._ignored = set(ignored)
        self._is_cast = False
        self._handles: list[Any] = []
        # Attributes of modules, in which parameters are that are not registered there. Looked for once: a module may
        # have long lists of other things.
        self._held: list[_Place] = []
        if config.buffer_dtype is not None:
            self._cast_buffers(config.buffer_dtype)
        if config.param_dtype is not None:
            self._note_dtypes(config.param_dtype)
            self._find_held()
            for one in module.modules():
                self._handles.append(one.register_forward_pre_hook(HookCallable(self._before_repeated)))
                self._handles.append(one.register_forward_hook(HookCallable(self._after_repeated), always_call=True))
        # Of the module that a forward pass in backward began with, what is to be put back.
        self._repeated: tuple[nn.Module, contextlib.ExitStack] | None = None

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """Of the gradients that travel; None: that of the parameters."""
        dtype: torch.dtype | None = self.config.reduce_dtype or self.config.param_dtype
        return dtype

    def remove(self) -> None:
        """Forward passes cast nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def cast_inputs(self, tree: Any) -> Any:
        """Floating-point tensors in `param_dtype`."""
        dtype = self.config.param_dtype
        if dtype is None:
            return tree
        return pytree.tree_map(
            lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, tree
        )

    @contextlib.contextmanager
    def cast_parameters(self, within: nn.Module | None = None) -> Iterator[None]:
        """In this block the parameters of the module, or of a part of it, are the casts."""
        dtype = self.config.param_dtype
        if dtype is None or self._is_cast:
            yield
            return
        places = self._places(within or self._module)
        held = self._held_by(within)
        casts: dict[int, Tensor] = {}
        originals = [owner._parameters[key] for owner, key in places]
        self._is_cast = True
        try:
            for (owner, key), parameter in zip(places, originals, strict=True):
                assert parameter is not None
                if id(parameter) not in casts:
                    casts[id(parameter)] = parameter.to(dtype)
                owner._parameters[key] = casts[id(parameter)]  # type: ignore[assignment]
            _replace_held(held, casts)
            yield
        finally:
            self._is_cast = False
            for (owner, key), parameter in zip(places, originals, strict=True):
                owner._parameters[key] = parameter
            # By identity, since the forward pass may have made other lists, as recurrent layers do.
            given = {id(one): one for one in originals if one is not None}
            _replace_held(held, {id(cast): given[key] for key, cast in casts.items()})

    def _places(self, root: nn.Module) -> list[_Place]:
        ignored = {
            id(parameter)
            for name, parameter in self._module.named_parameters(remove_duplicate=False)
            if name in self._ignored
        }
        return [
            (owner, key)
            for owner in root.modules()
            for key, parameter in owner._parameters.items()
            if parameter is not None and parameter.is_floating_point() and id(parameter) not in ignored
        ]

    def _find_held(self) -> None:
        parameters = {id(one): one for one in self._module.parameters()}
        for owner in self._module.modules():
            for key, value in vars(owner).items():
                if key not in _MODULES_OWN and _holds(value, parameters):
                    self._held.append((owner, key))

    def _held_by(self, root: nn.Module | None) -> list[_Place]:
        """Those of the modules in `root`; None: all."""
        if root is None or not self._held:
            return self._held
        owners = {id(one) for one in root.modules()}
        return [(owner, key) for owner, key in self._held if id(owner) in owners]

    def _before_repeated(self, module: nn.Module, _arguments: Any) -> None:
        if self._repeated is None and not self._is_cast and is_in_backward():
            stack = contextlib.ExitStack()
            stack.enter_context(self.cast_parameters(module))
            self._repeated = module, stack

    def _after_repeated(self, module: nn.Module, _arguments: Any, _output: Any) -> None:
        if self._repeated is not None and self._repeated[0] is module:
            (_, stack), self._repeated = self._repeated, None
            stack.close()

    def _cast_buffers(self, dtype: torch.dtype) -> None:
        for name, buffer in self._module.named_buffers():
            if name not in self._ignored and buffer.is_floating_point():
                buffer.data = buffer.to(dtype)

    def _note_dtypes(self, dtype: torch.dtype) -> None:
        """By the names under which torch has the cast and the full-precision data."""
        one: Any
        for name, one in self._module.named_parameters():
            if name not in self._ignored and one.is_floating_point():
                one._mp_param = torch.empty(0, dtype=dtype, device=one.device)
                one._fp_param = one.data


def _holds(value: Any, tensors: Mapping[int, Tensor], depth: int = 0) -> bool:
    """Whether one of these, which are by id, is `value` or in it."""
    if isinstance(value, Tensor):
        return id(value) in tensors
    if depth == _MAX_DEPTH or type(value) not in (list, tuple, dict):
        return False
    return any(_holds(one, tensors, depth + 1) for one in (value.values() if type(value) is dict else value))


def _replace_held(held: list[_Place], tensors: Mapping[int, Tensor]) -> None:
    for owner, key in held:
        if key in vars(owner):
            vars(owner)[key] = _replaced(vars(owner)[key], tensors)


def _replaced(value: Any, tensors: Mapping[int, Tensor], depth: int = 0) -> Any:
    """`value` with others in place of these tensors, which are by id. Lists and dicts stay the same objects."""
    if isinstance(value, Tensor):
        return tensors.get(id(value), value)
    if depth == _MAX_DEPTH:
        return value
    if type(value) is tuple:
        return tuple(_replaced(one, tensors, depth + 1) for one in value)
    if type(value) in (list, dict):
        for key in range(len(value)) if type(value) is list else list(value):
            value[key] = _replaced(value[key], tensors, depth + 1)
    return value
