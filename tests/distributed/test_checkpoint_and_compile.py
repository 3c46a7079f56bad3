"""Activation checkpointing, whose forward passes are repeated within backward, and torch.compile."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.sweeps import rest_is_deep
from support.training import (
    NormNet,
    batches,
    begin,
    check_close,
    check_equal,
    check_ranks_equal,
    counted_all_reduces,
    loss_of,
    message_of,
    mlp,
    momentum,
    pair,
    torch_ddp,
    train,
    with_algorithm,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl
from bagua.torch_api.data_parallel import DistributedDataParallel

HOW = ("with_bagua", "wrapper")


class Blocks(nn.Module):
    """Three blocks and a head, each checkpointed in the way given; the last block can be one that was used before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)
        self.reentrant: bool | None = None
        self.share = False

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.first, self.second, self.second if self.share else self.third):
            x = torch.tanh(self._run(block, x))
        return self._run(self.head, x)

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return block(x)
        x = x if x.requires_grad else x.requires_grad_()
        return checkpoint(block, x, use_reentrant=self.reentrant)


class Reentrant(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.reentrant = True


class NotReentrant(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.reentrant = False


class Shared(NotReentrant):
    """One block is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.share = True
        del self.third


def _checkpointed(make: Callable[[], nn.Module], how: str) -> list[int]:
    rank, device = begin()
    both = pair(how, rank, device, make)
    ours, optimizer = both[0]
    data = batches(rank, 6, device)
    with counted_all_reduces() as calls:
        train(ours, optimizer, data)
    train(*both[1], data)
    check_equal(ours, both[1][0])
    return calls


@pytest.mark.parametrize("small_buckets", [False, True])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("make", [Reentrant, NotReentrant, Shared])
def test_checkpointed_blocks(make: Callable[[], nn.Module], how: str, small_buckets: bool) -> None:
    env = {"BAGUA_DEFAULT_BUCKET_SIZE": "1"} if small_buckets else None
    calls = run_ranks(2, _checkpointed, make, how, env=env, reuse=True)[0]
    tensors = 6 if make is Shared else 8
    assert len(calls) == 6 * (tensors if small_buckets and how == "with_bagua" else 1)


@dataclasses.dataclass
class Answer:
    logits: Tensor


class ReentrantInDataclass(Reentrant):
    """What comes out is where pytree does not look."""

    def forward(self, x: Tensor) -> Any:
        return Answer(super().forward(x))


@pytest.mark.parametrize("make", [Reentrant, ReentrantInDataclass])
@on_ranks(2)
def test_checkpointed_blocks_while_looking_for_unused_parameters(
    rank: int, device: torch.device, make: Callable[[], Blocks]
) -> None:
    """The end of a nested backward pass is not the end of the pass, or what comes later would count as unused."""
    ours, theirs = make().to(device), Blocks().to(device)
    theirs.load_state_dict(ours.state_dict())
    optimizer, other = momentum(ours), momentum(theirs)
    wrapped = DistributedDataParallel(ours, find_unused_parameters=True, optimizers=[optimizer])
    data = batches(rank, 6, device)

    def run(x: Tensor) -> Tensor:
        output = wrapped(x)
        logits: Tensor = output.logits if isinstance(output, Answer) else output
        return logits

    with counted_all_reduces() as calls:
        train(run, optimizer, data)
    assert len(calls) == 12, "a bucket and the agreement on what was used, in each step"
    train(torch_ddp(theirs), other, data)
    check_equal(ours, theirs)


@on_ranks(2, env={"BAGUA_DEFAULT_BUCKET_SIZE": "1"})
def test_a_reentrant_block_that_is_used_twice_is_refused(rank: int, device: torch.device) -> None:
    torch.manual_seed(rank)
    net: Any = Reentrant().to(device)
    net.share = True
    del net.third
    with_algorithm(net, momentum(net))
    message = message_of(RuntimeError, lambda: loss_of(net, batches(rank, 1, device)[0]).backward())
    assert "'second." in message
    assert "use_reentrant=False" in message


def _call_checkpointed(model: Any, reentrant: bool) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("how", HOW)
@on_ranks(2)
def test_the_whole_module_checkpointed(rank: int, device: torch.device, reentrant: bool, how: str) -> None:
    """The forward pass that is repeated is the wrapped module's own: no step of its own, no broadcast of buffers."""
    torch.manual_seed(rank)
    both = pair(how, rank, device, NormNet)
    (ours, optimizer), (theirs, other) = both
    repeated = _call_checkpointed(ours, reentrant)
    data = batches(rank, 5, device)
    broadcasts = []
    if how == "wrapper":
        broadcast = ours.forward_buffers.run
        ours.forward_buffers.run = lambda source: broadcasts.append(broadcast(source))
    train(repeated, optimizer, data)
    assert len(broadcasts) == (5 if how == "wrapper" else 0)
    counter = (ours.inner if how == "wrapper" else ours.bagua_ddp).bagua_train_step_counter
    assert counter == 5, counter
    train(theirs, other, data)
    # Batch normalisation sees the batch twice; what it computes with is the same.
    check_equal(*(nn.ParameterList(model.parameters()) for model, _ in both))


# --- torch.compile ---------------------------------------------------------------------------------------------------


class Noting(GradientAllReduceAlgorithm):
    """Gradient all-reduce that notes whether its forward hook is being compiled."""

    def __init__(self, compiled: list[bool]) -> None:
        super().__init__()
        self.compiled = compiled

    def reify(self, process_group: Any) -> GradientAllReduceAlgorithmImpl:
        return _NotingImpl(process_group, self.compiled)


class _NotingImpl(GradientAllReduceAlgorithmImpl):
    def __init__(self, process_group: Any, compiled: list[bool]) -> None:
        super().__init__(process_group)
        self.compiled = compiled

    def init_forward_pre_hook(self, bagua_ddp: Any) -> Callable[[Any], None]:
        return lambda _: self.compiled.append(torch.compiler.is_compiling())


def _compiled(where: str, backend: str) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    rank, device = begin()
    warnings.simplefilter("default")  # the compiler's own, where a graph ends at a tensor that needs a gradient
    ours, theirs = NormNet(), NormNet()
    torch.manual_seed(rank)
    ours.load_state_dict({name: torch.rand_like(value.float()) for name, value in ours.state_dict().items()})
    theirs.load_state_dict(ours.state_dict())
    optimizer, other = momentum(ours.to(device)), momentum(theirs.to(device))
    data = batches(rank, 15, device)
    compiled: list[bool] = []
    algorithm = Noting(compiled)
    if where == "inside with_bagua":
        ours.first = torch.compile(ours.first, backend=backend)
        model: Any = ours.with_bagua([optimizer], algorithm)
    elif where == "of with_bagua":
        model = torch.compile(ours.with_bagua([optimizer], algorithm), backend=backend)
    elif where == "before with_bagua":
        model = torch.compile(ours, backend=backend).with_bagua([optimizer], algorithm)
    elif where == "of with_bagua in place":
        model = ours.with_bagua([optimizer], algorithm)
        model.compile(backend=backend)
    elif where == "inside the wrapper":
        model = DistributedDataParallel(torch.compile(ours, backend=backend), algorithm=algorithm)
    else:
        model = torch.compile(DistributedDataParallel(ours, algorithm=algorithm), backend=backend)
    reference = torch_ddp(theirs)
    with counted_all_reduces() as calls:
        train(model, optimizer, data[:3])
        graphs = counters["stats"]["unique_graphs"]
        train(model, optimizer, data[3:])
    assert len(calls) == 15, calls
    assert compiled == [False] * 15, "hooks run outside of what is compiled"
    assert counters["frames"]["ok"] > 0, "nothing was compiled"
    assert counters["stats"]["unique_graphs"] == graphs, "compiled again and again"
    train(reference, other, data)
    parameters = [nn.ParameterList(net.parameters()) for net in (ours, theirs)]
    check_close(*parameters)
    check_ranks_equal(parameters[0])


COMPILED = (
    "inside with_bagua",
    "before with_bagua",
    "of with_bagua",
    "of with_bagua in place",
    "inside the wrapper",
    "of the wrapper",
)


@pytest.mark.parametrize("places", rest_is_deep([(("of with_bagua", "inside the wrapper"),), (COMPILED,)], 0))
@on_ranks(2, timeout=150, joined=False)
def test_compiled(places: tuple[str, ...]) -> None:
    """In one process: loading the compiler takes longer than all of them. By "eager" what hooks and frames do is the
    same, without the seconds in which graphs of gradients are made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about its own modules, which the first call imports
        torch._dynamo.reset()
    for where in places:
        torch._dynamo.reset()
        try:
            _compiled(where, "aot_eager" if where == places[0] else "eager")
        except Exception as error:
            error.add_note(f"compiled {where}")
            raise
    torch._dynamo.reset()
    _compiled_find_unused()
    _compiled_steps()


def _compiled_steps() -> None:
    """A step that calls backward: hooks are not compiled, one by one. Compiled autograd is refused in words."""
    from torch._dynamo.utils import counters

    rank, device = begin()
    warnings.simplefilter("ignore")
    ignored: list[str] = []
    sys.unraisablehook = lambda one: ignored.append(str(one.exc_value))
    both = pair("with_bagua", rank, device, lambda: nn.Linear(2, 4))  # each weight takes compiled autograd long
    engine = both[0][0].bagua_ddp
    data = batches(rank, 4, device)
    frames = []
    for model, optimizer in both:
        torch._dynamo.reset()
        counters.clear()

        def step(batch: Any, model: Any = model) -> None:
            loss_of(model, batch).backward()

        compiled = torch.compile(step, backend="eager")
        for batch in data:
            optimizer.zero_grad()
            compiled(batch)
            optimizer.step()
        frames.append(counters["frames"]["total"])
    check_close(both[0][0], both[1][0])
    assert frames[0] <= frames[1] + 1, "no more than with torch's DDP, but for the hook of the forward pass"
    torch._dynamo.reset()
    model, optimizer = both[0]
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(lambda batch: loss_of(model, batch).backward(), backend="eager")
        message = message_of(RuntimeError, lambda: compiled(data[0]))
    assert "Compiled autograd is not supported" in message
    assert engine.bagua_module_name in message
    torch._dynamo.reset()
    train(model, optimizer, data)  # as the message says
    check_ranks_equal(model)
    assert not ignored
    sys.unraisablehook = sys.__unraisablehook__


@on_ranks(1, timeout=150, joined=False)
def test_modules_that_are_not_wrapped_compile_as_without_us() -> None:
    """Whatever else of torch goes through all attributes of a module."""
    warnings.simplefilter("ignore")
    net = NormNet().eval()
    x = torch.randn(3, 2)
    expected = net(x)
    for convert in (
        lambda: torch.compile(net, backend="eager", fullgraph=True),
        lambda: torch.jit.script(net),
        lambda: torch.fx.symbolic_trace(net),
        lambda: torch.export.export(net, (x,)).module(),
    ):
        assert torch.allclose(convert()(x), expected)
    assert not [name for name in dir(net) if not hasattr(net, name)]


def _compiled_find_unused() -> None:
    rank, device = begin()
    warnings.simplefilter("default")
    net = mlp(rank, device)
    optimizer = momentum(net)
    wrapped = DistributedDataParallel(net, find_unused_parameters=True, optimizers=[optimizer])
    train(torch.compile(wrapped, backend="eager"), optimizer, batches(rank, 3, device))
    check_ranks_equal(net)
