"""Small models, their data and loops for tests of training, for use inside a rank (support.ranks).

Every rank draws other batches and builds its model from another seed, so that a test notices when something is not
communicated. `train` is the loop that a user would write.
"""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from support.ranks import device_for
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel

Batch = tuple[Tensor, Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, fused=True),
}

# Ways to make a module data-parallel, each with the place where gradients lie.
WRAPPERS = ("with_bagua", "with_bagua unflattened", "wrapper", "wrapper without views")


def launched_on(*sizes: int) -> list[dict[str, str]]:
    """What the launcher would say to each rank where node i has sizes[i] of them."""
    return [
        {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": str(node)}
        for node, size in enumerate(sizes)
        for local_rank in range(size)
    ]


TWO_NODES_OF_TWO = launched_on(2, 2)
NODES_OF_TWO_AND_ONE = launched_on(2, 1)
NODES = {"two nodes of two": TWO_NODES_OF_TWO, "nodes of two and one": NODES_OF_TWO_AND_ONE}


def begin() -> tuple[int, torch.device]:
    """Joins the job, once for all functions that a rank runs: (rank, device). A warning is an error in what follows."""
    warnings.simplefilter("error")
    rank = int(os.environ["RANK"])
    device = device_for(rank)
    if not dist.is_initialized():
        bagua.init_process_group()
    return rank, device


# --- models and data -------------------------------------------------------------------------------------------------


def mlp(seed: int = 0, device: torch.device | str = "cpu") -> nn.Sequential:
    """2-10-50-4 with a softmax."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(2, 10), nn.ReLU(), nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 4), nn.Softmax(dim=1)
    ).to(device)


class Scaled(nn.Module):
    """A matrix at the root, a scale of no dimension, and parameters without elements, one the only one of its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2))
        self.scale = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.randn(0, 3))
        self.alone = nn.Parameter(torch.randn(3, 0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x @ self.weight.t()) + self.nothing.sum() + self.alone.sum().float()


class MixedDtypes(nn.Module):
    """A layer of each floating-point type, and one of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 8)
        self.second = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.third = nn.Linear(8, 8, dtype=torch.float64)
        self.fourth = nn.Linear(8, 4)
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.relu(self.first(x)).bfloat16())
        x = self.third(x.double()).float()
        return self.fourth((x * self.turn).real)


class ConvNet(nn.Module):
    """Convolutions and batch normalisation: 4-D parameters, and buffers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 3)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.head(self.second(x).mean(dim=(2, 3)))


class NormNet(nn.Module):
    """Batch normalisation of vectors: cheap, with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))


class Branches(nn.Module):
    """A trunk, two branches of which a call takes some, and one that none takes."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(2, 6)
        self.left = nn.Linear(6, 4)
        self.right = nn.Linear(6, 4)
        self.never = nn.Linear(6, 4)

    def forward(self, x: Tensor, take: Sequence[str] = ("left",)) -> Tensor:
        x = torch.relu(self.trunk(x))
        return torch.stack([getattr(self, branch)(x) for branch in take]).sum(dim=0)


def batches(
    rank: int, count: int, device: torch.device | str = "cpu", shape: tuple[int, ...] = (4, 2), seed: int = 0
) -> list[Batch]:
    """Inputs of `shape` with targets for four outputs; others on each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [
        (
            torch.randn(shape, generator=generator).to(device),
            torch.randn(shape[0], 4, generator=generator).to(device),
        )
        for _ in range(count)
    ]


# --- loops -----------------------------------------------------------------------------------------------------------


def with_algorithm(module: Any, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    """`with_bagua` with gradient all-reduce; `options` are the algorithm's."""
    return module.with_bagua([optimizer], GradientAllReduceAlgorithm(**options))


def wrap_with(
    how: str,
    module: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    algorithm: Algorithm,
    process_group: Any = None,
    **options: Any,
) -> Any:
    """
    Args:
        how: "with_bagua" or "wrapper", and any of "unflattened" (or "without views"), "unlisted" (the wrapper does not
            know the optimizers) and "finding unused".
        options: of the wrapper alone.
    """
    views = "unflattened" not in how and "without views" not in how
    if how.startswith("with_bagua"):
        return module.with_bagua(list(optimizers), algorithm, process_group=process_group, do_flatten=views)
    return DistributedDataParallel(
        module,
        optimizers=[] if "unlisted" in how else list(optimizers),
        algorithm=algorithm,
        process_group=process_group,
        gradient_as_bucket_view=views,
        find_unused_parameters="finding unused" in how,
        **options,
    )


def wrap(how: str, module: Any, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    """`wrap_with` gradient all-reduce; `options` are the algorithm's."""
    return wrap_with(how, module, [optimizer], GradientAllReduceAlgorithm(**options))


def algorithm_of(kind: Callable[[Any], Any]) -> Algorithm:
    """An algorithm as users write them, which makes `kind` of a process group."""

    class Own(Algorithm):
        def reify(self, process_group: Any) -> Any:
            return kind(process_group)

    return Own()


def engine_of(model: Any) -> Any:
    """Of a wrapped module or a wrapper."""
    return getattr(model, "inner", None) or model.bagua_ddp


def torch_ddp(module: nn.Module, **options: Any) -> nn.parallel.DistributedDataParallel:
    """What all is compared with."""
    return nn.parallel.DistributedDataParallel(module, **options)


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of tests that are not about optimizers."""
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def pair(
    how: str,
    rank: int,
    device: torch.device,
    make: Callable[[], nn.Module] = mlp,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum,
) -> list[tuple[Any, Any]]:
    """The same model in our hands (by one of WRAPPERS) and in torch's, each with its optimizer."""
    torch.manual_seed(rank)
    ours = make().to(device)
    theirs = copy.deepcopy(ours)
    optimizer, other = make_optimizer(ours), make_optimizer(theirs)
    return [(wrap(how, ours, optimizer), optimizer), (torch_ddp(theirs), other)]


def loss_of(model: Any, batch: Batch, **keywords: Any) -> Tensor:
    """Squared error, in float32 whatever the model computes in."""
    return nn.functional.mse_loss(model(batch[0], **keywords).float(), batch[1])


def train(model: Any, optimizer: torch.optim.Optimizer, data: Iterable[Batch], set_to_none: bool = True) -> None:
    """A step for each batch."""
    for batch in data:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, batch).backward()
        optimizer.step()


# --- what must hold --------------------------------------------------------------------------------------------------


def check_equal(ours: nn.Module, reference: nn.Module, what: str = "") -> None:
    """Parameters and buffers are the same bits. Either may be in a wrapper."""
    theirs = _state(reference)
    mine = _state(ours)
    assert list(mine) == list(theirs), f"{what}: {list(mine)} and {list(theirs)}"
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), f"{what}: {name} is {_distance(value, theirs[name])} away"


def check_close(ours: nn.Module, reference: nn.Module, what: str = "", tolerance: float = 1e-5) -> None:
    """Parameters and buffers agree but for the order of sums."""
    theirs = _state(reference)
    for name, value in _state(ours).items():
        assert torch.allclose(value, theirs[name], rtol=tolerance, atol=tolerance), (
            f"{what}: {name} is {_distance(value, theirs[name])} away"
        )


def check_ranks_equal(module: nn.Module, what: str = "") -> None:
    """Every rank has the same bits. Collective."""
    for name, value in _state(module).items():
        check_tensor_on_ranks(value, f"{what}: {name}")


def check_tensor_on_ranks(value: Tensor, what: str) -> None:
    """Every rank has the same bits in it. Collective."""
    raw = value.detach().contiguous().view(-1).view(torch.uint8)
    first = raw.clone()
    dist.broadcast(first, 0)
    assert torch.equal(raw, first), f"{what} differs from rank 0's"


def gathered(tensor: Tensor) -> list[Tensor]:
    """Every rank's. Collective."""
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor.contiguous())
    return every


def _state(module: nn.Module) -> dict[str, Tensor]:
    inner = module.module if hasattr(module, "module") else module
    return {
        name: value.detach()
        for name, value in (*inner.named_parameters(remove_duplicate=False), *inner.named_buffers())
    }


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.to(torch.complex128) - other.to(torch.complex128)).abs().max()) if one.numel() else 0.0


@contextlib.contextmanager
def counted_all_reduces() -> Iterator[list[int]]:
    """The elements of each all-reduce that this rank starts within, in order."""
    sizes: list[int] = []
    original = dist.ProcessGroup.__dict__["allreduce"]  # as read from the class it would not bind its group any more

    def counting(group: dist.ProcessGroup, tensors: Any, *arguments: Any, **keywords: Any) -> Any:
        sizes.append(sum(tensor.numel() for tensor in (tensors if isinstance(tensors, list) else [tensors])))
        return original.__get__(group)(tensors, *arguments, **keywords)

    dist.ProcessGroup.allreduce = counting  # type: ignore[assignment]
    try:
        yield sizes
    finally:
        dist.ProcessGroup.allreduce = original  # type: ignore[method-assign]


def message_of(kind: type[BaseException], call: Callable[[], Any], *parts: str) -> str:
    """What `call` raises, which must be of this kind and have these parts."""
    try:
        call()
    except kind as error:
        message = str(error)
        missing = [part for part in parts if part not in message]
        assert not missing, f"{missing} is not in: {message}"
        return message
    raise AssertionError(f"no {kind.__name__} was raised")


def step_lengths(optimizer: torch.optim.Optimizer, parameter: Tensor, steps: int) -> list[float]:
    """How far a parameter of one element moves in each step, with a gradient that is always the same."""
    lengths = []
    for _ in range(steps):
        before = parameter.item()
        parameter.grad = torch.full_like(parameter, 0.25)
        optimizer.step()
        lengths.append(before - parameter.item())
    return lengths


def three_groups(net: nn.Module) -> list[dict[str, Any]]:
    """The parameters in groups with other options each, for an optimizer like Adam."""
    parameters = list(net.parameters())
    return [
        {"params": parameters[:2], "lr": 0.02, "betas": (0.8, 0.95)},
        {"params": parameters[2:3], "weight_decay": 0.3, "eps": 1e-3},
        {"params": parameters[3:]},
    ]
