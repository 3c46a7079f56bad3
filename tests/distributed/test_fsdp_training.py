"""Models under FSDP2 whose communication Bagua compresses, next to the same models without: what FSDP2 offers works on,
and gradients and weights are where the codec's error allows. What is frozen, compiled or accumulated:
test_sharded_programs.py."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.sharded import Tied, check_near, gradients_of, layers, shard, train_sharded, twins, weights_of, whole
from support.sweeps import rest_is_deep
from support.training import batches, begin, check_tensor_on_ranks, loss_of
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from bagua.codecs import codec_names
from bagua.fsdp import compress_communication

# Of the largest gradient of the model, what a codec may take: half a level, on blocks that may be as wide as from
# -largest to largest, before weights differ.
SHARE = {"int8": 1 / 250, "int4": 1 / 7, "fp8_e4m3": 1 / 14, "bf16": 1 / 250}


def _one_step(ours: Any, plain: Any, device: torch.device, what: str, share: float = SHARE["int8"]) -> None:
    batch = batches(dist.get_rank(), 1, device)[0]
    for model in (ours, plain):
        loss_of(model, batch).backward()
    check_near(gradients_of(ours), gradients_of(plain), share, what)


def _codecs(device: torch.device) -> None:
    for name in codec_names():
        ours, plain = twins(device)
        handle = compress_communication(ours, name)
        _one_step(ours, plain, device, name, SHARE[name])
        assert handle.statistics["gradients"]["sent"] > 0
        assert handle.statistics["weights"] == {"sent": 0, "saved": 0}
        ours, plain = twins(device)
        compress_communication(ours, None, weights=name)
        # Every weight may be off, and each changes all gradients below: no bound, but the same on all ranks.
        _one_step(ours, plain, device, f"weights {name}", 0.5)
        check_near(weights_of(ours), weights_of(plain), 0, f"shards {name}")


def _mixed_precision(device: torch.device) -> None:
    for policy in (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        MixedPrecisionPolicy(param_dtype=torch.float16),
    ):
        for feedback in (False, True):
            ours, plain = twins(device, mp_policy=policy)
            compress_communication(ours, error_feedback=feedback)
            _one_step(ours, plain, device, str(policy), 4 * SHARE["int8"])
        ours, plain = twins(device, mp_policy=policy)
        compress_communication(ours, None, weights="int8")
        _one_step(ours, plain, device, f"weights {policy}", 0.1)


def _divide_factor(device: torch.device) -> None:
    """PREMUL_SUM, which gloo does not have."""
    ours, plain = twins(device)
    compress_communication(ours)
    for module in ours.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(3.0)
    batch = batches(dist.get_rank(), 1, device)[0]
    for model in (ours, plain):
        loss_of(model, batch).backward()
    expected = {name: one * dist.get_world_size() / 3 for name, one in gradients_of(plain).items()}
    check_near(gradients_of(ours), expected, SHARE["int8"], "divide factor")


def _frozen_in_turn(device: torch.device) -> None:
    """What one layer is owed is not given to another of its size. Frozen for good, error feedback goes on."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)), nn.Linear(2, 4))

    def train(net: Any, position: int) -> dict[str, torch.Tensor]:
        for number in range(2):
            net[0][number].requires_grad_(number == position)
        net.zero_grad()
        loss_of(net, batch).backward()
        return gradients_of(net)

    batch = batches(dist.get_rank(), 1, device)[0]
    with_feedback, without = twins(device, make)
    handle = compress_communication(with_feedback, "int4", error_feedback=True)
    compress_communication(without, "int4")
    first, second = (train(with_feedback, 0)["0.0.weight"] for _ in range(2))
    assert not torch.equal(first, second), "what was rounded off comes later"
    with pytest.warns(RuntimeWarning, match="'0' are of other parameters than in the last step"):
        other = train(with_feedback, 1)["0.1.weight"]
    assert torch.equal(other, train(without, 1)["0.1.weight"])
    # A state does not say whose it is: it is used with the parameters that are trained when it was loaded.
    handle.load_state_dict(handle.state_dict())
    assert not torch.equal(train(with_feedback, 1)["0.1.weight"], other)


def _shared(device: torch.device) -> None:
    ours, plain = twins(device, Tied)
    compress_communication(ours)
    _one_step(ours, plain, device, "shared")
    assert ours.head.weight is ours.embedding.weight


def _separate_group(device: torch.device) -> None:
    ours, plain = twins(device)
    if hasattr(ours, "set_separate_reduce_scatter_group"):
        compress_communication(ours)
        ours.set_separate_reduce_scatter_group()
        _one_step(ours, plain, device, "separate group")


def _offloaded(device: torch.device) -> None:
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    torch.manual_seed(5)
    ours, plain = (shard(copy.deepcopy(layers()).cpu(), device, offload_policy=policy) for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    compress_communication(ours)
    _one_step(ours, plain, device, "offloaded")


def _resharded(device: torch.device) -> None:
    for kept in (False, 2):
        if kept and dist.get_world_size() != 4:
            continue
        ours, plain = twins(device, reshard_after_forward=kept)
        compress_communication(ours)
        _one_step(ours, plain, device, f"reshard_after_forward {kept}")
        if kept:
            # Backward gathers from two ranks what forward has rounded, and must not round it again.
            ours, _ = twins(device, reshard_after_forward=kept)
            compress_communication(ours, None, weights="int8")
            third, _ = twins(device, reshard_after_forward=True)
            compress_communication(third, None, weights="int8")
            _one_step(ours, third, device, "weights of fewer ranks", 0)


def _prefetched(device: torch.device) -> None:
    ours, plain = twins(device)
    compress_communication(ours, weights="int8")
    twin, _ = twins(device)
    compress_communication(twin, weights="int8")
    for module in ours.modules():
        if hasattr(module, "unshard"):
            module.unshard(async_op=True)
    _one_step(ours, twin, device, "prefetched", 0)
    del plain


def _differences_of_nothing(device: torch.device) -> None:
    """They begin with exact weights, and of weights that stay they are zero."""
    ours, plain = twins(device, reshard_after_forward=False)
    options: dict[str, Any] = {"weights": "int8", "exact_weights_every": 3, "weight_differences": True}
    handle = compress_communication(ours, None, **options)
    for x, _ in batches(7, 7, device):
        outputs = [model(x) for model in (ours, plain)]
        for model, one in zip((ours, plain), outputs, strict=True):
            one.square().mean().backward()
            model.zero_grad()
        assert torch.equal(*outputs)
    assert handle.statistics["weights"]["saved"] > 0


def _differences(device: torch.device) -> None:
    """Of weights that move little, differences are nearer to them than weights that are rounded."""
    far = []
    for differences in (True, False):
        ours, plain = twins(device, reshard_after_forward=False)
        compress_communication(ours, None, weights="int8", weight_differences=differences)
        plain.load_state_dict(ours.state_dict())
        optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)
        train_sharded(ours, [optimizer], batches(dist.get_rank(), 4, device))
        plain.load_state_dict(ours.state_dict())
        x = batches(7, 1, device)[0][0]
        mine, exact = whole(ours(x)), whole(plain(x))
        check_tensor_on_ranks(mine, "outputs")
        far.append(float((mine - exact).abs().max()))
    assert 0 < far[0] < far[1] / 20, far


def _inference(device: torch.device) -> None:
    """The weights that differences refer to may be those of a pass in inference mode."""
    ours, _ = twins(device, reshard_after_forward=False)
    compress_communication(ours, None, weights="bf16", weight_differences=True, exact_weights_every=3)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    data = batches(dist.get_rank(), 3, device)
    train_sharded(ours, [optimizer], data)
    with torch.inference_mode():
        ours(data[0][0])  # exact, as the third pass
    train_sharded(ours, [optimizer], data)


def _mixed_dtypes(device: torch.device) -> None:
    """One module gathers bytes of two dtypes: they are sent as they are, with a warning."""

    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 4))
        net.register_parameter("scale", nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False))
        net.register_parameter("shift", nn.Parameter(torch.zeros(5)))
        return net

    ours, plain = twins(device, make)
    compress_communication(ours, None, weights="int8", exact_weights_every=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model in (ours, plain):
            model(batches(7, 1, device)[0][0])
    told = [str(one.message) for one in caught if "cannot" in str(one.message)]
    assert len(told) == 1, told
    assert "bytes of several dtypes" in told[0]


CASES: dict[str, Callable[[torch.device], None]] = {
    "codecs": _codecs,
    "mixed precision": _mixed_precision,
    "divide factor": _divide_factor,
    "frozen in turn": _frozen_in_turn,
    "shared": _shared,
    "separate group": _separate_group,
    "offloaded": _offloaded,
    "resharded": _resharded,
    "prefetched": _prefetched,
    "differences of nothing": _differences_of_nothing,
    "differences": _differences,
    "inference": _inference,
    "mixed dtypes": _mixed_dtypes,
}


def _run(case: str) -> None:
    _, device = begin()
    CASES[case](device)


# Sums of four ranks are in test_fsdp_collectives.py. By default what is about groups of ranks runs on four, and in
# `make deep` all.
ON_FOUR_RANKS = ("separate group", "resharded")
PLACES = [(ranks, case) for ranks in (2, 4) for case in CASES]
BY_DEFAULT = [number for number, (ranks, case) in enumerate(PLACES) if ranks == 2 or case in ON_FOUR_RANKS]


@pytest.mark.parametrize(("ranks", "case"), rest_is_deep(PLACES, *BY_DEFAULT))
def test_compressed(ranks: int, case: str) -> None:
    run_ranks(ranks, _run, case, reuse=case != "separate group")  # torch may name it like one of an earlier test
