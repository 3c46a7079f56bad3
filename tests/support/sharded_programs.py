"""Programs of training steps of a model under FSDP2 whose communication Bagua compresses, beside plain FSDP2: plain
data, carried out by every rank of a pool (support.rank_pool).

The codec is bf16, whose error is known. Where weights are rounded, the plain model computes with weights that were
rounded by hand, so that losses are bitwise equal; gradients are as near as the codec allows. After each step the plain
model's shards and momenta are copied, so that errors do not add up.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from bagua.fsdp import compress_communication, measure_communication

PARTS = ("a", "b", "c")
WAYS = ("called", "methods", "checkpointed", "reentrant")
MESHES = ("shards", "hybrid", "one replica", "group of replicas")
RATE = 0.1
# Of the largest gradient so far: the rounding of a gradient, of a mean of replicas, and of what error feedback owes.
SHARE = 6 / 256


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def begin(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x))

    def go_on(self, x: Tensor) -> Tensor:
        return torch.tanh(self.c(torch.tanh(self.b(x))))

    def forward(self, x: Tensor, way: str = "called") -> Tensor:
        """Without the methods: torch frees what it was to keep if a pass calls a registered method."""
        is_checkpointed = way in ("checkpointed", "reentrant")
        for part in (self.a, self.b, self.c):
            y = checkpoint(part, x, use_reentrant=way == "reentrant") if is_checkpointed else part(x)
            x = torch.tanh(y)
        return x


class Twins:
    """
    Args:
        mesh: of MESHES.
        is_rooted: the model is sharded as a whole, too, and called; otherwise its parts are roots.
        keeps: FSDP keeps weights between forward and backward.
        rounds: weights are compressed, too.
        every: so many passes have exact weights; 0: none.
        feeds_back: error feedback.
        is_compiled, on_meta: the compressed model is, or is made there.
        in_backward: optimizers step in hooks of the backward pass.
    """

    def __init__(
        self,
        mesh: str,
        is_rooted: bool,
        keeps: bool,
        rounds: bool,
        every: int,
        feeds_back: bool,
        is_compiled: bool,
        on_meta: bool,
        in_backward: bool,
    ) -> None:
        warnings.simplefilter("ignore")  # of torch.compile, and of residuals when other parameters are trained
        ranks = dist.get_world_size()
        sizes = (1, ranks) if mesh in ("shards", "one replica") else (ranks, 1)
        self._mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        self._of_plain = self._mesh["shard"] if mesh == "shards" else self._mesh
        self._of_ours = self._mesh if mesh in ("hybrid", "one replica") else self._mesh["shard"]
        self._replicas = self._mesh.get_group("replicate") if mesh == "group of replicas" else None
        self._is_rooted, self._keeps = is_rooted, keeps
        self._options: dict[str, Any] = {"gradients": "bf16", "error_feedback": feeds_back}
        if rounds:
            self._options.update(weights="bf16", exact_weights_every=every or None)
        if mesh in ("hybrid", "one replica", "group of replicas"):
            self._options.update(replicas=self._replicas, compress_shard=True)
        # A gather from one rank alone is none.
        self._rounds, self._every = rounds and sizes[1] > 1, every
        self._is_compiled, self._in_backward = is_compiled, in_backward
        self._on_meta = on_meta and self._replicas is None
        self._frozen: set[str] = set()
        self._held: dict[str, bool] = {}  # parts that FSDP keeps gathered, and whether exactly
        self._passes = self._batches = 0
        self._is_accumulated = False
        self._is_over = True  # the last pass had its backward pass
        self._largest = 0.0
        self._grads: dict[int, Tensor] = {}  # those that hooks have stepped with
        self._saved: Any = None
        torch.manual_seed(7)
        self.plain = self._shard(Net(), self._of_plain)
        self._plain_optimizer = self._optimizer_of(self.plain)
        self._make()

    # --- calls -------------------------------------------------------------------------------------------------------

    def train(self, way: str, clips: bool) -> None:
        self._pass(way, communicates=True)
        self._step(clips)

    def accumulate(self, way: str) -> None:
        if not self._in_backward:  # their hooks run with whatever has been reduced
            self._pass(way, communicates=False)
            self._is_accumulated = True

    def forward(self, way: str) -> None:
        """Without a backward pass, so that the pass goes on."""
        self._grads.clear()
        losses, exact = self._losses(way, counts=True)
        assert torch.equal(*losses), losses
        self._restore()
        self._note_held(exact)

    def look(self) -> None:
        """In training mode without gradients: not a pass."""
        self._grads.clear()
        with torch.no_grad():
            losses, exact = self._losses("called", counts=False)
        assert torch.equal(*losses), losses
        self._restore()
        self._note_held(exact)

    def evaluate(self) -> None:
        whole = Net()
        names = [name for name, _ in whole.named_parameters()]
        whole.load_state_dict(dict(zip(names, map(self._full, self._shards(self._optimizer)), strict=True)))
        x = self._batch()
        for model in (self.ours, self.plain):
            model.eval()
        with torch.no_grad():
            assert torch.equal(self._called(x), whole(x)), "evaluation is not exact"
        for model in (self.ours, self.plain):
            model.train()
        self._note_held(dict.fromkeys(PARTS, True))

    def freeze(self, part: str, is_frozen: bool) -> None:
        if not self._is_accumulated:
            (self._frozen.add if is_frozen else self._frozen.discard)(part)
            self._apply_frozen()

    def save(self) -> None:
        if not self._is_accumulated:
            locals_ = [one.clone() for one in self._locals(self.plain)]
            optimizers = copy.deepcopy([one.state_dict() for one in (self._plain_optimizer, self._optimizer)])
            self._saved = locals_, optimizers, copy.deepcopy(self.handle.state_dict()), self._passes

    def load(self) -> None:
        """Into a model that was made anew."""
        if self._saved is None or self._is_accumulated:
            return
        locals_, optimizers, state, self._passes = copy.deepcopy(self._saved)
        self._free(self.plain)
        with torch.no_grad():
            for one, value in zip(self._locals(self.plain), locals_, strict=True):
                one.copy_(value)
        self._make()
        for optimizer, one in zip((self._plain_optimizer, self._optimizer), optimizers, strict=True):
            optimizer.load_state_dict(one)
        self.handle.load_state_dict(state)
        for model in (self.plain, self.ours):
            model.zero_grad()

    def finish(self) -> None:
        """Each step was compared when it was made."""

    def compress_again(self) -> None:
        """Removed, and set up anew: without a state."""
        self.handle.remove()
        self.handle = compress_communication(self.ours, **self._options)
        self._passes, self._is_over = 0, True
        # What was rounded has been freed.
        self._held = {part: True for part, is_exact in self._held.items() if is_exact}

    # --- what they do ------------------------------------------------------------------------------------------------

    def _make(self) -> None:
        with torch.device("meta" if self._on_meta else "cpu"):
            net = Net()
        self.ours = self._shard(net, self._of_ours)
        self.handle = compress_communication(self.ours, **self._options)
        self.meter = measure_communication(self.ours)
        if self._on_meta:
            self.ours.to_empty(device="cpu")
        with torch.no_grad():
            for one, value in zip(self._locals(self.ours), self._locals(self.plain), strict=True):
                one.copy_(value)
        self._optimizer = self._optimizer_of(self.ours)
        self._is_over = True
        self._called: Any = torch.compile(self.ours, backend="eager") if self._is_compiled else self.ours
        self._held = {}
        self._apply_frozen()

    def _shard(self, net: Any, mesh: Any) -> Any:
        kept = False if self._keeps else None
        for part in (net.a, net.b) if self._is_rooted else (net.a, net.b, net.c):
            fully_shard(part, mesh=mesh, reshard_after_forward=kept)
        if self._is_rooted:
            fully_shard(net, mesh=mesh, reshard_after_forward=kept)
            for method in ("begin", "go_on"):
                register_fsdp_forward_method(net, method)
        return net

    def _optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        if not self._in_backward:
            return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)

        def step(one: Tensor) -> None:
            assert one.grad is not None
            self._grads[id(one)] = one.grad.detach().clone()
            with torch.no_grad():
                one -= RATE * one.grad
            one.grad = None

        for one in model.parameters():
            one.register_post_accumulate_grad_hook(step)
        return torch.optim.SGD(model.parameters(), lr=RATE)  # has no state, and does not step

    def _apply_frozen(self) -> None:
        self._held = {}
        for model in (self.plain, self.ours):
            self._free(model)  # torch freezes only what is gathered, where it is
            for part in PARTS:
                getattr(model, part).requires_grad_(part not in self._frozen)

    def _batch(self) -> Tensor:
        self._batches += 1
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * self._batches + dist.get_rank()))

    def _losses(self, way: str, counts: bool) -> tuple[list[Tensor], dict[str, bool]]:
        """Ours and that of the plain model, whose shards are rounded where ours have to be; and which parts were
        exact."""
        if counts and (self._is_over or self._trains_nothing):
            self._passes += 1
        self._is_over &= not counts
        if self._trains_nothing and way == "methods":
            way = "called"  # nothing tells that two methods are one pass
        needs_exact = not self._rounds or bool(self._every and self._passes % self._every == 0)
        if self._rounds and self._every and self._passes == 0:
            needs_exact = True
        exact = {part: needs_exact or self._held.get(part, False) for part in PARTS}
        x = self._batch()
        x.requires_grad_(way == "reentrant" and torch.is_grad_enabled())
        self._round(exact)
        losses = []
        for model in (self._called, self.plain):
            if way == "methods" and self._is_rooted:
                y = model.go_on(model.begin(x))
            else:
                y = model(x, way if torch.is_grad_enabled() else "called")
            losses.append((y - 1).square().mean())
        return losses, exact

    @property
    def _trains_nothing(self) -> bool:
        return self._frozen == set(PARTS)

    def _round(self, exact: dict[str, bool]) -> None:
        self._free(self.plain)
        self._masters = [one.clone() for one in self._locals(self.plain)]
        with torch.no_grad():
            for (name, _), one in zip(self.plain.named_parameters(), self._locals(self.plain), strict=True):
                if not exact[name[0]]:
                    one.copy_(one.bfloat16())

    def _restore(self) -> None:
        """The plain model's shards, and a step that hooks have made from them."""
        self._free(self.plain)
        with torch.no_grad():
            for parameter, one, master in zip(
                self.plain.parameters(), self._locals(self.plain), self._masters, strict=True
            ):
                one.copy_(master)
                if id(parameter) in self._grads:
                    one -= RATE * self._grads[id(parameter)].to_local()  # type: ignore[attr-defined]

    def _note_held(self, exact: dict[str, bool]) -> None:
        for part in PARTS:
            if self._keeps or not self._is_rooted or part == "c":
                self._held[part] = exact[part]

    def _pass(self, way: str, communicates: bool) -> None:
        for model in (self.plain, self.ours):
            for one in (model, model.a, model.b, model.c):
                if hasattr(one, "set_requires_gradient_sync"):
                    one.set_requires_gradient_sync(communicates)
        losses, exact = self._losses(way, counts=True)
        assert torch.equal(*losses), f"{losses}, pass {self._passes}"
        self._grads.clear()
        if losses[0].requires_grad:
            for loss in losses:
                loss.backward()
            self._is_over = True
        is_reached, held = way == "reentrant", {}
        for part in PARTS:
            is_reached |= part not in self._frozen
            if not (is_reached or (self._is_rooted and losses[0].requires_grad)):
                held[part] = exact[part]
        self._restore()
        self._note_held(exact)
        self._held = {part: self._held[part] for part in held if part in self._held}
        passes = self.handle.state_dict()["forward_passes"]
        assert passes == self._passes, f"{passes} passes were counted, and there were {self._passes}"
        if communicates:
            self._compare_gradients()

    def _compare_gradients(self) -> None:
        shards = map(self._shards, (self._optimizer, self._plain_optimizer))
        found = [[self._gradient(one) for one in of_one] for of_one in shards]
        names = [name for name, _ in self.plain.named_parameters()]
        has_none = [[one is None for one in of_one] for of_one in found]
        assert has_none[0] == has_none[1], (names, has_none)
        pairs = [(name, *pair) for name, *pair in zip(names, *found, strict=True) if pair[0] is not None]
        for _, _, plain in pairs:
            self._largest = max(self._largest, float(plain.abs().max()))
        for name, ours, plain in pairs:
            distance = float((ours - plain).abs().max())
            assert distance <= SHARE * self._largest, f"{name}: {distance:.2e} of {self._largest:.2e}"

    def _gradient(self, one: Any) -> Any:
        grad = self._grads.get(id(one)) if self._in_backward else one.grad
        return None if grad is None else grad.full_tensor()

    def _step(self, clips: bool) -> None:
        if not self._in_backward:
            for model, optimizer in ((self.plain, self._plain_optimizer), (self.ours, self._optimizer)):
                if clips and any(one.grad is not None for one in model.parameters()):
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        self._is_accumulated = False
        pairs = zip(*map(self._shards, (self._optimizer, self._plain_optimizer)), strict=True)
        far = max(float((self._full(ours) - self._full(plain)).abs().max()) for ours, plain in pairs)
        # Momenta are those of the plain model, but for this step's gradient.
        assert far <= RATE * SHARE * self._largest + 1e-6, f"weights are off by {far:.2e}"
        self._copy_plain()

    def _copy_plain(self) -> None:
        with torch.no_grad():
            for one, value in zip(self._shards(self._optimizer), self._locals(self.plain), strict=True):
                one.to_local().copy_(value)
            for ours, plain in zip(*map(self._momenta, (self._optimizer, self._plain_optimizer)), strict=True):
                ours.copy_(plain)

    @staticmethod
    def _full(one: Any) -> Tensor:
        found: Tensor = one.detach().full_tensor()
        return found

    @staticmethod
    def _momenta(optimizer: torch.optim.Optimizer) -> list[Tensor]:
        states = (optimizer.state.get(one, {}) for one in Twins._shards(optimizer))
        return [state["momentum_buffer"].to_local() for state in states if "momentum_buffer" in state]

    @staticmethod
    def _shards(optimizer: torch.optim.Optimizer) -> list[Any]:
        """The model has them only while nothing is gathered."""
        found: list[Any] = optimizer.param_groups[0]["params"]
        return found

    def _locals(self, model: Any) -> list[Tensor]:
        self._free(model)
        return [one.detach().to_local() for one in model.parameters()]

    @staticmethod
    def _free(model: Any) -> None:
        for one in (model, model.a, model.b, model.c):
            if hasattr(one, "reshard"):
                one.reshard()
