"""What the scheduler makes CUDA streams wait for, with stand-ins for streams: tensors lie on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua.collectives import process_group
from bagua.collectives.process_group import BaguaProcessGroup


def test_the_stream_of_a_group_is_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device, priority: SimpleNamespace(device=device, priority=priority)
    )
    one, other = torch.device("cuda", 1), torch.device("cuda", 0)
    group = BaguaProcessGroup(None, [0])
    assert group.stream_on(one) is group.stream_on(one) is group.stream
    assert group.stream_on(other) is group.stream_on(other)
    for device in (one, other):
        stream: Any = group.stream_on(device)
        assert (stream.device, stream.priority) == (device, process_group.STREAM_PRIORITY)
    given: Any = SimpleNamespace(device=one)
    group = BaguaProcessGroup(None, [0], given)
    assert group.stream_on(one) is given
    assert group.stream_on(other).device == other
