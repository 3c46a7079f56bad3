"""What measure_communication says of steps that wait for their network, of those that do not, and of FSDP itself."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.sharded import check_near, gradients_of, layers, param_groups, twins, weights_of
from support.training import batches, begin, loss_of, message_of
from torch import Tensor

from bagua.fsdp import compress_communication, measure_communication
from bagua.fsdp.waits import StepWaits
from bagua.tuning.advice import most_to_gain
from bagua.tuning.sampled_steps import SAMPLE_EVERY

PAUSE_S = 0.02


class SlowReduceScatter:
    """torch's, over a network that needs PAUSE_S for it."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def allocate(self, *arguments: Any, **options: Any) -> Tensor:
        memory: Tensor = self._plain.allocate(*arguments, **options)
        return memory

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        if output_tensor.is_cuda:
            torch.cuda._sleep(int(PAUSE_S * 2e9))
        else:
            time.sleep(PAUSE_S)
        return self._plain(output_tensor=output_tensor, input_tensor=input_tensor, **options)


def _steps(models: tuple[Any, ...], rank: int, device: torch.device, number: int) -> None:
    for batch in batches(rank, number, device):
        for model in models:
            model.zero_grad()
            loss_of(model, batch).backward()
    if device.type == "cuda":
        torch.cuda.synchronize()


def _measured() -> None:
    rank, device = begin()
    told = message_of(ValueError, lambda: measure_communication(layers()))
    assert "fully_shard" in told
    ours, plain = twins(device)
    meter = measure_communication(ours)
    assert math.isnan(meter.stats().exposed_s)
    assert "not measured yet" in str(meter.stats())
    for module, group in zip(ours, param_groups(ours), strict=True):
        module.set_custom_reduce_scatter(SlowReduceScatter(group._reduce_scatter_comm))
    _steps((ours, plain), rank, device, 2 * SAMPLE_EVERY + 4)
    check_near(gradients_of(ours), gradients_of(plain), 0, "measured")
    slow = meter.stats()
    assert slow.steps == 2 * SAMPLE_EVERY + 4
    # Two steps of one kind, so that the median is of what was slow.
    assert 3 * PAUSE_S * 0.8 < slow.exposed_s < slow.step_s
    assert slow.advice.startswith(most_to_gain(slow.step_s, slow.exposed_s))
    assert f"({100 * slow.exposed_s / slow.step_s:.0f} % of the step)" in str(slow)
    # What is hidden says so: the same waits, in steps that compute for much longer.
    assert most_to_gain(slow.exposed_s * 1000, slow.exposed_s) == "communication is hidden: nothing to gain"

    # Evaluation between steps is no part of them.
    ours.eval()
    with torch.no_grad():
        ours(batches(rank, 1, device)[0][0])
    ours.train()

    # With compression and without it, and gone without a trace.
    handle = compress_communication(ours, weights="int8")
    _steps((ours,), rank, device, SAMPLE_EVERY)
    handle.remove()
    before = [dict(group.__dict__) for group in param_groups(plain)]
    other = measure_communication(plain)
    assert [group.__dict__.keys() for group in param_groups(plain)] != [one.keys() for one in before]
    other.remove()
    other.remove()
    assert [group.__dict__.keys() for group in param_groups(plain)] == [one.keys() for one in before]
    meter.remove()
    counted = meter.stats().steps
    _steps((ours, plain), rank, device, 2)
    assert meter.stats().steps == counted
    check_near(weights_of(ours), weights_of(plain), 0, "weights")


def _prefetched_and_accumulated() -> None:
    rank, device = begin()
    models = twins(device)
    meter = measure_communication(models[0])
    passes = 2 * (SAMPLE_EVERY + 2)
    for number in range(passes):
        for model in models:
            model.set_requires_gradient_sync(number % 2 == 1)
            for module in (model[0], model[1]):
                module.unshard(async_op=True)
            loss_of(model, batches(rank, 1, device)[0]).backward()
    check_near(gradients_of(models[0]), gradients_of(models[1]), 0, "accumulated")
    assert meter.stats().steps == passes // 2, "a step ends with a reduction"
    if device.type == "cuda":
        torch.cuda.synchronize()
    models[0](batches(rank, 1, device)[0][0])
    assert 0 < meter.stats().exposed_s <= meter.stats().step_s
    assert dist.get_world_size() == 2


@pytest.mark.parametrize("case", [_measured, _prefetched_and_accumulated])
def test_waits_are_measured(case: Any) -> None:
    run_ranks(2, case, timeout=120, reuse=True)


@pytest.mark.parametrize(
    ("samples", "words"), [(1, "from 1 sampled step; measure at least 24"), (2, "from 2 sampled steps;"), (3, "")]
)
def test_advice_from_few_steps_says_so(samples: int, words: str) -> None:
    for exposed_s, advice in ((0.15, "steps would be 4.00x as fast"), (0.001, "nothing to gain")):
        waits = StepWaits(8 * samples, 0.2, exposed_s, samples)
        assert advice in waits.advice
        assert words in waits.advice
        assert ("sampled" in waits.advice) == bool(words)
        assert str(waits).endswith(f"; median of {samples} sampled step{'s' * (samples > 1)}")


def test_what_could_be_gained() -> None:
    assert most_to_gain(0.2, 0.15) == "without any exposed communication, steps would be 4.00x as fast"
    assert most_to_gain(0.2, 0.001) == "communication is hidden: nothing to gain"
    assert most_to_gain(0.2, 0.2) == ""
