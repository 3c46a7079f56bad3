"""A bucket's memory: where tensors and gradients lie in it, and how they get in and out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import bagua.torch_api.tensor  # noqa: F401 - gives tensors their methods
from bagua.collectives.tensor import ensure_record, gradient_of, set_gradient
from bagua.engine.bucket import Bucket, FunctionOp, PrescaledOp

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=6)


def _named(tensors: list[Tensor], module: str = "module") -> list[Tensor]:
    for number, tensor in enumerate(tensors):
        ensure_record(tensor, f"t{number}", module)
    return tensors


def _parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for number, parameter in enumerate(parameters):
        ensure_record(parameter, f"p{number}", "module", gradient_of, set_gradient)
    return parameters


@given(shapes=SHAPES, alignment=st.integers(1, 9), flatten=st.booleans())
def test_memory_holds_the_tensors_in_order_and_zeros_behind(
    shapes: list[tuple[int, ...]], alignment: int, flatten: bool
) -> None:
    tensors = _named([torch.randn(shape) for shape in shapes])
    values = [tensor.clone() for tensor in tensors]
    bucket = Bucket(tensors, "b", flatten, alignment)
    bucket.copy_in()
    elements = sum(value.numel() for value in values)
    flat = bucket.flattened_tensor()
    assert flat.numel() % alignment == 0
    assert flat.numel() - elements < alignment
    assert torch.equal(flat[:elements], torch.cat([value.reshape(-1) for value in values]))
    assert not flat[elements:].any()
    assert (bucket.padding_tensor is None) == (flat.numel() == elements)
    assert bucket.bytes() == 4 * elements
    for tensor, value in zip(tensors, values, strict=True):
        assert torch.equal(tensor, value)
        assert tensor.shape == value.shape
    # What communication leaves there comes back.
    flat.add_(1)
    bucket.copy_out()
    for tensor, value in zip(tensors, values, strict=True):
        assert torch.equal(tensor, value + 1)
    bucket.copy_in()
    assert not flat[elements:].any(), "what is not finite would spread from there"
    assert bucket.check_flatten() == flatten or elements == 0
    bucket.release()
    flat.zero_()
    for tensor, value in zip(tensors, values, strict=True):
        assert torch.equal(tensor, value + 1)


@pytest.mark.parametrize("flatten", [True, False])
def test_gradients_are_taken_over_when_they_exist(flatten: bool) -> None:
    first, second = _parameters((2, 2), (3,))
    first.grad = torch.ones(2, 2)
    bucket = Bucket([first, second], "b", flatten)
    assert second.grad is None
    assert bucket.holds_gradients
    bucket.copy_in()
    assert torch.equal(bucket.flattened_tensor(), torch.tensor([1.0] * 4 + [0.0] * 3))
    assert bucket.check_flatten() == flatten
    if flatten:
        assert second.grad is bucket.views[1]
        assert first.grad is bucket.views[0]
    else:
        assert second.grad is None
        bucket.copy_out()
        assert not second.grad.any()


def test_a_gradient_that_was_dropped_counts_as_zeros_and_another_is_copied() -> None:
    first, second = _parameters((2,), (2,))
    first.grad, second.grad = torch.ones(2), torch.ones(2)
    bucket = Bucket([first, second], "b")
    first.grad, second.grad = None, torch.full((2,), 5.0)
    bucket.copy_in()
    assert bucket.flattened_tensor().tolist() == [0, 0, 5, 5]
    assert bucket.check_flatten()


def test_views_have_the_strides_of_their_parameter() -> None:
    (weight,) = _parameters((4, 3, 2, 2))
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    transposed = nn.Parameter(torch.randn(3, 5).t())
    spread = nn.Parameter(torch.randn(6, 4)[::2])  # holes: no strides to keep
    for name, parameter in (("transposed", transposed), ("spread", spread)):
        ensure_record(parameter, name, "module", gradient_of, set_gradient)
    bucket = Bucket([weight, transposed, spread], "b")
    (weight.sum() * 2 + transposed.square().sum() + spread.square().sum()).backward()
    gradients = [parameter.grad.clone() for parameter in (weight, transposed, spread)]
    bucket.copy_in()
    assert [view.stride() for view in bucket.views] == [weight.stride(), transposed.stride(), (4, 1)]
    for parameter, gradient in zip((weight, transposed, spread), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    # Autograd goes on adding to the same memory.
    weight.sum().backward()
    assert bucket.check_flatten()
    assert torch.equal(bucket.flattened_tensor()[: weight.numel()], torch.full((weight.numel(),), 3.0))


def test_a_sparse_gradient_is_refused_by_name() -> None:
    (table,) = _parameters((5, 2))
    bucket = Bucket([table], "b")
    nn.functional.embedding(torch.tensor([1]), table, sparse=True).sum().backward()
    with pytest.raises(NotImplementedError, match="'p0' is sparse"):
        bucket.copy_in()
    bucket.release()
    assert table.grad is not None
    assert table.grad.is_sparse


@pytest.mark.parametrize("scale", [None, 0.5])
def test_a_gradient_that_was_given_other_memory_is_copied_into_its_bucket(scale: float | None) -> None:
    """`p.grad.data = p.grad.data.clamp(...)`, as old code clips: the gradient is the view itself."""
    first, second = _parameters((2, 3), (2,))
    first.data = first.data.t().contiguous().t()
    bucket = Bucket([first, second], "b")
    bucket.append_op(FunctionOp(lambda _: None, prescale=scale))
    for _ in range(2):
        first.grad, second.grad = torch.full((2, 3), 4.0), torch.full((2,), 8.0)
        bucket.copy_in()
        assert first.grad is bucket.views[0]
        first.grad.data = torch.arange(6.0).view(2, 3)
        assert not bucket.check_flatten()
        bucket.copy_in()
        assert bucket.check_flatten()
        assert first.grad is bucket.views[0]
        assert first.grad.stride() == first.stride()
        factor = 1 if scale is None else scale
        assert torch.equal(first.grad, factor * torch.arange(6.0).view(2, 3))
        # It is a view again, and one that code may detach in place.
        bucket.flattened_tensor().zero_()
        assert not first.grad.any()
        first.grad.detach_()
    bucket.release()
    assert first.grad.data_ptr() != bucket.views[0].data_ptr()


@pytest.mark.parametrize(("flatten", "one_by_one"), [(False, ()), (True, ()), (True, (0, 2)), (True, (0, 1, 2))])
@pytest.mark.parametrize("scale", [None, 0.25, 1 / 3])
def test_every_gradient_is_scaled_once(scale: float | None, flatten: bool, one_by_one: tuple[int, ...]) -> None:
    """Those that are gathered one by one, and the others when all are."""
    fresh, view, absent = _parameters((2, 3), (2,), (4,))
    view.grad = torch.zeros(2)
    bucket = Bucket([fresh, view, absent], "b", flatten, alignment=16)
    bucket.append_op(FunctionOp(lambda _: None, prescale=scale))
    factor = 1.0 if scale is None else scale
    for number in (1.0, 3.0):
        fresh.grad, absent.grad = torch.full((2, 3), number), None
        view.grad.fill_(2 * number)
        for index in one_by_one:
            bucket.copy_in_one(index)
        assert not one_by_one or fresh.grad is bucket.views[0]
        bucket.copy_in()
        expected = factor * torch.tensor([number] * 6 + [2 * number] * 2 + [0.0] * 8)
        assert torch.equal(bucket.flattened_tensor(), expected)
    bucket.release()


def test_what_was_gathered_one_by_one_can_be_added_to_when_it_is_unscaled() -> None:
    gathered, other = _parameters((3,), (2,))
    bucket = Bucket([gathered, other], "b")
    bucket.append_op(FunctionOp(lambda _: None, prescale=0.25))
    gathered.grad, other.grad = torch.full((3,), 4.0), torch.full((2,), 8.0)
    bucket.copy_in_one(0)
    bucket.unscale()
    assert (gathered.grad.tolist(), other.grad.tolist()) == ([4.0] * 3, [8.0] * 2)
    gathered.grad += 4.0
    for index in (0, 1):
        bucket.copy_in_one(index)
    bucket.copy_in()
    assert bucket.flattened_tensor().tolist() == [2.0] * 5
    bucket.release()


@pytest.mark.parametrize("given", ["another tensor", "other memory"])
def test_a_gradient_that_is_replaced_after_it_was_scaled_is_scaled(given: str) -> None:
    replaced, other = _parameters((3,), (2,))
    bucket = Bucket([replaced, other], "b")
    bucket.append_op(FunctionOp(lambda _: None, prescale=0.25))
    replaced.grad, other.grad = torch.full((3,), 4.0), torch.full((2,), 8.0)
    for index in (0, 1):
        bucket.copy_in_one(index)
    if given == "another tensor":
        replaced.grad = torch.full((3,), 12.0)
    else:
        replaced.grad.data = torch.full((3,), 12.0)
    bucket.copy_in()
    assert bucket.flattened_tensor().tolist() == [3.0] * 3 + [2.0] * 2
    bucket.release()


def test_large_gradients_are_gathered_alone_and_small_ones_together() -> None:
    large, small = _parameters((128, 128), (128,))
    bucket = Bucket([large, small], "b")
    assert [bucket.gathers_alone(index) for index in (0, 1)] == [True, False]
    assert not Bucket(_parameters((128, 128)), "copies", flatten=False).gathers_alone(0)


@pytest.mark.parametrize("odd", ["sparse", "other dtype", "has a graph", "other memory"])
def test_a_gradient_that_is_not_as_usual_waits_until_all_are_gathered(odd: str) -> None:
    (parameter,) = _parameters((2, 3))
    bucket = Bucket([parameter], "b")
    parameter.grad = torch.ones(2, 3)
    bucket.copy_in_one(0)
    if odd == "other memory":
        parameter.grad.data = torch.full((2, 3), 2.0)
    elif odd == "other dtype":
        parameter.grad.data = torch.full((2, 3), 2.0, dtype=torch.float64)
    elif odd == "sparse":
        parameter.grad = torch.full((2, 3), 2.0).to_sparse()
    else:
        parameter.grad = torch.full((2, 3), 2.0, requires_grad=True) * 1
    given = parameter.grad
    bucket.copy_in_one(0)
    assert parameter.grad is given
    if odd == "sparse":
        with pytest.raises(NotImplementedError, match="'p0' is sparse"):
            bucket.copy_in()
    elif odd == "other dtype":
        with pytest.raises(RuntimeError, match="'p0' is float64"):
            bucket.copy_in()
    else:
        bucket.copy_in()
        assert bucket.flattened_tensor().tolist() == [2.0] * 6


def test_state_that_was_given_other_memory_is_copied_into_its_bucket() -> None:
    state = [torch.ones(2)]
    (proxy,) = _named([torch.zeros(2)])
    ensure_record(proxy, getter=lambda _: state[0], setter=lambda _, new: state.__setitem__(0, new))
    bucket = Bucket([proxy], "b")
    state[0].data = torch.full((2,), 3.0)
    assert not bucket.check_flatten()
    bucket.copy_in()
    assert bucket.check_flatten()
    assert bucket.flattened_tensor().tolist() == [3, 3]


@pytest.mark.parametrize("data", [torch.ones(2, dtype=torch.float64), torch.ones(1)])
def test_a_gradient_whose_new_memory_does_not_fit_is_refused_by_name(data: Tensor) -> None:
    (parameter,) = _parameters((2,))
    bucket = Bucket([parameter], "b")
    bucket.copy_in()
    parameter.grad.data = data
    with pytest.raises(
        RuntimeError, match=r"(?s)'p0' is float(64 \[2\]|32 \[1\]) on cpu.* float32 \[2\].* wrap it again"
    ):
        bucket.copy_in()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
@pytest.mark.parametrize("wanted", [torch.float32, None])
def test_a_gradient_of_another_dtype_than_its_parameter_is_refused_in_true_words(wanted: torch.dtype | None) -> None:
    (parameter,) = _parameters((2,), dtype=torch.bfloat16)
    bucket = Bucket([parameter], "b")
    parameter.grad_dtype = wanted  # type: ignore[assignment]
    parameter.grad = torch.ones(2)
    refused = pytest.raises(NotImplementedError, match=r"(?s)'p0' is torch.float32, and .* torch.bfloat16.*grad_dtype")
    with refused:
        bucket.copy_in()
    parameter.grad = None
    if wanted is not None:
        with refused:
            Bucket([parameter], "b")
    else:
        Bucket([parameter], "b").copy_in()  # nothing is known of it yet


def test_what_does_not_belong_together_is_refused() -> None:
    with pytest.raises(ValueError, match="no tensors"):
        Bucket([], "b")
    with pytest.raises(ValueError, match="alignment 0"):
        Bucket(_named([torch.ones(1)]), "b", alignment=0)
    with pytest.raises(ValueError, match=r"mixes dtypes \['torch.float32', 'torch.float64'\]"):
        Bucket(_named([torch.ones(1), torch.ones(1).double()]), "b")
    with pytest.raises(ValueError, match="mixes modules"):
        Bucket(_named([torch.ones(1)], "one") + _named([torch.ones(1)], "other"), "b")
    with pytest.raises(RuntimeError, match="not a Bagua tensor"):
        Bucket([torch.ones(2)], "b")


def test_operations_can_be_appended_in_a_chain_and_cleared() -> None:
    bucket: Any = Bucket(_named([torch.ones(2)]), "b")
    calls: list[str] = []
    assert bucket.append_python_op(calls.append).append_python_op(calls.append, group=None) is bucket
    assert len(bucket.ops) == 2
    assert bucket.backend_bucket is bucket
    for op in bucket.ops:
        assert op.run(bucket) is None
    assert calls == ["b", "b"]
    assert bucket.clear_ops() is bucket
    assert not bucket.ops


def test_a_later_operation_finds_the_elements_multiplied() -> None:
    """The first one's number goes into the copy, that of another one is applied before it runs."""
    (parameter,) = _parameters((2,))
    bucket = Bucket([parameter], "b")
    seen: list[float] = []
    for scale in (0.5, None, 0.25):
        bucket.append_op(FunctionOp(lambda _: seen.append(float(bucket.flattened_tensor()[0])), prescale=scale))
    parameter.grad = torch.full((2,), 8.0)
    bucket.copy_in()
    bucket.run_ops()
    assert seen == [4.0, 4.0, 1.0]
    bucket.clear_ops()
    bucket.copy_in()
    bucket.run_ops()
    assert bucket.flattened_tensor().tolist() == [1.0, 1.0]


class _WithoutScale:
    inline = False

    def run(self, bucket: Bucket) -> None:
        return None


class _BareScale(_WithoutScale):
    """The engine would not see the number."""

    prescale: float | None = 0.25


class _DerivedScale(_BareScale, PrescaledOp):
    pass


def test_an_operation_that_would_not_be_scaled_is_refused() -> None:
    bucket = Bucket(_parameters((2,)), "b")
    with pytest.raises(TypeError, match=r"_BareScale has prescale=0\.25.*\n.*bagua\.engine\.bucket\.PrescaledOp"):
        bucket.append_op(_BareScale())
    assert list(bucket.ops) == []
    bucket.append_op(_DerivedScale())
    bucket.append_op(_WithoutScale())
    assert bucket.prescale == 0.25
    assert len(bucket.ops) == 2
