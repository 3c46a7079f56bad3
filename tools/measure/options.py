"""The options that all tools share: ranks and device, duration, and output files."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path

from bagua.net.bench.api import check_output_files, make_folder, sharing_of, within

# Of the all-reduces of --warm-up.
WARM_UP_BYTES = 1 << 20
_PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def parser_of(tool: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"PYTHONPATH=tools python -m measure {tool}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_ranks(parser: argparse.ArgumentParser, *, least: int = 1, most: int = 128) -> None:
    """Leaves `ranks`, `device` and `share_gpus`."""
    parser.add_argument(
        "--nproc-per-node",
        type=within(int, least, most),
        default=2,
        metavar="N",
        dest="ranks",
        help="ranks, one per GPU (default 2)",
    )
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: CUDA if there are GPUs"
    )
    add_sharing_option(parser)


def add_sharing_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--share-gpus",
        action="store_true",
        help="give a GPU to several ranks where there are more ranks than GPUs; NCCL then takes each for a host of its"
        " own",
    )


def add_length(
    parser: argparse.ArgumentParser, *, rounds: int, time_limit_s: float | None = None, timeout_s: float | None = None
) -> argparse._ArgumentGroup:
    length = parser.add_argument_group("how long")
    length.add_argument(
        "--rounds", type=within(int, 1, 1000), default=rounds, help=f"turns of each in each case (default {rounds})"
    )
    if time_limit_s is not None:
        length.add_argument(
            "--time-limit",
            type=within(float, 1.0, 86400.0),
            default=time_limit_s,
            metavar="S",
            help=f"seconds for all; no round begins that is longer than what is left (default {time_limit_s:g})",
        )
    if timeout_s is not None:
        length.add_argument(
            "--timeout",
            type=within(float, 1.0, 86400.0),
            default=timeout_s,
            metavar="S",
            help=f"for one turn (default {timeout_s:g})",
        )
    return length


def add_warm_up(length: argparse._ArgumentGroup) -> None:
    """Leaves `warm_up`."""
    length.add_argument(
        "--warm-up",
        type=within(float, 0.0, 3600.0),
        default=1.5,
        metavar="S",
        help="seconds of all-reduces of 1 MiB with which each backend begins in a network, not counted: in the first "
        "second of a job the plugin finds out how many connections pay (default 1.5)",
    )


def add_results(parser: argparse.ArgumentParser, *, plot: bool = False) -> argparse._ArgumentGroup:
    output = parser.add_argument_group("results")
    output.add_argument("--json", type=Path, metavar="PATH", help="result file: medians and their range")
    output.add_argument("--details", type=Path, metavar="PATH", help="every turn, as JSON")
    if plot:
        output.add_argument("--plot", type=Path, metavar="PATH", help="a picture (.png, .svg or .pdf)")
    return output


def check_results(parser: argparse.ArgumentParser, given: argparse.Namespace, *folders: str) -> None:
    """Ends the program if an output file cannot be written. Creates the folders that the given options name."""
    try:
        check_output_files([("--json", given.json), ("--details", given.details)])
        if getattr(given, "plot", None) is not None:
            _check_plot(given.plot)
            check_output_files([("--plot", given.plot)])
        for option in folders:
            name = option.removeprefix("--").replace("-", "_")
            folder: Path | None = getattr(given, name)
            if folder is not None:
                make_folder(option, folder)
                setattr(given, name, folder.absolute())
    except ValueError as error:
        parser.error(str(error))


def _check_plot(path: Path) -> None:
    if path.suffix.lower() not in _PLOT_SUFFIXES:
        raise ValueError(f"--plot {str(path)!r} has suffix {path.suffix!r}; use one of {', '.join(_PLOT_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed; run: pip install matplotlib")


def choose_device(
    parser: argparse.ArgumentParser,
    given: argparse.Namespace,
    gpus: Callable[[], int] | None = None,
    *,
    ranks_option: str = "--nproc-per-node",
    auto_is_cuda_with_any: bool = False,
) -> None:
    """Sets `given.device` to "cuda" or "cpu", and `given.sharing` to how ranks share GPUs, or None.

    Ends the program if there are not enough GPUs.

    Args:
        gpus: Returns the number of GPUs. Default: `count_gpus`.
        auto_is_cuda_with_any: Let `auto` mean CUDA if there is any GPU, even if there are fewer than ranks.
    """
    found = (gpus or count_gpus)() if given.device != "cpu" else 0
    auto_needs = 1 if auto_is_cuda_with_any or given.share_gpus else given.ranks
    is_cuda = given.device == "cuda" or (given.device == "auto" and found >= auto_needs)
    if is_cuda and found < given.ranks and not (found and given.share_gpus):
        share = "add --share-gpus to have several ranks on a GPU, " if found else ""
        parser.error(
            f"{ranks_option} {given.ranks} needs as many GPUs, this machine shows {found}; lower it, {share}or use"
            " --device cpu"
        )
    given.device = "cuda" if is_cuda else "cpu"
    given.sharing = sharing_of(given.ranks, found) if is_cuda else None


def count_gpus() -> int:
    """The GPUs that torch can use."""
    import torch

    return torch.cuda.device_count()
