"""A report from the JSON that another host's `bagua-net stats --json` printed. It comes from the network: every value
is checked, and text is stripped of what a terminal would obey."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from bagua.net.stats.errors import NotAReportError, StatsError
from bagua.net.stats.layout import SIZE_CLASSES
from bagua.net.stats.quantities import printable
from bagua.net.stats.reports import SCHEMA, HostReport

_Report = TypeVar("_Report")

# Far above a host of eight busy ranks; a line without an end is not read into memory.
MAX_BYTES = 1 << 26
# A sum over all streams of a page.
_MAX_NUMBER = 1 << 80
_SIZES = len(SIZE_CLASSES) + 1


def report_from_json(text: str | bytes, where: str) -> HostReport:
    """
    Raises:
        StatsError: it is not a report, or one of another version.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _not_a_report(where, str(error)) from error
    if not isinstance(value, Mapping):
        raise _not_a_report(where, f"it is a {type(value).__name__}")
    if value.get("schema") != SCHEMA:
        raise StatsError(
            f"{where} sent statistics of version {value.get('schema')!r:.40}; this bagua-net reads version {SCHEMA}.\n"
            "The two hosts have different versions of Bagua-Net.\nInstall the same version on both."
        )
    try:
        return _dataclass_of(HostReport, value)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _not_a_report(where, str(error)) from error


def _not_a_report(where: str, why: str) -> NotAReportError:
    return NotAReportError(
        f"What {where} sent is not a report of `bagua-net stats --json`: {why[:200]}.\n"
        "Its shell may print text at login, or its bagua-net may be another program.\n"
        f"Run `bagua-net stats --json` on {where} and look at the output.",
        why[:200],
    )


def _dataclass_of(cls: type[_Report], value: Any) -> _Report:
    if not isinstance(value, Mapping):
        raise TypeError(f"{cls.__name__} is a {type(value).__name__}")
    hints = get_type_hints(cls)
    return cls(**{one.name: _value_of(hints[one.name], value[one.name], one.name) for one in fields(cls)})  # type: ignore[arg-type]


def _value_of(kind: Any, value: Any, name: str) -> Any:
    if is_dataclass(kind):
        return _dataclass_of(kind, value)  # type: ignore[arg-type]
    if get_origin(kind) in (Union, types.UnionType):
        if value is None:
            return None
        kind = next(one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is list and isinstance(value, list) and (name != "message_sizes" or len(value) == _SIZES):
        return [_value_of(get_args(kind)[0], one, name) for one in value]
    if kind is float and type(value) in (int, float) and abs(value) <= _MAX_NUMBER:  # and not NaN
        return float(value)
    if kind is str and isinstance(value, str):
        return "\n".join(map(printable, value.split("\n")))
    if kind is bool and type(value) is bool:
        return value
    if kind is int and type(value) is int and abs(value) <= _MAX_NUMBER:
        return value
    raise TypeError(f"{name} is {value!r:.60}")
