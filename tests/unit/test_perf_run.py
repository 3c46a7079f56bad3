"""make perf as a whole: a base that is built from its commit, the fake driver, table, file and exit status."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.fake_driver import install_fake_driver
from support.perf_tool import TOOLS, Repository
from support.processes import living_pids, wait_until

from bagua.net.bench.errors import BenchError
from bagua.net.bench.progress import Progress
from bagua.net.bench.result_file import Figure, ResultFile, read_result

from perf.base_build import TARGET, build_base, build_type  # isort: skip (support.perf_tool puts it on the path)
from perf.base_commit import BaseCommit, resolve_base  # isort: skip
from perf.cli import main, parse_options  # isort: skip
from perf.rounds import Libraries, Part, RowSamples, add_round, bench_command, measure  # isort: skip

DEADLINE_S = 180.0
QUICK = ["--rounds", "11", "--seconds", "1"]
MIB = 1 << 20


class Tree:
    """A repository, the fake driver, and a library as it would be installed."""

    def __init__(self, folder: Path) -> None:
        self.repository = Repository(folder / "clone")
        self.driver = install_fake_driver(folder)
        self.library = folder / "libinstalled.so"
        self.library.write_text("1", encoding="utf-8")
        self.pids = folder / "pids"
        self.pids.mkdir()

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("BAGUA_NET_", "NCCL_"))}
        path = os.pathsep.join(filter(None, [str(TOOLS), kept.get("PYTHONPATH")]))
        return {**kept, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "FAKE_DRIVER_PIDS": str(self.pids), **more}

    def command(self, *words: str) -> list[str]:
        given = ["--repository", str(self.repository.root), "--library", str(self.library)]
        return [sys.executable, "-m", "perf", *given, "--driver", str(self.driver), *words]

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*words),
            env=self.environment(**more),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            stdin=subprocess.DEVNULL,
        )
        assert living_pids(self.pids) == []
        assert "Traceback" not in done.stderr
        return done


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_slower_tree_is_seen_in_every_row(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    released = tree.repository.commit("1")
    tree.repository.git("tag", "v1.0.0")
    tree.repository.commit("3")
    samples = RowSamples([1.25] * 12, [1.25] * 12, [1.5] * 6, [8.0] * 12, [10.0] * 12)
    monkeypatch.setattr("perf.cli.measure", lambda *_, **__: {(2, 8): samples, (8, 1024): samples})
    path = tmp_path / "perf.json"
    words = tree.command("--fail-on-slower", "--json", str(path))[3:]
    assert main(words) == 3
    output = capsys.readouterr().out
    assert f"base: v1.0.0 ({released[:10]}): the last release that HEAD contains" in output
    assert "base's library: built in " in output
    rows = re.findall(r"^ +(\d) +(\S+ \w+) .* 1\.250  1\.250\.\.1\.250 .*  slower, more CPU$", output, re.MULTILINE)
    assert rows == [("2", "8 B"), ("8", "1 KiB")]
    assert "slower: 2 of 2 rows" in output
    result = read_result(path)
    assert (result.parameters["base"], result.parameters["base_name"]) == (released, "v1.0.0")
    ratios = result.select("time_ratio", baseline="base")
    assert [(one.case["verdict"], one.median, one.repetitions) for one in ratios] == [
        ("slower, more CPU", 1.25, 12)
    ] * 2
    assert result.find("time_ratio", baseline="bare", size_bytes=8).median == 1.5


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["v7"], 1, "make perf: error: base 'v7' names no commit of this repository"),
        (["--rounds", "3"], 2, "--rounds: 3 is outside 11..1000"),
        (["--seconds", "0"], 2, "--seconds: 0 is outside 1..86400"),
        (["--json", "/no/such/perf.json"], 2, "'/no/such' does not exist"),
        (["HEAD", "--library", "/no/libtree.so"], 1, "'/no/libtree.so' does not exist"),
    ],
)
def test_what_cannot_be_compared_says_why(tree: Tree, words: list[str], code: int, message: str) -> None:
    tree.repository.commit("1")
    done = tree.run(*words)
    assert done.returncode == code, done.stderr
    assert message in done.stderr


def test_a_failing_driver_is_named_with_the_libraries(tree: Tree) -> None:
    tree.repository.commit("1")
    fault = {"at": "verify", "do": "wrong", "rank": 1, "library": "libnccl-net.so"}
    done = tree.run("HEAD", *QUICK, FAKE_DRIVER_FAULT=json.dumps(fault))
    assert done.returncode == 1
    assert "WRONG DATA: baseline, all_reduce of 8 B: baseline rank 1: 3 wrong elements" in done.stderr
    assert f"--library {tree.library} --baseline-library {tree.repository.root}" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_comparison_leaves_nothing_behind(tree: Tree, number: signal.Signals) -> None:
    tree.repository.commit("1")
    fault = json.dumps({"at": "run", "do": "hang", "transport": "bare"})
    running = subprocess.Popen(
        tree.command("HEAD", *QUICK),
        env=tree.environment(FAKE_DRIVER_FAULT=fault),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # 2 ranks of plugin, baseline and bare.
        wait_until(lambda: len(living_pids(tree.pids)) == 6, "the start of six drivers")
    finally:
        running.send_signal(number)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "interrupted; all processes are ended" in errors
    assert "Traceback" not in errors
    wait_until(lambda: not living_pids(tree.pids), "the end of the drivers")


def test_two_comparisons_at_a_time_are_refused(tree: Tree) -> None:
    tree.repository.commit("1")
    cache = tree.repository.root / "build" / "perf"
    cache.mkdir(parents=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = tree.run("HEAD", *QUICK)
    assert done.returncode == 1
    assert "another `make perf` is running in " in done.stderr


def base_of(repository: Repository, name: str = "HEAD") -> BaseCommit:
    return resolve_base(repository.root, name)


def test_a_base_is_built_from_its_commit_and_not_from_the_tree(tree: Tree, tmp_path: Path) -> None:
    tree.repository.commit("1")
    tree.repository.commit("2")
    (tree.repository.root / "speed").write_text("9", encoding="utf-8")
    (tree.repository.root / "CMakeLists.txt").write_text("nonsense(", encoding="utf-8")
    cache = tmp_path / "cache"
    built = {
        name: build_base(tree.repository.root, base_of(tree.repository, name), cache, os.environ)
        for name in ("HEAD", "HEAD~1")
    }
    assert {name: one.path.read_text() for name, one in built.items()} == {"HEAD": "2", "HEAD~1": "1"}
    assert not any(one.was_cached for one in built.values())
    folder = built["HEAD"].path.parent
    assert folder == cache / base_of(tree.repository).sha
    assert (folder / "source" / "speed").read_text() == "2"
    assert (tree.repository.root / "speed").read_text() == "9"


def test_a_kept_library_is_used_again_unless_it_was_built_otherwise(tree: Tree, tmp_path: Path) -> None:
    tree.repository.commit("1")

    def build(environment: Mapping[str, str]) -> bool:
        return build_base(tree.repository.root, base_of(tree.repository), tmp_path / "cache", environment).was_cached

    plain = {name: value for name, value in os.environ.items() if name != "CXXFLAGS"}
    assert [build(plain), build(plain)] == [False, True]
    assert [build({**plain, "CXXFLAGS": "-O1"}), build({**plain, "CXXFLAGS": "-O1"})] == [False, True]
    # One that was interrupted has no library.
    sha = base_of(tree.repository).sha
    (tmp_path / "cache" / sha / "libnccl-net.so").unlink()
    assert not build({**plain, "CXXFLAGS": "-O1"})
    with pytest.raises(BenchError, match="the C\\+\\+ compiler '/no/cxx' cannot be run"):
        build({**plain, "CXX": "/no/cxx"})


def test_a_base_that_does_not_build_shows_the_end_of_the_log(tree: Tree) -> None:
    broken = (
        'cmake_minimum_required(VERSION 3.25)\nproject(x LANGUAGES NONE)\nmessage(FATAL_ERROR "lost a semicolon")\n'
    )
    sha = tree.repository.commit("1", broken)
    done = tree.run("HEAD")
    assert done.returncode == 1
    assert f"HEAD ({sha[:10]}) does not build: cmake exited with 1; the end of " in done.stderr
    assert "lost a semicolon" in done.stderr
    assert f"{sha}/build.log" in done.stderr
    sha = tree.repository.commit("1", "cmake_minimum_required(VERSION 3.25)\nproject(x LANGUAGES NONE)\n")
    done = tree.run("HEAD")
    assert done.returncode == 1
    assert re.search(rf"{sha[:10]}\) does not build: cmake exited .*unknown target '{TARGET}'", done.stderr, re.DOTALL)
    nothing = "cmake_minimum_required(VERSION 3.25)\nproject(x LANGUAGES NONE)\nadd_custom_target(nccl-net)\n"
    tree.repository.commit("1", nothing)
    done = tree.run("HEAD")
    assert done.returncode == 1
    assert "the target nccl-net built no libnccl-net.so" in done.stderr


def test_the_base_is_built_as_its_own_wheel_was(repository: Path, tmp_path: Path) -> None:
    ours = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["scikit-build"]
    assert build_type(repository) == ours["cmake"]["build-type"]
    assert TARGET in ours["build"]["targets"]
    cmake_lists = (repository / "CMakeLists.txt").read_text()
    assert "option(BAGUA_BUILD_TESTS" in cmake_lists
    assert "option(BAGUA_BUILD_PYTHON" in cmake_lists
    assert build_type(tmp_path) == "Release", "no pyproject.toml: what scikit-build-core takes by itself"
    (tmp_path / "pyproject.toml").write_text('[tool.scikit-build]\n"cmake.build-type" = "Debug"\n')
    assert build_type(tmp_path) == "Debug"


def bench_result(tree_seconds: float, base_seconds: float, *, swapped: bool) -> ResultFile:
    """What bagua-net-bench writes of 1 KiB."""
    plugin, baseline = (base_seconds, tree_seconds) if swapped else (tree_seconds, base_seconds)
    times = {"plugin": plugin, "baseline": baseline, "bare": 1.0}
    found = [Figure({"backend": n, "size_bytes": 1024}, "latency_p50", "us", t * 1e6) for n, t in times.items()]
    for name in ("baseline", "bare"):
        case = {"backend": "plugin", "baseline": name, "size_bytes": 1024}
        found.append(Figure(case, "speedup", "x", times[name] / plugin))
    return ResultFile("", "", "", None, {}, {}, tuple(found))


def test_base_and_tree_change_places_and_the_ratio_does_not(tmp_path: Path) -> None:
    rows: dict[tuple[int, int], object] = {}
    for swapped in (False, True):
        add_round(rows, 2, bench_result(3.0, 2.0, swapped=swapped), swapped=swapped)
    found = rows[2, 1024]
    assert found.time_ratios == pytest.approx([1.5, 1.5])
    assert found.cpu_ratios == []
    assert found.over_bare == pytest.approx([3.0])
    assert (found.tree_us, found.base_us) == ([3e6, 3e6], [2e6, 2e6])

    libraries = Libraries(Path("/base.so"), Path("/tree.so"), Path("/driver"))
    part = Part(8, "1K", "4M", 1.0)
    straight = bench_command(libraries, part, 2.5, tmp_path / "r", swapped=False, verify=True)
    turned = bench_command(libraries, part, 2.5, tmp_path / "r", swapped=True, verify=False)
    places = [
        (words[words.index("--library") + 1], words[words.index("--baseline-library") + 1])
        for words in (straight, turned)
    ]
    assert places == [("/tree.so", "/base.so"), ("/base.so", "/tree.so")]
    assert ("--no-verify" in straight, "--no-verify" in turned) == (False, True)


def test_base_and_tree_are_measured_in_both_places_of_each_part(tree: Tree) -> None:
    parts = (Part(2, "8", "8", 0.5), Part(8, "1K", "4K", 0.5))
    rows = measure(
        Libraries(tree.library, tree.library, tree.driver),
        rounds=2,
        seconds=60,
        environment=tree.environment(),
        parts=parts,
        progress=Progress(1, quiet=True),
    )
    assert list(rows) == [(2, 8), (8, 1024), (8, 4096)]
    assert all(samples.time_ratios == pytest.approx([1.0, 1.0]) for samples in rows.values())
    assert all(len(samples.over_bare) == 1 for samples in rows.values()), "of the tree alone"


def test_a_slow_machine_gets_fewer_rounds_but_never_too_few(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def run(*_: object) -> None:
        now[0] += 10.0

    monkeypatch.setattr("perf.rounds._run_bench", run)
    monkeypatch.setattr("perf.rounds.read_result", lambda _: bench_result(1.0, 1.0, swapped=False))
    rows = measure(
        Libraries(tree.library, tree.library, tree.driver),
        rounds=1000,
        seconds=1,
        environment={},
        parts=(Part(2, "8", "8", 1.0),),
        progress=Progress(1, quiet=True),
        clock=lambda: now[0],
    )
    assert [len(samples.time_ratios) for samples in rows.values()] == [12], "the even number after MIN_ROUNDS"


def test_an_empty_base_is_none_given() -> None:
    """`make perf PERF_BASE=` may pass one on."""
    assert parse_options([""]).base is None
    assert parse_options(["v1.0.0"]).base == "v1.0.0"
