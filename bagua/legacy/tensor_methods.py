"""BaguaTensor: the methods that Bagua gives to every torch.Tensor.

They are thin: the record behind them is bagua.collectives.tensor's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bagua.collectives import tensor as engine_tensor
from bagua.collectives.tensor import Getter, Setter


class BaguaTensor:
    """A tensor that is communicated under a name. Never constructed: these are methods of torch.Tensor."""

    @property
    def bagua_tensor_name(self: Any) -> str:
        """The name by which the ranks know it. AttributeError: it is not a Bagua tensor."""
        return _attributes(self).name

    @property
    def bagua_module_name(self: Any) -> str | None:
        """The name of its module. AttributeError: it is not a Bagua tensor."""
        return _attributes(self).module_name

    def is_bagua_tensor(self: Any) -> bool:
        """Whether it has a name and a record."""
        return engine_tensor.record_of(self) is not None

    def ensure_bagua_tensor(
        self: Any,
        name: str | None = None,
        module_name: str | None = None,
        getter_closure: Getter | None = None,
        setter_closure: Setter | None = None,
    ) -> Tensor:
        """Make this tensor, in place, a Bagua tensor, and return it.

        Args:
            name: unique in its module, alike on all ranks.
            module_name: of the module that it belongs to.
            getter_closure: given this tensor, returns the effective one, which is communicated; None: itself.
            setter_closure: given this tensor and another, makes that the effective one.

        Raises:
            ValueError: another name than it has, or a setter without a getter.
        """
        engine_tensor.ensure_record(self, name, module_name, getter_closure, setter_closure)
        tensor: Tensor = self
        return tensor

    def to_bagua_tensor(
        self: Any,
        name: str | None = None,
        module_name: str | None = None,
        getter_closure: Getter | None = None,
        setter_closure: Setter | None = None,
    ) -> Tensor:
        """As ensure_bagua_tensor, of a new tensor that shares this one's memory."""
        view: Tensor = self.view(self.shape)
        engine_tensor.ensure_record(view, name, module_name, getter_closure, setter_closure)
        return view

    def bagua_getter_closure(self: Any) -> Tensor:
        """The effective tensor now."""
        return engine_tensor.effective_tensor(self)

    def bagua_setter_closure(self: Any, tensor: Tensor) -> None:
        """Make `tensor` the effective one."""
        engine_tensor.replace_effective(self, tensor)

    def bagua_backend_tensor(self: Any) -> Tensor:
        """What is communicated: the effective tensor."""
        return engine_tensor.effective_tensor(self)

    def bagua_ensure_grad(self: Any) -> Tensor:
        """This tensor, whose gradient now exists; zeros if there was none."""
        tensor: Tensor = self
        if tensor.grad is None:
            with torch.no_grad():
                tensor.grad = torch.zeros_like(tensor)
        return tensor

    def bagua_mark_communication_ready(self: Any) -> None:
        """What the current stream was given so far completes the tensor; it may be communicated.

        Raises:
            RuntimeError: it belongs to no bucket of a wrapped module.
        """
        record = engine_tensor.require_record(self)
        if record.set_ready is None:
            raise RuntimeError(
                f"tensor {record.name!r} belongs to no bucket that is communicated; wrap its module with with_bagua"
            )
        record.set_ready(None)

    def bagua_mark_communication_ready_without_synchronization(self: Any) -> None:
        """The same: streams are ordered by events, and nobody waits on the host."""
        BaguaTensor.bagua_mark_communication_ready(self)

    def bagua_set_storage(
        self: Any, storage: torch.UntypedStorage | torch.TypedStorage, storage_offset: int = 0
    ) -> None:
        """Make the effective tensor lie in `storage`, from element `storage_offset` on, with the strides that it has.
        The values are those of the storage."""
        is_untyped = isinstance(storage, torch.UntypedStorage)
        untyped = storage if is_untyped else storage.untyped()  # type: ignore[no-untyped-call]
        effective = engine_tensor.effective_tensor(self)
        new = torch.empty(0, dtype=effective.dtype, device=effective.device)
        with torch.no_grad():
            new.set_(untyped, storage_offset, effective.shape, effective.stride())
        engine_tensor.replace_effective(self, new)


def _attributes(self: Any) -> engine_tensor.TensorRecord:
    record = engine_tensor.record_of(self)
    if record is None:
        raise AttributeError("not a Bagua tensor: call ensure_bagua_tensor(name) first")
    return record
