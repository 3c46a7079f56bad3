"""Bagua tensors: names, closures, effective tensors, and what copies take with them."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import bagua.torch_api.tensor  # noqa: F401 - gives tensors their methods
from bagua.collectives.tensor import drop_record, gradient_of, record_of, set_gradient
from bagua.engine.bucket import Bucket


def _parameter() -> Any:
    return nn.Parameter(torch.arange(6.0).view(2, 3))


def test_an_ordinary_tensor_is_none_and_a_view_may_be_one() -> None:
    tensor: Any = torch.ones(2, 3)
    assert not tensor.is_bagua_tensor()
    assert not hasattr(tensor, "bagua_tensor_name")
    assert not hasattr(tensor, "bagua_module_name")
    for call in (tensor.bagua_getter_closure, tensor.bagua_backend_tensor, tensor.bagua_mark_communication_ready):
        with pytest.raises(RuntimeError, match=r"not a Bagua tensor\. Call ensure_record"):
            call()
    view = tensor.to_bagua_tensor("name", "module")
    assert not tensor.is_bagua_tensor()
    assert view.is_bagua_tensor()
    assert view.data_ptr() == tensor.data_ptr()
    assert view.bagua_getter_closure() is view
    assert tensor.ensure_bagua_tensor("name", "module") is tensor
    assert (tensor.bagua_tensor_name, tensor.bagua_module_name) == ("name", "module")


def test_the_effective_tensor_is_what_the_closures_say() -> None:
    parameter = _parameter()
    parameter.ensure_bagua_tensor("p", "m", gradient_of, set_gradient)
    # One that does not exist is made of zeros. It is asked each time.
    for _ in range(2):
        assert not parameter.bagua_getter_closure().any()
        assert parameter.grad is not None
        gradient = torch.full((2, 3), 7.0)
        parameter.bagua_setter_closure(gradient)
        assert parameter.grad is gradient
        assert parameter.bagua_backend_tensor() is gradient
        parameter.grad = None
    assert parameter.bagua_ensure_grad() is parameter
    gradient = parameter.grad
    assert not gradient.any()
    assert parameter.bagua_ensure_grad().grad is gradient


def test_without_a_setter_the_effective_tensor_takes_over_the_memory() -> None:
    parameter = _parameter()
    parameter.ensure_bagua_tensor("p", "m")
    assert parameter.bagua_getter_closure() is parameter
    new = torch.zeros(10)[2:8].view(2, 3)
    parameter.bagua_setter_closure(new)
    assert parameter.data_ptr() == new.data_ptr()
    assert parameter.shape == (2, 3)
    assert parameter.requires_grad
    memory = torch.arange(20.0)
    for storage in (memory.untyped_storage(), memory._typed_storage()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about typed storages, which old code has
            parameter.bagua_set_storage(storage, 3)
        assert torch.equal(parameter, memory[3:9].view(2, 3))
        assert parameter.data_ptr() == memory[3:].data_ptr()
    other = _parameter()
    other.extra = torch.ones(4)
    other.ensure_bagua_tensor("q", "m", lambda one: one.extra)
    kept, new = other.extra, torch.zeros(4)
    other.bagua_setter_closure(new)
    assert other.extra is kept
    assert kept.data_ptr() == new.data_ptr()


def test_names_cannot_change_but_closures_can() -> None:
    parameter = _parameter()
    parameter.ensure_bagua_tensor("p")
    parameter.ensure_bagua_tensor("p", "m", gradient_of, set_gradient)
    assert parameter.bagua_module_name == "m"
    parameter.ensure_bagua_tensor(getter_closure=gradient_of)
    assert (parameter.bagua_tensor_name, parameter.bagua_module_name) == ("p", "m")
    with pytest.raises(ValueError, match=r"'p' cannot be renamed to 'q'"):
        parameter.ensure_bagua_tensor("q")
    with pytest.raises(ValueError, match=r"belongs to module 'm', not to 'other'"):
        parameter.ensure_bagua_tensor("p", "other")
    with pytest.raises(ValueError, match=r"needs a getter_closure"):
        parameter.ensure_bagua_tensor("p", "m", setter_closure=set_gradient)
    for mark in (
        parameter.bagua_mark_communication_ready,
        parameter.bagua_mark_communication_ready_without_synchronization,
    ):
        with pytest.raises(RuntimeError, match=r"'p' belongs to no bucket"):
            mark()
    for _ in range(2):
        drop_record(parameter)
        assert record_of(parameter) is None
    parameter.ensure_bagua_tensor("another", "module")


def _through_file(tensor: Any) -> Any:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)), _through_file])
@pytest.mark.parametrize("make", [_parameter, lambda: torch.ones(2, 3)], ids=["parameter", "tensor"])
def test_copies_are_ordinary_tensors(duplicate: Any, make: Any) -> None:
    tensor = make()
    tensor.ensure_bagua_tensor("p", "m")
    bucket = Bucket([tensor], "b")
    other = duplicate(tensor)
    assert torch.equal(other, tensor)
    assert not other.is_bagua_tensor()
    other.ensure_bagua_tensor("q", "another module")
    assert tensor.bagua_tensor_name == "p"
    assert bucket.check_flatten()
