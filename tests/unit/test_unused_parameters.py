"""The agreement on what a backward pass has reached, without a group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua.engine import unused_parameters
from bagua.engine.unused_parameters import Presence, agree_on_presence

COMMUNICATOR: Any = SimpleNamespace(torch_group=object())
CPU = torch.device("cpu")


def test_who_has_reached_all_parameters_takes_part_and_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either copy, to the GPU and back, would keep the host until all that is queued there is done."""
    calls: list[object] = []
    monkeypatch.setattr(unused_parameters, "in_order", lambda group, *_: calls.append(group))
    made = torch.full((3,), 2, dtype=torch.int32).as_subclass(_Unread)
    monkeypatch.setattr(torch, "full", lambda *_, **__: made)
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("copied to the device"))
    assert agree_on_presence([Presence.USED] * 3, COMMUNICATOR, CPU) == [Presence.USED] * 3
    assert len(calls) == 1


class _Unread(torch.Tensor):
    def tolist(self) -> Any:
        pytest.fail("copied from the device")


def test_others_win_over_what_this_rank_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_ranks(tensor: torch.Tensor, *_: object, **__: object) -> None:
        tensor[1] = int(Presence.USED)

    monkeypatch.setattr("torch.distributed.all_reduce", other_ranks)
    monkeypatch.setattr(unused_parameters, "in_order", lambda _group, _device, job: job())
    found = agree_on_presence([Presence.USED, Presence.ABSENT, Presence.KEPT], COMMUNICATOR, CPU)
    assert found == [Presence.USED, Presence.USED, Presence.KEPT]
