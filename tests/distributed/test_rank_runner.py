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
from support.processes import living_pids, wait_until
from support.ranks import run_ranks

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


def modules() -> list[str]:
    return [name for name in ("torch", "torch._dynamo") if name in sys.modules]
