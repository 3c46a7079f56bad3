"""What all parsers and runs of the benchmark and of the tools share: types of arguments, options that several kinds of
run have, checks of output paths before a run, and how a run ends.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from bagua.command_exit import run_with_stdout
from bagua.net.bench.errors import BenchError, UsageError
from bagua.net.bench.sizes import parse_size, size_series

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class OptionParser(argparse.ArgumentParser):
    """Says in one line what is wrong, where argparse's own prints the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {_with_help(self.prog, message)}\n")


def run_in_order(program: str, helpers: str, run: Callable[[], int]) -> int:
    """The exit code of `run`, with one line for what it raised. `helpers`: what has ended when it is interrupted."""
    # Slurm and torchrun end a job with SIGTERM; the helpers are then ended in order, as with Ctrl-C.
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return run_with_stdout(program, run)
    except UsageError as error:
        return _complain(program, _with_help(program, str(error)), EXIT_USAGE)
    except BenchError as error:
        return _complain(program, str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return _complain(program, f"interrupted; all {helpers} are ended", EXIT_INTERRUPTED)
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _with_help(program: str, message: str) -> str:
    return f"{message} (all options: {program} --help)"


def _complain(program: str, message: str, code: int) -> int:
    sys.stdout.flush()
    print(f"{program}: error: {message}", file=sys.stderr, flush=True)
    return code


_Number = TypeVar("_Number", int, float)


def within(kind: Callable[[str], _Number], low: _Number, high: _Number) -> Callable[[str], _Number]:
    """An int or float (`kind`) from `low` to `high`, both included."""
    nouns: dict[object, str] = {int: "an integer"}
    noun = nouns.get(kind, "a number")

    def convert(text: str) -> _Number:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {noun}; give one in {low}..{high}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is outside {low}..{high}; give {noun} in that range")
        return value

    return convert


def byte_size(text: str) -> int:
    """`64K`, `1M`: bytes, powers of 1024."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def names_of(
    kind: str, known: Sequence[str], groups: Mapping[str, Sequence[str]] | None = None
) -> Callable[[str], tuple[str, ...]]:
    """For argparse: one or several, with commas, each once; `groups` are names for several."""

    def convert(text: str) -> tuple[str, ...]:
        words = [name.strip() for name in text.split(",") if name.strip()]
        names = [name for word in words for name in (groups or {}).get(word, (word,))]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(
                f"unknown {kind} {', '.join(map(repr, unknown)) or repr(text)}; give a comma-separated list of"
                f" {', '.join([*known, *(groups or {})])}"
            )
        return tuple(dict.fromkeys(names))

    return convert


class RunOptions(argparse.Namespace):
    """What every kind of run is told. None: what the run, or its launcher, makes of it."""

    sizes: tuple[int, ...]
    iterations: int | None
    warmup: int | None
    repeats: int
    ranks: int | None
    verify: bool
    json_path: Path | None
    csv_path: Path | None
    interface: str | None
    library: Path | None
    timeout_s: float
    port: int | None
    local: bool


def parser_of(program: str, description: str, epilog: str) -> OptionParser:
    return OptionParser(
        prog=program,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add(
    group: argparse._ActionsContainer, names: str, kind: Callable[[str], Any], metavar: str, about: str, **more: Any
) -> None:
    """An option with a value. `names`: with spaces between them."""
    group.add_argument(*names.split(), type=kind, metavar=metavar, help=about, **more)


def add_sizes(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    sizes = parser.add_argument_group("sizes (nccl-tests spellings)")
    add(sizes, "-b --minbytes", byte_size, "SIZE", "smallest size (default 8)")
    add(sizes, "-e --maxbytes", byte_size, "SIZE", "largest size (default 256M)")
    add(sizes, "-f --stepfactor", within(int, 2, 1024), "N", "from size to size (default 2)")
    return sizes


def series_of(given: argparse.Namespace, largest: int = 256 << 20) -> list[int]:
    """The sizes of -b, -e and -f. `largest` is the default of -e, or -b if that is larger. Raises ValueError."""
    begin = 8 if given.minbytes is None else given.minbytes
    end = max(begin, largest) if given.maxbytes is None else given.maxbytes
    return size_series(begin, end, given.stepfactor or 2)


def add_length(parser: argparse.ArgumentParser, of: str, repeats: str) -> argparse._ArgumentGroup:
    """`of`: what one backend does at a time; `repeats`: what --repeats says."""
    length = parser.add_argument_group("how long")
    about = f"iterations of a {of} (default: as many as there is time for)"
    add(length, "-n --iters", within(int, 1, 100_000), "N", about, dest="iterations")
    about = f"warm-ups of a {of} (default: a sixth of the iterations)"
    add(length, "-w --warmup_iters", within(int, 0, 10_000), "N", about, dest="warmup")
    add(length, "--repeats", within(int, 1, 1000), "N", repeats)
    return length


def add_programs(group: argparse._ArgumentGroup, *, driver: bool = True) -> None:
    add(group, "--library", Path, "PATH", "libnccl-net.so (default: the package's)")
    if driver:
        add(group, "--driver", Path, "PATH", "bagua-net-driver (default: the package's)")


def add_network(parser: argparse.ArgumentParser, interface: str, *, address: bool = True) -> argparse._ArgumentGroup:
    network = parser.add_argument_group("network")
    add(network, "--interface", str, "NAME", interface)
    if address:
        add(network, "--address", str, "IP", "an address of this host instead of an interface")
    about = "for anything that makes no progress (default 60)"
    add(network, "--timeout", within(float, 1, 3600), "S", about, default=60.0, dest="timeout_s")
    add(network, "--port", within(int, 1, 65535), "N", "where launched ranks meet on rank 0's host")
    network.add_argument("--local", action="store_true", help="run here alone even if a launcher's variables are set")
    return network


def add_results(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    output = parser.add_argument_group("results")
    add(output, "--json", Path, "PATH", "every figure and the machine's facts", dest="json_path")
    add(output, "--csv", Path, "PATH", "one row per figure", dest="csv_path")
    return output


def check_writable(option: str, path: Path) -> None:
    """Raise before the run, so that minutes of measuring are not lost to a misspelt folder."""
    if path.is_dir():
        raise ValueError(f"{option} {str(path)!r} is a directory; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {str(path)!r}: folder {str(path.parent)!r} does not exist; create it first")
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ValueError(
            f"{option} {str(path)!r} cannot be written ({error.strerror}); choose a path that you may write"
        ) from error


def check_output_files(outputs: Sequence[tuple[str, Path | None]]) -> None:
    """`check_writable` for each option, and no two may name the same file: the later would overwrite the earlier."""
    options: dict[Path, str] = {}
    for option, path in outputs:
        if path is None:
            continue
        check_writable(option, path)
        # Not of a device, such as /dev/null.
        if path.is_file() and (other := options.setdefault(path.resolve(), option)) != option:
            raise ValueError(f"{other} and {option} both name {str(path)!r}; give each a file of its own")


def check_outputs(json_path: Path | None, csv_path: Path | None) -> None:
    """--json and --csv, on rank 0 only: the other hosts need not have those folders. Raises UsageError."""
    try:
        check_output_files((("--json", json_path), ("--csv", csv_path)))
    except ValueError as error:
        raise UsageError(str(error)) from error


def make_folder(option: str, path: Path) -> None:
    """Raises as `check_writable`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option} {str(path)!r} cannot be created ({error.strerror}); choose another") from error
