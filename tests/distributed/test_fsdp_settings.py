"""Every setter of FSDP2 and option of fully_shard, with compressed communication and without: called before
compress_communication and after it, gradients are where the codec's error allows, or the setter is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.sharded import check_near, gradients_of, layers, param_groups, train_sharded, twins, weights_of
from support.training import batches, begin, loss_of, message_of
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from bagua.fsdp import compress_communication

_RANKS = 2
SHARE = 1 / 250  # what int8 may take of the largest gradient


def _each(model: nn.Module, name: str, *values: Any) -> None:
    """Calls the setter of every sharded module."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            getattr(module, name)(*values)


def _event() -> Any:
    event = torch.cuda.Event()
    event.record()
    return event


# Of the root alone, or of each module; what has the setter's name is not in every version of torch.
SETTERS: dict[str, Callable[[Any], object]] = {
    "set_reduce_scatter_unused_params": lambda model: model.set_reduce_scatter_unused_params(True),
    "set_reduce_scatter_max_input_buffers": lambda model: model.set_reduce_scatter_max_input_buffers(3),
    "set_separate_reduce_scatter_group": lambda model: model.set_separate_reduce_scatter_group(),
    "set_force_sum_reduction_for_comms": lambda model: _each(model, "set_force_sum_reduction_for_comms", True),
    "set_gradient_divide_factor": lambda model: _each(model, "set_gradient_divide_factor", float(_RANKS)),
    "set_unshard_in_backward": lambda model: model[0].set_unshard_in_backward(False),
    "set_reshard_after_forward": lambda model: model.set_reshard_after_forward(False),
    "set_reshard_after_backward": lambda model: model.set_reshard_after_backward(False),
    "set_modules_to_forward_prefetch": lambda model: model[0].set_modules_to_forward_prefetch([model[1], model[2]]),
    "set_modules_to_backward_prefetch": lambda model: model[2].set_modules_to_backward_prefetch([model[1], model[0]]),
    "set_requires_all_reduce": lambda model: model.set_requires_all_reduce(False),
    "set_all_reduce_hook": lambda model: _each(model, "set_all_reduce_hook", _halve),
    "set_is_last_backward": lambda model: model.set_is_last_backward(True),
    "set_post_optim_event": lambda model: model.set_post_optim_event(_event()),
}
# Not with a custom collective, says torch; before, and after by torch's own words.
ONLY_BEFORE = "set_allocate_memory_from_process_group_for_comm"
# Of all other setters it is known where they are tested, so that a torch with a new one is noticed.
ELSEWHERE = {
    "set_requires_gradient_sync",  # test_fsdp_training.py
    "set_custom_all_gather",  # here
    "set_custom_reduce_scatter",  # test_fsdp_handle.py
    "set_reduce_scatter_divide_factor",  # an old name of set_gradient_divide_factor
    "set_symm_mem_for_comm",  # of NCCL alone
    ONLY_BEFORE,
}


def _halve(reduced: Tensor) -> None:
    reduced.mul_(0.5)


def _setters() -> None:
    rank, device = begin()
    known = {name for name in dir(FSDPModule) if name.startswith("set_")}
    assert known <= set(SETTERS) | ELSEWHERE, f"new in this torch: {known - set(SETTERS) - ELSEWHERE}"
    for name, change in SETTERS.items():
        if name not in known or (name == "set_post_optim_event" and device.type == "cpu"):  # a CPU has no events
            continue
        (before, plain), (after, _) = twins(device), twins(device)
        for model in (plain, before):
            change(model)
        compress_communication(before, error_feedback=True)
        compress_communication(after)
        change(after)
        for batch in batches(rank, 2, device):
            for model in (plain, before, after):
                loss_of(model, batch).backward()
        for model in (plain, before, after):
            _each(model, "reshard")
        for what, ours in (("before", before), ("after", after)):
            check_near(gradients_of(ours), gradients_of(plain), SHARE, f"{name} {what}")


def _memory_of_the_group() -> None:
    rank, device = begin()
    ours, plain = twins(device)
    for model in (ours, plain):
        _each(model, ONLY_BEFORE, True)
    handle = compress_communication(ours, weights="int8", exact_weights_every=1)
    for model in (ours, plain):
        loss_of(model, batches(rank, 1, device)[0]).backward()
    check_near(gradients_of(ours), gradients_of(plain), SHARE, ONLY_BEFORE)
    assert "CompressedAllGather" in message_of(AssertionError, lambda: _each(ours, ONLY_BEFORE, True))
    handle.remove()
    _each(ours, ONLY_BEFORE, False)


def _options_of_fully_shard() -> None:
    rank, device = begin()

    def even() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 16), nn.GELU(), nn.Linear(16, 8), nn.Linear(8, 4))

    def by_column(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % _RANKS == 0 else None

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    for what, options in {
        "Shard(1)": {"shard_placement_fn": by_column},
        "output_dtype": {"mp_policy": policy},
    }.items():
        for weights in (None, "int8"):
            ours, plain = twins(device, even, **options)
            compress_communication(ours, weights=weights, exact_weights_every=1 if weights else None)
            for model in (ours, plain):
                loss_of(model, batches(rank, 1, device)[0]).backward()
            check_near(gradients_of(ours), gradients_of(plain), SHARE, f"{what} {weights}")

    models = []
    for _ in range(2):
        torch.manual_seed(1)
        net = layers().to(device)
        ignored = {net[0].weight, net[2].bias}
        for child in net:
            fully_shard(child, ignored_params=ignored)
        models.append(fully_shard(net, ignored_params=ignored))
    compress_communication(models[0])
    for model in models:
        loss_of(model, batches(rank, 1, device)[0]).backward()
    check_near(gradients_of(models[0]), gradients_of(models[1]), SHARE, "ignored_params")
    assert not hasattr(models[0][0].weight, "full_tensor")
    assert torch.allclose(models[0][0].weight.grad, models[1][0].weight.grad, rtol=1e-5)


def _weights_of_one_kind() -> None:
    """float64 weights go uncompressed: one warning for all modules."""
    _, device = begin()
    ours, plain = twins(device, lambda: layers().double())
    compress_communication(ours, None, weights="int8")
    with pytest.warns(RuntimeWarning, match=r"torch\.float64") as caught:
        found = [model(torch.ones(3, 2, device=device, dtype=torch.float64)) for model in (ours, plain)]
    assert torch.equal(*found)
    assert len([one for one in caught if "float64" in str(one.message)]) == 1


def _later_changes() -> None:
    rank, device = begin()
    ours, _ = twins(device, reshard_after_forward=False)
    handle = compress_communication(ours, weights="int8", weight_differences=True)
    train_sharded(ours, [torch.optim.SGD(ours.parameters(), lr=0.1)], batches(rank, 1, device))
    ours.set_reshard_after_forward(True)
    told = message_of(RuntimeError, lambda: ours(batches(rank, 1, device)[0][0]))
    assert "set_reshard_after_forward(True)" in told
    ours.set_reshard_after_forward(False)
    ours(batches(rank, 1, device)[0][0])
    handle.remove()

    # A custom all-gather that is set later stays: the module's weights are exact then.
    ours, plain = twins(device)
    handle = compress_communication(ours, None, weights="int4")
    default = param_groups(plain)[0]._all_gather_comm
    _each(ours, "set_custom_all_gather", default)
    for model in (ours, plain):
        loss_of(model, batches(rank, 1, device)[0]).backward()
    check_near(gradients_of(ours), gradients_of(plain), 0, "custom all-gather")
    check_near(weights_of(ours), weights_of(plain), 0, "custom all-gather")


CASES: tuple[Callable[[], None], ...] = (
    _setters,
    _memory_of_the_group,
    _options_of_fully_shard,
    _weights_of_one_kind,
    _later_changes,
)


@pytest.mark.parametrize("case", CASES)
def test_settings_of_fsdp(case: Callable[[], None]) -> None:
    # torch may name the separate group like one of an earlier test.
    run_ranks(_RANKS, case, timeout=120, reuse=case is not _setters)
