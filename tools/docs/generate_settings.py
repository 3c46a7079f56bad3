#!/usr/bin/env python3
"""Fills the marked sections of docs/reference/settings.md from the settings table of the compiled library, so that the
two cannot differ: <!-- settings: NAME --> ... <!-- /settings -->. The other text is the page's own.

Needs the package installed (`make test` does that). `--check` changes nothing: it prints the difference and exits with
status 1 if there is one.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from generated_page import run

from bagua.net import _core

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "settings.md"
_SECTION = re.compile(r"(<!-- settings: (\S+) -->\n).*?(<!-- /settings -->)", re.DOTALL)

# What a user may want to change; all other settings are for experts.
EVERYDAY = (
    "ENABLE_BAGUA_NET",
    "BAGUA_NET_REQUIRED",
    "BAGUA_NET_NSTREAMS",
    "BAGUA_NET_NWORKERS",
    "BAGUA_NET_CONNECT_TIMEOUT_MS",
    "BAGUA_NET_KEEPALIVE_S",
)
# What the knob table has as the default of a variable whose absence means something that no value does.
NOT_SET = "not set"


def section(row: dict[str, str]) -> str:
    # As one would set it, or the words "not set", which nobody must take for a value.
    default = row["default_value"] if row["default_value"] == NOT_SET else f"`{row['default_value']}`"
    facts = [row["type"], f"default {default}", row["range"]]
    if row["unit"]:
        facts.append(f"in {row['unit']}")
    return f"### {row['name']}\n\n*{' · '.join(facts)}*\n\n{row['meaning']}\n\n"


def render() -> str:
    """The whole page."""
    rows = {row["name"]: row for row in _core.knobs()}
    retired = [f"| `{row['name']}` | {row['replacement']} |\n" for row in _core.retired_knobs()]
    sections = {
        "everyday": "".join(section(rows.pop(name)) for name in EVERYDAY),
        "expert": "".join(map(section, rows.values())),
        "retired": "".join(["| Variable | Instead |\n|---|---|\n", *retired, "\n"]),
    }
    page = _SECTION.sub(lambda match: f"{match[1]}\n{sections.pop(match[2])}{match[3]}", PAGE.read_text())
    if sections:
        raise SystemExit(f"{PAGE} has no marks of {', '.join(sections)}: write <!-- settings: NAME --> and its end")
    return page


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", PAGE, render))
