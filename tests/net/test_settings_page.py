"""The generated reference pages are current, and no page names a setting that does not exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bagua.net import _core

REPOSITORY = Path(__file__).resolve().parents[2]
GENERATORS = REPOSITORY / "tools" / "docs"
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]

# Not part of a longer name, such as MY_BAGUA_NET_X; `BAGUA_NET_*` stands for all of them.
VARIABLE = re.compile(r"(?<![A-Z0-9_])(?:ENABLE_BAGUA_NET|BAGUA_NET_[A-Z][A-Z0-9_]*)")


def generate(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(GENERATORS)}
    command = [sys.executable, "-m", name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


@pytest.mark.parametrize("generator", ["generate_settings", "generate_cli"])
def test_the_page_is_current(generator: str) -> None:
    result = generate(generator, "--check")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_settings_in_the_documentation_exist(page: Path) -> None:
    known = {knob["name"] for knob in [*_core.knobs(), *_core.retired_knobs()]}
    assert set(VARIABLE.findall(page.read_text())) - known == set()
