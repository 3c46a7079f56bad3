"""make perf: which commit is compared with, the base that is built from it, ratios and exit status. The verdict is
tested in tests/net/test_bench_verdict.py."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from support.fake_driver import install_fake_driver
from support.perf_tool import Repository

from bagua.net.bench.errors import BenchError
from bagua.net.bench.progress import Progress
from bagua.net.bench.result_file import read_result

from perf.base_build import build_base  # isort: skip (support.perf_tool puts it on the path)
from perf.base_commit import resolve_base  # isort: skip
from perf.cli import main  # isort: skip
from perf.rounds import Libraries, Part, RowSamples, measure  # isort: skip


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "clone")


def test_the_last_release_in_head_comes_first(repository: Repository) -> None:
    repository.commit("1")
    repository.git("tag", "v1.0.0")
    released = repository.commit("2")
    repository.git("tag", "--annotate", "--message", "release", "v1.1.0")
    repository.commit("3")
    repository.git("tag", "very-good")
    repository.git("switch", "--quiet", "--create", "elsewhere", "v1.0.0")
    repository.commit("4")
    repository.git("tag", "v9.0.0")
    repository.git("switch", "--quiet", "main")
    base = resolve_base(repository.root, None)
    assert (base.sha, base.name) == (released, "v1.1.0"), "v9.0.0 is not in HEAD, very-good is no release"


def test_without_a_release_it_is_where_the_branch_began_or_the_parent(repository: Repository) -> None:
    parent = repository.commit("1")
    began = repository.commit("2")
    base = resolve_base(repository.root, None)
    assert (base.sha, base.name) == (parent, "HEAD~1")
    repository.git("switch", "--quiet", "--create", "topic")
    repository.commit("3")
    repository.commit("4")
    base = resolve_base(repository.root, None)
    assert (base.sha, base.name) == (began, "merge base with main")


@pytest.mark.parametrize("name", ["v7.7.7", "--all", "HEAD:speed", ""])
def test_an_unknown_base_is_named(repository: Repository, name: str) -> None:
    repository.commit("1")
    with pytest.raises(BenchError, match=f"base '{name}' names no commit of this repository; `git tag` and `git log"):
        resolve_base(repository.root, name)


def test_a_base_is_built_from_its_commit_and_not_from_the_tree(repository: Repository, tmp_path: Path) -> None:
    repository.commit("1")
    repository.commit("2")
    (repository.root / "speed").write_text("9", encoding="utf-8")
    (repository.root / "CMakeLists.txt").write_text("nonsense(", encoding="utf-8")
    for name, speed in (("HEAD", "2"), ("HEAD~1", "1")):
        base = resolve_base(repository.root, name)
        assert build_base(repository.root, base, tmp_path / "cache", os.environ).path.read_text() == speed


def test_base_and_tree_are_measured_in_both_places(tmp_path: Path) -> None:
    """By the real bagua-net-bench with a driver that is slower with the tree's library, wherever it stands."""
    tree, base = tmp_path / "libtree.so", tmp_path / "libbase.so"
    tree.write_text("3", encoding="utf-8")
    base.write_text("2", encoding="utf-8")
    rows = measure(
        Libraries(base, tree, install_fake_driver(tmp_path)),
        rounds=2,
        seconds=60,
        environment=os.environ,
        parts=(Part(2, "8", "8", 0.5), Part(8, "1K", "4K", 0.5)),
        progress=Progress(1, quiet=True),
    )
    assert list(rows) == [("loopback", 2, 8), ("loopback", 8, 1024), ("loopback", 8, 4096)]
    for samples in rows.values():
        assert len(samples.time_ratios) >= 2
        assert samples.time_ratios == pytest.approx([1.5] * len(samples.time_ratios))


def test_a_slower_tree_is_seen_in_every_row(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    released = repository.commit("1")
    repository.git("tag", "v1.0.0")
    repository.commit("3")
    samples = RowSamples([1.25] * 12, [1.25] * 12, [1.5] * 6, [8.0] * 12, [10.0] * 12)
    monkeypatch.setattr("perf.cli.measure", lambda *_, **__: {("loopback", 2, 8): samples, ("10G", 8, 1024): samples})
    path = tmp_path / "perf.json"
    given = ["--repository", str(repository.root), "--library", sys.executable, "--driver", sys.executable]
    assert main([*given, "--fail-on-slower", "--json", str(path)]) == 3
    output = capsys.readouterr().out
    assert f"base: v1.0.0 ({released[:10]}): the last release that HEAD contains" in output
    rows = re.findall(
        r"^ *(\w+) +(\d) +(\S+ \w+) .* 1\.250  1\.250\.\.1\.250 .*  slower, more CPU$", output, re.MULTILINE
    )
    assert rows == [("loopback", "2", "8 B"), ("10G", "8", "1 KiB")]
    assert "slower: 2 of 2 rows" in output
    ratios = read_result(path).select("time_ratio", baseline="base")
    assert [(one.case["verdict"], one.median) for one in ratios] == [("slower, more CPU", 1.25)] * 2
