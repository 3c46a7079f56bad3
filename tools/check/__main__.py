"""`make check BASE=<commit>`: lints what changed since the commit, and runs the tests that the change reaches.

`python -m check --base=COMMIT` with tools/ and tests/ on PYTHONPATH; --list only prints.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from perf import run_git

from bagua.net.bench.api import BenchError

from .selection import CPP_RUNNER, REPOSITORY, SOURCES, Arrows, Selection, select

_BIN = Path(sys.executable).parent
# Those of the C++ tests and of the forwarder of tools/netlab, which `make cpp-tests` builds.
_NEED_NATIVE_BUILD = ("tests/net/", "tests/distributed/", "tests/gpu/")


def changed_since(repository: Path, base: str) -> list[str]:
    """Of the working tree, with files that are not known to git and those that are gone; a renamed one is both."""
    named = ["rev-parse", "--verify", "--quiet", "--end-of-options", f"{base}^{{commit}}"]
    if run_git(repository, *named).returncode:
        raise BenchError(
            f"BASE is {base!r}, which names no commit of this repository\nName the commit to compare with, as in: make"
            " check BASE=main (`git log --oneline` lists commits; a shallow clone lacks most: git fetch --unshallow)"
        )
    found: set[str] = set()
    for words in (
        ["diff", "--name-only", "--no-renames", "-z", base, "--"],
        ["ls-files", "--others", "--exclude-standard", "-z"],
    ):
        done = run_git(repository, *words)
        if done.returncode:
            raise BenchError(f"git {' '.join(words)} failed in {str(repository)!r}: {done.stderr.strip()}")
        found |= set(done.stdout.split("\0")) - {""}
    return sorted(found)


def lint_commands(changed: Sequence[str]) -> list[list[str]]:
    existing = [path for path in changed if (REPOSITORY / path).is_file() and not path.startswith("third_party/")]
    python = [path for path in existing if path.endswith(".py")]
    native = [path for path in existing if Path(path).suffix in SOURCES - {".py"}]
    commands = []
    if python:
        commands += [["ruff", "check", "--quiet", *python], ["ruff", "format", "--check", "--quiet", *python]]
    if any(path.startswith("bagua/") for path in python):
        commands += [["lint-imports", "--no-logo", "--no-cache"], ["mypy"]]
    if native:
        commands.append(["clang-format", "--dry-run", "-Werror", *native])
    return [[str(_BIN / command[0]), *command[1:]] for command in commands]


def test_commands(selection: Selection, options: Sequence[str]) -> list[list[str]]:
    pytest = [str(_BIN / "pytest"), "--installed", "--dist", "worksteal", *options]
    if selection.everything:
        return [["make", "--no-print-directory", "cpp-tests"], pytest]
    commands = []
    if selection.cpp_tests or any(path.startswith(_NEED_NATIVE_BUILD) for path in selection.tests):
        commands.append(["make", "--no-print-directory", "cpp-tests"])
    if selection.tests:
        commands.append([*pytest, *selection.tests])
    if selection.cpp_tests:
        commands.append([*pytest, CPP_RUNNER, "-k", " or ".join(selection.cpp_tests)])
    return commands


def run(command: Sequence[str]) -> bool:
    print(f"== {Path(command[0]).name} {' '.join(command[1:])}"[:120], flush=True)
    # tools/ and tests/ are on the path of this program only.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment).returncode == 0


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m check", description=__doc__)
    parser.add_argument("--base", required=True, help="the commit that the working tree is compared with")
    parser.add_argument("--list", action="store_true", help="print the rooms and tests, and run nothing")
    parser.add_argument("pytest", nargs=argparse.REMAINDER, help="options of pytest, after --")
    given = parser.parse_args(words)
    try:
        changed = changed_since(REPOSITORY, given.base)
        selection = select(changed, Arrows())
    except (BenchError, ValueError) as error:
        print(f"make check: {error}", file=sys.stderr)
        return 2
    print(f"{len(changed)} changed files since {given.base}")
    print(*(selection.reasons or ["they reach no test"]), sep="\n")
    if given.list:
        print(*selection.tests, *selection.cpp_tests, sep="\n")
        return 0
    options = [word for word in given.pytest if word != "--"]
    results = [run(command) for command in [*lint_commands(changed), *test_commands(selection, options)]]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
