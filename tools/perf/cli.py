"""The command line of `make perf`."""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bagua.net.bench.api import (
    BenchError,
    OptionParser,
    Progress,
    check_output_files,
    describe_machine,
    run_in_order,
    shows_colour,
    within,
    write_result,
)
from bagua.net.library import MissingFileError, driver_path, library_path

from .base_build import build_base
from .base_commit import check_repository, describe_tree, resolve_base
from .report import judged, render_closing, render_table, result_of_comparison
from .rounds import MIN_ROUNDS, PARTS, Libraries, measure

REPOSITORY = Path(__file__).resolve().parents[2]
# With the build of the base and a tree to be installed within five minutes on two cores.
DEFAULT_SECONDS = 200.0
# Many short rounds rather than few long ones: where a neighbour's work spoils one in four, 20 rounds find a change of
# 5 % in six runs of ten, 30 in more than eight. Even, so that base and tree have each place equally often.
DEFAULT_ROUNDS = 30

_EXIT_SLOWER = 3

_EPILOG = f"""\
exit status: 0; 1 if the comparison could not be made; 2 if an option was wrong; {_EXIT_SLOWER} with --fail-on-slower
if a row is slower or takes more CPU; 130 after Ctrl-C.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="make perf",
        description="Compare the installed plugin with that of another commit, interleaved on this machine, and say of"
        " every size whether it is faster, slower or the same.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "base",
        nargs="?",
        metavar="COMMIT",
        help="tag, branch or commit (default: the last tag v* in HEAD; else where this branch left main; else HEAD~1)",
    )
    parser.add_argument("--fail-on-slower", action="store_true", help=f"exit with {_EXIT_SLOWER} if a row is worse")
    parser.add_argument("--json", type=Path, metavar="PATH", help="the ratios and their spread")
    parser.add_argument(
        "--rounds",
        type=within(int, MIN_ROUNDS, 1000),
        default=DEFAULT_ROUNDS,
        metavar="N",
        help=f"fresh starts (default {DEFAULT_ROUNDS})",
    )
    parser.add_argument(
        "--seconds",
        type=within(float, 1, 86400),
        default=DEFAULT_SECONDS,
        metavar="S",
        help=f"for measuring, without the build of the base (default {DEFAULT_SECONDS:g})",
    )
    parser.add_argument("--library", type=Path, metavar="PATH", help="the tree's libnccl-net.so (default: installed)")
    parser.add_argument("--driver", type=Path, metavar="PATH", help="bagua-net-driver of both (default: installed)")
    parser.add_argument(
        "--repository", type=Path, default=REPOSITORY, metavar="DIR", help="the checkout (default: this one)"
    )
    return parser


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser()
    options = parser.parse_args(arguments)
    # `make perf PERF_BASE=` passes an empty one on.
    options.base = options.base or None
    try:
        check_output_files([("--json", options.json)])
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    return run_in_order("make perf", "processes", lambda: _compare(options))


def _compare(options: argparse.Namespace) -> int:
    repository: Path = options.repository
    check_repository(repository)
    tree = describe_tree(repository)
    base = resolve_base(repository, options.base)
    try:
        installed, driver = options.library or library_path(), options.driver or driver_path()
    except MissingFileError as error:
        raise BenchError(str(error)) from error
    cache = repository / "build" / "perf"
    with _alone(cache):
        what = "the library given" if options.library else f"{tree}, as installed"
        print(f"base: {base}\ntree: {what}, {installed}", flush=True)
        if base.sha == tree.sha and not tree.is_changed and not options.library:
            print("note: base and tree are the same commit, so every row should be the same", flush=True)
        began = time.monotonic()
        built = build_base(repository, base, cache, os.environ)
        how = "kept from an earlier run" if built.was_cached else f"built in {time.monotonic() - began:.0f} s"
        print(f"base's library: {how}, {built.path}", flush=True)
        machine = describe_machine()
        print(f"{machine.caption()}\n", flush=True)
        libraries = Libraries(built.path.absolute(), installed.absolute(), driver.absolute())
        parts = PARTS if os.geteuid() == 0 else tuple(part for part in PARTS if part.rate is None)
        if len(parts) < len(PARTS):
            print("note: emulated links need root, and are left out", flush=True)
        with Progress(-(-options.rounds // 2) * 2 * len(parts)) as progress:
            progress.message(f"measuring: {options.rounds} rounds, about {options.seconds:.0f} s")
            rows = measure(
                libraries,
                rounds=options.rounds,
                seconds=options.seconds,
                environment=os.environ,
                parts=parts,
                progress=progress,
            )
    verdicts = judged(rows)
    print(render_table(verdicts, colour=shows_colour(sys.stdout)))
    print(render_closing(verdicts), end="", flush=True)
    if options.json is not None:
        write_result(options.json, result_of_comparison(verdicts, base, tree, machine))
        print(f"written: {options.json}")
    worse = any(row.is_worse for row in verdicts)
    return _EXIT_SLOWER if worse and options.fail_on_slower else 0


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Two comparisons at a time would measure each other. The lock ends with the process, however that ends."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BenchError(
                f"another `make perf` is running in {str(cache)!r}; both would measure each other: wait for its end"
            ) from error
        yield
