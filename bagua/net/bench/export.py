"""--json and --csv: every figure of a run with the facts of the machine that gave it."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from bagua.net.bench.machine import MachineFacts
from bagua.net.bench.measurement import Measurement

# Raised when a field changes its meaning; new fields do not raise it.
SCHEMA_VERSION = 1


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


def make_folder(option: str, path: Path) -> None:
    """Raises as `check_writable`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option} {str(path)!r} cannot be created ({error.strerror}); choose another") from error


def write_json(
    path: Path,
    measurements: Sequence[Measurement],
    machine: MachineFacts,
    *,
    parameters: Mapping[str, object] | None = None,
    summary: Mapping[str, object] | None = None,
) -> None:
    document = {
        "schema": SCHEMA_VERSION,
        "machine": machine.as_dict(),
        "parameters": dict(parameters or {}),
        "summary": dict(summary or {}),
        "measurements": [measurement.as_dict() for measurement in measurements],
    }
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_csv(path: Path, measurements: Sequence[Measurement], machine: MachineFacts) -> None:
    """The machine's facts as leading `# name: value` lines, then a head line and one row a measurement."""
    with path.open("w", encoding="utf-8", newline="") as file:
        for name, value in machine.as_dict().items():
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            file.write(f"# {name}: {' '.join(text.splitlines())}\n")
        # A kind of run may add figures of its own, in a class derived from Measurement.
        kind = type(measurements[0]) if measurements else Measurement
        writer = csv.DictWriter(file, [field.name for field in fields(kind)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(measurement.as_dict() for measurement in measurements)
