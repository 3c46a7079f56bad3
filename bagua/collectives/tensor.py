"""Bagua tensors: what is communicated on behalf of a parameter.

A *proxy* tensor (usually an nn.Parameter) has a name and closures that get and set its *effective* tensor: the
gradient, the parameter itself, or an optimizer's state. What the closures give may be replaced at any time, for
instance when `zero_grad(set_to_none=True)` drops a gradient; whoever communicates asks again each time.

The record of a proxy hangs on the tensor as one attribute. Copies and pickles of the tensor do not carry it on: they
belong to no bucket.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Getter = Callable[[Tensor], Tensor | None]
Setter = Callable[[Tensor, Tensor], None]

_ATTRIBUTE = "_bagua_record"


@dataclass(eq=False)
class TensorRecord:
    """What Bagua knows about one proxy.

    view: where the effective tensor, or its copy, lies in the memory of its bucket, if nobody else may lay it out.
    set_ready: sets the tensor's ready flag, and ignores its argument; None while the tensor is in no bucket in use.
    """

    name: str
    module_name: str | None
    getter: Getter | None
    setter: Setter | None
    view: Tensor | None = None
    set_ready: Callable[[object], None] | None = None

    def __reduce__(self) -> tuple[type[OrderedDict[str, Any]], tuple[()]]:
        # What stands for no record: of an empty value that `torch.load(weights_only=True)`, its default, can read.
        return OrderedDict, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


def record_of(tensor: Tensor) -> TensorRecord | None:
    """The tensor's record, or None if it is not a Bagua tensor."""
    return getattr(tensor, _ATTRIBUTE, None) or None


def require_record(tensor: Tensor) -> TensorRecord:
    """
    Raises:
        RuntimeError: `tensor` is not a Bagua tensor.
    """
    record = record_of(tensor)
    if record is None:
        raise RuntimeError(
            f"A tensor of shape {tuple(tensor.shape)} is not a Bagua tensor. Call ensure_record(tensor, name) first."
        )
    return record


def mark_ready(_name: str, parameter: Tensor) -> None:
    """The usual backward hook of an algorithm: sets the parameter's ready flag, if it is in a bucket in use."""
    record = record_of(parameter)
    if record is not None and record.set_ready is not None:
        record.set_ready(None)


def ensure_record(
    tensor: Tensor,
    name: str | None = None,
    module_name: str | None = None,
    getter: Getter | None = None,
    setter: Setter | None = None,
) -> TensorRecord:
    """Make `tensor` a Bagua tensor, or give the one that it is new closures.

    Raises:
        ValueError: another name or module than before, or a setter without a getter.
    """
    if setter is not None and getter is None:
        raise ValueError(f"tensor {name!r}: a setter_closure needs a getter_closure that reads what it sets")
    record = record_of(tensor)
    if record is None:
        record = TensorRecord(name or "", module_name, getter, setter)
        setattr(tensor, _ATTRIBUTE, record)
        return record
    _check_owner(record, module_name)
    if name is not None and name != record.name:
        raise ValueError(f"tensor {record.name!r} cannot be renamed to {name!r}: peers know it by its first name")
    record.module_name = module_name if module_name is not None else record.module_name
    record.getter, record.setter = getter, setter
    return record


def restore_record(tensor: Tensor, record: TensorRecord) -> None:
    """Give `tensor` back the record that `drop_record` took.

    Raises:
        ValueError: another module has it now.
    """
    present = record_of(tensor)
    if present is not record:
        if present is not None:
            _check_owner(present, record.module_name)
        setattr(tensor, _ATTRIBUTE, record)


def _check_owner(record: TensorRecord, module_name: str | None) -> None:
    if module_name is not None and record.module_name not in (None, module_name):
        raise ValueError(
            f"The tensor {record.name!r} already belongs to module {record.module_name!r}, not to {module_name!r}.\n"
            "Wrap one module that contains both. If you no longer train the first, call its bagua_ddp.detach()."
        )


def drop_record(tensor: Tensor) -> None:
    """Make it an ordinary tensor again."""
    if record_of(tensor) is not None:
        delattr(tensor, _ATTRIBUTE)


def effective_tensor(tensor: Tensor) -> Tensor:
    """What is communicated for this proxy now; the proxy itself if no getter was given. What does not exist, usually a
    gradient, is made of zeros, in the memory of its bucket if there is one."""
    record = require_record(tensor)
    if record.getter is None:
        return tensor
    effective = record.getter(tensor)
    if effective is not None:
        return effective
    with torch.no_grad():
        zeros = torch.zeros_like(tensor) if record.view is None else record.view.zero_()
    (record.setter or set_gradient)(tensor, zeros)
    return zeros


def replace_effective(tensor: Tensor, new: Tensor) -> None:
    """Make `new`, of the same shape, the effective tensor. The values are the caller's business."""
    record = require_record(tensor)
    if record.getter is None:
        with torch.no_grad():
            tensor.set_(new.untyped_storage(), new.storage_offset(), new.shape, new.stride())
    elif record.setter is not None:
        record.setter(tensor, new)
    else:
        target = effective_tensor(tensor)
        with torch.no_grad():
            target.set_(new.untyped_storage(), new.storage_offset(), new.shape, new.stride())


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The getter closure of gradients: one function, by which a bucket of gradients is recognized."""
    return parameter.grad


def set_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """The setter closure of gradients."""
    parameter.grad = gradient
