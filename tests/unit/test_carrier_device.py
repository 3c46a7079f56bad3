"""On which device what has no tensor is carried. GPUs are named, and not used."""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua.collectives.carrier_device import carrier, gpus_of, refuse_other_gpus
from bagua.collectives.communicator import BaguaCommunicator, TorchGroupReference
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.comm_ops.async_average import AsyncModelAverage
from bagua.job import torch_internals

CPU, META = torch.device("cpu"), torch.device("meta")
GPUS = [torch.device("cuda", number) for number in range(4)]
CURRENT = GPUS[3]


class TorchGroup:
    """Of this process alone.

    Args:
        backends: by kind of device.
        bound: as `init_process_group(device_id=...)` says.
    """

    def __init__(self, backends: dict[str, str], bound: torch.device | None = None) -> None:
        self._backends = backends
        self._device_types = [torch.device(kind) for kind in backends]
        self.bound_device_id = bound

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: self._backends[device.type])


@pytest.fixture(autouse=True)
def current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CURRENT.index)


@pytest.fixture
def torch_group() -> TorchGroup:
    return TorchGroup({"cuda": "nccl"})


def communicator_of(group: Any, bound: torch.device | None = None) -> BaguaCommunicator:
    stream = lambda gpu: SimpleNamespace(device=gpu or CURRENT)  # noqa: E731
    return BaguaCommunicator(group, [0], "0", "global", stream, datetime.timedelta(seconds=1), bound)  # type: ignore[arg-type]


def tensors_on(*devices: torch.device) -> list[Any]:
    return [SimpleNamespace(device=device) for device in devices]


@pytest.mark.parametrize(
    ("served", "gpu", "bound", "expected"),
    [
        (["cpu", "cuda"], GPUS[1], GPUS[0], CPU),
        (["cpu"], None, None, CPU),
        (["cuda"], GPUS[1], None, GPUS[1]),
        (["cuda"], None, GPUS[2], GPUS[2]),
        (["cuda"], None, None, CURRENT),
        (["xpu"], None, None, torch.device("xpu")),
    ],
)
def test_the_order(
    served: list[str], gpu: torch.device | None, bound: torch.device | None, expected: torch.device
) -> None:
    assert carrier(served, gpu, bound) == expected


def test_a_communicator_for_a_module_is_on_its_gpu(torch_group: TorchGroup) -> None:
    whole = communicator_of(torch_group)
    one = whole.on(GPUS[1])
    assert (one.device, one.gpu, one.cuda_stream.device) == (GPUS[1],) * 3  # type: ignore[union-attr]
    assert (whole.device, whole.cuda_stream.device) == (CURRENT, CURRENT)  # type: ignore[union-attr]
    assert whole.on(GPUS[1]) is one
    assert one.on(GPUS[2]).device == GPUS[2]
    assert whole.on(None) is whole
    assert (one.rank(), one.ranks, one.torch_group) == (0, (0,), torch_group)


def test_it_is_aborted_with_the_others(torch_group: TorchGroup) -> None:
    for first in range(2):
        whole, follower = communicator_of(torch_group), communicator_of(torch_group)
        both = [whole, whole.on(GPUS[1])]
        both[first].add_follower(follower)
        both[1 - first].abort()
        assert all(one.check_abort() for one in (*both, follower))
        with pytest.raises(RuntimeError, match="it was aborted"):
            both[first].barrier()


@pytest.mark.parametrize(
    ("backends", "bound", "expected"),
    [
        ({"cuda": "nccl"}, GPUS[0], GPUS[0]),
        ({"cpu": "gloo", "cuda": "nccl"}, GPUS[0], GPUS[0]),
        ({"cuda": "nccl"}, None, None),
        # gloo takes tensors of every GPU.
        ({"cpu": "gloo", "cuda": "gloo"}, GPUS[0], None),
        ({"cpu": "gloo"}, GPUS[0], None),
        ({"cpu": "gloo", "cuda": "nccl"}, CPU, None),
    ],
)
def test_nccl_alone_is_bound(
    backends: dict[str, str], bound: torch.device | None, expected: torch.device | None
) -> None:
    assert torch_internals.bound_device(TorchGroup(backends, bound)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("devices", "bound", "expected"),
    [
        ([CPU], GPUS[0], GPUS[0]),
        ([META], GPUS[0], GPUS[0]),
        ([GPUS[0], CPU], GPUS[0], GPUS[0]),
        ([GPUS[1], GPUS[2]], None, GPUS[1]),
        ([CPU, GPUS[2], GPUS[1]], None, GPUS[2]),
        ([], None, CURRENT),
    ],
)
def test_modules_that_a_group_takes(
    torch_group: TorchGroup, devices: list[torch.device], bound: torch.device | None, expected: torch.device
) -> None:
    group = BaguaProcessGroup(None, [0], bound=bound)
    group._global = communicator_of(torch_group, bound)
    assert group.communicator_for("Net", tensors_on(*devices)).device == expected


@pytest.mark.parametrize("devices", [[GPUS[1]], [CPU, GPUS[1]], [GPUS[0], GPUS[1]]])
def test_a_module_on_another_gpu_than_the_bound_one_is_refused(devices: list[torch.device]) -> None:
    group = BaguaProcessGroup(None, [0], bound=GPUS[0])
    with pytest.raises(ValueError, match="bound") as raised:
        group.communicator_for("Net", tensors_on(*devices))
    assert str(raised.value).splitlines() == [
        "Net is on cuda:1, and its process group is bound to cuda:0, on which alone NCCL communicates.",
        "The group was made by init_process_group(device_id=torch.device('cuda:0')).",
        "Move it to cuda:0, pass device_id=torch.device('cuda:1'), or leave device_id out.",
    ]


def test_gpus_in_the_order_of_the_tensors() -> None:
    assert gpus_of(tensors_on(CPU, GPUS[2], META, GPUS[1], GPUS[2])) == [GPUS[2], GPUS[1]]
    refuse_other_gpus("Net", [], GPUS[0])


def test_the_stream_of_a_bound_group_is_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, _priority: SimpleNamespace(device=device or CURRENT))
    assert BaguaProcessGroup(None, [0], bound=GPUS[1]).stream.device == GPUS[1]  # type: ignore[union-attr]
    assert BaguaProcessGroup(None, [0]).stream.device == CURRENT  # type: ignore[union-attr]


def test_a_lock_waits_on_the_device_that_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a bucket on cuda:1, for a caller that does not say so."""
    waits: list[tuple[torch.device, Any]] = []
    event: Any = SimpleNamespace(device=GPUS[1])
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda device: SimpleNamespace(
            record_event=lambda: event, wait_event=lambda awaited: waits.append((device, awaited))
        ),
    )
    operation = AsyncModelAverage(SimpleNamespace(size=1), SimpleNamespace())  # type: ignore[arg-type]
    operation.lock_weight(GPUS[1])
    operation.unlock_weight(GPUS[1])
    operation.lock_weight()
    assert waits == [(GPUS[1], event)]


def test_a_group_that_torch_has_given_other_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = TorchGroup({"cpu": "gloo"})
    reference = TorchGroupReference(group, "the group")
    assert reference.get() is group
    monkeypatch.setattr(group, "size", lambda: 3)
    with pytest.raises(RuntimeError, match=r"the group has 3 ranks now. It had 1 when Bagua took it"):
        reference.get()
