"""Flags of Bagua 0.9's launchers, which `launch` and `run` of bagua.distributed still take. All but the level are about
the autotune service: they set their variables, of which the ranks say that nothing reads them."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from bagua.distributed.options import add_option, port, positive

_DEFAULT_SERVICE_PORT = 29501

# Flag -> the variable that carries its value to the ranks.
_VARIABLES = {
    "bagua_service_port": "BAGUA_SERVICE_PORT",
    "autotune_level": "BAGUA_AUTOTUNE",
    "autotune_max_samples": "BAGUA_AUTOTUNE_MAX_SAMPLES",
    "autotune_sampling_confidence_time": "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S",
    "autotune_warmup_time": "BAGUA_AUTOTUNE_WARMUP_TIME_S",
    "is_output_autotune_log": "BAGUA_IS_OUTPUT_AUTOTUNE_LOG",
}


class _WithoutEffect(argparse.Action):
    """Of a flag that sets no variable of which a rank could say so."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"{parser.prog}: --{self.dest} has no effect in this version.", file=sys.stderr)


def add_to(parser: argparse.ArgumentParser) -> None:
    """The flags, as a group of their own."""
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
    add_option(group, "is_output_autotune_log", action="store_const", const=1, help="log the configurations tried")
    add_option(group, "report_metrics", action=_WithoutEffect, nargs=0, help="not used by 0.9 either")


def variables(options: argparse.Namespace, master_addr: str | None) -> dict[str, str]:
    """What the flags set; those that were not given set nothing. With `master_addr`, also where the ranks of 0.9 found
    the autotune service, if it was on."""
    values = {name: getattr(options, name) for name in _VARIABLES}
    if values["autotune_level"] and values["bagua_service_port"] is None:
        values["bagua_service_port"] = _DEFAULT_SERVICE_PORT
    given = {_VARIABLES[name]: str(value) for name, value in values.items() if value is not None}
    if values["autotune_level"] and master_addr is not None:
        given["AUTO_TUNE_SERVER_ADDR"] = f"{master_addr}:{values['bagua_service_port']}"
    return given
