"""Communication begins while gradients are still being made: the order of events, no times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import batches, begin, loss_of, mlp, momentum, train, wrap_with
from torch import Tensor, nn

from bagua.torch_api.algorithms.base import AlgorithmImpl
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket


class Noting(GradientAllReduceAlgorithm):
    """Gradient all-reduce that notes what happens, in order."""

    def __init__(self, events: list[str], **options: Any) -> None:
        super().__init__(**options)
        self.events = events

    def reify(self, process_group: Any) -> AlgorithmImpl:
        return _NotingImpl(process_group, self.events, self.hierarchical)


class _NotingImpl(GradientAllReduceAlgorithmImpl):
    def __init__(self, process_group: Any, events: list[str], hierarchical: bool) -> None:
        super().__init__(process_group, hierarchical)
        self.events = events

    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        super().init_operations(bagua_ddp, bucket)
        copy_in = bucket.copy_in

        def noted() -> None:
            self.events.append(f"launch {bucket.name}")
            copy_in()

        bucket.copy_in = noted  # type: ignore[method-assign]

    def init_post_backward_hook(self, bagua_ddp: Any) -> Any:
        wait = super().init_post_backward_hook(bagua_ddp)

        def noted() -> None:
            self.events.append("end of backward")
            wait()

        return noted


def _events(how: str, hierarchical: bool) -> list[str]:
    rank, device = begin()
    net = mlp(rank, device)
    optimizer = momentum(net)
    events: list[str] = []
    model = wrap_with(how, net, [optimizer], Noting(events, hierarchical=hierarchical), bucket_cap_mb=1e-5)
    # Of parameters, before the engine's hook runs.
    for name, parameter in net.named_parameters():
        parameter.register_hook(_note(events, name))
    train(model, optimizer, batches(rank, 2, device))
    events.clear()
    loss_of(model, batches(rank, 1, device)[0]).backward()
    return events


def _note(events: list[str], name: str) -> Any:
    def hook(_: Tensor) -> None:
        events.append(name)

    return hook


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("how", ["with_bagua", "with_bagua unflattened", "wrapper"])
def test_buckets_are_launched_between_gradients(how: str, hierarchical: bool) -> None:
    env = {"BAGUA_DEFAULT_BUCKET_SIZE": "10"}
    for events in run_ranks(2, _events, how, hierarchical, env=env):
        launches = [event for event in events if event.startswith("launch")]
        assert launches == [f"launch {number}" for number in range(6)]
        layers = [event.split(".")[0] for event in events]
        # The two parameters of a layer come in either order; its buckets follow both, before the next layer's.
        assert sorted(layers[:4]) == ["4", "4", "launch 0", "launch 1"]
        assert sorted(layers[4:8]) == ["2", "2", "launch 2", "launch 3"]
        assert sorted(layers[8:12]) == ["0", "0", "launch 4", "launch 5"]
        assert events[-1] == "end of backward"
        assert events.index("launch 0") < max(events.index("0.weight"), events.index("0.bias"))


class Blocking(GradientAllReduceAlgorithm):
    """Its first bucket waits, on the communication thread, until backward has made the first layer's gradient."""

    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.gate = gate

    def reify(self, process_group: Any) -> AlgorithmImpl:
        return _BlockingImpl(process_group, self.gate)


class _BlockingImpl(GradientAllReduceAlgorithmImpl):
    def __init__(self, process_group: Any, gate: Any) -> None:
        super().__init__(process_group)
        self.gate = gate

    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        if bucket.name == "0":
            bucket.append_python_op(lambda _: self.gate())
        bucket.append_centralized_synchronous_op(group=self.process_group)


@on_ranks(2, env={"BAGUA_DEFAULT_BUCKET_SIZE": "10"})
def test_backward_goes_on_while_an_operation_blocks(rank: int, device: torch.device) -> None:
    import threading

    made = threading.Event()

    def gate() -> None:
        assert made.wait(30), "backward waited for the communication of its first bucket"

    net: Any = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4)).to(device)
    net.with_bagua([torch.optim.SGD(net.parameters(), lr=0.1)], Blocking(gate))
    net[0].weight.register_hook(lambda _: made.set())
    loss_of(net, batches(rank, 1, device)[0]).backward()
    assert made.is_set()
    assert torch.isfinite(net[0].weight.grad).all()
