"""`make perf`: is this tree faster or slower than the last release, or than any commit?

See docs/how-to/measure-network.md. Builds the plugin of the base commit as its wheel was built, and keeps it by commit;
`bagua-net-bench --baseline-library ... --fresh-processes` then compares the installed one with it, over loopback and
between two emulated hosts. Run with tools/ on PYTHONPATH: the root would bring the source tree of bagua before the
installed package, which has the library.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

from bagua.net.bench.api import (
    BenchError,
    Figure,
    OptionParser,
    ResultFile,
    check_output_files,
    read_result,
    run_in_order,
    running,
    within,
    write_result,
)
from bagua.net.library import LIBRARY_NAME

REPOSITORY = Path(__file__).resolve().parents[1]
CACHE = REPOSITORY / "build" / "perf"
# With the build of the base and a tree to be installed within five minutes on two cores.
DEFAULT_SECONDS = 200.0
# Many short rounds rather than few long ones: where a neighbour's work spoils one in four, 20 rounds find a change of
# 5 % in six runs of ten, 30 in more than eight. Even, so that base and tree have each place equally often.
DEFAULT_ROUNDS = 30
_GIT_TIMEOUT_S = 60.0
_BUILD_TIMEOUT_S = 900.0
# Beyond its seconds: a machine so slow that single iterations of the largest size overdraw them.
_PATIENCE_S = 1800.0
_LOG_TAIL_LINES = 25
_SHALLOW = "(a shallow clone lacks most: git fetch --unshallow --tags)"
_EXIT_SLOWER = 3

# What is faster over loopback may be slower between hosts, and these are what users have: network, rate of the link,
# channels, sizes, and the share of the time.
PARTS = (
    ("loopback", None, 2, ("8", "128M"), 0.4),
    ("loopback", None, 8, ("1K", "4M"), 0.2),
    ("10G", "10G", 8, ("64K", "16M"), 0.4),
)


def run_git(repository: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Not checked: the caller knows what a failure means."""
    options = {"capture_output": True, "text": True, "errors": "replace", "stdin": subprocess.DEVNULL}
    try:
        return subprocess.run(["git", "-C", str(repository), *words], timeout=_GIT_TIMEOUT_S, **options)  # type: ignore[call-overload, no-any-return]
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"git {words[0]} failed ({error}); commits need it: install git") from error


def resolve_base(asked: str | None) -> tuple[str, str]:
    """The commit that was asked for; else the last release; else where this branch began; else the parent. And why."""
    head = _commit("HEAD")
    if head is None:
        raise BenchError(f"{str(REPOSITORY)!r} is no git checkout; commits are compared: clone the repository")
    if asked is not None:
        if (sha := _commit(asked)) is None:
            raise BenchError(f"base {asked!r} names no commit here; `git tag` and `git log` list them {_SHALLOW}")
        return sha, asked
    tag = run_git(REPOSITORY, "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "HEAD").stdout.strip()
    if tag and (sha := _commit(tag)):
        return sha, f"{tag}, the last release that HEAD contains"
    for trunk in ("origin/HEAD", "origin/main", "main"):
        fork = run_git(REPOSITORY, "merge-base", "HEAD", trunk).stdout.strip()
        if fork and fork != head:
            return fork, f"merge base with {trunk}: HEAD contains no release tag v*"
    if (parent := _commit("HEAD~1")) is None:
        raise BenchError(f"HEAD contains no release tag v* and its parent is not here; name a base {_SHALLOW}")
    return parent, "HEAD~1: HEAD contains no release tag v* and is on no branch beside main"


def _commit(name: str) -> str | None:
    # --end-of-options: a name that begins with a dash is no option.
    found = run_git(REPOSITORY, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    return found.stdout.strip() if found.returncode == 0 else None


def build_base(sha: str) -> Path:
    """Its libnccl-net.so alone: the driver is the installed one for both.

    Raises:
        BenchError: the commit cannot be exported, or does not build; with the tail of the log.
    """
    folder = CACHE / f"{sha[:12]}-{_compiler()}"
    library = folder / LIBRARY_NAME
    if library.is_file():
        return library
    # One that was interrupted.
    shutil.rmtree(folder, ignore_errors=True)
    source, build, archive = folder / "source", folder / "build", folder / "source.tar"
    source.mkdir(parents=True)
    # Beside this interpreter first: the versions of constraints.txt.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    cmake, ninja = (shutil.which(name, path=path) or name for name in ("cmake", "ninja"))
    _build(folder, ["git", "-C", str(REPOSITORY), "archive", "--output", str(archive), sha])
    # Not tarfile: its filter for safe extraction is missing in early 3.11.
    _build(folder, ["tar", "-xf", str(archive), "-C", str(source)])
    # As wheels are built.
    options = ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DBAGUA_BUILD_PYTHON=OFF", "-DBAGUA_BUILD_TESTS=OFF"]
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    _build(folder, [cmake, "-S", str(source), "-B", str(build), *generator, *options])
    _build(folder, [cmake, "--build", str(build), "--target", "nccl-net"])
    next(build.rglob(LIBRARY_NAME)).replace(library)
    # The object files are many times the library, and a commit never changes.
    shutil.rmtree(build)
    return library


def _compiler() -> str:
    """A hash of what a kept library depends on beside its commit."""
    command = os.environ.get("CXX", "c++").split()
    try:
        told = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S).stdout
    except (OSError, IndexError) as error:
        raise BenchError(f"the C++ compiler {command} cannot be run ({error}); install one or set CXX") from error
    flags = [os.environ.get(name, "") for name in ("CXX", "CXXFLAGS", "LDFLAGS")]
    return hashlib.sha256(repr([told, *flags]).encode()).hexdigest()[:8]


def _build(folder: Path, command: Sequence[str]) -> None:
    log = folder / "build.log"
    with log.open("ab") as output:
        code = _code(command, _BUILD_TIMEOUT_S, output)
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
        raise BenchError(
            f"the base does not build: {command[0]} exited with {code}; the end of {log}:\n{tail}\nChoose another"
            " base, or a compiler that builds it (CXX)."
        )


def _code(command: Sequence[str], timeout_s: float, output: IO[bytes] | None = None) -> int:
    """Its exit code. It ends with this process, with all that it started."""

    def start() -> subprocess.Popen[bytes]:
        error = None if output is None else subprocess.STDOUT
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=error, start_new_session=True)

    try:
        with running(start) as process:
            return process.wait(timeout_s)
    except OSError as error:
        raise BenchError(f"{command[0]} cannot be started ({error.strerror}); install it") from error
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"not done after {timeout_s:.0f} s: {' '.join(command)}") from error


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(
        prog="make perf",
        description="Compare the installed plugin with that of another commit, interleaved on this machine, and say of"
        " every size whether it is faster, slower or the same.",
        epilog="exit status: 0; 1 if the comparison could not be made; 2 if an option was wrong; 3 with"
        " --fail-on-slower if a row is slower or takes more CPU; 130 after Ctrl-C.",
        allow_abbrev=False,
    )
    default_base = "the last tag v* in HEAD; else where this branch left main; else HEAD~1"
    parser.add_argument("base", nargs="?", metavar="COMMIT", help=f"tag, branch or commit (default: {default_base})")
    parser.add_argument("--fail-on-slower", action="store_true", help=f"exit with {_EXIT_SLOWER} if a row is worse")
    parser.add_argument("--json", type=Path, metavar="PATH", help="the ratios and their spread")
    for name, convert, default, about in (
        ("--rounds", within(int, 11, 1000), DEFAULT_ROUNDS, "fresh starts"),
        ("--seconds", within(float, 1, 86400), DEFAULT_SECONDS, "for measuring, without the build of the base"),
    ):
        parser.add_argument(name, type=convert, default=default, metavar="N", help=f"{about} (default {default:g})")
    options = parser.parse_args(arguments)
    try:
        check_output_files([("--json", options.json)])
    except ValueError as error:
        parser.error(str(error))
    return options


def _compare(options: argparse.Namespace) -> int:
    # `make perf PERF_BASE=` passes an empty one on.
    base, reason = resolve_base(options.base or None)
    head = run_git(REPOSITORY, "rev-parse", "HEAD").stdout.strip()
    # A new file that git does not know is built as well; what git ignores is not.
    watched = ("net_plugin", "CMakeLists.txt", "pyproject.toml")
    changed = bool(run_git(REPOSITORY, "status", "--porcelain", "--", *watched).stdout.strip())
    print(
        f"base: {base[:10]}, {reason}\ntree: {head[:10]}{', with uncommitted changes' if changed else ''}", flush=True
    )
    if base == head and not changed:
        print("note: base and tree are the same commit, so every row should be the same", flush=True)
    found, slower = [], False
    with _alone(), tempfile.TemporaryDirectory(prefix="bagua-perf-") as folder:
        library = build_base(base)
        for place, rate, channels, sizes, share in PARTS:
            if rate is not None and os.geteuid() != 0:
                print("note: emulated links need root, and are left out", flush=True)
                continue
            print(f"\n== {place}, {channels} channels", flush=True)
            result = Path(folder, f"{place}-{channels}.json")
            command = bench_command(options, library, channels, sizes, options.seconds * share, rate, result)
            code = _code(command, options.seconds + _PATIENCE_S)
            if code not in (0, _EXIT_SLOWER):
                raise BenchError(f"exited with {code}: {' '.join(command)}")
            slower = slower or code == _EXIT_SLOWER
            found.append((place, read_result(result)))
    if options.json is not None:
        names = {"base": base, "base_name": reason, "tree": head, "uncommitted_changes": changed}
        write_result(options.json, merged(found, f"The plugin against {base[:10]}", names))
        print(f"written: {options.json}")
    return _EXIT_SLOWER if slower else 0


def bench_command(
    options: argparse.Namespace,
    baseline: Path,
    channels: int,
    sizes: tuple[str, str],
    seconds: float,
    rate: str | None,
    result: Path,
) -> list[str]:
    command = [] if rate is None else [sys.executable, "-m", "netlab", "run", "--rate", rate, "--"]
    # The source tree, which has no library, must not come before the installed package.
    command += [sys.executable, "-P", "-m", "bagua.cli.net_bench", *(["--local"] if rate is None else [])]
    command += ["--baseline-library", str(baseline), "--fresh-processes", str(options.rounds)]
    command += ["--channels", str(channels), "-b", sizes[0], "-e", sizes[1], "-f", "4"]
    command += ["--time-budget", f"{max(1.0, seconds):g}", "--json", str(result)]
    return [*command, *(["--fail-on-slower"] if options.fail_on_slower else [])]


def merged(found: Sequence[tuple[str, ResultFile]], title: str, parameters: dict[str, object]) -> ResultFile:
    """One result of all parts; each figure says of which network it is."""
    figures: list[Figure] = [
        replace(figure, case={"network": place, **figure.case}) for place, result in found for figure in result.figures
    ]
    first = found[0][1]
    return replace(first, title=title, figures=tuple(figures), parameters={**first.parameters, **parameters})


@contextmanager
def _alone() -> Iterator[None]:
    """Two comparisons at a time would measure each other. The lock ends with the process, however that ends."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BenchError(f"another `make perf` is running in {str(CACHE)!r}: wait for its end") from error
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    return run_in_order("make perf", "processes", lambda: _compare(options))


if __name__ == "__main__":
    sys.exit(main())
