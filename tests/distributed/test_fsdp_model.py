"""What bagua.fsdp takes for a pass, for the root, for the name of a module and for exact weights, in models that are
called, wrapped and changed in the ways that torch allows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.sharded import param_groups
from support.training import check_tensor_on_ranks, message_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from bagua.fsdp import compress_communication, measure_communication
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.sharded_replicas import exchange_shards

INT4: dict[str, Any] = {"gradients": None, "weights": "int4"}


class Coder(nn.Module):
    """Two parts, which are called one after the other, by the module or without it."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 16), nn.Linear(16, 8)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(x))

    def decode(self, z: Tensor) -> Tensor:
        found: Tensor = self.up(z)
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


def coder(device: torch.device, with_root: bool = True, **options: Any) -> Any:
    torch.manual_seed(3)
    model = Coder().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in (model.down, model.up, *((model,) if with_root else ())):
        fully_shard(part, mesh=mesh, **options)
    return model


def inputs(device: torch.device) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(device)


def _checkpointed(reentrant: bool, model: Any, x: Tensor) -> Tensor:
    z = torch.tanh(checkpoint(model.down, x.requires_grad_(), use_reentrant=reentrant))
    found: Tensor = checkpoint(model.up, z, use_reentrant=reentrant)
    return found


def _in_chunks(model: Any, x: Tensor) -> Tensor:
    """A loss in chunks calls the last layer beside the root."""
    return torch.stack([model.up(part).sum() for part in model.encode(x).split(2)])


# How a forward pass is made, and whether there is a root.
WAYS: dict[str, tuple[Callable[[Any, Tensor], Tensor], bool]] = {
    "called": (lambda model, x: model(x), True),
    "methods": (lambda model, x: model.decode(model.encode(x)), True),
    "parts": (lambda model, x: model.up(torch.tanh(model.down(x))), False),
    "twice": (lambda model, x: model(x) + model(2 * x), True),
    "container": (lambda model, x: model(x), False),
    "parts, checkpointed": (partial(_checkpointed, False), False),
    "parts, checkpointed (reentrant)": (partial(_checkpointed, True), False),
    "in chunks": (_in_chunks, True),
}


@on_ranks(2)
def test_each_way_to_call_a_model_is_one_pass(device: torch.device) -> None:
    for number, (name, (call, with_root)) in enumerate(WAYS.items()):
        for is_called_first in (False, True) if number == 0 else (number % 2 == 1,):
            model = coder(device, with_root)
            register_fsdp_forward_method(model, "encode")
            register_fsdp_forward_method(model, "decode")
            meter = measure_communication(model)
            handle = compress_communication(model, **INT4, exact_weights_every=3)
            if is_called_first:
                model(inputs(device)).sum().backward()  # as for a summary
            begun = handle.state_dict()["forward_passes"]
            assert begun == is_called_first
            saved = []
            for _ in range(6):
                before = handle.statistics["weights"]["saved"]
                call(model, inputs(device)).square().sum().backward()
                saved.append(handle.statistics["weights"]["saved"] > before)
                with torch.no_grad():
                    model(inputs(device))  # no pass: nothing is trained by it
                model.eval()
                model(inputs(device))
                model.train()
                for part in (model.down, model.up):
                    part.reshard()
            due = [(begun + made) % 3 > 0 for made in range(1, 7)]
            assert saved == due, (name, saved)
            assert handle.state_dict()["forward_passes"] == meter.stats().steps == begun + 6, name


@on_ranks(2)
def test_passes_that_no_backward_pass_follows(device: torch.device) -> None:
    model = coder(device)
    model.requires_grad_(False)
    handle = compress_communication(model, **INT4, exact_weights_every=2)
    for number in range(1, 5):
        model(inputs(device))
        assert handle.state_dict()["forward_passes"] == number
    # One that was broken off counts, as one that was not.
    assert "shapes" in message_of(RuntimeError, lambda: model(torch.ones(3, 5, device=device)))
    if hasattr(model, "reset_iter_state"):  # torch 2.12 and later; before, FSDP does not go on after such a pass
        model.reset_iter_state()
        model(inputs(device))
        assert handle.state_dict()["forward_passes"] == 6


class _Twice(nn.Module):
    """A layer that is used twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.shared(torch.tanh(self.shared(self.first(x))))
        return found


@on_ranks(2)
def test_passes_of_a_part_of_what_is_called(device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (2,))
    model = _Twice().to(device)
    for one in (model.first, model.shared, model):
        fully_shard(one, mesh=mesh)
    handle = compress_communication(model.shared, **INT4, exact_weights_every=2)
    for number in range(1, 5):
        before = handle.statistics["weights"]["saved"]
        model(inputs(device)).sum().backward()
        assert handle.state_dict()["forward_passes"] == number
        assert (handle.statistics["weights"]["saved"] > before) == (number % 2 == 1)


@on_ranks(2)
def test_several_may_look_at_a_model_and_each_may_go(device: torch.device) -> None:
    for first_goes in (True, False):
        model = coder(device)
        handle, meter = compress_communication(model, **INT4), measure_communication(model)
        part = measure_communication(model.up)
        model(inputs(device)).sum().backward()
        (handle if first_goes else meter).remove()
        model(inputs(device)).sum().backward()
        assert handle.state_dict()["forward_passes"] == 2 - first_goes
        assert meter.stats().steps == 1 + first_goes
        assert part.stats().steps == 2
        for one in (meter, handle, part):
            one.remove()
        for one in (*param_groups(model), model._get_fsdp_state(), model.up._get_fsdp_state()):
            assert not any(hasattr(value, "arounds") for value in one.__dict__.values())


def _tower(device: torch.device, *kept: bool | None) -> Any:
    """A root with a layer of its own, and a sharded one within it; `kept` is reshard_after_forward of both."""
    mesh = init_device_mesh(device.type, (2,))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    for module, one in zip((model[0], model), kept, strict=True):
        fully_shard(module, mesh=mesh, reshard_after_forward=one)
    return model


@on_ranks(2)
def test_the_root_is_that_of_torch(device: torch.device) -> None:
    def refused(model: Any) -> str:
        return message_of(ValueError, lambda: compress_communication(model, **INT4, weight_differences=True))

    for is_called in (False, True):
        frees, keeps = _tower(device, None, None), _tower(device, False, None)
        box = nn.ModuleDict({"net": _tower(device, False, None)})
        compiled = torch.compile(_tower(device, False, None), backend="eager")
        if is_called:
            for model in (frees, keeps, box["net"]):
                model(inputs(device)).sum().backward()
        assert "The model frees its weights after forward" in refused(frees[0])
        assert "Module '0' frees its weights after forward" in refused(frees)
        for model in (keeps, box, compiled):
            compress_communication(model, **INT4, weight_differences=True)


@on_ranks(2)
def test_names_do_not_depend_on_wrappers(device: torch.device) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = _tower(device, None, None)
    handle = compress_communication(model, error_feedback=True)
    model(inputs(device)).sum().backward()
    state = handle.state_dict()
    assert set(state["residuals"]) == {"", "0"}
    handle.remove()
    wrapped: Any
    for wrapped in (torch.compile(model, backend="eager"), checkpoint_wrapper(model)):
        handle = compress_communication(wrapped, error_feedback=True)
        handle.load_state_dict(state)
        assert set(handle.state_dict()["residuals"]) == {"", "0"}
        handle.remove()

    mesh = init_device_mesh(device.type, (2, 1), mesh_dim_names=("replicate", "shard"))
    net: Any = fully_shard(nn.Linear(2, 2).to(device), mesh=mesh["shard"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    diloco = Algorithm.init("diloco", sync_every=2)
    exchange = exchange_shards(net, [optimizer], diloco, mesh.get_group("replicate"))
    saved = exchange.state_dict()
    exchange.remove()
    compiled: Any = torch.compile(net, backend="eager")
    exchange_shards(compiled, [optimizer], diloco, mesh.get_group("replicate")).load_state_dict(saved)


@on_ranks(2)
def test_evaluation_is_exact_whatever_was_kept(device: torch.device) -> None:
    x = inputs(device)
    exact = coder(device).eval()(x)

    def forward(model: Any) -> None:
        """In training mode, without a backward pass: the root keeps its weights."""
        with torch.no_grad():
            model(x)

    def whole_step(model: Any) -> None:
        model.set_reshard_after_backward(False)
        model(x).sum().backward()

    def prefetched(model: Any) -> None:
        model.up.unshard(async_op=True)

    for what in (forward, whole_step, prefetched):
        for kept in (None, False):
            model = coder(device, reshard_after_forward=kept)
            handle = compress_communication(model, **INT4)
            what(model)
            model.eval()
            with torch.no_grad():
                assert torch.equal(model(x), exact), what
            # By hand, too.
            model.train()
            what(model)
            model.eval()
            model.up.unshard()
            assert torch.equal(model.up.weight, coder(device).up.weight.full_tensor()), what
            # And where compression has ended.
            model.train()
            model.reshard()
            what(model)
            handle.remove()
            with torch.no_grad():
                assert torch.equal(model(x), exact), what

    # Evaluation between a forward pass and its backward pass changes no gradient.
    gradients = []
    for evaluates in (False, True):
        model = coder(device, reshard_after_forward=False)
        compress_communication(model, **INT4)
        loss = model(x).sum()
        if evaluates:
            with torch.no_grad():
                assert torch.equal(model.eval()(x), exact)
            model.train()
        loss.backward()
        gradients.append([one.grad.full_tensor() for one in model.parameters()])
    assert all(map(torch.equal, *gradients))

    # A pass whose weights are to be exact does not use those that an earlier one has rounded and kept.
    model = coder(device)
    compress_communication(model, **INT4, exact_weights_every=2)
    model.set_reshard_after_backward(False)
    for is_exact in (False, True, True):  # what is kept of the second pass is exact
        found = model(x)
        assert torch.equal(found, exact) == is_exact
        found.sum().backward()


@on_ranks(4)
def test_evaluation_is_exact_after_weights_were_kept_by_fewer_ranks(device: torch.device) -> None:
    x = inputs(device)
    exact = coder(device).eval()(x)
    gradients = []
    for evaluates in (False, True):
        model = coder(device, reshard_after_forward=2)
        compress_communication(model, **INT4)
        found = model(x)
        assert not torch.equal(found, exact)
        if evaluates:
            with torch.no_grad():
                assert torch.equal(model.eval()(x), exact)
            model.train()
        found.sum().backward()
        gradients.append([one.grad.full_tensor() for one in model.parameters()])
    assert all(map(torch.equal, *gradients))


@on_ranks(2)
def test_a_step_with_nan_can_be_rolled_back(device: torch.device) -> None:
    for bad in (float("nan"), float("inf")):
        for is_exact_at_first in (True, False):
            model = _tower(device, False, None)
            options = {"weights": "int8", "weight_differences": True}
            handle = compress_communication(model, gradients=None, **options)
            x = inputs(device)
            saved = {name: one.to_local().clone() for name, one in model.state_dict().items()}
            if not is_exact_at_first:
                model(x).sum().backward()
            with torch.no_grad():
                for one in model.parameters():
                    one.to_local().view(-1)[1] = bad
            assert not model(x).isfinite().all()
            model.reshard()
            state = handle.state_dict()
            for name, one in model.state_dict().items():
                one.to_local().copy_(saved[name])
            losses = []
            for number in range(4):
                if number == 2:  # a state that was saved in the bad step is no obstacle either
                    handle.load_state_dict(state)
                losses.append(float(model(x).sum().detach()))
                model.zero_grad()
                model.reshard()
                model[0].reshard()
            exact = float(model.eval()(x).sum().detach())
            assert all(abs(one - exact) < 0.05 * (1 + abs(exact)) for one in losses), (losses, exact)


def _with_statistics(device: torch.device, rank: int, mesh: Any) -> Any:
    """Other weights and statistics on each replica, and gathered weights that the root has kept."""
    torch.manual_seed(rank)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).to(device)
    for module in (model[0], model):
        fully_shard(module, mesh=mesh["shard"])
    with torch.no_grad():
        for _ in range(rank + 2):
            model(inputs(device) * (rank + 1))
    return model


@on_ranks(2)
def test_replicas_begin_alike(rank: int, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (2, 1), mesh_dim_names=("replicate", "shard"))
    replicas = mesh.get_group("replicate")

    def exchange(model: Any) -> None:
        model.reshard()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if model[0].weight.device.type != "meta":
            with torch.no_grad():
                model.eval()(inputs(device))  # gathered again
        exchange_shards(model, [optimizer], Algorithm.init("local_sgd", sync_every=2), replicas)

    for begin in (lambda model: compress_communication(model, replicas=replicas), exchange):
        model = _with_statistics(device, rank, mesh)
        model[1].num_batches_tracked += 5 * rank
        begin(model)
        assert model[1].num_batches_tracked == 2
        for name, one in model.eval().state_dict().items():
            check_tensor_on_ranks(getattr(one, "_local_tensor", one), name)
        check_tensor_on_ranks(model(inputs(device)).detach(), "outputs")

        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        fully_shard(model, mesh=mesh["shard"])
        told = message_of(ValueError, lambda: begin(model))  # noqa: B023
        assert "it is on the meta device and has no values" in told
    # Without replicas, nothing is broadcast, and the model may be made later.
    compress_communication(model)
    model.to_empty(device=device)
    with torch.no_grad():
        for one in (*model.parameters(), *model.buffers()):
            getattr(one, "_local_tensor", one).fill_(1)
    model(inputs(device)).sum().backward()


@on_ranks(2)
def test_replicas_that_differ_are_named(rank: int, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (2, 1), mesh_dim_names=("replicate", "shard"))
    model = _with_statistics(device, rank, mesh)
    model.register_buffer("extra", torch.zeros(2 + rank, device=device))
    told = message_of(RuntimeError, lambda: compress_communication(model, replicas=mesh.get_group("replicate")))
    assert "'extra'" in told, told


@on_ranks(2)
def test_a_model_that_is_converted_after_the_call(device: torch.device) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        for options in ({}, {"error_feedback": True}):
            model = _tower(device, None, None)
            handle = compress_communication(model, **options)
            model.to(dtype)
            x = inputs(device).to(dtype)
            if dtype == torch.bfloat16:
                model(x).sum().backward()
                continue
            for _ in range(2):
                told = message_of(RuntimeError, lambda: model(x))  # noqa: B023
                assert "reduces gradients in float64, which int8 cannot compress" in told, told
                assert "reduce_dtype" in told
                assert len(told.splitlines()) <= 3
            model.eval()
            model(x)
            model.train()
            # FSDP is as if the pass had not been called.
            handle.remove()
            model(x).sum().backward()
