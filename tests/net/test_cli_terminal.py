"""How reports look: width, columns, colour."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from pathlib import Path

import pytest
from support.fresh_process import TIMEOUT_S

from bagua.cli.doctor_report import rendered
from bagua.cli.net_doctor import _conclusion
from bagua.cli.terminal import Terminal
from bagua.net.doctor.finding import Report, Section, fail, ok, warn

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_REPORT = Report(
    "1.0.0",
    (
        Section(
            "nccl", "NCCL", (ok("fine"), warn("so so", "look again"), fail("a long " * 12 + "text", "put it right"))
        ),
        Section("settings", "Settings", (), table=(("variable", "value"), ("NCCL_DEBUG", "INFO"), ("X", "a b " * 20))),
    ),
    python="/usr/bin/python",
)


def _rendered(report: Report, terminal: Terminal) -> str:
    return rendered(report, _conclusion(report, terminal), terminal)


def test_the_report_is_aligned_and_wrapped() -> None:
    lines = _rendered(_REPORT, Terminal(60, is_coloured=False)).splitlines()
    assert lines[0] == "bagua-net doctor, version 1.0.0, /usr/bin/python"
    assert "  ok    fine" in lines
    assert "  warn  so so" in lines
    assert "        -> look again" in lines
    assert "  FAIL  a long a long a long a long a long a long a long a" in lines
    assert "        variable    value" in lines
    assert "        NCCL_DEBUG  INFO" in lines
    assert lines[lines.index("        X           a b a b a b a b a b a b a b a b a b a b") + 1].startswith(
        " " * 20 + "a b"
    )
    assert max(map(len, lines[:-1])) <= 60
    assert lines[-1].endswith("Failed checks: NCCL.")


def test_a_narrow_terminal_has_lists_instead_of_tables() -> None:
    table = (("interface", "address", "NUMA", "used", "why"), ("eth0", "192.0.2.1", "-", "yes", "running, and not lo"))
    report = Report("1.0.0", (Section("interfaces", "Interfaces", (), table=table),), python="/usr/bin/python")
    lines = _rendered(report, Terminal(40, is_coloured=False)).splitlines()
    assert lines == [
        "bagua-net doctor, version 1.0.0,",
        "/usr/bin/python",
        "",
        "Interfaces",
        "        eth0",
        "          address 192.0.2.1, used yes,",
        "          why running, and not lo",
        "",
        "A job started in this environment would",
        "use the plugin.",
    ]
    assert "        interface  address" in _rendered(report, Terminal(60, is_coloured=False))


def test_colour_changes_nothing_but_colour() -> None:
    coloured = _rendered(_REPORT, Terminal(60, is_coloured=True))
    assert "\x1b[1;31mFAIL\x1b[0m" in coloured
    assert _ESCAPE.sub("", coloured) == _rendered(_REPORT, Terminal(60, is_coloured=False))


@pytest.mark.parametrize(
    ("variables", "has_colour"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colour_on_a_terminal(
    variables: dict[str, str], has_colour: bool, bagua_net: Path, environment: dict[str, str]
) -> None:
    del environment["NO_COLOR"]
    ours, theirs = pty.openpty()
    try:
        command = [str(bagua_net), "knobs"]
        subprocess.run(
            command, env={**environment, "TERM": "xterm", **variables}, stdout=theirs, check=True, timeout=TIMEOUT_S
        )
        shown = os.read(ours, 4096)
    finally:
        os.close(ours)
        os.close(theirs)
    assert (b"\x1b[1mENABLE_BAGUA_NET" in shown) is has_colour
