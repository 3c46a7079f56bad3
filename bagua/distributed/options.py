"""The flags that the launchers share, and the environment variables that they mean.

Flags are spelled with underscores, as in Bagua 0.9, or with hyphens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from bagua.env import EnvironmentValueError, read_size
from bagua.gpu_presence import has_gpu

DEFAULT_MASTER_PORT = 29500
_DEFAULT_SERVICE_PORT = 29501

# Flag -> the variable that carries its value to the ranks.
_VARIABLES = {
    "default_bucket_size": "BAGUA_DEFAULT_BUCKET_SIZE",
    "bagua_service_port": "BAGUA_SERVICE_PORT",
    "autotune_level": "BAGUA_AUTOTUNE",
    "autotune_max_samples": "BAGUA_AUTOTUNE_MAX_SAMPLES",
    "autotune_sampling_confidence_time": "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S",
    "autotune_warmup_time": "BAGUA_AUTOTUNE_WARMUP_TIME_S",
}
_SWITCHES = {"enable_bagua_net": "ENABLE_BAGUA_NET", "is_output_autotune_log": "BAGUA_IS_OUTPUT_AUTOTUNE_LOG"}


def add_option(parser: argparse._ActionsContainer, name: str, **keywords: Any) -> None:
    """An option under both of its spellings."""
    spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
    parser.add_argument(*spellings, dest=name, **keywords)


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


def add_autotune_options(parser: argparse.ArgumentParser) -> None:
    """Those of Bagua 0.9 for autotuning. All but the level are about its service: they set their variables, of which
    the ranks say that nothing reads them."""
    group = parser.add_argument_group("autotuning; all but the level without effect in this version")
    add_option(
        group,
        "autotune_level",
        type=int,
        metavar="LEVEL",
        help="1 or more tunes the size of buckets; sets BAGUA_AUTOTUNE",
    )
    add_option(
        group,
        "bagua_service_port",
        type=port,
        metavar="PORT",
        help=f"of the autotune service (default with --autotune_level: {_DEFAULT_SERVICE_PORT})",
    )
    add_option(
        group, "autotune_max_samples", type=positive, metavar="N", help="number of configurations to try (0.9: 60)"
    )
    add_option(
        group, "autotune_sampling_confidence_time", type=float, metavar="SECONDS", help="per configuration (0.9: 5)"
    )
    add_option(group, "autotune_warmup_time", type=float, metavar="SECONDS", help="before the first (0.9: 30)")
    add_option(group, "is_output_autotune_log", action="store_true", help="log the configurations tried")
    add_option(group, "report_metrics", action="store_true", help="not used by 0.9 either")


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


def training_variables(options: argparse.Namespace) -> dict[str, str]:
    """The variables that the flags mean. Flags that were not given set none: the defaults are those of the readers."""
    values = {name: getattr(options, name, None) for name in _VARIABLES}
    if values["autotune_level"] and values["bagua_service_port"] is None:
        values["bagua_service_port"] = _DEFAULT_SERVICE_PORT
    variables = {_VARIABLES[name]: str(value) for name, value in values.items() if value is not None}
    return variables | {variable: "1" for name, variable in _SWITCHES.items() if getattr(options, name, False)}


def tune_server(variables: Mapping[str, str], master_addr: str) -> dict[str, str]:
    """Where the ranks of 0.9 found the autotune service, if it was on."""
    if variables.get("BAGUA_AUTOTUNE", "0") == "0":
        return {}
    return {"AUTO_TUNE_SERVER_ADDR": f"{master_addr}:{variables['BAGUA_SERVICE_PORT']}"}


def say_without_effect(program: str, options: argparse.Namespace, *names: str) -> None:
    """Of flags that set no variable of which a rank could say so."""
    for name in names:
        if getattr(options, name):
            print(f"{program}: --{name} has no effect in this version.", file=sys.stderr)


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
