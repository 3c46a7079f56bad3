"""The flags that the launchers share, and the environment variables that they mean.

Flags are spelled with underscores, as in Bagua 0.9, or with hyphens.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, Protocol

from bagua.env import EnvironmentValueError, read_size
from bagua.gpu_presence import has_gpu

DEFAULT_MASTER_PORT = 29500


class FurtherFlags(Protocol):
    """Flags that others add to `launch` and `run`."""

    def add_to(self, parser: argparse.ArgumentParser) -> None: ...

    def variables(self, options: argparse.Namespace, master_addr: str | None) -> dict[str, str]:
        """What they set in the ranks. `master_addr`: of `launch`; None: of `run`, whose rendezvous tells the ranks."""
        ...


further_flags: list[FurtherFlags] = []


def add_option(parser: argparse._ActionsContainer, name: str, **keywords: Any) -> None:
    """An option under both of its spellings."""
    spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
    parser.add_argument(*spellings, dest=name, **keywords)


def add_master_options(parser: argparse._ActionsContainer, what: str) -> None:
    """Where node 0 is. `what`: its port is, for the help."""
    add_option(
        parser, "master_addr", default="127.0.0.1", metavar="HOST", help="address of node 0 (default: 127.0.0.1)"
    )
    add_option(
        parser,
        "master_port",
        type=port,
        default=DEFAULT_MASTER_PORT,
        metavar="PORT",
        help=f"{what}, the same on all nodes (default: {DEFAULT_MASTER_PORT})",
    )


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Those that configure Bagua in the ranks."""
    group = parser.add_argument_group("Bagua")
    add_option(
        group,
        "enable_bagua_net",
        action="store_true",
        help="use Bagua-Net for NCCL's traffic between nodes: sets ENABLE_BAGUA_NET=1",
    )
    add_option(
        group,
        "default_bucket_size",
        type=size,
        metavar="BYTES",
        help="bucket size, optionally with a suffix K, M or G (default: 50M on GPUs, 25M on CPUs)",
    )


def add_further_options(parser: argparse.ArgumentParser) -> None:
    """Those of `further_flags`."""
    for flags in further_flags:
        flags.add_to(parser)


def add_script_options(parser: argparse.ArgumentParser, *, script_help: str) -> None:
    """How the script is started, and the script."""
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a Python module, as in python -m")
    add_option(parser, "no_python", action="store_true", help="SCRIPT is a program: start it directly, without Python")
    add_process_options(parser)
    parser.add_argument("script", metavar="SCRIPT", help=script_help)
    arguments = parser.add_argument(
        "script_args", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments of the script"
    )
    arguments.required = False  # Python before 3.12 calls them required where the script is missing


def add_process_options(parser: argparse._ActionsContainer) -> None:
    """What torchrun has under other names, or not at all."""
    add_option(
        parser, "set_additional_flag", action="store_true", help="pass --local_rank=N to the script as first argument"
    )
    add_option(
        parser, "logdir", metavar="DIR", help="write stdout and stderr of each process to files under DIR instead"
    )


def say_without_gpu(program: str, options: argparse.Namespace) -> None:
    """That --enable_bagua_net changes nothing where ranks cannot use NCCL."""
    if options.enable_bagua_net and not has_gpu():
        print(
            f"{program}: --enable_bagua_net has no effect on this host, which has no GPU: it is for NCCL, and gloo does"
            " not use it",
            file=sys.stderr,
        )


def training_variables(options: argparse.Namespace, master_addr: str | None = None) -> dict[str, str]:
    """The variables that the flags mean. Flags that were not given set none: the defaults are those of the readers."""
    variables = {"ENABLE_BAGUA_NET": "1"} if options.enable_bagua_net else {}
    if options.default_bucket_size is not None:
        variables["BAGUA_DEFAULT_BUCKET_SIZE"] = options.default_bucket_size
    for flags in further_flags:
        variables |= flags.variables(options, master_addr)
    return variables


# --- types of arguments ----------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    value = _integer(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too small: it must be at least 1")
    return value


def processes(text: str) -> str:
    """The number of processes of a node, or what torchrun derives it from."""
    if text not in ("auto", "cpu", "gpu", "xpu"):
        try:
            count = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} must be a number, auto, gpu or cpu") from None
        if count < 1:
            raise argparse.ArgumentTypeError(
                f"{count} is too small: start at least 1 process per node, usually one per GPU"
            )
    return text


def port(text: str) -> int:
    value = _integer(text)
    if not 1 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is not a port: it must be from 1 to 65535")
    return value


def size(text: str) -> str:
    try:
        read_size({"size": text}, "size")
    except EnvironmentValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("size=")) from None
    return text


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer") from None
