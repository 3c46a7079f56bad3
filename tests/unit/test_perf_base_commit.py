"""make perf: which commit is compared with, and what is said where there is none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.perf_tool import Repository

from bagua.net.bench.errors import BenchError

from perf import base_commit  # isort: skip (support.perf_tool puts it on the path)
from perf.base_commit import describe_tree, resolve_base  # isort: skip


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "clone")


def test_what_is_asked_for_may_be_a_tag_a_branch_or_a_commit(repository: Repository) -> None:
    first = repository.commit("1")
    repository.git("tag", "--annotate", "--message", "release", "v1.0.0")
    repository.git("branch", "topic")
    repository.commit("2")
    for name in ("v1.0.0", "topic", first, first[:8], "HEAD~1"):
        base = resolve_base(repository.root, name)
        assert (base.sha, base.name, base.reason) == (first, name, "as given")


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
    assert str(base) == f"v1.1.0 ({released[:10]}): the last release that HEAD contains"


def test_without_a_release_a_branch_is_compared_with_its_beginning(repository: Repository) -> None:
    began = repository.commit("1")
    repository.git("switch", "--quiet", "--create", "topic")
    repository.commit("2")
    repository.commit("3")
    base = resolve_base(repository.root, None)
    assert (base.sha, base.name) == (began, "merge base with main")
    assert "no release tag" in base.reason


def test_without_a_release_main_is_compared_with_its_parent(repository: Repository) -> None:
    parent = repository.commit("1")
    repository.commit("2")
    base = resolve_base(repository.root, None)
    assert (base.sha, base.name) == (parent, "HEAD~1")
    assert "no release tag" in base.reason


def test_a_single_commit_needs_a_base(repository: Repository) -> None:
    with pytest.raises(BenchError, match="has no commit yet"):
        resolve_base(repository.root, None)
    repository.commit("1")
    with pytest.raises(BenchError, match=r"its parent is not here; name a base .*git fetch --unshallow --tags"):
        resolve_base(repository.root, None)


@pytest.mark.parametrize("name", ["v7.7.7", "--all", "HEAD:speed", ""])
def test_an_unknown_base_is_named(repository: Repository, name: str) -> None:
    repository.commit("1")
    with pytest.raises(BenchError, match=f"base '{name}' names no commit of this repository; `git tag` and `git log"):
        resolve_base(repository.root, name)


def test_a_folder_that_is_no_checkout_of_its_own(repository: Repository, tmp_path: Path) -> None:
    plain = tmp_path / "unpacked"
    plain.mkdir()
    with pytest.raises(BenchError, match=r"unpacked' is no git checkout that can be read \(.*clone the repository"):
        resolve_base(plain, None)
    # An unpacked archive inside another project's checkout must not be compared with that project's commits.
    repository.commit("1")
    inside = repository.root / "unpacked"
    inside.mkdir()
    with pytest.raises(BenchError, match="which is another project"):
        resolve_base(inside, None)


def test_git_is_missing(repository: Repository, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert shutil.which("git") is not None
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchError, match="git is not on the PATH"):
        resolve_base(repository.root, None)


def test_the_tree_says_whether_it_is_the_commit(repository: Repository) -> None:
    sha = repository.commit("1")
    assert str(describe_tree(repository.root)) == sha[:10]
    (repository.root / "notes.txt").touch()
    assert not describe_tree(repository.root).is_changed, "what is not built changes nothing"
    (repository.root / "net_plugin").mkdir()
    (repository.root / "net_plugin" / "new.cc").touch()
    assert str(describe_tree(repository.root)) == f"{sha[:10]}, with uncommitted changes"
    assert base_commit.RELEASE_TAGS.startswith("v")
