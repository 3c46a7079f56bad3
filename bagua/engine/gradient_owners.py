"""Who reduces the gradient of a parameter: an engine, or a DistributedDataParallel of torch. Two of them would each
divide it by the number of ranks, without a word.

An engine is asked for through the record that it puts on its parameters. torch keeps no list of its wrappers and marks
nothing in Python, so from the first engine on they are noted when they are made. Before that, torch's constructor is
torch's own, and what it warns of names the caller's line. Functions; called while a module is wrapped, or when the
parameters of one are chosen anew.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeGuard, TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from bagua.collectives.tensor import drop_record, record_of

_Named = Sequence[tuple[str, nn.Parameter]]
_Found = TypeVar("_Found")


class Owner(Protocol):
    """An engine, as far as others have to know it."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def bagua_module_name(self) -> str: ...


# Every engine at work, by the name of its module.
owners_by_name: weakref.WeakValueDictionary[str, Owner] = weakref.WeakValueDictionary()

_torch_ddps: weakref.WeakSet[TorchDDP] = weakref.WeakSet()


def owner_of(parameter: Tensor) -> Owner | None:
    """The engine that synchronizes a parameter. One whose module is gone has left its record, but does nothing more."""
    record = record_of(parameter)
    return None if record is None or record.module_name is None else owners_by_name.get(record.module_name)


def refuse_second_engine(module: nn.Module, module_name: str, parameters: _Named) -> None:
    """Before the engine of `module` begins to synchronize these parameters of it.

    Raises:
        ValueError: another module's engine, or torch's DDP, reduces one of them.
    """
    _watch_torch_ddp()
    kind = type(module).__name__
    found = _confirmed(lambda: _in_other_engine(module, parameters))
    if found is not None:
        name, other = found
        raise ValueError(
            f"The tensor {name!r} already belongs to module {other.bagua_module_name!r}, not to"
            f" {module_name!r}: two engines would reduce its gradient.\n"
            f"Found while wrapping {kind} with Bagua.\n"
            "Wrap one module that contains both. If you no longer train the first, call its bagua_ddp.detach()."
        )
    wrapped = _confirmed(lambda: _in_torch_ddp(module, parameters))
    if wrapped is not None:
        name, ddp = wrapped
        raise ValueError(
            f"The parameter {name!r} is already in torch's DistributedDataParallel of {type(ddp.module).__name__}: its"
            " gradient would be reduced twice, by torch and by Bagua.\n"
            f"Found while wrapping {kind} with Bagua.\n"
            "Use one of them. For Bagua: wrap the module itself, without DistributedDataParallel (with Accelerate:"
            " leave the model out of prepare()), and delete a DistributedDataParallel that you no longer use. For"
            " torch's: register a hook of bagua.comm_hooks."
        )
    for _, parameter in parameters:
        record = record_of(parameter)
        if record is not None and record.set_ready is not None and owner_of(parameter) is None:
            drop_record(parameter)  # of a module that is gone


def _confirmed(find: Callable[[], _Found | None]) -> _Found | None:
    """What `find` finds that somebody may still use: modules that were dropped stay in cycles for a while."""
    if find() is None:
        return None
    gc.collect()
    return find()


def _in_other_engine(module: nn.Module, parameters: _Named) -> tuple[str, Owner] | None:
    for name, parameter in parameters:
        other = owner_of(parameter)
        if other is not None and other.module is not module:
            return name, other
    return None


def _in_torch_ddp(module: nn.Module, parameters: _Named) -> tuple[str, TorchDDP] | None:
    names = {id(parameter): name for name, parameter in parameters}
    within = [one for one in module.modules() if _is_torch_ddp(one)]  # copies are made without __init__
    for ddp in [*within, *_torch_ddps]:
        for _, parameter in _reduced_by_torch(ddp.module):
            if id(parameter) in names:
                return names[id(parameter)], ddp
    return None


def _in_any_engine(module: nn.Module) -> tuple[str, Owner] | None:
    for name, parameter in _reduced_by_torch(module):
        engine = owner_of(parameter)
        if engine is not None:
            return name, engine
    return None


def _is_torch_ddp(one: object) -> TypeGuard[TorchDDP]:
    """Not by isinstance, which Bagua's wrapper passes for the sake of frameworks."""
    return TorchDDP in type(one).__mro__


def _reduced_by_torch(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of what a DDP of this module reduces. Its ignore list names a parameter of the root ".name"."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    for prefix, owner in module.named_modules():
        for key, parameter in owner.named_parameters(recurse=False):
            name = f"{prefix}.{key}"
            if parameter.requires_grad and name not in ignored:
                yield name.removeprefix("."), parameter


@functools.cache
def _watch_torch_ddp() -> None:
    """From now on torch's DistributedDataParallel refuses parameters that an engine reduces, and is noted."""
    _torch_ddps.update(one for one in gc.get_objects() if _is_torch_ddp(one))
    make = TorchDDP.__init__

    @functools.wraps(make)
    def make_and_note(self: TorchDDP, module: Any, *arguments: Any, **keywords: Any) -> None:
        if isinstance(module, nn.Module):
            _refuse_engines(module)
        make(self, module, *arguments, **keywords)
        _torch_ddps.add(self)

    TorchDDP.__init__ = make_and_note  # type: ignore[method-assign]


def _refuse_engines(module: nn.Module) -> None:
    found = _confirmed(lambda: _in_any_engine(module))
    if found is not None:
        name, engine = found
        kind = type(engine.module).__name__
        raise ValueError(
            f"The parameter {name!r} is already synchronized by Bagua's {engine.bagua_module_name!r}, which wraps"
            f" {kind}: its gradient would be reduced twice, by Bagua and by torch.\n"
            f"Found while torch's DistributedDataParallel wrapped {type(module).__name__}.\n"
            "Use one of them. For Bagua: train the module that it wraps as it is (with Accelerate: leave the model out"
            f" of prepare()). For torch's: call bagua_ddp.detach() of that {kind} first."
        )
