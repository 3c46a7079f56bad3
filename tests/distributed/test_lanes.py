"""The lanes in which tests run on GPUs, on CPUs; and the tests that are chosen for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.cuda_choice import CHOICE, all_files, chosen_tests
from support.lanes import belongs_to, phases_of, run_lanes, shares_of
from support.processes import is_alive, wait_until

GPUS = ["0", "1", "2", "3"]

# As run_ranks does it, with what tests can do.
PLAYED = """
import os, subprocess, time, warnings
from pathlib import Path
import pytest

def gpus():
    return os.environ["CUDA_VISIBLE_DEVICES"].split(",")

@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_ranks(ranks):
    if len(gpus()) < ranks and os.environ["BAGUA_TEST_SHARE_GPUS"] == "0":
        pytest.skip(f"needs {ranks} GPUs, one per rank; here are {len(gpus())}")
    with Path(__file__).with_name("where").open("a") as where:
        print(ranks, ",".join(gpus()), os.environ["BAGUA_TEST_DEVICE"], os.environ["BAGUA_TEST_SHARE_GPUS"], file=where)

def test_skipped():
    pytest.skip("for a reason of its own")

def test_wrong():
    print("said before")
    assert gpus() == ["none"]

@pytest.fixture
def broken():
    yield
    raise ValueError("while it was taken down")

def test_taken_down(broken):
    pass

def test_hangs():
    Path(__file__).with_name("pid").write_text(str(subprocess.Popen(["sleep", "300"]).pid))
    time.sleep(300)

def test_dies():
    os._exit(7)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tmp_path / "test_played.py").write_text(PLAYED)
    return tmp_path


def test_a_test_that_lacks_gpus_runs_again_with_more(root: Path) -> None:
    report = run_lanes(["test_played.py::test_ranks", "test_played.py::test_skipped"], GPUS, 60, root=root)
    assert report.problems == []
    assert len(report.outcomes) == 6
    tests = [f"test_played.py::test_ranks[{n}]" for n in (1, 2, 3, 4, 5)]
    assert sorted(one.test for one in report.of_kind("passed")) == tests
    assert [one.test for one in report.of_kind("skipped")] == ["test_played.py::test_skipped"]
    where = sorted((root / "where").read_text().splitlines())
    assert where == ["1 0,1 cuda 0", "2 0,1 cuda 0", "3 0,1,2,3 cuda 0", "4 0,1,2,3 cuda 0", "5 0,1,2,3 cuda 1"]


@pytest.mark.parametrize(("gpus", "where"), [(["2", "3"], "2 2,3 cuda 0\n4 2,3 cuda 1\n"), (["7"], None)])
def test_with_fewer_gpus_ranks_share_them(gpus: list[str], where: str | None, root: Path) -> None:
    report = run_lanes(["test_played.py::test_ranks[2]", "test_played.py::test_ranks[4]"], gpus, 60, root=root)
    assert report.problems == []
    assert len(report.of_kind("passed")) == 2
    if where is None:  # in lanes side by side
        assert sorted((root / "where").read_text().splitlines()) == ["2 7 cuda 1", "4 7 cuda 1"]
    else:
        assert (root / "where").read_text() == where


def test_failures_are_told_verbatim(root: Path) -> None:
    tests = [f"test_played.py::{test}" for test in ("test_wrong", "test_taken_down")]
    report = run_lanes(tests, GPUS, 60, root=root)
    wrong, taken_down = (report.outcomes[test] for test in tests)
    assert (wrong.kind, taken_down.kind) == ("failed", "failed")
    assert 'assert gpus() == ["none"]' in wrong.text
    assert "said before" in wrong.text
    assert "while it was taken down" in taken_down.text
    assert report.problems == []


def test_what_was_running_when_a_lane_ended_is_named(root: Path) -> None:
    hanging, dying = ("test_played.py::test_hangs", "test_played.py::test_dies")
    after = "test_played.py::test_skipped"
    first, second, third = ("test_played.py::test_ranks[1]", "test_played.py::test_ranks[2]", "test_no_such.py::test_x")
    # Lane 0 hangs, lane 1 dies, lane 2 does not find its test.
    tests = [first, second, third, "test_played.py::test_taken_down", hanging, dying]
    report = run_lanes([*tests, third, after, after], GPUS, 10, root=root)
    assert {one.test for one in report.of_kind("passed")} == {first, second}
    hung, died, lost = report.problems
    assert "lane 0 (GPUs 0,1) was not done within 10 s" in hung
    assert f"while this test was running: {hanging}" in hung
    assert f"not begun: {after}" in hung
    assert "lane 1 (GPUs 0,1) ended with exit status 7" in died
    assert f"while this test was running: {dying}" in died
    assert f"not begun: {third}" in lost
    assert "not found" in lost
    started = int((root / "pid").read_text())
    wait_until(lambda: not is_alive(started), "the end of what a test had started", 10)


def test_phases() -> None:
    assert phases_of(1) == [(1, True)]
    assert phases_of(2) == [(2, False), (4, True)]
    assert phases_of(3) == phases_of(8) == [(2, False), (4, False), (4, True)]


def test_shares() -> None:
    assert shares_of(GPUS, 2) == [["0", "1"], ["2", "3"]]
    assert shares_of(GPUS, 4) == [GPUS]
    assert shares_of(GPUS[:3], 2) == [["0", "1"]]
    assert shares_of(GPUS[:3], 4) == [GPUS[:3]]
    assert len(shares_of([str(number) for number in range(9)], 4)) == 2


def test_tests_of_several_ranks_run_in_lanes() -> None:
    tests = [
        "tests/distributed/test_coalesced.py::test_tensors_may_come_from_an_iterator",
        "tests/distributed/test_process_groups.py::test_the_same_members_again_after_a_group_was_destroyed",
    ]
    report = run_lanes(tests, GPUS[:2], 200, device="cpu")
    assert report.problems == []
    assert [one.test for one in report.of_kind("passed")] == tests, report.of_kind("failed")


def test_every_chosen_test_exists(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *all_files()],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    there = done.stdout.splitlines()
    assert [test for test in chosen_tests() if not any(belongs_to(one, test) for one in there)] == []
    assert len(set(chosen_tests())) == sum(map(len, CHOICE.values()))
