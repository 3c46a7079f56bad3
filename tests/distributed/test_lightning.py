"""BaguaStrategy in real runs of Lightning's Trainer with two ranks, compared with Lightning's own DDPStrategy."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lightning_runs import INPUTS, environment, lightning_of, loader, module_class, trainer_of
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.regrouped import device_type, run_job
from support.sweeps import rest_is_deep
from torch import Tensor, nn

from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

if importlib.util.find_spec("lightning") is None:  # not imported, which takes seconds in every worker of pytest
    pytest.skip("needs lightning: pip install lightning", allow_module_level=True)


def _trained(package: str, folder: str, strategies: list[Callable[[Any], Any]], **options: Any) -> list[Any]:
    pl = lightning_of(package)
    results = []
    for make in strategies:
        pl.seed_everything(3, verbose=False)
        net = module_class(pl)()
        trainer = trainer_of(pl, make(pl), folder, **options)
        trainer.fit(net, loader(), loader())
        results.append((net.state_dict(), {name: float(one) for name, one in trainer.callback_metrics.items()}))
    return results


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "precision": "bf16-mixed"}]
)
@on_ranks(2, lightning=True, joined=False)
def test_gradient_all_reduce_is_ddp(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = str(tmp_path)

    def ours(pl: Any) -> Any:
        import bagua.lightning

        return bagua.lightning.strategy_for(pl.__name__)()

    def by_name(_: Any) -> str:
        return "bagua"

    from bagua.lightning.packages import PACKAGES

    packages = [one for one in PACKAGES if importlib.util.find_spec(one.partition(".")[0])]
    for package in packages[:1] if options else packages:
        made = [lambda pl: pl.strategies.DDPStrategy(), ours, by_name]
        theirs, *others = _trained(package, folder, made, **options)
        for one in others:
            assert one[1] == theirs[1]
            assert all(torch.equal(one[0][name], value) for name, value in theirs[0].items())


@on_ranks(2, lightning=True, joined=False)
def test_a_second_fit_begins_where_each_rank_ended(tmp_path: Path) -> None:
    """Of another Trainer, too; unless weights were changed in between, on one rank alone."""
    folder = str(tmp_path)
    pl = lightning_of()
    from bagua.lightning import BaguaStrategy

    class Start(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, _: Any, net: Any) -> None:
            self.weights = [tensor.clone().cpu() for tensor in net.state_dict().values()]
            self.steps = net.bagua_ddp.state_dict()["train_step_counter"]

    for name in ("low_precision_decentralized", "streaming_diloco"):
        net, start = module_class(pl)(), Start()

        def fit(name: str = name, net: Any = net, start: Any = start) -> None:
            strategy = BaguaStrategy(algorithm=name, **ALGORITHMS[name])
            trainer_of(pl, strategy, folder, max_epochs=1, callbacks=[start]).fit(net, loader())

        fit()
        ended, steps = [tensor.clone() for tensor in net.state_dict().values()], len(net.losses)
        fit()
        assert all(map(torch.equal, start.weights, ended)), name
        assert start.steps == steps, name
    is_first = environment()["RANK"] == "0"
    with torch.no_grad():
        next(net.parameters()).add_(0.0 if is_first else 1.0)
    fit()
    first = [tensor.clone() for tensor in start.weights]
    for tensor in first:
        torch.distributed.broadcast(tensor, 0)
    assert all(map(torch.equal, start.weights, first))


# --- algorithms and checkpoints --------------------------------------------------------------------------------------

# With their options. The checkpoint is of step 4, in the middle of a round of local steps, of an exchange and of a
# warm-up.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "bytegrad": {},
    "qadam": {},
    "decentralized": {},
    "low_precision_decentralized": {},
    "local_sgd": {"sync_every": 3, "warmup_steps": 2},
    "diloco": {"sync_every": 2, "warmup_steps": 5},
    "streaming_diloco": {"sync_every": 6, "delay": 2},
}
REPLICAS_DIFFER = tuple(name for name in ALGORITHMS if name not in ("bytegrad", "qadam"))


# Those without an own path through Lightning are saved and loaded by test_algorithms_resume.py.
@pytest.mark.parametrize(
    "names", rest_is_deep([(("qadam", "decentralized", "diloco", "streaming_diloco"),), ((*ALGORITHMS,),)], 0)
)
@on_ranks(2, lightning=True, joined=False)
def test_resumed_runs_end_where_others_do(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Training that is resumed from a checkpoint in its middle ends bitwise where it would have, also where replicas
    differ; and of what it leaves nothing is wrapped."""
    folder = str(tmp_path)
    pl = lightning_of()
    from bagua.lightning import BaguaStrategy

    class Save(pl.Callback):  # type: ignore[misc, name-defined]
        def __init__(self, path: str) -> None:
            self.path = path

        def on_train_epoch_end(self, trainer: Any, _: Any) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(self.path)

    for name in names:
        options = ALGORITHMS[name]
        path = f"{folder}/{name}.ckpt"

        def train(ckpt_path: str | None, name: str = name, path: str = path, options: dict[str, Any] = options) -> Any:
            pl.seed_everything(3, verbose=False)
            net = module_class(pl)("qadam" if name == "qadam" else "adam")
            trainer = trainer_of(pl, BaguaStrategy(algorithm=name, **options), folder, callbacks=[Save(path)])
            trainer.fit(net, loader(), ckpt_path=ckpt_path)
            assert trainer.strategy.model is net
            assert not net.bagua_ddp.is_attached
            return net

        whole, again = train(None), train(path)
        assert len(again.losses) == len(whole.losses) / 2
        assert torch.equal(torch.stack(again.losses), torch.stack(whole.losses[len(again.losses) :])), name
        assert all(torch.equal(again.state_dict()[key], value) for key, value in whole.state_dict().items()), name
        own = Path(f"{path}.rank1").exists()
        assert own == (name in REPLICAS_DIFFER)
    # Where another algorithm goes on, all ranks begin with the weights of rank 0, though each has a file.
    path = f"{folder}/decentralized.ckpt"
    net = module_class(pl)()
    is_first = environment()["RANK"] == "0"
    with pytest.warns(match="all from the weights of rank 0") if is_first else contextlib.nullcontext():
        trainer = trainer_of(pl, BaguaStrategy("low_precision_decentralized"), folder, max_epochs=1)
        trainer.fit(net, loader(), ckpt_path=path)
    saved = torch.load(path, weights_only=True, map_location="cpu")
    assert net.losses == []
    assert all(torch.equal(net.state_dict()[key].cpu(), value) for key, value in saved["state_dict"].items())
    torch.distributed.barrier()  # all have read it
    # Half of a checkpoint is of another one.
    if is_first:
        torch.save({**saved, "global_step": 1}, path)
    torch.distributed.barrier()
    with pytest.raises(RuntimeError, match=r"are of different steps: \[1, 4\], by rank"):
        trainer_of(pl, BaguaStrategy("decentralized"), folder).fit(module_class(pl)(), loader(), ckpt_path=path)


@on_ranks(2, lightning=True, joined=False)
def test_algorithms_know_the_scaler_of_the_precision_plugin(tmp_path: Path) -> None:
    """Weights are those of a scale that stays, where the plugin's doubles in each step: powers of two change no digit
    of float32. An Algorithm that two Trainers share is told by each; one that was told of another scaler is not."""
    folder = str(tmp_path)
    pl = lightning_of()
    from bagua.lightning import BaguaStrategy
    from bagua.torch_api.algorithms.powersgd import PowerSGDAlgorithm

    class Scaled(pl.plugins.MixedPrecision):  # type: ignore[misc, name-defined]
        def __init__(self, interval: int) -> None:
            scaler = torch.amp.GradScaler(device_type(), init_scale=2.0**4, growth_interval=interval)
            super().__init__("16-mixed", device_type(), scaler)

        def autocast_context_manager(self) -> Any:
            return contextlib.nullcontext()

    class Scale(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_end(self, trainer: Any, _: Any) -> None:
            self.last = trainer.precision_plugin.scaler.get_scale()
            self.known = trainer.strategy.model.inner.setup.algorithm.grad_scaler

    shared, other = PowerSGDAlgorithm(rank=1), torch.amp.GradScaler(device_type())
    told = PowerSGDAlgorithm(rank=1, grad_scaler=other)

    def train(optimizer: str, strategy: Any, interval: int) -> tuple[list[Tensor], Scale]:
        pl.seed_everything(3, verbose=False)
        net, scale = module_class(pl)(optimizer), Scale()
        trainer_of(pl, strategy, folder, plugins=[Scaled(interval)], callbacks=[scale]).fit(net, loader())
        return [one.detach().clone() for one in net.state_dict().values()], scale

    for optimizer, make in (
        ("adam", lambda: BaguaStrategy("powersgd", rank=1)),
        ("adam", lambda: BaguaStrategy(shared)),
        ("qadam", lambda: BaguaStrategy("qadam")),
    ):
        (constant, fixed), (growing, doubled) = (train(optimizer, make(), interval) for interval in (1000, 1))
        assert (fixed.last, doubled.last) == (2.0**4, 2.0 ** (4 + 8))
        assert all(map(torch.equal, constant, growing)), optimizer
    assert shared.grad_scaler is None
    _, scale = train("adam", BaguaStrategy(told), 1)
    assert scale.known is other


@on_ranks(2, lightning=True, joined=False)
def test_manual_optimization_of_halves_in_turn(tmp_path: Path) -> None:
    """Two optimizers that train their halves in turn."""
    folder = str(tmp_path)
    pl = lightning_of()
    from bagua.lightning import BaguaStrategy

    class Halves(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
            self.buckets: list[Any] = []

        def training_step(self, batch: Any, _: int) -> None:
            for optimizer, sign in zip(self.optimizers(), (1.0, -0.1), strict=True):
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(sign * nn.functional.mse_loss(self.second(self.first(batch[0]).relu()), batch[1]))
                if "bagua_ddp" in self.__dict__:
                    self.buckets.append(self.bagua_buckets[0])
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(half.parameters(), lr=0.1) for half in (self.first, self.second)]

    nets = []
    for strategy in (pl.strategies.DDPStrategy(find_unused_parameters=True), BaguaStrategy()):
        pl.seed_everything(3, verbose=False)
        nets.append(Halves())
        trainer_of(pl, strategy, folder).fit(nets[-1], loader())
    theirs, ours = nets
    assert all(torch.equal(ours.state_dict()[key], value) for key, value in theirs.state_dict().items())
    assert len(ours.buckets) == 16
    assert len({id(one) for one in ours.buckets}) == 2, "two plans, which are kept"


def _mean(tensor: Tensor) -> Tensor:
    total = tensor.detach().clone()
    torch.distributed.all_reduce(total)
    return total / torch.distributed.get_world_size()


@on_ranks(2, lightning=True, joined=False)
def test_halves_in_turn_that_exchange_weights(tmp_path: Path) -> None:
    """Compared with loops of collectives. Each forward pass has two half steps, the first with a loss that goes through
    both halves; with `toggle_optimizer`, or with a half that was frozen in the beginning, and is unfrozen within the
    third forward pass, while a mean is under way."""
    folder = str(tmp_path)
    pl = lightning_of()
    from bagua.lightning import BaguaStrategy

    class Halves(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, toggles: bool) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.toggles = toggles
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
            if not toggles:
                self.second.requires_grad_(False)
            self.seen: list[Any] = []

        def half_steps(self, number: int) -> list[int]:
            if self.toggles:
                return [0, 1]
            return [0, 0] if number < 3 else [1, 0]

        def loss(self, batch: Any, sign: int) -> Tensor:
            return (1, -0.1)[sign] * nn.functional.mse_loss(self.second(self.first(batch[0]).relu()), batch[1])

        def trains(self, half: int) -> None:
            for index, one in enumerate((self.first, self.second)):
                one.requires_grad_(index == half)

        def training_step(self, batch: Any, _: int) -> None:
            self.seen.append(batch)
            optimizers = self.optimizers()
            for half in self.half_steps(len(self.seen)):
                if self.toggles:
                    self.toggle_optimizer(optimizers[half])
                else:
                    self.trains(half)
                optimizers[half].zero_grad()
                self.manual_backward(self.loss(batch, half))
                optimizers[half].step()
                if self.toggles:
                    self.untoggle_optimizer(optimizers[half])

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(half.parameters(), lr=0.1) for half in (self.first, self.second)]

    def by_hand(net: Any, seen: list[Any], interval: int | None) -> None:
        optimizers = net.configure_optimizers()
        named = dict(net.named_parameters())
        due: set[str] = set()
        steps = 0
        for number, batch in enumerate(seen, 1):
            means: dict[str, Tensor] = {}
            if interval is None:
                unfrozen = {name for name, one in named.items() if one.requires_grad}
                means = {name: _mean(named[name]) for name in sorted(due | unfrozen)}
                due.clear()
            for half in net.half_steps(number):
                net.trains(half)
                optimizers[half].zero_grad()
                net.loss(batch, half).backward()
                due |= {name for name, one in named.items() if one.requires_grad}
                for name, mean in means.items():
                    named[name].data.copy_(mean)
                means = {}
                optimizers[half].step()
                if net.toggles:
                    net.requires_grad_(True)
                steps += 1
                if interval and steps % interval == 0:
                    for name in sorted(due):
                        named[name].data.copy_(_mean(named[name]))
                    due.clear()

    for algorithm, options in (
        ("decentralized", {"hierarchical": False}),
        ("local_sgd", {"sync_every": 1}),
        ("local_sgd", {"sync_every": 2}),
        ("local_sgd", {"sync_every": 4}),
        ("async", {"sync_interval_ms": 0}),
        ("low_precision_decentralized", {"hierarchical": False}),
        ("streaming_diloco", {"sync_every": 4, "delay": 1}),
    ):
        for toggles in (True, False):
            if algorithm == "streaming_diloco" and not toggles:
                continue  # the second half makes other fragments, and ends a round
            pl.seed_everything(3, verbose=False)
            net = Halves(toggles)
            expected = Halves(toggles)
            expected.load_state_dict(net.state_dict())
            trainer_of(pl, BaguaStrategy(algorithm, **options), folder).fit(net, loader())
            values = [one.detach() for one in net.parameters()]
            what = f"{algorithm} {options} {toggles}"
            if algorithm in ("decentralized", "local_sgd"):
                by_hand(expected.to(values[0].device), net.seen, options.get("sync_every"))
                distance = max(
                    (one - other).abs().max().item() for one, other in zip(values, expected.parameters(), strict=True)
                )
                assert distance < 1e-5, f"{what}: {distance}"
            apart = max((one - _mean(one)).abs().max().item() for one in values)
            assert apart < (1e-6 if algorithm == "async" else 0.05), f"{what}: {apart}"


@on_ranks(2, lightning=True, joined=False)
def test_averaging_that_could_not_end_is_an_error(tmp_path: Path) -> None:
    """And no warning: the replicas differ."""
    pl = lightning_of()
    from bagua.lightning import BaguaStrategy

    class Fail(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_end(self, trainer: Any, _: Any) -> None:
            trainer.strategy.model.bagua_algorithm._average._loop.failure = RuntimeError("rank 1 is gone")

    trainer = trainer_of(pl, BaguaStrategy("async"), str(tmp_path), max_epochs=1, callbacks=[Fail()])
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        trainer.fit(module_class(pl)(), loader())


# --- what is refused -------------------------------------------------------------------------------------------------


@on_ranks(2, lightning=True, joined=False)
def test_steps_count_whatever_passes_a_scheduler_gives_each(tmp_path: Path) -> None:
    """Of local steps, and of gradients."""
    pl = lightning_of()
    from bagua.lightning import BaguaStrategy

    class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)
            self.seen: list[Any] = []

        def training_step(self, batch: Any, _: int) -> Tensor:
            self.seen.append(batch)
            return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    for algorithm, options in (("gradient_allreduce", {}), ("local_sgd", {"sync_every": 3})):
        pl.seed_everything(3, verbose=False)
        net, expected = Net(), Net()
        expected.load_state_dict(net.state_dict())
        # Of 4 batches in each epoch, so that the last step of the last one has a pass less.
        scheduler = pl.callbacks.GradientAccumulationScheduler({1: 2, 2: 3})
        strategy = BaguaStrategy(algorithm, **options)
        trainer = trainer_of(pl, strategy, str(tmp_path), max_epochs=3, callbacks=[scheduler])
        trainer.fit(net, loader())
        optimizer, steps = expected.configure_optimizers(), 0
        for number, batch in enumerate(net.seen):
            passes = 1 + number // 4  # as many as the epoch says
            (expected.training_step(batch, 0) / passes).backward()
            if (number % 4 + 1) % passes and number % 4 != 3:
                continue
            for one in expected.parameters() if algorithm == "gradient_allreduce" else ():
                one.grad = _mean(one.grad)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            for one in expected.parameters() if algorithm == "local_sgd" and steps % 3 == 0 else ():
                one.data = _mean(one.data)
        assert steps == 4 + 2 + 2
        for one, other in zip(net.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one, other.to(one.device))


def _regrouping(folder: str) -> None:
    pl = lightning_of()
    import bagua.torch_api as bagua
    from bagua.lightning import BaguaStrategy

    bagua.init_process_group(regroup=bagua.Regroup(), backend="gloo")
    with pytest.raises(NotImplementedError, match="regroup: Lightning's Trainer is not supported under regroup"):
        trainer_of(pl, BaguaStrategy(), folder).fit(module_class(pl)(), loader())


def test_a_job_that_regroups_is_not_lightning_s(tmp_path: Path) -> None:
    """Which calls optimizers with a closure that makes the passes."""
    run_job(1, _regrouping, str(tmp_path), lightning=True)


def _misconfigured(folder: str) -> list[str]:
    pl = lightning_of()
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from bagua.lightning import BaguaStrategy

    messages = []
    for arguments in (
        {"algorithm": "bytegard"},
        {"algorithm": "bytegrad", "hierachical": True},
        {"algorithm": 3},
        {"algorithm": GradientAllReduceAlgorithm(), "hierarchical": True},
        {"loss": "sum"},
        {"batch_weights": "yes"},
        {"flatten": "no"},
    ):
        with pytest.raises(MisconfigurationException) as raised:
            BaguaStrategy(**arguments)  # type: ignore[arg-type]
        messages.append(str(raised.value))
    with pytest.raises(MisconfigurationException) as raised:
        trainer_of(pl, BaguaStrategy(algorithm="qadam"), folder).fit(module_class(pl)(), loader())
    messages.append(str(raised.value))

    class InAHook(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_epoch_start(self, trainer: Any, _: Any) -> None:
            trainer.accumulate_grad_batches = 1 + trainer.current_epoch

    by_epoch = pl.callbacks.GradientAccumulationScheduler
    for options in (
        {"accumulate_grad_batches": 2},
        {"callbacks": [by_epoch({7: 3})]},
        {"callbacks": [InAHook()]},
    ):
        trainer = trainer_of(pl, BaguaStrategy(count_batch=True), folder, **options)
        with pytest.raises(MisconfigurationException) as raised:
            trainer.fit(module_class(pl)(), loader())
        messages.append(str(raised.value))
    # A step is one pass: the first callback never accumulates, and the second one makes no passes when it does.
    for callbacks in ([by_epoch({1: 1})], [pl.callbacks.StochasticWeightAveraging(0.1, 1)]):
        trainer_of(pl, BaguaStrategy(count_batch=True), folder, callbacks=callbacks).fit(module_class(pl)(), loader())
    return messages


def test_what_is_wrong_is_told_with_the_remedy(tmp_path: Path) -> None:
    (told,) = run_ranks(1, _misconfigured, str(tmp_path), lightning=True)
    for message, words in zip(
        told,
        (
            ["'bytegard'", "bytegrad", "Known algorithms"],
            ["hierachical", "hierarchical"],
            ["algorithm=3", "algorithm='bytegrad'"],
            ["hierarchical", "GradientAllReduceAlgorithm"],
            ["loss='sum' has no effect without batch weights"],
            ["batch_weights is 'yes'. Pass True or False"],
            ["flatten is 'no'. Pass True or False"],
            ["QAdamOptimizer", "['Adam']"],
            ["accumulate_grad_batches=2: Lightning divides losses", "2 times too small"],
            ["accumulate_grad_batches=3: Lightning divides losses", "3 times too small"],
            ["accumulate_grad_batches=2: Lightning divides losses", "2 times too small"],
        ),
        strict=True,
    ):
        assert all(word in message for word in words), message


@on_ranks(2, lightning=True, joined=False)
def test_reduce(tmp_path: Path) -> None:
    folder = str(tmp_path)
    from bagua.lightning import BaguaStrategy

    pl = lightning_of()
    rank = int(environment()["RANK"])
    strategy = BaguaStrategy()
    trainer_of(pl, strategy, folder, max_epochs=1, limit_train_batches=1).fit(module_class(pl)(), loader())
    values = [
        float(strategy.reduce(torch.tensor(rank + 1.0, device=strategy.root_device), reduce_op=operation))
        for operation in (None, "mean", "SUM", "max")
    ]
    values.append(strategy.reduce("text"))
    for arguments in ({"group": object()}, {"reduce_op": "median"}):
        with pytest.raises(ValueError, match=r"sync_dist_group|'median' is unknown"):
            strategy.reduce(torch.ones(1), **arguments)
    assert values == [1.5, 1.5, 3.0, 2.0, "text"]


# --- samplers --------------------------------------------------------------------------------------------------------


def _samples(folder: str) -> dict[str, list[int]]:
    from bagua.lightning import BaguaStrategy
    from bagua.torch_api.contrib import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

    pl = lightning_of()
    numbers = torch.utils.data.TensorDataset(torch.arange(15.0), INPUTS[:15])
    seen: dict[str, list[int]] = {}

    class Noting(module_class(pl)):  # type: ignore[misc]
        def __init__(self, in_batches: bool) -> None:
            super().__init__()
            self.in_batches = in_batches

        def train_dataloader(self) -> Any:
            sampler = LoadBalancingDistributedSampler(range(15), complexity_fn=float)
            if not self.in_batches:
                return torch.utils.data.DataLoader(numbers, batch_size=2, sampler=sampler)
            batches = LoadBalancingDistributedBatchSampler(sampler, lambda own: [own[:5], own[5:]])
            return torch.utils.data.DataLoader(numbers, batch_sampler=batches)

        def training_step(self, batch: Any, _: int) -> Tensor:
            seen.setdefault(f"{self.in_batches} {self.current_epoch}", []).extend(map(int, batch[0]))
            return self(batch[1]).square().mean()

    for in_batches in (False, True):
        options = {"use_distributed_sampler": False} if in_batches else {}
        trainer_of(pl, BaguaStrategy(), folder, **options).fit(Noting(in_batches))
    assert BaguaStrategy.strategy_name == "bagua"
    return seen


def test_balanced_samplers_are_not_split_again(tmp_path: Path) -> None:
    first, second = run_ranks(2, _samples, str(tmp_path), lightning=True)
    for epoch in ("False 0", "False 1", "True 0", "True 1"):
        assert sorted(first[epoch] + second[epoch]) == sorted([*range(15), 0]), "all, and the cheapest as padding"
    assert first["False 0"] != first["False 1"]
    assert first["True 0"] != first["True 1"]
