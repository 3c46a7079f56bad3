"""Gates of a mixture of experts: capacity, overflow, noise and counts. One process, without a process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bagua.contrib.moe import gating
from bagua.contrib.moe.layer import MoE

S, E, M = 40, 4, 3


def logits() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(S, E)


def skewed() -> torch.Tensor:
    """Everybody prefers expert 2, and then expert 0."""
    return torch.tensor([2.0, 0.0, 3.0, 1.0]).repeat(S, 1)


def test_capacity() -> None:
    assert gating.capacity_of(40, 4, 1, 1.0, 4) == 10
    assert gating.capacity_of(41, 4, 1, 1.0, 4) == 11
    assert gating.capacity_of(8, 4, 1, 1.0, 4) == 4
    assert gating.capacity_of(40, 4, 2, 1.25, 4) == 25
    assert gating.capacity_of(2, 4, 2, 1.0, 4) == 1
    with pytest.raises(ValueError, match="3 tokens, and min_capacity is 4"):
        gating.capacity_of(3, 4, 1, 1.0, 4)


def test_top_1_is_weighted_by_its_probability() -> None:
    one = gating.top_1(logits(), S, None, is_noisy=False, is_random=False)
    probabilities = logits().softmax(1)
    assert torch.equal(one.expert[0], probabilities.argmax(1))
    torch.testing.assert_close(one.weight[0], probabilities.max(1).values)
    assert one.exp_counts.tolist() == [int((one.expert == expert).sum()) for expert in range(E)]
    # No two tokens have the same position in a queue.
    assert len({(int(e), int(p)) for e, p in zip(one.expert[0], one.position[0], strict=True)}) == S


@pytest.mark.parametrize("is_random", [False, True])
def test_top_1_drops_what_does_not_fit(is_random: bool) -> None:
    kept = []
    for _ in range(5):
        one = gating.top_1(skewed(), 10, None, is_noisy=False, is_random=is_random)
        assert one.exp_counts.tolist() == [0, 0, S, 0]  # before the cut
        assert int((one.weight > 0).sum()) == 10
        kept.append(tuple((one.weight[0] > 0).nonzero().flatten().tolist()))
    assert kept[0] == tuple(range(10)) or is_random
    assert (len(set(kept)) > 1) == is_random


def test_top_2_second_choices_queue_behind_all_first_ones() -> None:
    both = gating.top_2(skewed(), 10, None, is_random=False)
    assert both.expert.unique(dim=1).flatten().tolist() == [2, 0]
    assert both.exp_counts.tolist() == [0, 0, S, 0]
    # Both fit, or none.
    assert both.weight[:, :10].sum(0).tolist() == pytest.approx([1] * 10)
    assert both.weight[:, 10:].abs().sum() == 0
    mixed = torch.cat([skewed(), torch.tensor([[3.0, 2.0, 0.0, 1.0]])])
    last = gating.top_2(mixed, S, None, is_random=False)
    assert last.position[0, -1] == 0  # it is expert 0's only first choice, and comes before the second ones
    assert last.position[1, 0] == 1


def test_top_2_draws_the_second_by_the_probabilities_of_the_others() -> None:
    torch.manual_seed(0)
    drawn = gating.top_2(skewed().repeat(100, 1), S * 100, None, is_random=True)
    assert (drawn.expert[0] == 2).all()
    shares = torch.bincount(drawn.expert[1], minlength=E) / (S * 100)
    expected = torch.tensor([2.0, 0.0, -torch.inf, 1.0]).softmax(0)
    torch.testing.assert_close(shares, expected, atol=0.03, rtol=0)


def test_r_sample_draws_by_probability() -> None:
    torch.manual_seed(0)
    drawn = gating.top_1(skewed().repeat(100, 1), S * 100, None, is_noisy=True, is_random=False)
    torch.testing.assert_close(drawn.exp_counts / (S * 100), skewed()[0].softmax(0), atol=0.03, rtol=0)


def test_auxiliary_loss() -> None:
    even = torch.eye(E).repeat(S // E, 1) * 100
    assert gating.top_1(even, S, None, False, False).l_aux.item() == pytest.approx(1)
    assert gating.top_2(even, S, None, False).l_aux.item() == pytest.approx(1)
    one_only = 100 * torch.tensor([1.0, 0, 0, 0]).repeat(S, 1)
    assert gating.top_1(one_only, S, None, False, False).l_aux.item() == pytest.approx(E)


@pytest.mark.parametrize("k", [1, 2])
def test_unused_tokens_take_no_room(k: int) -> None:
    torch.manual_seed(0)
    layer = MoE(M, nn.Linear(M, M), num_local_experts=E, k=k, eval_capacity_factor=0.5).eval()
    x = torch.randn(4, S // 4, M)
    used = torch.zeros(4, S // 4)
    used[1] = 1
    output, _, counts = layer(x, used)
    assert output[0].abs().sum() == 0
    assert (output[1] != 0).any(dim=1).all()
    assert counts.sum() == S // 4
    alone, _, _ = MoE.forward(layer, x)
    assert (alone == 0).all(dim=-1).any()  # without it, some do not fit


def test_noise_and_dropout_are_for_training_alone() -> None:
    torch.manual_seed(0)
    x = torch.randn(S, M)
    for options in ({"noisy_gate_policy": "RSample"}, {"k": 2}, {"noisy_gate_policy": "Jitter"}):
        layer = MoE(M, nn.Linear(M, M), num_local_experts=E, output_dropout_prob=0.5, **options)  # type: ignore[arg-type]
        layer.eval()
        assert torch.equal(layer(x)[0], layer(x)[0])
        layer.train()
        assert not torch.equal(layer(x)[0], layer(x)[0])


def test_shape_dtype_and_counts() -> None:
    layer = MoE(M, nn.Linear(M, M), num_local_experts=E).to(torch.bfloat16)
    output, l_aux, counts = layer(torch.randn(2, 3, 5, M, dtype=torch.bfloat16))
    assert (output.shape, output.dtype) == ((2, 3, 5, M), torch.bfloat16)
    assert (l_aux.shape, l_aux.dtype) == ((), torch.float32)
    assert (counts.shape, counts.device.type) == ((E,), "cpu")
    assert all(parameter.expert for parameter in layer.bagua_moe.experts.parameters())  # type: ignore[union-attr]
    assert not hasattr(layer.bagua_moe.gate.wg.weight, "expert")  # type: ignore[union-attr]


def test_no_tokens() -> None:
    output, l_aux, counts = MoE(M, nn.Linear(M, M), num_local_experts=2, min_capacity=0)(torch.randn(0, M))
    assert (output.shape, l_aux.item(), counts.tolist()) == ((0, M), 0, [0, 0])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"k": 3}, "k=3"),
        ({"k": 2}, "there is 1 expert"),
        ({"noisy_gate_policy": "jitter"}, "'jitter'"),
        ({"num_local_experts": 0}, "num_local_experts=0"),
        ({"capacity_factor": 0}, "capacity_factor=0"),
        ({"min_capacity": -1}, "min_capacity=-1"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        MoE(M, nn.Linear(M, M), **options)


def test_shapes_are_checked() -> None:
    layer = MoE(M, nn.Linear(M, M))
    with pytest.raises(ValueError, match=r"shape \(5, 2\), must end in 3"):
        layer(torch.randn(5, 2))
    with pytest.raises(ValueError, match=r"used_token has the shape \(4,\), must be \(5,\)"):
        layer(torch.randn(5, M), torch.ones(4))
