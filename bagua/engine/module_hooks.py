"""The hooks by which the engine takes part in forward, backward and optimizer step, and their removal.

Owned by one engine. A copy or a pickle of the module carries none of them: its hooks become functions that do nothing,
for they would work on the buckets of the original. Their first call removes them, and so does wrapping the copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from bagua.job.torch_internals import hide_from_compiler

# Where torch.compile is told to compile all of it, this is in its error.
_NOT_COMPILED = (
    "Bagua communicates in hooks of the wrapped module, which cannot be compiled. Leave out fullgraph, or compile the"
    " parts of the module before it is wrapped: for block in model.blocks: block.compile()"
)


class HookCallable(functools.partial[Any]):
    """A hook that belongs to this module object alone: a function or a method of Python. torch.compile runs it outside
    the compiled code."""

    __name__: str

    def __new__(cls, function: Callable[..., Any]) -> HookCallable:
        if not hide_from_compiler(getattr(function, "__func__", function), _NOT_COMPILED):
            disable: Any = torch.compiler.disable
            function = disable(function)
        self = super().__new__(cls, function)
        self.__name__ = "bagua_hook"  # hooks are functions to torch.jit.script, which asks for it
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return do_nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _do_nothing_of, ()


def do_nothing(module: Any = None, *_arguments: Any, **_keywords: Any) -> None:
    """What a hook becomes in a copy of the module. It is needed no more than once: copies of copies would collect
    them."""
    # Compiled code keeps it, where it costs nothing: a module that changes its hooks could not be compiled.
    if isinstance(module, nn.Module) and not torch.compiler.is_compiling():
        remove_stubs(module)


def remove_stubs(module: nn.Module) -> None:
    """Take back what the hooks of the original became in this copy."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        # torch goes through a copy of the hooks that it calls, so that one may be taken out meanwhile.
        for key in [key for key, hook in list(hooks.items()) if hook is do_nothing]:
            hooks.pop(key, None)


def _do_nothing_of() -> Callable[..., None]:
    return do_nothing


# Of an optimizer, and the arguments of its step.
StepHook = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], None]


class StepWatch(Protocol):
    """What is told of the steps of all optimizers."""

    def before_any_step(self, optimizer: torch.optim.Optimizer) -> None: ...


# Of all engines. torch has one hook for them, which stays: garbage collection ends an engine anywhere, also while torch
# goes through its hooks.
_before_any_step: list[weakref.ref[StepWatch]] = []


@functools.cache  # once
def _install_once() -> None:
    register_optimizer_step_pre_hook(HookCallable(_call_before_any_step))


def _call_before_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for one in tuple(_before_any_step):
        watch = one()
        if watch is not None:
            watch.before_any_step(optimizer)


class ModuleHooks:
    """All hooks of one engine; `remove` takes them back."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._before_any_step: list[weakref.ref[StepWatch]] = []

    def before_forward(self, module: nn.Module, hook: Callable[[nn.Module, tuple[Any, ...]], None]) -> None:
        """`hook(module, positional arguments)` before each forward."""
        remove_stubs(module)
        self._handles.append(module.register_forward_pre_hook(HookCallable(hook)))

    def before_forward_with_keywords(
        self, module: nn.Module, hook: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
    ) -> None:
        """`hook(module, positional arguments, others by name)` before each forward."""
        self._handles.append(module.register_forward_pre_hook(HookCallable(hook), with_kwargs=True))

    def after_forward(self, module: nn.Module, hook: Callable[[nn.Module, tuple[Any, ...], Any], None]) -> None:
        """`hook(module, positional arguments, output)` after each forward."""
        self._handles.append(module.register_forward_hook(HookCallable(hook)))

    def after_gradient(self, parameter: Tensor, hook: Callable[[Tensor], None]) -> None:
        """`hook(parameter)` each time its gradient has been accumulated, on autograd's thread. One that is frozen gets
        gradients when it is unfrozen."""
        if parameter.requires_grad:
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            return
        # Some can never be unfrozen: integers, those made in inference mode, lazy ones.
        with contextlib.suppress(RuntimeError, ValueError):
            parameter.requires_grad = True  # torch takes no hooks of others
            try:
                self.after_gradient(parameter, hook)
            finally:
                parameter.requires_grad = False

    def before_each_step(self, optimizers: Iterable[torch.optim.Optimizer], hook: StepHook) -> None:
        """`hook(optimizer, ...)` before each `step` of these."""
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(HookCallable(hook)))

    def after_each_step(self, optimizers: Iterable[torch.optim.Optimizer], hook: StepHook) -> None:
        """`hook(optimizer, ...)` after each `step` of these."""
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_post_hook(HookCallable(hook)))

    def before_all_steps(self, watch: StepWatch) -> None:
        """Tell `watch`, as long as it lives, before each `step` of any optimizer in the process."""
        _install_once()
        reference = weakref.ref(watch)
        _before_any_step[:] = [one for one in _before_any_step if one() is not None] + [reference]
        self._before_any_step.append(reference)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _before_any_step[:] = [one for one in _before_any_step if one not in self._before_any_step]
        self._before_any_step.clear()


def call_at_end(on_end: Callable[[int], Any], number: int, on_exception: Callable[[object], None]) -> object:
    """
    Autograd calls at the end of the running backward pass. If that ends with an exception, it drops what it would have
    called. Neither object is one of Python's own classes: this runs in every step.

    Args:
        on_end: called at the end, with `number`.
        on_exception: called instead, if the pass has ended with an exception, with what is returned here; only as long
            as that lives.
    """
    end = functools.partial(on_end, number)
    Variable._execution_engine.queue_callback(end)
    return weakref.ref(end, on_exception)


def tensors_with_gradient(output: Any) -> list[Tensor]:
    """The tensors of a module's output that require gradients."""
    if isinstance(output, Tensor):
        return [output] if output.requires_grad else []
    found = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                found.extend(tensors_with_gradient(getattr(leaf, field.name, None)))
    return found
