"""The hook error_feedback_bytegrad: its formula, what it owes, and how that is saved, copied and resumed."""

from __future__ import annotations

import copy
import io
import itertools
import os
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.byte_reference import of_all_ranks, rounded
from support.hooked_ddp import hooked
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import (
    NODES_OF_TWO_AND_ONE,
    Batch,
    batches,
    begin,
    loss_of,
    message_of,
    mlp,
    torch_ddp,
)
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import bagua.torch_api as bagua_torch
from bagua.comm_hooks import (
    ByteGradState,
    ErrorFeedbackState,
    bytegrad,
    error_feedback_bytegrad,
)

SGD = {"lr": 0.3, "momentum": 0.9}


def finite(owed: Tensor) -> Tensor:
    """What is not is forgotten."""
    return torch.where(owed.isfinite(), owed, 0.0)


class _FeedbackReference:
    """e and d of all ranks, in plain torch."""

    def __init__(self, ranks: int, elements: int, average: bool) -> None:
        self.ranks, self.average, self.elements = ranks, average, elements
        length = elements + -elements % (32 * ranks)
        self.owed = [torch.zeros(length) for _ in range(ranks)]
        self.owners = [torch.zeros(length // ranks) for _ in range(ranks)]

    def step(self, flats: Sequence[Tensor]) -> Tensor:
        sent = []
        for rank, flat in enumerate(flats):
            self.owed[rank][: self.elements] += flat
            sent.append(torch.cat([rounded(chunk) for chunk in self.owed[rank].chunk(self.ranks)]))
            self.owed[rank] = finite(self.owed[rank] - sent[rank])
        result = []
        for rank, owner in enumerate(self.owners):
            total = owner * self.ranks if self.average else owner.clone()
            for one in sent:
                total += one.chunk(self.ranks)[rank]
            if self.average:
                total *= torch.tensor(1.0 / self.ranks)
            result.append(rounded(total))
            owner.copy_(finite(total - result[-1]))
        return torch.cat(result)[: self.elements].to(flats[0].dtype)


@pytest.mark.parametrize("ranks", [1, 3])
@on_ranks()
def test_error_feedback_is_its_formula(rank: int, device: torch.device) -> None:
    for average, dtype in itertools.product((True, False), (torch.float32, torch.bfloat16)):
        net = nn.Linear(70, 30).to(device, dtype)
        model, recorder = hooked(net, ErrorFeedbackState(average=average), error_feedback_bytegrad)
        for step, (x, _) in enumerate(batches(rank, 8, device, (4, 70))):
            net.zero_grad()
            (model(x.to(dtype)).square().mean() * (torch.inf if (step, rank) == (4, 0) else 1.0)).backward()
            if step < 2:  # DDP makes new buckets after the first step: what was owed is forgotten
                reference = _FeedbackReference(dist.get_world_size(), 70 * 30 + 30, average)
            for before, after in recorder.taken():
                result = reference.step(of_all_ranks(before))
                assert torch.equal(after.cpu().nan_to_num(), result.nan_to_num()), (average, dtype, step)
                assert after.isnan().any() == result.isnan().any() == (step == 4)


@on_ranks(2)
def test_what_is_owed_follows_the_scale_of_the_loss(rank: int, device: torch.device) -> None:
    """Powers of two change no digit. The state is saved and loaded between two scales."""
    for dtype in (torch.float32, torch.float16):
        found = []
        for scales in ((256.0,) * 6, (256.0, 256.0, 128.0, 64.0, 64.0, 512.0)):
            scaler = torch.amp.GradScaler(device.type)
            scaler.scale(torch.ones((), device=device))
            saved: dict[str, Any] = {"buckets": {}}
            gradients = []
            for scale in scales:
                if len(gradients) in (0, 3):
                    torch.manual_seed(0)
                    net = nn.Linear(70, 30, bias=False).to(device, dtype)
                    model = torch_ddp(net)
                    state = ErrorFeedbackState(codec="int4", grad_scaler=scaler)
                    state.load_state_dict(saved)
                    model.register_comm_hook(state, error_feedback_bytegrad)
                scaler.update(scale)
                net.zero_grad()
                x = torch.randn(4, 70, generator=torch.Generator().manual_seed(rank)).to(device, dtype)
                scaler.scale(model(x).float().square().mean()).backward()
                gradients.append(net.weight.grad.float() / scale)
                saved = copy.deepcopy(state.state_dict())
            assert all(owed["residual"].any() for owed in saved["buckets"].values())
            found.append(torch.stack(gradients))
        assert torch.equal(*found), dtype


def _resumed(hierarchical: bool) -> None:
    rank, device = begin()
    data = batches(rank, 8, device)

    def started() -> tuple[nn.Module, Any, torch.optim.Optimizer, ErrorFeedbackState]:
        net = mlp(0, device)
        model = torch_ddp(net)
        state = ErrorFeedbackState(hierarchical=hierarchical)
        model.register_comm_hook(state, error_feedback_bytegrad)
        return net, model, torch.optim.SGD(net.parameters(), **SGD), state

    def steps(model: Any, optimizer: torch.optim.Optimizer, data: Sequence[Batch]) -> None:
        for batch in data:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()

    net, model, optimizer, state = started()
    steps(model, optimizer, data[:4])
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), state.state_dict()))
    steps(model, optimizer, data[4:])
    owes = [one["residual"] for one in saved[2]["buckets"].values()]
    assert all((one is not None) == (not hierarchical or os.environ["LOCAL_RANK"] == "0") for one in owes)

    # DDP's first pass has the parameters of a bucket in another order than all others: here it is made.
    outcomes = []
    for loads in (True, False):
        again, model, optimizer, state = started()
        loss_of(model, data[0]).backward()
        again.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        if loads:
            state.load_state_dict(saved[2])
        else:
            state.load_state_dict({"buckets": {}})
        steps(model, optimizer, data[4:])
        outcomes.append(
            [torch.equal(one, other) for one, other in zip(net.parameters(), again.parameters(), strict=True)]
        )
    assert all(outcomes[0]), outcomes
    assert not all(outcomes[1]), "the state makes no difference"


def test_a_run_is_resumed_bit_for_bit_with_the_state() -> None:
    run_ranks(2, _resumed, False)
    run_ranks(3, _resumed, True, env=NODES_OF_TWO_AND_ONE)


@on_ranks(2)
def test_states_are_copied_and_pickled(rank: int, device: torch.device) -> None:
    """As torch's PowerSGDState: with a model (AveragedModel), alone, and by pickle."""
    group = bagua_torch.communication.new_group([rank])
    data = batches(rank, 8, device)
    for how in ("deepcopy", "pickle"):
        results = []
        for copies in (False, True):
            net = mlp(0, device)
            model = torch_ddp(net)
            state = ErrorFeedbackState(average=False)
            model.register_comm_hook(state, error_feedback_bytegrad)
            for batch in data[:4]:
                model.zero_grad()
                loss_of(model, batch).backward()
            if copies:
                AveragedModel(model)
                duplicate = copy.deepcopy(state) if how == "deepcopy" else pickle.loads(pickle.dumps(state))
                assert not duplicate.average
                loss_of(model, data[4]).backward()  # which the copy does not see
                state = duplicate
            results.append({index: one["residual"].clone() for index, one in state.state_dict()["buckets"].items()})
        assert all(torch.equal(one, other) for one, other in zip(results[0].values(), results[1].values(), strict=True))
    # A group of its own stays that of a copy, and is missed in a pickle.
    mine = ByteGradState(group, hierarchical=True)
    assert copy.deepcopy(mine).process_group is group
    assert copy.deepcopy(mine).hierarchical
    assert f"ranks [{rank}] now has the default group" in message_of(
        UserWarning, lambda: pickle.loads(pickle.dumps(mine))
    )
    file = io.BytesIO()
    torch.save(ByteGradState(average=False), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded.process_group = group.torch_group  # set by hand, as torch's
    model = torch_ddp(mlp(0, device))
    model.register_comm_hook(loaded, bytegrad)
    loss_of(model, data[0]).backward()


@on_ranks(2)
def test_a_state_of_another_model_is_refused(rank: int, device: torch.device) -> None:
    state = ErrorFeedbackState()
    model = torch_ddp(nn.Linear(4, 4).to(device))
    model.register_comm_hook(state, error_feedback_bytegrad)
    for batch in batches(rank, 2, device, (4, 4)):
        loss_of(model, batch).backward()
    fresh = ErrorFeedbackState()
    fresh.load_state_dict(state.state_dict())
    assert fresh.state_dict() == state.state_dict(), "what was loaded is saved, though no step was made"
    other = torch_ddp(nn.Linear(5, 4).to(device))
    other.register_comm_hook(fresh, error_feedback_bytegrad)
    data = batches(rank, 2, device, (4, 5))
    loss_of(other, data[0]).backward()
    message_of(ValueError, loss_of(other, data[1]).backward, "is of other buckets")
    message_of(ValueError, lambda: fresh.load_state_dict({"residual": 1}))
    # Each rank owes something else. Earlier versions did not say whose a state is; where nothing is owed, all agree.
    told = message_of(ValueError, lambda: fresh.load_state_dict({**state.state_dict(), "rank": 1 - rank}))
    assert f"that of rank {1 - rank} of 2, and this is rank {rank} of 2" in told
    fresh.load_state_dict({"buckets": state.state_dict()["buckets"]})
    fresh.load_state_dict({"rank": 1 - rank, "buckets": {}})
