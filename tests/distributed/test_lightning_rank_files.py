"""Checkpoints of Lightning where replicas differ: each rank goes on with its own state, whatever became of the file's
name; where a file is missing, all ranks are told, and start alike."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.lightning_runs import environment, lightning_of, loader, module_class, trainer_of
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.sweeps import rest_is_deep
from torch import Tensor

if importlib.util.find_spec("lightning") is None:
    pytest.skip("needs lightning: pip install lightning", allow_module_level=True)

PEERS = ("decentralized", "low_precision_decentralized")
OPTIONS: dict[str, dict[str, Any]] = {"async": {"sync_interval_ms": 1}}


class Runs:
    """Runs of one algorithm, whose nets start anew. Each epoch is two steps."""

    def __init__(self, algorithm: str, folder: str, has_experts: bool = False) -> None:
        self.has_experts = has_experts
        self.pl, self.algorithm, self.folder = lightning_of(), algorithm, folder
        self.rank = int(environment()["RANK"])

    def fit(self, epochs: int, ckpt_path: str | None = None, lr: float | None = None, **options: Any) -> Any:
        from bagua.lightning import BaguaStrategy

        at_start: list[Tensor] = []

        class Start(self.pl.Callback):  # type: ignore[misc, name-defined]
            def on_train_start(self, trainer: Any, module: Any) -> None:
                at_start.extend(one.detach().clone() for one in module.parameters())
                for group in trainer.optimizers[0].param_groups if lr is not None else ():
                    group["lr"] = lr

        self.pl.seed_everything(3, verbose=False)
        net = module_class(self.pl)()
        if self.has_experts:
            net.layers[3].weight.expert = True
        callbacks = [Start(), *options.pop("callbacks", [])]
        strategy = BaguaStrategy(self.algorithm, **OPTIONS.get(self.algorithm, {"hierarchical": False}))
        options = {"max_epochs": epochs, "limit_train_batches": 2, "callbacks": callbacks, **options}
        trainer = trainer_of(self.pl, strategy, self.folder, **options)
        trainer.fit(net, loader(), ckpt_path=ckpt_path)
        return trainer, net, at_start

    def check_resumes(self, net: Any, path: str) -> None:
        """Each rank with what it had in `net`."""
        _, _, start = self.fit(3, path)
        assert all(map(torch.equal, start, net.parameters())), path
        assert _differ(start) == (self.algorithm != "async"), path

    def check_starts_alike(self, path: str, told: str, ranks: tuple[int, ...] = (0, 1)) -> None:
        with pytest.warns(match=told) if self.rank in ranks else contextlib.nullcontext():
            _, net, start = self.fit(6, path, lr=0.0)
        assert not _differ(start)
        assert all(map(torch.equal, start, net.parameters())), "nothing moves at lr=0"

    def on_first(self, action: Any, *arguments: Any) -> None:
        if self.rank == 0:
            action(*arguments)
        dist.barrier()


def _differ(tensors: list[Tensor]) -> bool:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, [one.cpu() for one in tensors])
    return any(
        not torch.equal(one, first) for other in everybody for one, first in zip(other, everybody[0], strict=True)
    )


def _names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def _own_files(algorithm: str, folder: str) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    runs = Runs(algorithm, folder)
    # The only one that is kept, under the name of a link, next to a file that an older run has left.
    kept = ModelCheckpoint(folder, filename="{epoch}", save_last="link")
    _, net, _ = runs.fit(2, callbacks=[kept], enable_checkpointing=True)
    assert _names(folder) == ["epoch=1.ckpt", "epoch=1.ckpt.rank1", "last.ckpt", "last.ckpt.rank1"]
    runs.check_resumes(net, f"{folder}/last.ckpt")
    # Where no links are possible, Lightning copies.
    runs.on_first(shutil.copy, f"{folder}/epoch=1.ckpt", f"{folder}/copy.ckpt")
    runs.check_resumes(net, f"{folder}/copy.ckpt")
    # After training, then moved with the file of rank 1; by the URL of a file system.
    trainer, net, _ = runs.fit(2, plugins=[AsyncCheckpointIO()])
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    trainer.strategy.teardown()  # which waits for the thread that writes
    dist.barrier()
    for end in ("", ".rank1"):
        runs.on_first(os.rename, f"{folder}/after.ckpt{end}", f"{folder}/moved.ckpt{end}")
    runs.check_resumes(net, f"file://{folder}/moved.ckpt")
    # Another save's file is not taken, though it has as many steps.
    runs.on_first(shutil.copy, f"{folder}/epoch=1.ckpt.rank1", f"{folder}/moved.ckpt.rank1")
    with pytest.raises(RuntimeError, match=r"different saves: ranks \[1\] have only those of another"):
        runs.fit(3, f"{folder}/moved.ckpt")
    # Removed with their checkpoint, also those of more ranks than there are now.
    trainer.strategy._ranks_with_files = 4
    runs.on_first(shutil.copy, f"{folder}/moved.ckpt.rank1", f"{folder}/moved.ckpt.rank3")
    trainer.strategy.remove_checkpoint(f"{folder}/moved.ckpt")
    dist.barrier()
    assert not [name for name in _names(folder) if name.startswith("moved")]


@pytest.mark.parametrize("algorithm", rest_is_deep(PEERS, 1))
def test_each_rank_goes_on_with_its_own_state(algorithm: str, tmp_path: Path) -> None:
    torch.save({"global_step": 4}, tmp_path / "last.ckpt.rank1")
    run_ranks(2, _own_files, algorithm, str(tmp_path), lightning=True, timeout=150)


def _say_three_ranks(path: str) -> None:
    saved = torch.load(path, weights_only=True, map_location="cpu")
    saved["bagua"]["world_size"] = 3
    torch.save(saved, path)


@pytest.mark.parametrize("algorithms", rest_is_deep([((PEERS[0], "async", "gradient_allreduce"),), (PEERS[1:],)], 0))
@on_ranks(2, lightning=True, timeout=150, joined=False)
def test_where_files_are_missing_all_ranks_start_alike(tmp_path: Path, algorithms: tuple[str, ...]) -> None:
    root = str(tmp_path)
    for algorithm in algorithms:
        folder = f"{root}/{algorithm}"
        runs = Runs(algorithm, folder, has_experts=algorithm == "gradient_allreduce")
        path = f"{folder}/x.ckpt"
        trainer, net, _ = runs.fit(2)
        trainer.save_checkpoint(path)
        runs.check_resumes(net, path)
        # Tested with the file of rank 0, and saved again: of no training.
        trainer.validate(net, loader(), ckpt_path=path, verbose=False)
        assert not _differ(list(net.parameters()))
        trainer.save_checkpoint(f"{folder}/tested.ckpt")
        runs.check_starts_alike(f"{folder}/tested.ckpt", "has no state of each rank", (0,))
        runs.on_first(os.remove, f"{path}.rank1")
        runs.check_starts_alike(path, rf"rank 1 has no {path}\.rank1")
        # Other ranks, one more than there are.
        runs.on_first(_say_three_ranks, path)
        runs.check_starts_alike(path, "on 3 ranks", (0,))
        # What one rank cannot read, none goes on with.
        with pytest.raises(RuntimeError, match=r"Rank 0 .* could not read .*not found"):
            runs.fit(3, f"{folder}/absent.ckpt")
