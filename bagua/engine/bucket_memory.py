"""The memory of a bucket: tensors that are communicated together, copied into one flat piece of memory and back.

Owned by a bucket (bagua.engine.bucket). `copy_in` and `copy_out` run on the thread that launches the bucket and on the
one that waits for it; never on two at once. `copy_in_one` runs before them, on the thread that sets the tensor's ready
flag.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bagua.collectives.tensor import (
    TensorRecord,
    effective_tensor,
    gradient_of,
    record_of,
    replace_effective,
    require_record,
    restore_record,
)
from bagua.engine.local_gradients import LocalGradients
from bagua.kernels.flat_views import flat_views, offsets_of

# On CPUs, gradients of so many elements are copied into the bucket when they are made. Copying one takes a call of some
# microseconds, while one call can copy many: smaller ones wait for that.
_LARGE_GRADIENT = 16384

_dtype_of = operator.attrgetter("dtype")


class BucketMemory:
    """Named tensors of one dtype, device and module, and the piece of memory in which they are communicated.

    Args:
        tensors: Bagua tensors (see bagua.collectives.tensor), in the order in which they lie in memory.
        name: unique in its module; alike on all ranks.
        flatten: the effective tensors become views of the bucket's memory, which saves copying. Whatever shared memory
            with them shares none any more. Otherwise they are copied into it before communication, and back after it.
        alignment: the bucket's length, in elements, is rounded up to a multiple of this, with zeros.

    Attributes:
        prescale: what is copied in is multiplied by this; None: it is not.
        weight: likewise, in a pass with batch weights (bagua.engine.batch_weights): a number, or a tensor of one
            element on the GPU; None: there are none.
        dtype: of all its tensors.
        device: of all its tensors.
        local: where gradients are kept before they are communicated; None: nowhere.
        is_on_gpu: kernels work on it, and launching one takes longer than most of what is done here.
        holds_gradients: alone.

    Raises:
        ValueError: no tensors, a bad alignment, or tensors of several dtypes, devices or modules.
    """

    def __init__(self, tensors: Sequence[Tensor], name: str, flatten: bool = True, alignment: int = 1) -> None:
        if not tensors:
            raise ValueError(f"bucket {name!r} has no tensors; leave it out")
        if alignment < 1:
            raise ValueError(f"bucket {name!r}: alignment {alignment} must be at least 1 element")
        self.tensors = list(tensors)
        self.name = name
        self.flatten = flatten
        self._records = [require_record(tensor) for tensor in self.tensors]
        # A gradient that does not exist yet is laid out like its parameter, without being made for that.
        self.holds_gradients = all(record.getter is gradient_of for record in self._records)
        if self.holds_gradients:
            for tensor, record in zip(self.tensors, self._records, strict=True):
                wanted = _gradient_dtype(tensor)
                if wanted is not None and wanted != tensor.dtype:
                    raise _other_dtype(tensor, wanted, record.name)
        layouts = self.tensors if self.holds_gradients else [effective_tensor(tensor) for tensor in self.tensors]
        for what, found in (
            ("dtypes", {layout.dtype for layout in layouts}),
            ("devices", {layout.device for layout in layouts}),
            ("modules", {record.module_name for record in self._records}),
        ):
            if len(found) > 1:
                raise ValueError(f"bucket {name!r} mixes {what} {sorted(map(str, found))}; make a bucket for each")
        # Each is its own effective tensor.
        self._holds_weights = all(record.getter is None for record in self._records)
        dtype, device = layouts[0].dtype, layouts[0].device
        offsets, self._elements = offsets_of(layouts, 1)
        padding = -self._elements % alignment
        self._flat = torch.zeros(self._elements + padding, dtype=dtype, device=device)
        self.dtype, self.device = dtype, self._flat.device
        self.is_on_gpu = self.device.type == "cuda"
        self.views = flat_views(self._flat, layouts, offsets)
        # Of the views as they are made here: a gradient is the same object as its view, and may be given other memory.
        self._addresses = [view.data_ptr() for view in self.views]
        self._kinds = _kinds(self.views)
        self._layouts = [(view.shape, view.stride(), view.storage_offset()) for view in self.views]
        self.padding_tensor: Tensor | None = self._flat[self._elements :] if padding else None
        self.prescale: float | None = None
        self.weight: float | Tensor | None = None
        self.local: LocalGradients | None = None
        # Gradients that `copy_in_one` has multiplied: nothing may be added to them.
        self.is_scaled = bytearray(len(self.tensors))
        self.attach()

    def attach(self) -> None:
        """Take the effective tensors into the bucket's memory (`flatten`): gradients when a backward pass has made
        them, if there are none now."""
        for tensor, record in zip(self.tensors, self._records, strict=True):
            restore_record(tensor, record)
        if self.flatten:
            for index, (tensor, view) in enumerate(zip(self.tensors, self.views, strict=True)):
                self._records[index].view = view
                if not self.holds_gradients or tensor.grad is not None:
                    self._take_over(index, view)

    @property
    def records(self) -> list[TensorRecord]:
        """What is known about each tensor, in the order of `tensors`."""
        return self._records

    def flattened_tensor(self) -> Tensor:
        """The bucket's memory: 1-D, every tensor's elements in order, then the padding."""
        return self._flat

    def bytes(self) -> int:
        """Bytes of the tensors, without padding."""
        return self._elements * self._flat.element_size()

    def check_flatten(self) -> bool:
        """Whether the effective tensors lie in the bucket's memory, so that nothing needs to be copied."""
        if not self.flatten:
            return False
        for tensor, address in zip(self.tensors, self._addresses, strict=True):
            effective = tensor.grad if self.holds_gradients else effective_tensor(tensor)
            if effective is None or effective.data_ptr() != address:
                return False
        return True

    # --- before and after communication ------------------------------------------------------------------------------

    @property
    def _scale(self) -> float | Tensor | None:
        if self.weight is None:
            return self.prescale
        return self.weight if self.prescale is None else self.weight * self.prescale

    def gathers_alone(self, index: int) -> bool:
        """Whether `copy_in_one` is worth while for a gradient: on CPUs, where one that was just made is in the caches,
        and its memory is used again for the next one. On a GPU, a kernel for each gradient costs more."""
        is_large = self.views[index].numel() >= _LARGE_GRADIENT and self.local is None
        return is_large and self.holds_gradients and self.flatten and self.device.type == "cpu"

    def copy_in_one(self, index: int) -> None:
        """As `copy_in`, of the gradient of one tensor, which is complete. Runs between kernels of the backward pass,
        when their data has taken the caches: what is not the usual case waits for `copy_in`."""
        tensor, view = self.tensors[index], self.views[index]
        gradient = tensor.grad
        if (
            gradient is None
            or gradient is view
            or gradient.requires_grad
            or gradient.dtype is not self._flat.dtype
            or gradient.layout is not torch.strided
            or view.data_ptr() != self._addresses[index]
        ):
            return
        scale = self._scale
        if scale is None:
            view.copy_(gradient)
        else:
            torch.mul(gradient, scale, out=view)
            self.is_scaled[index] = True
        tensor.grad = view

    def unscale(self) -> None:
        """Undo the multiplications of `copy_in_one`: there are gradients to come, which are added."""
        scale = self._scale
        with torch.no_grad():
            for index, (tensor, view) in enumerate(zip(self.tensors, self.views, strict=True)):
                if scale is not None and self.is_scaled[index] and tensor.grad is view:
                    view.div_(scale)
        self.forget_scaled()

    def forget_scaled(self) -> None:
        """The next `copy_in` multiplies all."""
        self.is_scaled = bytearray(len(self.tensors))

    def copy_in(self) -> None:
        """Bring what the effective tensors hold now into the bucket's memory, and make them views of it (`flatten`).
        A gradient that does not exist counts as zeros. All are multiplied by `prescale`. On the current stream."""
        if torch.is_grad_enabled():  # not on autograd's threads, as a rule; the context costs half as much as the rest
            with torch.no_grad():
                BucketMemory.copy_in(self)
            return
        scale = self.prescale if self.weight is None else self._scale
        if self.padding_tensor is not None:
            # Where values were not finite, a compressed sum has left that here, and would spread it from now on.
            self.padding_tensor.zero_()
        if self.holds_gradients:
            self._copy_in_gradients(scale)
            return
        self._copy_in_others()
        if scale is not None:
            self._flat.mul_(scale)

    def _copy_in_others(self) -> None:
        self.check_tensors()
        effectives = self._effective_tensors()
        if not self.flatten:
            with torch.inference_mode():  # as in `copy_out`
                torch._foreach_copy_(self.views, effectives)
            return
        outside: list[tuple[int, Tensor, Tensor]] = []
        for index, (effective, address) in enumerate(zip(effectives, self._addresses, strict=True)):
            view = self.views[index]
            if view.data_ptr() != address:
                view = self._view_again(index, effective)
            if effective.data_ptr() != address:
                outside.append((index, effective, view))
        if outside:
            torch._foreach_copy_([view for _, _, view in outside], [effective for _, effective, _ in outside])
            for index, effective, view in outside:
                self._replace(index, effective, view)

    def check_tensors(self) -> None:
        """Of effective tensors that are no gradients.

        Raises:
            RuntimeError: one was converted or moved, and does not fit any more.
        """
        effectives = self._effective_tensors()
        if _kinds(effectives) != self._kinds:
            for index, effective in enumerate(effectives):
                self._check(effective, index)

    def _effective_tensors(self) -> list[Tensor]:
        return self.tensors if self._holds_weights else [effective_tensor(tensor) for tensor in self.tensors]

    def _copy_in_gradients(self, scale: float | Tensor | None) -> None:
        """Runs over every parameter in every step: what it asks of each gradient is little."""
        views: list[Tensor] = []
        gradients: list[Tensor] = []
        absent: list[Tensor] = []
        dtype, strided, flatten = self.dtype, torch.strided, self.flatten
        _, gpus, numels = self._kinds
        for index, (tensor, view, address) in enumerate(zip(self.tensors, self.views, self._addresses, strict=True)):
            # `p.grad.data = ...`, or a conversion of the module: the view, which the gradient is, has other memory.
            gradient = tensor.grad
            if view.data_ptr() != address:
                view = self._view_again(index, gradient)
            if gradient is view:
                continue
            if gradient is None:
                absent.append(view)
            else:
                if (
                    gradient.dtype is not dtype
                    or gradient.layout is not strided
                    # Of one, all: whoever moves a module moves all of it.
                    or (not gradients and (gradient.get_device() != gpus[index] or gradient.numel() != numels[index]))
                ):
                    self._check(gradient, index)
                views.append(view)
                gradients.append(gradient)
                self.is_scaled[index] = False  # not what was multiplied
            if flatten:
                if gradient is None or not gradient.requires_grad:
                    tensor.grad = view
                else:
                    tensor.grad = self._without_graph(index, gradient, view)
        if views:
            torch._foreach_copy_(views, gradients)
        if absent:
            torch._foreach_zero_(absent)
        if scale is None:
            return
        if any(self.is_scaled):
            unscaled = [view for view, is_scaled in zip(self.views, self.is_scaled, strict=True) if not is_scaled]
            if unscaled:
                torch._foreach_mul_(unscaled, scale)
            self.forget_scaled()
        else:
            self._flat.mul_(scale)

    def _check(self, gradient: Tensor, index: int) -> None:
        name = self._records[index].name
        if gradient.layout is not torch.strided:
            raise NotImplementedError(
                f"The gradient of {name!r} is sparse ({gradient.layout}). Bagua communicates only dense ones.\n"
                "Use sparse=False, or put the name into the module's _bagua_params_and_buffers_to_ignore."
            )
        tensor, shape = self.tensors[index], self._layouts[index][0]
        if self.holds_gradients and gradient.dtype != self.dtype and _gradient_dtype(tensor) != tensor.dtype:
            raise _other_dtype(tensor, gradient.dtype, name)
        if gradient.dtype != self.dtype or gradient.device != self.device or gradient.shape != shape:
            kinds = ("The gradient of", "The parameter", "What is communicated for")
            what = kinds[0 if self.holds_gradients else 1 if self._holds_weights else 2]
            raise misfit(f"{what} {name!r}", gradient, self._flat, shape)

    def _view_again(self, index: int, effective: Tensor | None) -> Tensor:
        """Make the view anew, where what it was has been given other memory. That is an ordinary tensor now, which is
        copied if it is the effective one.

        Raises:
            RuntimeError: it is the effective one, and does not fit any more.
        """
        moved = self.views[index]
        if effective is moved:
            self._check(effective, index)
        shape, strides, offset = self._layouts[index]
        view = self.views[index] = self._flat.as_strided(shape, strides, offset).data
        if self._records[index].view is moved:
            self._records[index].view = view
        return view

    def copy_out(self) -> None:
        """Copy the results back to effective tensors that are no views (`flatten` off). On the current stream."""
        if self.flatten:
            return
        if self._holds_weights:
            with torch.inference_mode():  # a tenth faster than no_grad for thousands of small ones
                torch._foreach_copy_(self.tensors, self.views)
            return
        with torch.no_grad():
            targets = self._effective_tensors()
            torch._foreach_copy_(targets, self.views)
            for index, target in enumerate(targets):
                if target.grad_fn is not None:
                    self._replace(index, target, target)

    def keep_for(self, stream: torch.cuda.Stream) -> None:
        """`stream` uses the bucket's memory: when it is freed, that must have ended."""
        self._flat.record_stream(stream)

    def keep_gradients_for(self, stream: torch.cuda.Stream) -> None:
        """`stream` reads gradients that were made on others: when they are freed, that must have ended."""
        for tensor in self.tensors:
            if tensor.grad is not None:
                tensor.grad.record_stream(stream)

    def _take_over(self, index: int, view: Tensor) -> None:
        with torch.no_grad():
            effective = effective_tensor(self.tensors[index])
            view.copy_(effective)
            self._replace(index, effective, view)

    def _replace(self, index: int, effective: Tensor, new: Tensor) -> None:
        """Make `new` the effective tensor, instead of one that a graph may have made."""
        if effective.grad_fn is not None:
            new = self._without_graph(index, effective, new)
        replace_effective(self.tensors[index], new)

    def _without_graph(self, index: int, gradient: Tensor, result: Tensor) -> Tensor:
        return _without_graph(gradient, result, self._records[index].name)

    def release(self) -> None:
        """Give the tensors memory of their own again, where they are views of this bucket's: undoes `attach`."""
        for tensor, view, record in zip(self.tensors, self.views, self._records, strict=True):
            if record.view is not view:
                continue
            record.view = None
            if self.holds_gradients:
                gradient = tensor.grad
                if gradient is None or gradient.layout is not torch.strided:
                    continue
                if gradient.data_ptr() == view.data_ptr():
                    with torch.enable_grad():  # one that must not be differentiated stays so
                        tensor.grad = gradient.clone()
            elif record_of(tensor) is record:  # otherwise the parameter was swapped with another
                effective = effective_tensor(tensor)
                if effective.data_ptr() == view.data_ptr():
                    replace_effective(tensor, effective.detach().clone())


def _gradient_dtype(parameter: Tensor) -> torch.dtype | None:
    """That autograd gives its gradient; None: any."""
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", parameter.dtype)  # torch 2.9 and later
    return dtype


def _other_dtype(parameter: Tensor, dtype: torch.dtype, name: str) -> NotImplementedError:
    return NotImplementedError(
        f"The gradient of {name!r} is {dtype}, and the parameter {parameter.dtype}. Bagua communicates gradients in the"
        " dtype of their parameter.\n"
        "Set its grad_dtype to that dtype before the backward pass, or put the name into the module's"
        " _bagua_params_and_buffers_to_ignore."
    )


def _kinds(tensors: Sequence[Tensor]) -> tuple[list[object], ...]:
    """What is compared for thousands of parameters in each step. Of other shapes with as many elements, a copy is
    refused or right."""
    return [*map(_dtype_of, tensors)], [*map(Tensor.get_device, tensors)], [*map(Tensor.numel, tensors)]


def misfit(what: str, found: Tensor, expected: Tensor, shape: torch.Size) -> RuntimeError:
    """The error of a tensor that is not of the dtype and device of `expected`, or not of this shape."""
    return RuntimeError(
        f"{what} is {_kind(found, found.shape)}, but its bucket expects {_kind(expected, shape)}.\n"
        "If you converted or moved the module (to, half, double, ...) after wrapping it, wrap it again. If you"
        " assigned to the data of a parameter, keep its shape, dtype and device."
    )


def _kind(tensor: Tensor, shape: torch.Size) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(shape)} on {tensor.device}"


class _Communicated(torch.autograd.Function):
    """The graph of a gradient, which `backward(create_graph=True)` makes, ends where the gradient was communicated.

    What other ranks have contributed has no graph here. To go on with this rank's part alone would be a derivative of
    something else, and to drop the graph one that lacks a term: whoever differentiates the result is told."""

    @staticmethod
    def forward(ctx: Any, _gradient: Tensor, result: Tensor, name: str) -> Tensor:
        ctx.name = name
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            f"The gradient of {ctx.name!r} has been communicated among the ranks. It cannot be differentiated.\n"
            "A backward pass reached .grad, which backward(create_graph=True) had made.\n"
            "Compute the gradient with torch.autograd.grad(loss, parameters, create_graph=True), which does not"
            " communicate. If you need the mean over all ranks, average the result with"
            " bagua.torch_api.data_parallel.functional.all_reduce(gradient, bagua.torch_api.ReduceOp.AVG)."
        )


@torch.enable_grad()
def _without_graph(gradient: Tensor, result: Tensor, name: str) -> Tensor:
    """`result`, in the same memory, as what was communicated for `gradient`. It requires a gradient as that one does,
    and raises where one would flow back."""
    communicated: Tensor = _Communicated.apply(gradient, result.detach(), name)  # type: ignore[no-untyped-call]
    return communicated
