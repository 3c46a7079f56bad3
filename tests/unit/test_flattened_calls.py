"""Tensors that one call handles as one flat tensor (bagua.torch_api.utils)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bagua.torch_api import utils


def test_what_was_flattened_can_be_taken_apart() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.tensor(7.0), torch.empty(0), torch.ones(2)]
    flat = utils.flatten(tensors)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 7, 1, 1]
    for one, other in zip(tensors, utils.unflatten(flat, tensors), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(utils.get_flattened_tensor(tensors), flat)


def test_flattened_tensor_is_a_copy_of_the_first_dtype() -> None:
    tensor = torch.ones(2, 2)[:, 0]
    flat = utils.get_flattened_tensor([tensor])
    flat.zero_()
    assert tensor.tolist() == [1, 1]
    mixed = utils.get_flattened_tensor([torch.ones(1, dtype=torch.float16), torch.full((1,), 0.1)])
    assert mixed.dtype == torch.float16
    assert mixed[1] == torch.tensor(0.1).half()
    assert utils.get_flattened_tensor([]) is None


def test_a_call_changes_the_tensors_by_their_flat_copy() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    tensors = [parameter, torch.full((2, 1), 2.0)]
    pointers = [tensor.data_ptr() for tensor in tensors]
    seen: list[list[float]] = []

    def call(flat: Tensor, factor: float = 10.0) -> None:
        seen.append(flat.tolist())
        flat.mul_(factor)

    utils.apply_flattened_call(tensors, call)
    utils.apply_flattened_call(tensors, call, (0.5,))
    assert seen == [[1, 1, 2, 2], [10, 10, 20, 20]]
    assert [tensor.flatten().tolist() for tensor in tensors] == [[5, 5], [10, 10]]
    assert pointers == [tensor.data_ptr() for tensor in tensors]


def test_each_dtype_is_a_call_of_its_own() -> None:
    tensors = [torch.ones(1), torch.ones(2, dtype=torch.int64), torch.ones(3)]
    seen: list[tuple[torch.dtype, int]] = []

    def call(flat: Tensor) -> None:
        seen.append((flat.dtype, flat.numel()))
        flat.add_(1)

    utils.apply_flattened_call_all(tensors, call)
    assert seen == [(torch.float32, 4), (torch.int64, 2)]
    assert all((tensor == 2).all() for tensor in tensors)


def test_contiguous_is_what_follows_without_gaps() -> None:
    whole = torch.arange(10.0)
    assert utils.check_contiguous([])
    assert utils.check_contiguous([whole[:3], whole[3:4], whole[4:]])
    assert not utils.check_contiguous([whole[:3], whole[4:]])
    assert not utils.check_contiguous([whole[3:], whole[:3]])


def test_names_of_dtypes() -> None:
    names = {torch.float32: "f32", torch.float16: "f16", torch.uint8: "u8", torch.long: "i64"}
    assert {dtype: utils.to_bagua_datatype(dtype) for dtype in names} == names
    with pytest.raises(ValueError, match="bfloat16"):
        utils.to_bagua_datatype(torch.bfloat16)
