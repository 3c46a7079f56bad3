"""torch.distributed.checkpoint of Bagua's wrapper: files have the names of those of torch's, and load into it."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from support.ranks import run_ranks
from support.training import NormNet, batches, begin, torch_ddp, train

from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel

_WRAPPERS: dict[str, Any] = {
    "plain": lambda net, _: net,
    "torch": lambda net, _: torch_ddp(net),
    "bagua": lambda net, optimizer: DistributedDataParallel(net, optimizers=[optimizer]),
    "bytegrad": lambda net, optimizer: DistributedDataParallel(
        net, optimizers=[optimizer], algorithm=ByteGradAlgorithm()
    ),
}


def _made(wrapper: str, seed: int, device: torch.device) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = NormNet().to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1 / (1 + seed))
    return _WRAPPERS[wrapper](net, optimizer), optimizer


def _round_trips(folder: str, pairs: list[tuple[str, str]]) -> None:
    # Here, in the ranks: these imports take more than a second, of each worker of pytest that collects this file.
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
        set_model_state_dict,
        set_state_dict,
    )

    rank, device = begin()
    warnings.simplefilter("ignore")  # of torch's checkpoints
    for saver, loader in pairs:
        model, optimizer = _made(saver, 1, device)
        train(model, optimizer, batches(rank, 2, device))
        state, optimizer_state = get_state_dict(model, optimizer)
        assert set(state) == set(NormNet().state_dict())
        assert "first.weight" in optimizer_state["state"]
        dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/{saver} {loader}")
        expected = copy.deepcopy(optimizer_state)

        other, other_optimizer = _made(loader, 2, device)
        state, optimizer_state = get_state_dict(other, other_optimizer)
        dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/{saver} {loader}")
        set_state_dict(other, other_optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
        loaded = get_state_dict(other, other_optimizer)[1]
        assert loaded["param_groups"] == expected["param_groups"]
        for name, values in expected["state"].items():
            assert all(torch.equal(value, loaded["state"][name][key]) for key, value in values.items())
        train(model, optimizer, batches(rank, 2, device, seed=1))
        train(other, other_optimizer, batches(rank, 2, device, seed=1))
        if "bytegrad" not in (saver, loader) and "plain" not in (saver, loader):
            # Not the buffers: a file has those of any rank.
            assert all(map(torch.equal, other.parameters(), model.parameters()))
    # On one rank alone, and of a whole model: nothing is communicated that others do not take part in.
    ours, _ = _made("bagua", 1, device)
    if rank == 0:
        set_model_state_dict(ours, get_model_state_dict(ours))
        set_model_state_dict(ours, {}, options=StateDictOptions(strict=False))


def test_files_of_torchs_wrapper_and_of_ours_are_the_same(tmp_path: Path) -> None:
    pairs = [("torch", "bagua"), ("bagua", "torch"), ("bagua", "plain"), ("torch", "bytegrad")]
    run_ranks(2, _round_trips, str(tmp_path), pairs)
