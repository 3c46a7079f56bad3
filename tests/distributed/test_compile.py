"""torch.compile of a wrapped module: of all of it, or of its blocks."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from support.rank_tests import on_ranks
from support.training import check_ranks_equal, message_of, momentum
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua.engine.comm_scheduler import CommScheduler
from bagua.torch_api.data_parallel import DistributedDataParallel

BLOCKS = 4


class _Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(x))


class _NoteBackward(torch.autograd.Function):
    """In front of a block: its backward pass is done."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[str], name: str) -> Tensor:
        ctx.events, ctx.name = events, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.events.append(ctx.name)
        return gradients[0], None, None


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_each_compiled_block_is_communicated_while_the_next_one_computes(device: torch.device) -> None:
    """What the backward pass does when blocks are compiled: they are done, and buckets are launched."""
    warnings.simplefilter("default")  # the compiler's own, where a graph ends at a tensor that needs a gradient
    blocks = nn.ModuleList(_Block() for _ in range(BLOCKS)).to(device)
    for block in blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    events: list[str] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: Tensor) -> Tensor:
            for number, block in enumerate(self.blocks):
                x = block(_NoteBackward.apply(x, events, f"block {number}"))  # type: ignore[no-untyped-call]
            return x

    model: Any = DistributedDataParallel(Net(), bucket_cap_mb=4 * (64 * 64 + 64) / (1 << 20))
    assert len(model.bagua_buckets) == BLOCKS
    optimizer = momentum(model)
    launch = CommScheduler._launch

    def noting(scheduler: CommScheduler, state: Any) -> None:
        events.append("launch")
        launch(scheduler, state)

    CommScheduler._launch = noting  # type: ignore[method-assign]
    try:
        for _ in range(2):
            events.clear()
            optimizer.zero_grad()
            model(torch.ones(2, 64, device=device, requires_grad=True)).sum().backward()
            optimizer.step()
    finally:
        CommScheduler._launch = launch  # type: ignore[method-assign]
    check_ranks_equal(model)
    assert events.count("launch") == BLOCKS
    assert events.index("launch") < events.index(f"block {BLOCKS - 2}"), events


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_a_compiled_wrapper_has_a_graph_for_each_bucket(device: torch.device) -> None:
    """How many graphs one call of a compiled wrapper makes, and how many buckets it has."""
    warnings.simplefilter("default")
    width = 600  # 1.4 MiB
    net = nn.Sequential(*(_Block(width) for _ in range(BLOCKS))).to(device)
    model: Any = DistributedDataParallel(net, bucket_cap_mb=1.2)
    graphs = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    compiled(torch.ones(2, width, device=device)).sum().backward()
    check_ranks_equal(model)
    assert [len(graphs), len(model.bagua_buckets)] == [BLOCKS, BLOCKS]


@pytest.mark.slow
@pytest.mark.skipif(
    "reason" not in inspect.signature(torch.compiler.disable).parameters, reason="this torch cannot be told a reason"
)
@on_ranks(2, timeout=240)
def test_a_full_graph_is_refused_with_what_to_do_instead(device: torch.device) -> None:
    model = DistributedDataParallel(_Block().to(device))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    text = message_of(torch._dynamo.exc.Unsupported, lambda: compiled(torch.ones(1, 64, device=device)))
    assert "Bagua communicates in hooks" in text
    assert "block.compile()" in text


class _Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output


@pytest.mark.slow
@on_ranks(1, timeout=240)
def test_hooks_run_though_another_model_of_the_class_was_compiled_without_any(device: torch.device) -> None:
    warnings.simplefilter("default")  # the compiler's own, where a graph ends at a tensor that needs a gradient

    def train(net: nn.Module, module: nn.Module, how: str) -> None:
        if how == "method":
            net.compile(backend="eager")
        compiled: Any = torch.compile(net, backend="eager") if how == "function" else net
        for samples in (4, 5):
            module.zero_grad()
            compiled(torch.ones(samples, 3, device=device)).mean().backward()

    for how in ("function", "method"):
        for make in (lambda module: module, _Outer):
            plain, net = nn.Linear(3, 2).to(device), nn.Linear(3, 2).to(device)
            train(make(plain), plain, how)
            model: Any = bagua.with_bagua(net, [momentum(net)], count_batch=True)
            train(make(net), net, how)
            assert model.bagua_train_step_counter == 2, how
            model.bagua_ddp.detach()
