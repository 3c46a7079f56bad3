"""The runner of ranks itself: a test that cannot fail proves nothing."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.processes import is_alive, living_pids, wait_until
from support.ranks import MAX_KEPT, run_ranks

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


@dataclass
class Parcel:
    """Of this file: pickles of it name the module that pytest made of it."""

    text: str
    tensor: torch.Tensor


def rank() -> int:
    return int(os.environ["RANK"])


def send_back(parcel: Parcel, number: int) -> tuple[Parcel, int, int]:
    return Parcel(parcel.text.upper(), parcel.tensor + rank()), number, torch.get_num_threads()


def test_arguments_and_results_are_carried() -> None:
    results = run_ranks(3, send_back, Parcel("text", torch.ones(300_000)), 7)
    for number, (parcel, same, threads) in enumerate(results):
        assert parcel.text == "TEXT"
        assert torch.equal(parcel.tensor, torch.full((300_000,), 1.0 + number))
        assert same == 7
        assert threads == 1


def read_environment(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_TEST", "seen")
    monkeypatch.setenv("GROUP_RANK", "of another launcher")
    assert run_ranks(2, read_environment, *RANK_VARIABLES, "OF_THE_TEST", "GROUP_RANK") == [
        ["0", "2", "0", "2", "127.0.0.1", "seen", None],
        ["1", "2", "1", "2", "127.0.0.1", "seen", None],
    ]
    monkeypatch.delenv("OF_THE_TEST")
    assert run_ranks(1, read_environment, "OF_THE_TEST") == [[None]]
    assert run_ranks(2, read_environment, "X", env={"X": "both"}) == [["both"], ["both"]]
    each = [{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, {"LOCAL_RANK": "0"}]
    assert run_ranks(2, read_environment, "LOCAL_RANK", "LOCAL_WORLD_SIZE", env=each) == [["0", "1"], ["0", "2"]]


def test_ranks_without_a_gpu_each_share_one_if_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_TEST_DEVICE", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert run_ranks(2, read_environment, "NCCL_HOSTID") == [[None], [None]]
    with pytest.raises(pytest.skip.Exception, match="needs 3 GPUs, one per rank; here are 2"):
        run_ranks(3, read_environment, "NCCL_HOSTID")
    monkeypatch.setenv("BAGUA_TEST_SHARE_GPUS", "1")
    assert run_ranks(2, read_environment, "NCCL_HOSTID") == [[None], [None]]
    hosts = run_ranks(3, read_environment, "NCCL_HOSTID", "NCCL_SOCKET_IFNAME")
    assert len({host for host, _ in hosts}) == 3
    assert {interface for _, interface in hosts} == {"lo"}


def leave_pid(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()


def one_raises(folder: str) -> None:
    print(f"rank {rank()} says something", flush=True)
    leave_pid(folder)
    if rank() == 1:
        # Only then: a rank that is slow to start may be stopped before it has said anything.
        wait_until(lambda: len(list(Path(folder).iterdir())) == 3, "all ranks have spoken")
        raise KeyError("the reason")
    threading.Event().wait()


def test_a_rank_that_raises_ends_the_others_and_every_story_is_told(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(3, one_raises, str(tmp_path))
    story = str(caught.value)
    assert "rank 1 raised\nTraceback" in story
    assert "KeyError: 'the reason'" in story
    for other in (0, 2):
        assert f"rank {other} was stopped" in story
        assert f"rank {other} says something" in story
    assert story.count(f'test_rank_runner.py", line {one_raises.__code__.co_firstlineno + 7} in one_raises') == 2
    assert len(list(tmp_path.iterdir())) == 3
    assert living_pids(tmp_path) == []


def one_dies(folder: str, how: str) -> str:
    leave_pid(folder)
    if rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    return "alive"


@pytest.mark.parametrize("how", ["killed", "left"])
def test_a_rank_that_dies(tmp_path: Path, how: str) -> None:
    assert run_ranks(2, one_dies, str(tmp_path), how, expect_death={1}) == ["alive", None]
    with pytest.raises(AssertionError, match="rank 1 died without a result"):
        run_ranks(2, one_dies, str(tmp_path), how)
    with pytest.raises(AssertionError, match="rank 1 died without a result"):
        run_ranks(2, one_dies, str(tmp_path), how, expect_death={0})
    assert living_pids(tmp_path) == []


def dies_before_its_child(file: str) -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
    Path(file).write_text(str(child))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_has_ended_although_a_process_that_it_forked_has_not(tmp_path: Path) -> None:
    file = tmp_path / "child"
    try:
        assert run_ranks(1, dies_before_its_child, str(file), expect_death={0}, timeout=10) == [None]
    finally:
        os.kill(int(file.read_text()), signal.SIGKILL)


def raise_where_death_is_allowed() -> None:
    raise ValueError("wrong")


def test_an_exception_is_no_death() -> None:
    with pytest.raises(AssertionError, match="ValueError: wrong"):
        run_ranks(1, raise_where_death_is_allowed, expect_death={0})


def wait_for_ever(folder: str) -> None:
    leave_pid(folder)
    threading.Thread(target=threading.Event().wait, name="beside").start()
    threading.Event().wait()


def test_time_is_up(tmp_path: Path) -> None:
    # On a busy machine ranks may not have begun after a second.
    for seconds in (1, 5, 25):
        folder = tmp_path / str(seconds)
        folder.mkdir()
        with pytest.raises(AssertionError, match=f"not done within {seconds} s") as caught:
            run_ranks(2, wait_for_ever, str(folder), timeout=seconds)
        story = str(caught.value)
        if story.count("in wait_for_ever") == 2:
            break
    assert story.count("in wait_for_ever") == 2
    assert story.count(" in _bootstrap\n") == 2, "the stacks of all threads are there"
    assert living_pids(folder) == []


def return_what_cannot_be_pickled() -> object:
    return lambda: None


def warn() -> None:
    import warnings

    warnings.warn("watch out", stacklevel=1)


def test_other_failures() -> None:
    with pytest.raises(AssertionError, match="pickle"):
        run_ranks(1, return_what_cannot_be_pickled)
    with pytest.raises(AssertionError, match="UserWarning: watch out"):
        run_ranks(1, warn)
    with pytest.raises(ValueError, match="top level"):
        run_ranks(1, lambda: None)
    with pytest.raises(ValueError, match="1 mappings for 2 ranks"):
        run_ranks(2, warn, env=[{}])


def stay_until_all_are_done(folder: str) -> int:
    """Rank 0, which would serve the others' store, returns at once; its process has to stay."""
    if rank() == 0:
        leave_pid(folder)
        return -1
    wait_until(lambda: any(Path(folder).iterdir()), "rank 0 has begun")
    (pid,) = (int(path.name) for path in Path(folder).iterdir())
    os.kill(pid, 0)
    return pid


def test_a_rank_stays_until_all_are_done(tmp_path: Path) -> None:
    results = run_ranks(3, stay_until_all_are_done, str(tmp_path))
    assert results == [-1, results[1], results[1]]
    assert living_pids(tmp_path) == []


def modules() -> list[str]:
    return [name for name in ("torch", "torch._dynamo") if name in sys.modules]


def test_ranks_start_with_torch_imported() -> None:
    assert run_ranks(1, modules) == [["torch", "torch._dynamo"]]


def own_pid() -> int:
    return os.getpid()


def test_ranks_of_several_kinds_are_kept() -> None:
    """Those that were used last, whatever ran in ranks of their own in between."""
    kinds: list[dict[str, str]] = [{"KIND": str(number)} for number in range(MAX_KEPT)]
    first = [run_ranks(1, own_pid, env=kind, reuse=True) for kind in kinds]
    (own,) = run_ranks(1, own_pid, env=kinds[0])
    assert [run_ranks(1, own_pid, env=kind, reuse=True) for kind in kinds] == first
    assert [own] not in first
    assert run_ranks(1, own_pid, env={"KIND": "another"}, reuse=True) not in first
    assert [is_alive(pid) for (pid,) in first] == [False] + [True] * (MAX_KEPT - 1)
