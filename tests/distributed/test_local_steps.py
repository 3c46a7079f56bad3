"""local_sgd, diloco and streaming_diloco: codecs, states, what counts as a step, and what they refuse. What is
exchanged, and when: test_weight_exchanges.py and test_step_programs.py."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.local_steps import RATE, batch, loss_of, make_step, model_of
from support.logged import told_of
from support.rank_tests import on_ranks
from support.training import message_of
from torch import Tensor, nn

import bagua.torch_api as bagua
import bagua.torch_api.communication as communication
from bagua.codecs import codec_names
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.fragments import split
from bagua.torch_api.data_parallel import DistributedDataParallel
from bagua.torch_api.wrap_summary import summary


def are_equal(*tensors: Tensor) -> bool:
    """Whether all ranks have the same bits."""
    found: list[Any] = [None] * bagua.get_world_size()
    dist.all_gather_object(found, [tensor.detach().cpu().tolist() for tensor in tensors])
    return all(one == found[0] for one in found)


def outer_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def trained(rank: int, device: torch.device, name: str, options: dict[str, Any]) -> tuple[Any, torch.optim.Optimizer]:
    model = model_of(rank).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return bagua.with_bagua(model, [optimizer], Algorithm.init(name, **options)), optimizer


@on_ranks(2, fresh=True)
def test_differences_are_compressed_by_any_codec(rank: int, device: torch.device) -> None:
    """What a codec rounds off is at most its error bound of the differences, twice: sent, and sent on."""
    for codec in codec_names():
        plain, optimizer = trained(rank, device, "streaming_diloco", {"sync_every": 2, "fragments": 1})
        options = {"sync_every": 2, "fragments": 1, "codec": codec}
        rounded, other = trained(rank, device, "streaming_diloco", options)
        for number in range(2):
            make_step(plain, [optimizer], number, rank)
            make_step(rounded, [other], number, rank)
        assert are_equal(*rounded.parameters()), codec
        start = model_of(0)
        moved = max(
            (a.cpu() - b).abs().max().item() for a, b in zip(plain.parameters(), start.parameters(), strict=True)
        )
        gaps = [(a - b).abs().max().item() for a, b in zip(plain.parameters(), rounded.parameters(), strict=True)]
        assert 0 < max(gaps) < 0.35 * moved, f"{codec}: {max(gaps)} of {moved}"


@on_ranks(2, fresh=True)
def test_steps_without_a_step_of_the_optimizer(rank: int, device: torch.device) -> None:
    # What the outer optimizer makes in inference mode, it can change later.
    model, optimizer = trained(rank, device, "diloco", {"sync_every": 1})
    for number in range(4):
        loss_of(model, batch(number, rank).to(device)).backward()
        with torch.inference_mode():
            model(batch(number, rank).to(device))
        make_step(model, [optimizer], number, rank)
        assert model.bagua_algorithm.rounds == 2 * number + 2

    # Who accumulates gradients without no_sync is told; a GradScaler that skips some steps is not meant.
    def train(passes: int, steps: int) -> None:
        for number in range(steps):
            for _ in range(passes):
                loss_of(model, batch(number, rank).to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()

    for lines, passes in ((1, 2), (0, 1)):
        model, optimizer = trained(rank, device, "local_sgd", {"sync_every": 40})
        train(20, 1)
        found = told_of(functools.partial(train, passes, 40))
        assert len(found) == (lines if rank == 0 else 0)
        assert all("After 34 of the first 50 backward passes" in line and "no_sync()" in line for line in found), found

    # Nor are two optimizers that step in turn, as in a GAN.
    alternating = model_of(rank).to(device)
    first, *rest = alternating.parameters()
    optimizers = [torch.optim.SGD([first], lr=RATE), torch.optim.SGD(rest, lr=RATE)]
    bagua.with_bagua(alternating, optimizers, Algorithm.init("local_sgd", sync_every=40))

    def alternate() -> None:
        for number in range(60):
            loss_of(alternating, batch(number, rank).to(device)).backward()
            optimizers[number % 2].step()
            alternating.zero_grad()

    assert told_of(alternate) == []


@on_ranks(2, fresh=True)
def test_steps_states_and_refusals(rank: int, device: torch.device) -> None:
    """A rank that makes no step, as a GradScaler may decide, and one that trains in passes, count as their peers do."""
    model, optimizer = trained(rank, device, "local_sgd", {"sync_every": 2})
    for number in range(6):
        optimizer.zero_grad()
        with model.bagua_ddp.no_sync():
            loss_of(model, batch(100 + number, rank).to(device)).backward()
        loss_of(model, batch(number, rank).to(device)).backward()
        if not (rank == 1 and number in (1, 2)):
            optimizer.step()
    # The step that one rank skipped at the end of the first round is made by its next forward pass.
    assert model.bagua_algorithm.rounds == 3
    assert are_equal(*model.parameters())

    whole, _ = trained(rank, device, "streaming_diloco", {"sync_every": 6})
    fewer, _ = trained(rank, device, "streaming_diloco", {"sync_every": 4, "fragments": 1})
    saved = whole.bagua_ddp.state_dict()
    message = message_of(ValueError, lambda: fewer.bagua_ddp.load_state_dict(saved))
    assert "another number of fragments" in message
    assert "number 4: torch.float32 [5] in group 1 in the state, torch.float32 [5] in group 0 here" in message

    # With another sync_every, the round goes on, and ends when it has as many steps, or at once if it has them already.
    for interval, last in ((2, 4), (4, 4), (9, 8)):
        whole, optimizer = trained(rank, device, "local_sgd", {"sync_every": 6})
        for number in range(4):
            make_step(whole, [optimizer], number, rank)
        resumed, other = trained(rank + 7, device, "local_sgd", {"sync_every": interval})
        alone = copy.deepcopy(whole)
        its_optimizer = torch.optim.SGD(alone.parameters(), lr=RATE)
        resumed.load_state_dict(whole.state_dict())
        resumed.bagua_ddp.load_state_dict(whole.bagua_ddp.state_dict())
        for number in range(4, last + 1):
            make_step(resumed, [other], number, rank)
            make_step(alone, [its_optimizer], number, rank)
        for mine, own in zip(resumed.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(own.data)
            assert torch.allclose(mine, own / 2, atol=1e-6), f"from 6 to {interval}"

    # Options of the outer optimizer may change, on all ranks in the same round.
    model, optimizer = trained(rank, device, "diloco", {"sync_every": 2})
    for fragment in model.bagua_algorithm._fragments:
        fragment.outer_optimizer.param_groups[0]["lr"] = 0.5
    make_step(model, [optimizer], 6, rank)
    make_step(model, [optimizer], 7, rank)
    assert are_equal(*model.parameters())

    # A rank in another round is named.
    model, optimizer = trained(rank, device, "local_sgd", {"sync_every": 1})
    model.bagua_algorithm.rounds = rank
    message = message_of(RuntimeError, lambda: make_step(model, [optimizer], 0, rank))
    assert "different rounds (rank 0: 1, rank 1: 2)" in message

    # So are outer optimizers that differ, before weights are mixed.
    def outer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=(0.7, 0.1)[rank])

    model = model_of(rank).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    different = Algorithm.init("diloco", sync_every=1, outer_optimizer=outer)
    bagua.with_bagua(model, [optimizer], different, process_group=communication.new_group([0, 1]))
    message = message_of(RuntimeError, lambda: make_step(model, [optimizer], 0, rank))
    assert f"outer optimizers of ranks [{1 - rank}] have another class or other options" in message
    assert f"SGD with [{{'lr': {(0.7, 0.1)[rank]}" in message

    # By the name that users write.
    model = model_of(0).to(device)
    optimizers = [torch.optim.SGD(model.parameters(), lr=RATE)]
    wrapper = DistributedDataParallel(model, optimizers=optimizers, algorithm=Algorithm.init("diloco", sync_every=2))
    assert message_of(NotImplementedError, wrapper.join).startswith("join: diloco communicates something else")
    assert "diloco over 2 ranks" in summary(wrapper.inner)
    bad = {"train_step_counter": 0, "algorithm": {}}
    assert "; diloco needs [" in message_of(ValueError, lambda: wrapper.inner.load_state_dict(bad))

    model = model_of(0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    rising = Algorithm.init("diloco", sync_every=1, outer_optimizer=outer_adam, momentum_rounds=2)
    assert "the outer optimizer, Adam, has no option 'momentum'" in message_of(
        ValueError, lambda: bagua.with_bagua(model, [optimizer], rising)
    )
    level = Algorithm.init("diloco", sync_every=1, outer_optimizer=outer, momentum_rounds=2)
    assert "momentum_rounds=2 has no effect, because the outer optimizer's momentum is 0" in message_of(
        ValueError, lambda: bagua.with_bagua(model, [optimizer], level)
    )
    many = Algorithm.init("streaming_diloco", sync_every=100, fragments=10)
    assert "fragments=10, but the model has 6" in message_of(
        ValueError, lambda: bagua.with_bagua(model, [optimizer], many)
    )


@on_ranks(2)
def test_states_of_other_outer_optimizers(rank: int, device: torch.device) -> None:
    def after(steps: int, name: str = "diloco", sync_every: int = 1, **options: Any) -> Any:
        model, optimizer = trained(rank, device, name, {"sync_every": sync_every, **options})
        for number in range(steps):
            make_step(model, [optimizer], number, rank)
        return copy.deepcopy(model.bagua_ddp.state_dict())

    def resume(state: Any, steps: int = 1, name: str = "diloco", sync_every: int = 1, **options: Any) -> list[Any]:
        model, optimizer = trained(rank, device, name, {"sync_every": sync_every, **options})
        model.bagua_ddp.load_state_dict(copy.deepcopy(state))
        for number in range(steps):
            make_step(model, [optimizer], number, rank)
        return [one.outer_optimizer.param_groups[0] for one in model.bagua_algorithm._fragments]

    def refused(state: Any, **options: Any) -> str:
        return message_of(ValueError, lambda: resume(state, **options))

    plain, adam = after(2), after(2, outer_optimizer=outer_adam)
    for state, options, told in (
        (adam, {}, "is Adam, and here it is SGD"),
        (plain, {"outer_optimizer": outer_adam}, "is SGD, and here it is Adam"),
        (after(2, "local_sgd"), {}, "is none, and here it is SGD"),
    ):
        message = refused(state, **options)
        assert f"The outer optimizer of the state {told}." in message
        assert "average_replicas=True" in message
    # Options are those of the state, as torch's are; before the first round there is nothing to go on with.
    other = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5)
    assert resume(plain, outer_optimizer=other)[0]["lr"] == 0.7
    warming = after(2, warmup_steps=3)
    assert len(resume(warming, 3, warmup_steps=3, outer_optimizer=outer_adam)) == 1

    # Where the momentum still rises, it goes on to rise.
    rising, risen = (after(steps, momentum_rounds=4) for steps in (2, 4))
    for rounds in (0, 3, 8):
        message = refused(rising, momentum_rounds=rounds)
        assert f"momentum_rounds=4 when 2 rounds were over, and here it is {rounds}" in message
        assert f"It can be changed once {max(rounds, 4)} rounds are over." in message
    assert "once 3 rounds" in refused(plain, momentum_rounds=3)
    assert resume(rising, momentum_rounds=4)[0]["momentum"] == 0.9 * 3 / 4
    assert resume(rising, 2, momentum_rounds=4)[0]["momentum"] == 0.9
    for rounds in (0, 3, 4):
        assert resume(risen, momentum_rounds=rounds)[0]["momentum"] == 0.9
    assert "once 8 rounds" in refused(risen, momentum_rounds=8)
    # Each fragment has rounds of its own.
    streaming: dict[str, Any] = {"name": "streaming_diloco", "sync_every": 2}
    assert "when 3 rounds were over" in refused(after(7, momentum_rounds=4, **streaming), **streaming)
    found = resume(after(8, momentum_rounds=4, **streaming), 2, **streaming)
    assert [one["momentum"] for one in found] == [0.9, 0.9]

    # Options are kept where fragments are made anew, as the outer optimizer's state is.
    for name, options in (("diloco", {"sync_every": 1}), ("streaming_diloco", {"sync_every": 2, "momentum_rounds": 9})):
        model, optimizer = trained(rank, device, name, options)
        for number in range(6):
            if number == 2:
                for one in model.bagua_algorithm._fragments:
                    one.outer_optimizer.param_groups[0]["lr"] = 0.5
            if number == 3:
                model.bagua_ddp.rebuild_buckets()
            make_step(model, [optimizer], number, rank)
        groups = [one.outer_optimizer.param_groups[0] for one in model.bagua_algorithm._fragments]
        assert [group["lr"] for group in groups] == [0.5] * len(groups)
        assert [group["momentum"] for group in groups] == [0.9] if name == "diloco" else [0.9 * 3 / 9] * 2

    # Earlier versions did not save what is compared; the momentum does not stay where it was.
    for state in (rising, risen):
        del state["algorithm"]["outer_classes"], state["algorithm"]["momentum_rounds"]
    assert resume(rising, momentum_rounds=4)[0]["momentum"] == 0.9 * 3 / 4
    assert resume(rising)[0]["momentum"] == 0.9
    # A momentum that is changed after that is kept.
    group = resume(risen, 2, momentum_rounds=4)[0]
    assert group["momentum"] == 0.9
    model, optimizer = trained(rank, device, "diloco", {"sync_every": 1, "momentum_rounds": 2})
    for number in range(4):
        make_step(model, [optimizer], number, rank)
        if number == 1:
            model.bagua_algorithm._fragments[0].outer_optimizer.param_groups[0]["momentum"] = 0.5
    assert model.bagua_algorithm._fragments[0].outer_optimizer.param_groups[0]["momentum"] == 0.5


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("local_sgd", {"sync_every": 0}, "sync_every=0: must be a whole number of at least 1"),
        ("diloco", {"sync_every": 1.5}, "sync_every=1.5"),
        ("streaming_diloco", {"sync_every": 5}, "not a multiple of fragments=2; use 4 or 6"),
        (
            "streaming_diloco",
            {"sync_every": 4, "delay": 2},
            "delay=2 is too long: it must be less than sync_every / fragments, which is 2",
        ),
        ("streaming_diloco", {"sync_every": 4, "alpha": 1.5}, "alpha=1.5: must be from 0 to 1"),
        ("streaming_diloco", {"sync_every": 4, "codec": "int3"}, "int3"),
        (
            "diloco",
            {"sync_every": 4, "momentum_rounds": -1},
            "momentum_rounds=-1: must be a whole number of at least 0",
        ),
    ],
)
def test_numbers_that_do_not_fit_together(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        Algorithm.init(name, **options)


def test_an_outer_optimizer_is_a_function() -> None:
    with pytest.raises(TypeError, match="Pass a function of the parameters"):
        Algorithm.init("diloco", sync_every=2, outer_optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))


@pytest.mark.parametrize("sizes", [[1, 1, 1], [100, 1, 1], [1, 1, 100], [3, 50, 2, 2, 2, 40], [0, 0, 0, 5]])
@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_fragments_are_parts_in_order(sizes: list[int], fragments: int) -> None:
    tensors = [torch.zeros(size) for size in sizes]
    parts = split(tensors, fragments)
    assert len(parts) == fragments
    assert all(parts)
    assert [id(one) for part in parts for one in part] == [id(one) for one in tensors]
