"""Checkpoints of one process: what is on the disk after crashes, and what is refused."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.crashes import Lost, crash_at
from support.sweeps import rest_is_deep
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from bagua.contrib.checkpoint import durable_files, saving
from bagua.torch_api.checkpoint import async_save_checkpoint, load_checkpoint, save_checkpoint
from bagua.torch_api.contrib import fuse_optimizer


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory: which files a loss of power takes is simulated, and each wait for a busy disk would be one for
    nothing."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bagua-checkpoints-") as folder:
        yield Path(folder)


def filled(value: float) -> nn.Linear:
    net = nn.Linear(3, 2)
    with torch.no_grad():
        net.weight.fill_(value)
        net.bias.fill_(-value)
    return net


def value_of(net: nn.Linear) -> float:
    values = {*net.weight.flatten().tolist(), *(-net.bias).tolist()}
    assert len(values) == 1, values
    return values.pop()


def loaded(path: Path, **options: Any) -> tuple[int, float]:
    net = filled(0)
    return load_checkpoint(path, net, **options), value_of(net)


# --- crashes ---------------------------------------------------------------------------------------------------------


def _next(path: Path) -> None:
    save_checkpoint(20, path, filled(20), keep_last=1)


def _again(path: Path) -> None:
    save_checkpoint(10, path, filled(11))


NEXT, AGAIN = (_next, (20, 20)), (_again, (10, 11))


@pytest.mark.parametrize(
    ("save", "new", "lost"),
    rest_is_deep([(*NEXT, "nothing"), (*NEXT, "all"), (*NEXT, "all but the last rename"), (*AGAIN, "all")], 2, 3),
    ids=["next, killed", "next, power lost", "next, renames reordered", "same iteration, power lost"],
)
def test_a_crash_anywhere_leaves_the_former_or_the_new_one(
    save: Callable[[Path], None], new: tuple[int, float], lost: Lost, tmp_path: Path
) -> None:
    start = tmp_path / "start"
    save_checkpoint(10, start, filled(10))
    seen = []
    number = 1
    while True:
        path = tmp_path / str(number)
        shutil.copytree(start, path)
        if not crash_at(number, partial(save, path), lost):
            break
        seen.append(loaded(path))
        assert seen[-1] in ((10, 10), new), f"after operation {number}"
        for iteration in durable_files.saved_iterations(path):  # none that only looks complete
            assert loaded(path, iteration=iteration)[0] == iteration
        save_checkpoint(30, path, filled(30), keep_last=1)
        assert loaded(path) == (30, 30)
        assert sorted(one.name for one in path.iterdir()) == ["iter_0000030", durable_files.LATEST_FILE]
        shutil.rmtree(path)
        number += 1
    assert number > 10
    assert {(10, 10), new} <= set(seen), "both happen"
    assert seen == sorted(seen), "once the new one is there, it stays"


def test_a_crash_of_the_first_save_leaves_nothing_to_load(tmp_path: Path) -> None:
    number = 1
    while crash_at(number, partial(save_checkpoint, 10, tmp_path / str(number), filled(10)), "all"):
        assert loaded(tmp_path / str(number)) in ((0, 0), (10, 10))
        number += 1
    assert number > 10


# --- what is saved ---------------------------------------------------------------------------------------------------


def test_the_files_are_those_of_bagua_0_9(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    save_checkpoint(12, tmp_path, net, optimizer)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "12"
    file = torch.load(tmp_path / "iter_0000012" / "mp_rank_00_model_states.pt")
    assert file["iteration"] == 12
    assert list(file["model"]) == ["weight", "bias"]
    assert file["optimizer"] == optimizer.state_dict()
    assert "lr_scheduler" not in file


def test_files_of_bagua_0_9_are_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000005"
    folder.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    state = {f"module.{name}": value for name, value in filled(3).state_dict().items()}
    torch.save({"iteration": 5, "model": state}, folder / "mp_rank_00_model_states.pt")
    assert loaded(tmp_path) == (5, 3)


def _trained(steps: int) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    _train((net, optimizer, scheduler), range(steps))
    return net, optimizer, scheduler


def _train(run: tuple[nn.Module, Any, Any], steps: range) -> None:
    net, optimizer, scheduler = run
    for step in steps:
        optimizer.zero_grad()
        net(torch.randn(5, 3, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("in_background", [False, True])
def test_training_goes_on_as_if_it_had_not_stopped(in_background: bool, tmp_path: Path) -> None:
    run = _trained(3)
    if in_background:
        pending = async_save_checkpoint(3, tmp_path, *run)
        _train(run, range(3, 6))  # while the copy is written
        pending.wait()
    else:
        save_checkpoint(3, tmp_path, *run)
        _train(run, range(3, 6))
    resumed = _trained(0)
    assert load_checkpoint(tmp_path, *resumed) == 3
    _train(resumed, range(3, 6))
    for one, other in zip(run[0].state_dict().values(), resumed[0].state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert resumed[2].get_last_lr() == run[2].get_last_lr()


def test_a_part_of_a_larger_memory_is_saved_alone(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    bucket = torch.zeros(1 << 20)
    net.weight.data = bucket[:4].view(2, 2)
    save_checkpoint(1, tmp_path, net)
    assert (tmp_path / "iter_0000001" / durable_files.MODEL_FILE).stat().st_size < 10_000


@pytest.mark.parametrize("copies", [saving.compact, lambda state: saving.staged(state)[0]])
def test_tied_weights_are_written_once(copies: Callable[[Any], Any]) -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    state = copies(net.state_dict())
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()
    assert state._metadata == net.state_dict()._metadata  # type: ignore[attr-defined]


@pytest.mark.parametrize("copies", [saving.compact, lambda state: saving.staged(state)[0]])
def test_tensors_without_memory_of_their_own_are_not_taken_for_tied(copies: Callable[[Any], Any]) -> None:
    """Subclasses that wrap other tensors, as those of quantized weights do: all of them lie at address 0."""
    values = [TwoTensor(torch.full((3,), float(one)), torch.full((3,), -float(one))) for one in (1, 2)]
    assert values[0].data_ptr() == values[1].data_ptr() == 0
    state = copies({"first": values[0], "second": values[1]})
    assert [state[name].a[0] for name in ("first", "second")] == [1, 2]


# --- keep_last -------------------------------------------------------------------------------------------------------


def test_old_ones_are_deleted_and_later_ones_are_not(tmp_path: Path) -> None:
    for iteration in (10, 20, 30, 40):
        save_checkpoint(iteration, tmp_path, filled(iteration), keep_last=2)
    assert durable_files.saved_iterations(tmp_path) == [30, 40]
    assert load_checkpoint(tmp_path, filled(0), iteration=30) == 30
    # Training went back to 30, and comes to 35: 40 is not newer.
    save_checkpoint(35, tmp_path, filled(35), keep_last=1)
    assert durable_files.saved_iterations(tmp_path) == [35, 40]
    assert loaded(tmp_path) == (35, 35)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_strict(tmp_path: Path) -> None:
    assert loaded(tmp_path / "missing") == (0, 0)
    save_checkpoint(1, tmp_path, filled(1))
    other = nn.Linear(3, 2, bias=False)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*bias"):
        load_checkpoint(tmp_path, other)
    assert load_checkpoint(tmp_path, other, strict=False) == 1
    with pytest.raises(RuntimeError, match="without optimizer"):
        load_checkpoint(tmp_path, filled(0), torch.optim.SGD(other.parameters()))
    assert load_checkpoint(tmp_path, filled(0), torch.optim.SGD(other.parameters()), strict=False) == 1


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    net = filled(1)
    save_checkpoint(1, tmp_path, net, torch.optim.Adam(net.parameters()))
    momentum = torch.optim.SGD(net.parameters(), momentum=0.9)
    with pytest.raises(RuntimeError, match=r"an optimizer of class Adam, and here is SGD; .*optimizer=None"):
        load_checkpoint(tmp_path, net, momentum)
    assert load_checkpoint(tmp_path, net) == 1
    # A fused optimizer has the same state.
    assert load_checkpoint(tmp_path, net, fuse_optimizer(torch.optim.Adam(net.parameters()))) == 1


def test_a_wrong_log_level_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(10, tmp_path, filled(10))
    net = filled(0)
    monkeypatch.setenv("BAGUA_LOG_LEVEL", "loud")
    with pytest.raises(ValueError, match="BAGUA_LOG_LEVEL=loud"):
        load_checkpoint(tmp_path, net)
    assert value_of(net) == 0
    monkeypatch.setenv("BAGUA_LOG_LEVEL", "info")
    assert load_checkpoint(tmp_path, net) == 10


def test_what_was_loaded_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bagua")
    net = filled(1)
    load_checkpoint(tmp_path / "typo", net)
    load_checkpoint(tmp_path, net)
    save_checkpoint(7, tmp_path, net, torch.optim.SGD(net.parameters()))
    load_checkpoint(tmp_path, net, torch.optim.SGD(net.parameters()))
    assert [record.getMessage() for record in caplog.records] == [
        f"no checkpoint in {tmp_path / 'typo'}, which does not exist: nothing was loaded",
        f"no checkpoint in {tmp_path}: nothing was loaded",
        f"loaded model, optimizer from {tmp_path / 'iter_0000007'}",
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], capture_output=True)
    if mount.returncode:
        pytest.skip(f"needs to mount a tmpfs: {mount.stderr.decode()}")
    try:
        save_checkpoint(1, tmp_path, filled(1))
        with pytest.raises(RuntimeError, match=r"No space left on device: \d+ bytes are free"):
            save_checkpoint(2, tmp_path, nn.Linear(1000, 500))
        assert loaded(tmp_path) == (1, 1)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


class _Own:
    def state_dict(self) -> dict[str, Any]:
        return {"path": Path()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def test_other_objects_are_loaded_only_if_that_is_asked_for(tmp_path: Path) -> None:
    save_checkpoint(1, tmp_path, filled(1), _Own())
    with pytest.raises(RuntimeError, match="weights_only=False"):
        load_checkpoint(tmp_path, filled(0), _Own())
    own = _Own()
    load_checkpoint(tmp_path, filled(0), own, weights_only=False)
    assert own.loaded == {"path": Path()}


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    file.write_text("of another program")
    for call in (lambda: save_checkpoint(1, file, filled(1)), lambda: load_checkpoint(file, filled(0))):
        with pytest.raises(RuntimeError, match=r"model\.pt is a file, and checkpoints_path must be a folder"):
            call()
    assert file.read_text() == "of another program"


def test_what_cannot_be_found_is_named(tmp_path: Path) -> None:
    save_checkpoint(10, tmp_path, filled(1))
    with pytest.raises(RuntimeError, match=r"no checkpoint of iteration 7 .*\n.*there are \[10\]"):
        load_checkpoint(tmp_path, filled(0), iteration=7)
    with pytest.raises(RuntimeError, match="is the folder of one iteration; pass "):
        load_checkpoint(tmp_path / "iter_0000010", filled(0))
    file = tmp_path / "iter_0000010" / durable_files.MODEL_FILE
    for damaged in (b"", file.read_bytes()[:-100]):
        file.write_bytes(damaged)
        with pytest.raises(RuntimeError, match=f"{durable_files.MODEL_FILE} is damaged"):
            load_checkpoint(tmp_path, filled(0))
    (tmp_path / durable_files.LATEST_FILE).write_text("release")
    with pytest.raises(RuntimeError, match="'release' instead of a number"):
        load_checkpoint(tmp_path, filled(0))


@pytest.mark.parametrize(
    ("iteration", "options", "kind"),
    [(-1, {}, ValueError), (1.5, {}, TypeError), (True, {}, TypeError), (1, {"keep_last": 0}, ValueError)],
)
def test_arguments_are_checked(iteration: Any, options: Any, kind: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(kind, match=r"must be"):
        save_checkpoint(iteration, tmp_path, filled(1), **options)
    assert not list(tmp_path.iterdir())


# --- in the background -----------------------------------------------------------------------------------------------


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_an_error_in_the_background_is_raised_by_wait_or_else_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(1, tmp_path, filled(1))
    with monkeypatch.context() as patch, caplog.at_level(logging.CRITICAL, "bagua"):
        patch.setattr(durable_files, "write_state", _full)
        pending = async_save_checkpoint(2, tmp_path, filled(2))
        with pytest.raises(RuntimeError, match=r"write checkpoint 2: OSError.*No space left"):
            pending.wait()
        pending = async_save_checkpoint(3, tmp_path, filled(3))
        pending._join()
    with pytest.raises(RuntimeError, match="checkpoint 3: OSError"):
        save_checkpoint(4, tmp_path, filled(4))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["iter_0000001", durable_files.LATEST_FILE]
    save_checkpoint(5, tmp_path, filled(5))
    assert loaded(tmp_path) == (5, 5)


def test_saves_are_made_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    write = durable_files.write_state

    def wait_and_write(path: Path, state: Any) -> None:
        assert may_write.wait(30)
        write(path, state)

    monkeypatch.setattr(durable_files, "write_state", wait_and_write)
    net = filled(1)
    pending = async_save_checkpoint(1, tmp_path, net)
    net.weight.data.zero_()
    assert not pending.done()
    with pytest.raises(TimeoutError, match="still being written"):
        pending.wait(timeout_s=0)
    may_write.set()
    assert loaded(tmp_path) == (1, 1)  # waits for it
    assert pending.done()
