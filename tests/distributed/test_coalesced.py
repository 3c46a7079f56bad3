"""What draws of collectives of many tensors (test_reductions_drawn.py) do not reach."""

from __future__ import annotations

import pytest
import torch
from support.rank_tests import on_ranks

import bagua.torch_api as bagua
from bagua.collectives import coalesced
from bagua.torch_api import communication


def test_a_flat_buffer_has_as_much_as_it_may_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesced, "FLAT_BYTES", 40)
    tensors = [torch.empty(elements) for elements in (4, 6, 1, 11, 1, 10)]
    assert [[one.numel() for one in run] for run in coalesced._runs(tensors)] == [[4, 6], [1], [11], [1], [10]]


@on_ranks(2)
def test_tensors_may_come_from_an_iterator(rank: int, device: torch.device) -> None:
    model = torch.nn.Linear(2, 1).to(device)
    torch.nn.init.constant_(model.weight, rank)
    communication.broadcast_coalesced(model.parameters())
    assert all(parameter.is_leaf and parameter.grad_fn is None for parameter in model.parameters())
    total = torch.ones(2, device=device)
    communication.allreduce_coalesced_inplace(one for one in [total])
    assert [*model.weight.flatten().tolist(), *total.tolist()] == [0, 0, 2, 2]


@on_ranks(2)
def test_a_lone_tensor_and_expanded_ones_are_refused(device: torch.device) -> None:
    before = torch.ones(2, device=device)
    expanded = torch.ones(1, device=device).expand(3)
    for call in (communication.broadcast_coalesced, communication.allreduce_coalesced_inplace):
        with pytest.raises(TypeError, match=r"one tensor of shape \(2,\); give a list of them"):
            call(before)
        # On every rank, the source too, before anything is sent.
        with pytest.raises(ValueError, match=r"tensors\[1\] is expanded .*contiguous\(\)"):
            call([before, expanded])
    assert before.tolist() == [1, 1]
    bagua.barrier()
