"""Which commit is compared with, and why that one; and what the tree is that stands against it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from bagua.net.bench.api import BenchError

GIT_TIMEOUT_S = 60.0
RELEASE_TAGS = "v[0-9]*"
_TRUNKS = ("origin/HEAD", "origin/main", "main")


@dataclass(frozen=True)
class BaseCommit:
    sha: str
    name: str  # as the user or git calls it
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.sha[:10]}): {self.reason}"


def run_git(repository: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Not checked: the caller knows what a failure means."""
    try:
        return subprocess.run(
            ["git", "-C", str(repository), *words],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=GIT_TIMEOUT_S,
        )
    except FileNotFoundError as error:
        raise BenchError("git is not on the PATH; commits cannot be compared without it: install git") from error
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"git {words[0]} did not answer within {GIT_TIMEOUT_S:g} s in {str(repository)!r}") from error


def check_repository(repository: Path) -> None:
    found = run_git(repository, "rev-parse", "--show-toplevel")
    if found.returncode != 0:
        said = found.stderr.strip() or "git rev-parse failed"
        raise BenchError(
            f"{str(repository)!r} is no git checkout that can be read ({said}); commits are compared: clone the"
            " repository"
        )
    top = Path(found.stdout.strip())
    if not top.samefile(repository):
        raise BenchError(
            f"{str(repository)!r} belongs to the git checkout {str(top)!r}, which is another project; commits are"
            " compared: clone the repository"
        )


def resolve_base(repository: Path, asked: str | None) -> BaseCommit:
    """The commit that was asked for; else the last release; else where this branch began; else the parent."""
    check_repository(repository)
    if asked is not None:
        sha = _commit(repository, asked)
        if sha is None:
            raise BenchError(
                f"base {asked!r} names no commit of this repository; `git tag` and `git log --oneline` list them (a"
                " shallow clone lacks most: git fetch --unshallow --tags)"
            )
        return BaseCommit(sha, asked, "as given")
    head = _commit(repository, "HEAD")
    if head is None:
        raise BenchError(f"{str(repository)!r} has no commit yet; commit something to compare with")
    tag = run_git(repository, "describe", "--tags", "--abbrev=0", "--match", RELEASE_TAGS, "HEAD")
    if tag.returncode == 0:
        name = tag.stdout.strip()
        return BaseCommit(_existing(repository, name), name, "the last release that HEAD contains")
    for trunk in _TRUNKS:
        fork = run_git(repository, "merge-base", "HEAD", trunk)
        sha = fork.stdout.strip()
        if fork.returncode == 0 and sha != head:
            return BaseCommit(sha, f"merge base with {trunk}", "HEAD contains no release tag v*; here the branch began")
    parent = _commit(repository, "HEAD~1")
    if parent is None:
        raise BenchError(
            "HEAD contains no release tag v* and its parent is not here; name a base (a shallow clone lacks both: git"
            " fetch --unshallow --tags)"
        )
    return BaseCommit(parent, "HEAD~1", "the parent: HEAD contains no release tag v* and is on no branch beside main")


@dataclass(frozen=True)
class WorkingTree:
    sha: str
    is_changed: bool

    def __str__(self) -> str:
        return f"{self.sha[:10]}, with uncommitted changes" if self.is_changed else self.sha[:10]


def describe_tree(repository: Path) -> WorkingTree:
    # A new file that git does not know is built as well; what git ignores is not.
    changed = run_git(repository, "status", "--porcelain", "--", "net_plugin", "CMakeLists.txt", "pyproject.toml")
    return WorkingTree(_existing(repository, "HEAD"), bool(changed.stdout.strip()))


def _commit(repository: Path, name: str) -> str | None:
    # --end-of-options: a name that begins with a dash is no option.
    found = run_git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    return found.stdout.strip() if found.returncode == 0 else None


def _existing(repository: Path, name: str) -> str:
    sha = _commit(repository, name)
    if sha is None:
        raise BenchError(f"{name!r} is no commit in {str(repository)!r}; is the repository damaged? (git fsck)")
    return sha
